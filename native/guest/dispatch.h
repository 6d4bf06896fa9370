/* From a frame of the live connection to the part of the agent that answers it. */
#ifndef OPENDSEC_DISPATCH_H
#define OPENDSEC_DISPATCH_H

#include <stdbool.h>

#include "wire.h"

/* `payload` is writable and followed by one byte that may be overwritten. False: the frame is malformed. */
bool dispatch(const struct header *header, char *payload);
/* The live connection has ended: commands go on, calls of that connection are cancelled. */
void dispatch_detach(void);
/* Answers HELLO. */
void dispatch_hello(void);

#endif
