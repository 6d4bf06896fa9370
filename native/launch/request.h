/* One request, parsed: what docs/reference/launcher.md lists, as values. Strings point into the packet. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    MAX_PACKET = 64 * 1024,
    MAX_FDS = 250,
    MAX_LOWER = 200,
    MAX_CGROUP1 = 16,
    MAX_BINDS = 64,
    MAX_TMPFS = 16,
    MAX_MASKS = 64,
    MAX_ARGS = 32,
    MAX_RLIMITS = 16,
    MAX_OVERLAY = 16,
    MAX_SYSCTLS = 16,
};

struct bind {
    int fd;
    uint64_t attributes; /* MOUNT_ATTR_* */
    const char *target;
};

struct tmpfs {
    char *options;
    const char *target;
};

struct sysctl {
    const char *name; /* below /proc/sys, with slashes */
    const char *value;
};

struct limit {
    int number;
    uint64_t soft, hard;
};

struct request {
    uint64_t seq;
    int lower[MAX_LOWER];
    char *upper, *work;
    uint32_t inside, outside, count;
    const char *hostname;
    int cgroup2, listen, guest;
    int cgroup1[MAX_CGROUP1];
    const char *args[MAX_ARGS];
    struct bind binds[MAX_BINDS];
    struct tmpfs tmpfs[MAX_TMPFS];
    const char *devpts;
    const char *masks[MAX_MASKS];
    char *overlay[MAX_OVERLAY];
    uint64_t caps;
    struct limit rlimits[MAX_RLIMITS];
    struct sysctl sysctls[MAX_SYSCTLS];
    uint64_t root_attributes; /* MOUNT_ATTR_* the root gets when all is attached */
    unsigned lowers, cgroup1s, arg_count, bind_count, tmpfs_count, mask_count, overlay_count, rlimit_count, sysctl_count;
    unsigned seen; /* bit per known key */
};

struct mistake {
    const char *key;
    const char *message;
};

/* Fills `request` from a packet of `length` bytes, which is cut into strings in place, and its descriptors. Returns false and says why in `mistake`;
 * `seq` is set whenever the packet had one. */
bool request_parse(struct request *request, char *packet, size_t length, const int *fds, unsigned fd_count, struct mistake *mistake);
