/*
 * The tree below a directory as a tree stream, or one file as a stream of one entry without a name. Follows no symbolic
 * link below PATH; sockets, FIFOs, devices are left out.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "worker.h"

enum { MAX_NAME = 32 * 1024, MAX_XATTRS = 12 * 1024 };

static char name[MAX_NAME]; /* relative to the root of the tree */
static const char *root;

static _Noreturn void pack_fail(void) {
    static char path[PATH_MAX + MAX_NAME];
    int error = errno;
    strncpy(path, root, PATH_MAX - 1);
    strcat(path, "/");
    strcat(path, name);
    worker_fail_with(error, path);
}

static bool is_kept(const char *attribute) {
    return strncmp(attribute, "user.", 5) == 0 || strcmp(attribute, "security.capability") == 0 ||
           strncmp(attribute, "system.posix_acl_", 17) == 0;
}

/* Attributes of an open file that mean something elsewhere: capabilities, access lists, the users' own. */
static void put_xattrs(struct writer *writer, int fd) {
    static char names[64 * 1024], field[MAX_XATTRS];
    ssize_t length = flistxattr(fd, names, sizeof names);
    if (length < 0 && errno == EOPNOTSUPP) return;
    if (length < 0) pack_fail();
    for (const char *at = names; at < names + length; at += strlen(at) + 1) {
        size_t room = strlen(at) + 1;
        if (!is_kept(at)) continue;
        if (room >= sizeof field) {
            errno = E2BIG;
            pack_fail();
        }
        memcpy(field, at, room);
        ssize_t size = fgetxattr(fd, at, field + room, sizeof field - room);
        if (size < 0 && errno == ENODATA) continue; /* removed meanwhile */
        if (size < 0) pack_fail();
        write_bytes(writer, TAG_XATTR, field, room + (size_t)size);
    }
}

static void put_entry(const struct stat *info, const char *kind, const char *link, size_t link_length, int fd) {
    static char bytes[MAX_NAME + PATH_MAX + MAX_XATTRS + 512];
    struct writer writer = {bytes + 4, 0, sizeof bytes - 4, false};
    write_text(&writer, TAG_KIND, kind);
    write_text(&writer, TAG_NAME, name);
    write_u64(&writer, TAG_MODE, info->st_mode & 07777);
    write_u64(&writer, TAG_MTIME_NS, (uint64_t)((int64_t)info->st_mtim.tv_sec * 1000000000 + info->st_mtim.tv_nsec));
    write_u64(&writer, TAG_SIZE, S_ISREG(info->st_mode) ? (uint64_t)info->st_size : 0);
    write_u64(&writer, TAG_UID, info->st_uid);
    write_u64(&writer, TAG_GID, info->st_gid);
    if (link) write_bytes(&writer, TAG_LINK, link, link_length);
    if (fd >= 0) put_xattrs(&writer, fd);
    if (writer.full) { /* an attribute that would be lost without a word */
        errno = E2BIG;
        pack_fail();
    }
    put_u32(bytes, (uint32_t)writer.length);
    worker_put(bytes, 4 + writer.length);
}

static void pack_file(int dir, const char *base, int flags) {
    static char buffer[WORKER_PIECE];
    struct stat info;
    int fd = openat(dir, base, flags | O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) return; /* removed meanwhile */
    if (fd < 0 || fstat(fd, &info) < 0) pack_fail();
    if (!S_ISREG(info.st_mode)) {
        close(fd);
        return;
    }
    put_entry(&info, "file", NULL, 0, fd);
    for (off_t left = info.st_size; left > 0;) {
        ssize_t count = read(fd, buffer, left < (off_t)sizeof buffer ? (size_t)left : sizeof buffer);
        if (count == 0) errno = EBUSY; /* it shrinks while it is read: neither content would be true */
        if (count <= 0) pack_fail();
        worker_put(buffer, (size_t)count);
        left -= count;
    }
    close(fd);
}

static void pack_directory(int fd, size_t length);

static void pack_subdirectory(int dir, const char *base, const struct stat *info, size_t length) {
    int fd = openat(dir, base, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 && (errno == ENOENT || errno == ENOTDIR || errno == ELOOP)) return;
    put_entry(info, "directory", NULL, 0, fd);
    pack_directory(fd, length);
}

static void pack_link(int dir, const char *base, const struct stat *info) {
    char target[PATH_MAX];
    ssize_t length = readlinkat(dir, base, target, sizeof target);
    if (length >= 0) put_entry(info, "symlink", target, (size_t)length, -1);
}

/* Takes `fd` over; `length` is that of the directory's own name. */
static void pack_directory(int fd, size_t length) {
    DIR *list = fd < 0 ? NULL : fdopendir(fd);
    if (!list) pack_fail();
    for (struct dirent *entry; (errno = 0, entry = readdir(list));) {
        struct stat info;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        size_t at = length ? length + 1 : 0, base = strlen(entry->d_name);
        if (at + base >= MAX_NAME) {
            errno = ENAMETOOLONG;
            pack_fail();
        }
        if (length) name[length] = '/';
        strcpy(name + at, entry->d_name);
        if (fstatat(dirfd(list), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) == 0) {
            if (S_ISREG(info.st_mode)) pack_file(dirfd(list), entry->d_name, O_NOFOLLOW);
            if (S_ISDIR(info.st_mode)) pack_subdirectory(dirfd(list), entry->d_name, &info, at + base);
            if (S_ISLNK(info.st_mode)) pack_link(dirfd(list), entry->d_name, &info);
        }
        name[length] = '\0';
    }
    if (errno) pack_fail();
    closedir(list);
}

void file_pack(struct request *request) {
    static const char end[4];
    root = request->path;
    int fd = open(request->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 && errno == ENOTDIR) pack_file(AT_FDCWD, request->path, 0);
    else pack_directory(fd, 0);
    worker_put(end, sizeof end);
    worker_end();
}
