/* From a request to a running program: what happens between fork and exec. */
#ifndef OPENDSEC_SPAWN_H
#define OPENDSEC_SPAWN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct launch {
    char **argv;        /* NULL-terminated, or NULL: then `script` is run by the image's shell */
    const char *script; /* NULL with argv NULL: an interactive session's shell (see session.c) */
    size_t script_length;
    char **env; /* `env_count` entries, room for two more */
    size_t env_count;
    const char *cwd, *user;
    int in, out, err; /* become 0, 1, 2 */
    int status;       /* write side: closed by a successful exec, else one struct spawn_failure */
    int control, text; /* a session's two descriptors, else -1 */
    int cgroup;       /* directory of the command's cgroup, or -1 */
    bool terminal;    /* `in` is the slave of a new terminal */
};

struct spawn_failure {
    char code[16];
    int32_t error;
    char message[232];
};

/* Called once at start: limits children get back. */
void spawn_init(void);
/* The pid, or -1 with errno (EAGAIN: pids limit, ENOMEM). Does not wait for the exec. */
pid_t spawn(const struct launch *launch);
/*
 * A bare fork for the agent's own work in the sandbox: a process that keeps only descriptor `keep`, as 3, and `root`, as 4, unless that
 * is -1 (and 0-2). 0 in the child.
 */
pid_t spawn_worker(int keep, int root);
/*
 * False with EMFILE when `fd`, just opened for something new, is in the upper quarter of the agent's descriptors: those are
 * for ending what runs (cgroup.kill, cgroup.events) and for the host's next connection.
 */
bool spawn_has_room(int fd);
/* In a child, its descriptors being only those it may keep: the ordinary victim of the OOM killer, unlike the agent. */
void spawn_be_mortal(void);

#endif
