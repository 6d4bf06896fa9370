/* Who a process of the sandbox runs as, by the sandbox's own /etc/passwd and /etc/group. Used in forked children only. */
#ifndef OPENDSEC_IDENTITY_H
#define OPENDSEC_IDENTITY_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

enum { MAX_GROUPS = 1024 };

struct identity {
    uid_t uid;
    gid_t gid;
    gid_t groups[MAX_GROUPS];
    size_t group_count;
    char home[1024];
    const char *problem; /* set when it could not be resolved */
};

/* `user`: name, uid, name:group, uid:gid, or empty for root. False with `problem`. */
bool identity_resolve(const char *user, struct identity *identity);
/* Becomes it, for good. False with errno. */
bool identity_assume(const struct identity *identity);

#endif
