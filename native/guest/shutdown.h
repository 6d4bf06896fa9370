/* SHUTDOWN: ends every process of the sandbox, then the agent. */
#ifndef OPENDSEC_SHUTDOWN_H
#define OPENDSEC_SHUTDOWN_H

#include <stdbool.h>
#include <stddef.h>

bool shutdown_begin(char *payload, size_t length);

#endif
