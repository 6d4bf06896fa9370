/* The forked side of a request: the process that becomes the sandbox's pid 1. */
#pragma once

#include "launch/request.h"

#include <stdint.h>

/* What the launcher prepared once, as descriptors. */
struct host {
    int proc;  /* the host's /proc */
    int slim;  /* a mount namespace with next to nothing in it: what sandboxes' mount namespaces are copied from */
    int null;  /* /dev/null */
    int last_capability;
};

/* Where the process is, in memory shared with the launcher: it costs no system call to keep up to date, and survives the process. */
struct report {
    const char *volatile step; /* a string constant: valid on both sides */
    volatile int error;
    char message[232];
};

#define STEP_EXEC "exec"

/* Sets everything up and executes the agent in the user namespace `userns`. `alive` is the writing end of a pipe whose only reader is the launcher and which the execution
 * closes. On failure it fills `report` and exits. */
_Noreturn void sandbox_run(const struct request *request, const struct host *host, int userns, int alive, struct report *report);
