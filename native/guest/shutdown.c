/* See shutdown.h. As pid 1 everything else in the pid namespace is ours to end; elsewhere (tests) only the commands are. */
#include "shutdown.h"

#include <signal.h>
#include <stdint.h>
#include <unistd.h>

#include "command.h"
#include "loop.h"
#include "reap.h"
#include "session.h"
#include "wire.h"

enum { POLL_MS = 10, AFTER_KILL_MS = 1000 };

static struct timer timer;
static uint64_t deadline_ns;

static void end_all(int signal) {
    if (getpid() == 1) {
        kill(-1, signal);
        kill(-1, SIGCONT);
        return;
    }
    command_kill_all(signal == SIGKILL ? 0 : 3600000);
    session_end_all();
}

static void poll_ends(struct timer *fired) {
    uint64_t now = now_ns();
    bool empty = getpid() == 1 ? !reap_has_children() : command_live_count() == 0;
    if (empty || now > deadline_ns + AFTER_KILL_MS * 1000000ull) return loop_stop();
    if (now >= deadline_ns) end_all(SIGKILL);
    timer_set(fired, POLL_MS, poll_ends);
}

bool shutdown_begin(char *payload, size_t length) {
    struct cursor cursor = {payload, payload + length, false};
    uint64_t grace_ms = 0;
    for (struct field field; field_next(&cursor, &field);) {
        if (field.tag == TAG_GRACE_MS && !field_u64(&cursor, &field, &grace_ms)) return false;
    }
    if (cursor.bad) return false;
    if (grace_ms > 3600000) grace_ms = 3600000;
    deadline_ns = now_ns() + grace_ms * 1000000u;
    end_all(grace_ms ? SIGTERM : SIGKILL);
    timer_set(&timer, 0, poll_ends);
    return true;
}
