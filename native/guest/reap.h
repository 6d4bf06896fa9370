/* The ends of processes: of our own children, each told to its owner, and of every orphan of the sandbox. */
#ifndef OPENDSEC_REAP_H
#define OPENDSEC_REAP_H

#include <stdbool.h>
#include <sys/resource.h>
#include <sys/types.h>

struct child {
    struct child *next;
    pid_t pid; /* 0: not registered */
    void (*exited)(struct child *child, int status, const struct rusage *usage);
};

/* Signals end or disturb nothing from now on; SIGCHLD is taken by descriptor. */
void reap_init(void);
/* Must be called before the loop runs again after the fork: nothing is reaped in between, so no end is lost. */
void child_register(struct child *child, pid_t pid, void (*exited)(struct child *, int, const struct rusage *));
/* Its end is of no interest any more. */
void child_forget(struct child *child);
/* Whether any child or orphan is left. */
bool reap_has_children(void);

#endif
