/* Process trees by reading /proc: the fallback where there is no cgroup. */
#ifndef OPENDSEC_PROCWALK_H
#define OPENDSEC_PROCWALK_H

#include <sys/types.h>

/* Signals the first process, its descendants and everything in their sessions. */
int procwalk_signal(pid_t first, int signal, pid_t except);
/* The same with SIGSTOP first until no new process shows up, then SIGKILL. */
void procwalk_kill(pid_t first);

#endif
