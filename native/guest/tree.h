/*
 * A command's process tree: a cgroup of its own below the sandbox's, so that nothing it forks can leave it.
 *
 * Without a cgroup (no cgroup2 in sight, or one the agent may not write) a tree is what /proc shows below the first
 * process; HELLO then lacks the capability `cgroup`, because a process that left (setsid and double fork) is missed.
 */
#ifndef OPENDSEC_TREE_H
#define OPENDSEC_TREE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "loop.h"

struct tree {
    int fd;    /* the cgroup's directory, or -1 */
    pid_t pid; /* the first process */
    char name[24];
    struct source watch;
    void (*emptied)(struct tree *tree);
};

/* `fd` may be -1: then /sys/fs/cgroup is tried. Returns whether cgroups are used. */
bool tree_init(int fd);
bool tree_has_cgroups(void);
/* False with errno: no cgroup could be made. */
bool tree_make(struct tree *tree, const char *prefix, uint32_t number);
/* Sends `signal` to every process but `except` (0: none); returns how many there were. */
int tree_signal(const struct tree *tree, int signal, pid_t except);
/* SIGKILL to all, at once and for good. */
void tree_kill(const struct tree *tree);
/* Holds all processes still, or lets them go on. */
void tree_freeze(const struct tree *tree, bool frozen);
/* Calls `emptied` once no process is left; false when that is so already or cannot be watched. */
bool tree_await_empty(struct tree *tree, void (*emptied)(struct tree *));
/* The cgroup goes away as soon as it is empty; `tree` may be reused at once. */
void tree_retire(struct tree *tree);
/* How many forks were refused in cgroups below ours, where the kernel counts them there (before Linux 6.11); else 0. */
uint64_t tree_forks_refused(void);

#endif
