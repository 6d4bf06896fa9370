/* The sandbox's file system: made from descriptors in the host's mount namespace, put together in its own. */
#pragma once

#include "launch/sandbox.h"

struct trees {
    int root;             /* the overlay */
    int binds[MAX_BINDS]; /* clones */
    int cgroup;           /* a clone of the sandbox's cgroup directory */
};

/* In the host's mount namespace: clones and idmaps every tree, makes the overlay. Nothing is attached yet. */
void mounts_prepare(const struct request *request, int userns, struct trees *trees);

/* In the sandbox's own mount namespace, still the empty one: attaches everything and makes it the root. */
void mounts_attach(const struct request *request, const struct trees *trees);
