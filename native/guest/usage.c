/*
 * Counters the host cannot read from outside of a machine. They are told before every EXIT, so that whoever sees how a
 * command ended knows them as of then. A host that has just come is told a little later: it comes for something else, and in a
 * machine that was just restored looking them all up takes longer than all the rest.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "conn.h"
#include "loop.h"
#include "machine.h"
#include "tree.h"

enum { FULL_BELOW = 64 * 1024, IS_FULL = 1, SOON_MS = 500 };

static struct timer soon;
static uint64_t kills_before, refused_before; /* of a sandbox that had this memory earlier */

/* The number after `name` in a file of lines; 0 when it is not there. */
static uint64_t number_in(const char *path, const char *name) {
    static char text[32 * 1024];
    if (!machine_read(path, text, sizeof text)) return 0;
    size_t length = strlen(name);
    for (const char *at = text; at; at = strchr(at, '\n')) {
        at += *at == '\n';
        if (strncmp(at, name, length) == 0) return strtoull(at + length, NULL, 10);
    }
    return 0;
}

static bool is_full(void) {
    struct statfs info;
    int fd = openat(machine_root(), "w", O_PATH | O_DIRECTORY | O_CLOEXEC);
    bool full = fd >= 0 && fstatfs(fd, &info) == 0 &&
                ((uint64_t)info.f_bavail * (uint64_t)info.f_bsize < FULL_BELOW || info.f_ffree == 0);
    if (fd >= 0) close(fd);
    return full;
}

static uint64_t oom_kills(void) {
    uint64_t below = number_in("c/sandbox/memory.events", "oom_kill "), all = number_in("proc/vmstat", "oom_kill ");
    return below > all ? below : all; /* each may be configured out */
}

static uint64_t forks_refused(void) {
    uint64_t at_limit = number_in("c/sandbox/pids.events", "max "), below = tree_forks_refused();
    return at_limit > below ? at_limit : below;
}

static uint64_t since(uint64_t before, uint64_t now) { return now > before ? now - before : 0; }

void usage_begin_anew(void) {
    kills_before = oom_kills();
    refused_before = forks_refused();
    usage_send();
}

void usage_send(void) {
    timer_stop(&soon);
    if (!machine_is_ready() || !conn_is_live()) return;
    char bytes[128];
    struct writer writer = {bytes, 0, sizeof bytes, false};
    uint64_t total = number_in("proc/meminfo", "MemTotal:"), free_kb = number_in("proc/meminfo", "MemAvailable:");
    write_u64(&writer, TAG_OOM_KILLS, since(kills_before, oom_kills()));
    write_u64(&writer, TAG_PIDS_DENIED, since(refused_before, forks_refused()));
    write_u64(&writer, TAG_FLAGS, is_full() ? IS_FULL : 0);
    write_u64(&writer, TAG_MEMORY, total > free_kb ? (total - free_kb) * 1024 : 0);
    write_u64(&writer, TAG_CPU_US, number_in("c/sandbox/cpu.stat", "usage_usec "));
    frame_send(FRAME_USAGE, 0, 0, bytes, writer.length);
}

static void it_is_time(struct timer *timer) {
    (void)timer;
    usage_send();
}

void usage_send_soon(void) { timer_set(&soon, SOON_MS, it_is_time); }
