/* Reading and writing the contents of one regular file. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "worker.h"

enum { MAKE_PARENTS = 1, MAX_LINKS = 40, DEFAULT_MODE = 0644 };

void file_read(struct request *request) {
    static char buffer[WORKER_PIECE];
    struct stat info;
    int fd = open(request->path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC); /* a FIFO must not hold us */
    if (fd < 0 || fstat(fd, &info) < 0) worker_fail(request->path);
    if (!S_ISREG(info.st_mode)) worker_fail_with(S_ISDIR(info.st_mode) ? EISDIR : EINVAL, request->path);
    if (request->offset > INT64_MAX) worker_fail_with(EINVAL, request->path);
    char bytes[512];
    struct writer writer = {bytes, 0, sizeof bytes, false};
    write_stat(&writer, &info);
    worker_answer(&writer);
    uint64_t left = request->has_length ? request->length : UINT64_MAX;
    off_t at = (off_t)request->offset;
    while (left) {
        size_t wanted = left < sizeof buffer ? (size_t)left : sizeof buffer;
        ssize_t count = pread(fd, buffer, wanted, at);
        if (count < 0) worker_fail(request->path);
        if (count == 0) break;
        worker_put(buffer, (size_t)count);
        worker_flush();
        at += count;
        left -= (uint64_t)count;
    }
    worker_end();
}

static char temporary[PATH_MAX]; /* to be removed when the upload is abandoned */

static void remove_temporary(void) {
    if (*temporary) unlink(temporary);
}

static _Noreturn void write_fail(const char *path) {
    int error = errno;
    remove_temporary();
    worker_fail_with(error, path);
}

/* Where PATH's last symbolic links lead: the file itself is replaced, not a link to it. */
static void follow_links(char path[PATH_MAX]) {
    for (int i = 0; i < MAX_LINKS; i++) {
        char target[PATH_MAX], next[PATH_MAX];
        ssize_t length = readlink(path, target, sizeof target - 1);
        if (length < 0) return;
        target[length] = '\0';
        char *slash = strrchr(path, '/');
        int dir = target[0] == '/' || !slash ? 0 : (int)(slash - path) + 1;
        if (snprintf(next, sizeof next, "%.*s%s", dir, path, target) >= PATH_MAX) worker_fail_with(ENAMETOOLONG, path);
        strcpy(path, next);
    }
    worker_fail_with(ELOOP, path);
}

static int make_temporary(const char *path) {
    uint64_t number;
    if (getrandom(&number, sizeof number, 0) < 0) return -1;
    const char *slash = strrchr(path, '/');
    int dir = slash ? (int)(slash - path) + 1 : 0;
    int length = snprintf(temporary, sizeof temporary, "%.*s.opendsec-%016llx", dir, path, (unsigned long long)number);
    if (length >= PATH_MAX) {
        errno = ENAMETOOLONG;
        return -1;
    }
    int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) *temporary = '\0';
    return fd;
}

/* Owner and mode of the file that is replaced, as far as the user may give them; MODE wins. */
static bool dress(int fd, const struct request *request, const struct stat *old, bool replaces) {
    struct stat made;
    if (fstat(fd, &made) < 0) return false;
    if (replaces && (made.st_uid != old->st_uid || made.st_gid != old->st_gid) && fchown(fd, old->st_uid, old->st_gid) < 0) {
        if (fchown(fd, (uid_t)-1, old->st_gid) < 0) errno = 0; /* a user without the right to: the file becomes theirs */
    }
    mode_t mode = replaces ? old->st_mode & 07777 : DEFAULT_MODE;
    if (request->has_mode) mode = (mode_t)request->mode & 07777;
    return fchmod(fd, mode) == 0;
}

static void receive(int fd, const char *path) {
    char *bytes;
    size_t length;
    while (worker_take(&bytes, &length, remove_temporary)) {
        while (length) {
            ssize_t count = write(fd, bytes, length);
            if (count < 0 && errno == EINTR) continue;
            if (count < 0) write_fail(path);
            bytes += count;
            length -= (size_t)count;
        }
    }
}

static void check_target(const char *path, struct stat *old, bool *replaces) {
    *replaces = stat(path, old) == 0;
    if (!*replaces) {
        if (errno != ENOENT) worker_fail(path);
        return;
    }
    if (!S_ISREG(old->st_mode)) worker_fail_with(S_ISDIR(old->st_mode) ? EISDIR : EINVAL, path);
    if (faccessat(AT_FDCWD, path, W_OK, AT_EACCESS) < 0) worker_fail(path); /* a rename alone would not ask */
}

void file_write(struct request *request) {
    char path[PATH_MAX];
    struct stat old, info;
    bool replaces;
    if (strlen(request->path) >= sizeof path) worker_fail_with(ENAMETOOLONG, request->path);
    strcpy(path, request->path);
    follow_links(path);
    check_target(path, &old, &replaces);
    char *slash = strrchr(path, '/');
    if (slash && slash != path && request->flags & MAKE_PARENTS) {
        *slash = '\0';
        if (!make_parents(path, 0755)) worker_fail(path);
        *slash = '/';
    }
    int fd = make_temporary(path);
    if (fd < 0) worker_fail(path);
    receive(fd, path);
    if (!dress(fd, request, &old, replaces) || fstat(fd, &info) < 0 || rename(temporary, path) < 0) write_fail(path);
    worker_done_stat(AT_FDCWD, path, &info);
}
