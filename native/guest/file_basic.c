/* File operations that need one or two system calls: stat, list, mkdir, move, remove, chmod. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "worker.h"

enum { FLAG = 1, MAX_DEPTH = 4096 };

static const char *kind_of(mode_t mode) {
    switch (mode & S_IFMT) {
        case S_IFREG: return "file";
        case S_IFDIR: return "directory";
        case S_IFLNK: return "symlink";
        case S_IFIFO: return "fifo";
        case S_IFSOCK: return "socket";
        case S_IFCHR: return "char_device";
        default: return "block_device";
    }
}

void write_stat(struct writer *writer, const struct stat *info) {
    write_text(writer, TAG_KIND, kind_of(info->st_mode));
    write_u64(writer, TAG_MODE, info->st_mode & 07777);
    write_u64(writer, TAG_SIZE, (uint64_t)info->st_size);
    write_u64(writer, TAG_MTIME_NS, (uint64_t)((int64_t)info->st_mtim.tv_sec * 1000000000 + info->st_mtim.tv_nsec));
    write_u64(writer, TAG_UID, info->st_uid);
    write_u64(writer, TAG_GID, info->st_gid);
}

static void write_link(struct writer *writer, int dir, const char *name, const struct stat *info) {
    char target[PATH_MAX];
    if (!S_ISLNK(info->st_mode)) return;
    ssize_t length = readlinkat(dir, name, target, sizeof target);
    if (length >= 0) write_bytes(writer, TAG_LINK, target, (size_t)length);
}

void worker_done_stat(int dir, const char *name, const struct stat *info) {
    char bytes[PATH_MAX + 512];
    struct writer writer = {bytes, 0, sizeof bytes, false};
    write_stat(&writer, info);
    write_link(&writer, dir, name, info);
    worker_done(&writer);
}

void file_stat(struct request *request) {
    struct stat info;
    if (lstat(request->path, &info) < 0) worker_fail(request->path);
    worker_done_stat(AT_FDCWD, request->path, &info);
}

void file_list(struct request *request) {
    DIR *list = opendir(request->path);
    if (!list) worker_fail(request->path);
    char bytes[PATH_MAX + NAME_MAX + 512];
    for (struct dirent *entry; (entry = readdir(list));) {
        struct stat info;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (fstatat(dirfd(list), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) < 0) continue; /* removed meanwhile */
        struct writer writer = {bytes + 4, 0, sizeof bytes - 4, false};
        write_text(&writer, TAG_NAME, entry->d_name);
        write_stat(&writer, &info);
        write_link(&writer, dirfd(list), entry->d_name, &info);
        put_u32(bytes, (uint32_t)writer.length);
        worker_put(bytes, 4 + writer.length);
    }
    worker_end();
}

static bool is_directory(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

bool make_parents(char *path, mode_t mode) {
    for (char *at = path; (at = strchr(at + 1, '/'));) {
        *at = '\0';
        bool made = mkdir(path, 0755) == 0 || errno == EEXIST || is_directory(path);
        *at = '/';
        if (!made) return false;
    }
    if (mkdir(path, mode) == 0) return true;
    return is_directory(path);
}

void file_mkdir(struct request *request) {
    mode_t mode = request->has_mode ? (mode_t)request->mode & 07777 : 0755;
    bool made = request->flags & FLAG ? make_parents(request->path, mode) : mkdir(request->path, mode) == 0;
    if (!made) worker_fail(request->path);
    worker_done(NULL);
}

void file_move(struct request *request) {
    unsigned flags = request->flags & FLAG ? RENAME_NOREPLACE : 0;
    if (syscall(SYS_renameat2, AT_FDCWD, request->path, AT_FDCWD, request->target, flags) < 0) worker_fail(request->path);
    worker_done(NULL);
}

void file_chmod(struct request *request) {
    if (!request->has_mode) worker_fail_with(EINVAL, request->path);
    if (chmod(request->path, (mode_t)request->mode & 07777) < 0) worker_fail(request->path);
    worker_done(NULL);
}

/* Everything in the directory `fd` (taken over). Follows no link; false with errno. Depth is bounded by descriptors. */
static bool empty_directory(int fd, int depth) {
    DIR *list = fd < 0 ? NULL : fdopendir(fd);
    bool emptied = list != NULL;
    while (emptied) {
        errno = 0;
        struct dirent *entry = readdir(list);
        if (!entry) {
            emptied = errno == 0;
            break;
        }
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (unlinkat(dirfd(list), entry->d_name, 0) == 0 || errno == ENOENT) continue;
        if (errno != EISDIR && errno != EPERM) emptied = false;
        if (depth > MAX_DEPTH) {
            errno = ELOOP;
            emptied = false;
        }
        if (!emptied) break;
        int child = openat(dirfd(list), entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        emptied = empty_directory(child, depth + 1) && unlinkat(dirfd(list), entry->d_name, AT_REMOVEDIR) == 0;
    }
    int error = errno;
    if (list) closedir(list);
    errno = error;
    return emptied;
}

void file_remove(struct request *request) {
    const char *path = request->path;
    if (unlink(path) == 0) worker_done(NULL);
    if (errno != EISDIR && errno != EPERM) worker_fail(path);
    if (rmdir(path) == 0) worker_done(NULL);
    if (errno != ENOTEMPTY || !(request->flags & FLAG)) worker_fail(path);
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (!empty_directory(fd, 0) || rmdir(path) < 0) worker_fail(path);
    worker_done(NULL);
}
