/* Calls: file operations and dials, numbered by the host, gone with the connection. */
#ifndef OPENDSEC_CALL_H
#define OPENDSEC_CALL_H

#include <stdbool.h>

#include "wire.h"

/* FS and DIAL. False: malformed. */
bool call_begin(const struct header *header, char *payload);
/* DATA, END, CREDIT and CANCEL; a call that has ended meanwhile is no error. */
bool call_frame(const struct header *header, char *payload);
void call_drop_all(void);

#endif
