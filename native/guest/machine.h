/*
 * The agent as init of a virtual machine: from the kernel's start to a sandbox that is like any other.
 *
 * What is mounted before SETUP stays below the sandbox's root, out of its programs' sight: the agent keeps a descriptor
 * of it (`machine_root`), and finds there whatever the sandbox does to its own /proc and /sys:
 *
 *   dev proc sys   what the kernel shows          l/N  layers            w  the writable drive: upper, work
 *   c              cgroup2, and c/sandbox         f    files about the host, the layer above the image's
 *   g              generation id, boot id         n    where the root was put together
 *
 * A machine with a disk of its own has no layers and no f: w is the disk's file system, and the root is that.
 */
#ifndef OPENDSEC_MACHINE_H
#define OPENDSEC_MACHINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "wire.h"

enum { MAX_LAYERS = 200, MAX_DISKS = 16, MAX_RESOLVERS = 8 };

/* What went wrong, for an ERROR frame. */
struct problem {
    int error;
    char text[256];
};

struct layer {
    char *meta, *data; /* data: NULL for an image in one file */
};

struct disk {
    char *drive, *mount_point;
};

enum { RENEW_IS_NEW = 1 };

/* The fields of RENEW. Strings are never NULL. */
struct renewal {
    uint64_t clock_ns, flags;
    const char *entropy;
    size_t entropy_length, resolver_count;
    char *host_name, *machine_id, *generation, *mac, *address, *gateway, *resolvers[MAX_RESOLVERS];
};

struct setup {
    struct layer layers[MAX_LAYERS];
    struct disk disks[MAX_DISKS];
    size_t layer_count, disk_count;
    char *writable;
    uint64_t pids_limit;
    struct renewal renewal;
};

/* Is this process the init the kernel has started (and not a sandbox's, which is given options)? */
bool machine_is_init(int argc, char **argv);
/* Mounts what the agent itself needs, loads modules, and says how the host is to be met: a port's path, or `vsock_port`. */
void machine_boot(const char **serial, unsigned *vsock_port);
/* A machine with a root on a disk of its own (`opendsec.root=` on its command line) makes it now, and needs no SETUP. */
void machine_start(void);
bool machine_runs(void);
bool machine_is_ready(void);
bool machine_has_disk(void);
/* The first file system, or -1 outside of machines. */
int machine_root(void);
/* SETUP and RENEW, answered when they are done: the loop goes on meanwhile. False: malformed. */
bool machine_frame(const struct header *header, char *payload);
/* The connection is gone: what goes on is finished, and nobody is told. */
void machine_detach(void);
/* Answers what cannot be done before SETUP; false: go on. */
bool machine_refuses(const struct header *header);
/* Everything on the disks, and off. */
_Noreturn void machine_off(void);

/* False, with errno and these words. */
bool problem_set(struct problem *problem, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* A small file below `machine_root`: all of it, terminated; what is written. */
bool machine_read(const char *path, char *text, size_t room);
bool machine_write(const char *path, const char *text);

/* drives.c: the device of a drive, e.g. /dev/vda. */
bool drive_find(const char *name, char *path, size_t room, struct problem *problem);
/* root.c: puts the root together and enters it. */
bool root_make(const struct setup *setup, struct problem *problem);
/* The same of a whole file system on a disk, which is written to itself. */
bool root_of_disk(const char *device, struct problem *problem);
/* facts.c: the files about the machine. `first`: makes them. */
bool facts_write(const struct renewal *renewal, bool first, struct problem *problem);
/* renew.c: all before the network, and all after it. */
bool renew_begin(const struct renewal *renewal, bool first, struct problem *problem);
bool renew_finish(const struct renewal *renewal, struct problem *problem);
/* network.c: sets the network, for a machine that boots and has nothing else to do. */
bool network_set(const struct renewal *renewal, struct problem *problem);
/* The same in a child; `done` is called by the loop, with NULL when it is set. False: not begun. */
bool network_begin(const struct renewal *renewal, void (*done)(const struct problem *), struct problem *problem);
/* Ends what was begun; `done` is not called. */
void network_stop(void);
/* usage.c: tells the host, if there is anything to tell. */
void usage_send(void);
void usage_send_soon(void);
/* What was counted so far was another sandbox's. */
void usage_begin_anew(void);

#endif
