/* DIAL: a TCP connection from inside the sandbox, its bytes pumped to the host. */
#ifndef OPENDSEC_DIAL_H
#define OPENDSEC_DIAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct call;

bool dial_begin(uint32_t id, char *payload, size_t length);
/* The connection attempt has ended; false when it failed (the call is gone then). */
bool dial_connected(struct call *call);
/* Bytes, the end (0) or an error (-1) from the peer; true when more may come. */
bool dial_received(struct call *call, const char *bytes, ssize_t count);

#endif
