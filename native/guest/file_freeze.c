/*
 * FS operation `freeze`: the sandbox and its writable drive stand still as long as this process is asked to, and no
 * longer: END, CANCEL, a lost connection and the time limit all end it. One at a time.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <poll.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "loop.h"
#include "worker.h"

enum { SOCKET = 3, ROOT = WORKER_ROOT, STEP_MS = 2 };

static uint64_t deadline_ns;
static int drive = -1;
static bool is_our_turn, drive_is_frozen;

static bool write_text_at(const char *path, const char *text) {
    int fd = openat(ROOT, path, O_WRONLY | O_CLOEXEC);
    bool written = fd >= 0 && write(fd, text, strlen(text)) > 0;
    if (fd >= 0) close(fd);
    return written;
}

static void thaw(void) {
    if (!is_our_turn) return;
    if (drive_is_frozen) ioctl(drive, FITHAW, 0);
    drive_is_frozen = false;
    write_text_at("c/sandbox/cgroup.freeze", "0");
}

static _Noreturn void fail(int error, const char *what) {
    thaw();
    worker_fail_with(error, what);
}

static bool is_held(void) {
    char text[128];
    int fd = openat(ROOT, "c/sandbox/cgroup.events", O_RDONLY | O_CLOEXEC);
    ssize_t count = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    text[count < 0 ? 0 : count] = '\0';
    return strstr(text, "frozen 1") != NULL;
}

static int left_ms(void) {
    uint64_t now = now_ns();
    return now >= deadline_ns ? 0 : (int)((deadline_ns - now) / 1000000 + 1);
}

/* Waits so long for the host. True: it said END. Ends the process when the host is gone. */
static bool host_said_end(int wait_ms) {
    struct pollfd host = {.fd = SOCKET, .events = POLLIN};
    char type;
    if (poll(&host, 1, wait_ms) <= 0) return false;
    ssize_t count = recv(SOCKET, &type, 1, MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (count <= 0) {
        thaw();
        _exit(0);
    }
    return type == FRAME_END;
}

/* Until the next look. The host may be gone, or have changed its mind, before anything stands still. */
static void step(int error, const char *what) {
    if (!left_ms()) fail(error, what);
    if (host_said_end(STEP_MS)) fail(ECANCELED, what);
}

/* One that was before, and lost its host, is thawing still. */
static void take_turn(void) {
    drive = openat(ROOT, "w", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (drive < 0) worker_fail("the writable drive");
    while (flock(drive, LOCK_EX | LOCK_NB) < 0) step(EBUSY, "the writable drive");
    is_our_turn = true;
}

static void stay_alive(void) {
    write_text_at("proc/self/oom_score_adj", "-1000"); /* nobody would thaw what it holds */
}

void file_freeze(struct request *request) {
    stay_alive();
    uint64_t most = request->has_length && request->length < 3600000 ? request->length : 3600000;
    deadline_ns = now_ns() + most * 1000000;
    take_turn();
    worker_leaving = thaw;
    if (!write_text_at("c/sandbox/cgroup.freeze", "1")) fail(errno, "the sandbox's processes");
    while (!is_held()) step(ETIMEDOUT, "the sandbox's processes");
    if (ioctl(drive, FIFREEZE, 0) < 0) fail(errno, "the writable drive");
    drive_is_frozen = true;
    worker_answer(NULL);
    while (!host_said_end(left_ms())) {
        if (!left_ms()) fail(ETIMEDOUT, "the freeze ran out");
    }
    thaw();
    worker_end();
}
