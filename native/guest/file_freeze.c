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
static bool drive_is_frozen;

static bool write_text_at(const char *path, const char *text) {
    int fd = openat(ROOT, path, O_WRONLY | O_CLOEXEC);
    bool written = fd >= 0 && write(fd, text, strlen(text)) > 0;
    if (fd >= 0) close(fd);
    return written;
}

static void thaw(void) {
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

/* True: the host said END. False: the time is over. Ends the process when the host is gone. */
static bool wait_for_end(void) {
    struct pollfd host = {.fd = SOCKET, .events = POLLIN};
    while (left_ms()) {
        char type;
        if (poll(&host, 1, left_ms()) <= 0) continue;
        ssize_t count = recv(SOCKET, &type, 1, MSG_DONTWAIT);
        if (count < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (count <= 0) {
            thaw();
            _exit(0);
        }
        if (type == FRAME_END) return true;
    }
    return false;
}

static void stay_alive(void) {
    write_text_at("proc/self/oom_score_adj", "-1000"); /* nobody would thaw what it holds */
}

void file_freeze(struct request *request) {
    stay_alive();
    uint64_t most = request->has_length && request->length < 3600000 ? request->length : 3600000;
    deadline_ns = now_ns() + most * 1000000;
    drive = openat(ROOT, "w", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (drive < 0 || flock(drive, LOCK_EX | LOCK_NB) < 0) worker_fail_with(drive < 0 ? errno : EBUSY, "the writable drive");
    if (!write_text_at("c/sandbox/cgroup.freeze", "1")) fail(errno, "the sandbox's processes");
    while (!is_held()) {
        if (!left_ms()) fail(ETIMEDOUT, "the sandbox's processes");
        usleep(STEP_MS * 1000);
    }
    if (ioctl(drive, FIFREEZE, 0) < 0) fail(errno, "the writable drive");
    drive_is_frozen = true;
    worker_answer(NULL);
    if (!wait_for_end()) fail(ETIMEDOUT, "the freeze ran out");
    thaw();
    worker_end();
}
