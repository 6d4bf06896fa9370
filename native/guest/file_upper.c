/*
 * FS operation `pack_upper`: the upper directory of the sandbox's overlay as a raw tree stream, exactly: whiteouts, opaque
 * marks, every attribute, devices, hard links, holes. The host makes a layer of it without ever mounting a disk that a
 * guest has written.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "worker.h"

enum { MAX_NAME = 32 * 1024, MAX_XATTRS = 24 * 1024, LINK_BUCKETS = 4096, PIECE = 60 * 1024 };

struct link {
    struct link *next;
    ino_t inode;
    char name[];
};

static char name[MAX_NAME];
static struct link *links[LINK_BUCKETS];

static _Noreturn void fail(void) { worker_fail(name); }

static _Noreturn void fail_with(int error) {
    errno = error;
    fail();
}

/* The first name of a file with several; NULL: this is it. */
static const char *first_name(ino_t inode) {
    struct link **bucket = &links[inode % LINK_BUCKETS], *link = *bucket;
    while (link && link->inode != inode) link = link->next;
    if (link) return link->name;
    link = malloc(sizeof *link + strlen(name) + 1);
    if (!link) fail_with(ENOMEM);
    *link = (struct link){*bucket, inode};
    strcpy(link->name, name);
    *bucket = link;
    return NULL;
}

/* Attributes of links and devices have no descriptor: names here are those of the working directory. */
static void put_xattrs(struct writer *writer, const char *path) {
    static char names[64 * 1024], field[MAX_XATTRS];
    ssize_t length = llistxattr(path, names, sizeof names);
    if (length < 0 && errno == EOPNOTSUPP) return;
    if (length < 0) fail();
    for (const char *at = names; at < names + length; at += strlen(at) + 1) {
        size_t room = strlen(at) + 1;
        memcpy(field, at, room); /* names have at most 255 bytes */
        ssize_t size = lgetxattr(path, at, field + room, sizeof field - room);
        if (size < 0) fail();
        write_bytes(writer, TAG_XATTR, field, room + (size_t)size);
    }
}

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

static void put_head(const struct stat *info, const char *path, const char *first) {
    static char bytes[2 * MAX_NAME + PATH_MAX + MAX_XATTRS + 1024], target[PATH_MAX];
    struct writer writer = {bytes + 4, 0, 64 * 1024, false};
    write_text(&writer, TAG_KIND, kind_of(info->st_mode));
    write_text(&writer, TAG_NAME, name);
    if (first) write_text(&writer, TAG_HARD_LINK, first);
    else {
        write_u64(&writer, TAG_MODE, info->st_mode & 07777);
        write_u64(&writer, TAG_MTIME_NS, (uint64_t)((int64_t)info->st_mtim.tv_sec * 1000000000 + info->st_mtim.tv_nsec));
        write_u64(&writer, TAG_SIZE, S_ISREG(info->st_mode) ? (uint64_t)info->st_size : 0);
        write_u64(&writer, TAG_UID, info->st_uid);
        write_u64(&writer, TAG_GID, info->st_gid);
        if (S_ISCHR(info->st_mode) || S_ISBLK(info->st_mode))
            write_u64(&writer, TAG_DEVICE, (uint64_t)major(info->st_rdev) << 32 | minor(info->st_rdev));
        if (S_ISLNK(info->st_mode)) {
            ssize_t length = readlink(path, target, sizeof target);
            if (length < 0) fail();
            write_bytes(&writer, TAG_LINK, target, (size_t)length);
        }
        put_xattrs(&writer, path);
    }
    if (writer.full) fail_with(E2BIG);
    put_u32(bytes, (uint32_t)writer.length);
    worker_put(bytes, 4 + writer.length);
}

static void put_extent(int fd, off_t at, off_t end) {
    static char piece[12 + PIECE];
    while (at < end) {
        size_t wanted = end - at < PIECE ? (size_t)(end - at) : PIECE;
        ssize_t count = pread(fd, piece + 12, wanted, at);
        if (count == 0) errno = EBUSY; /* it shrinks while it is read */
        if (count <= 0) fail();
        put_u64(piece, (uint64_t)at);
        put_u32(piece + 8, (uint32_t)count);
        worker_put(piece, 12 + (size_t)count);
        at += count;
    }
}

static void put_content(int directory, const char *base, const struct stat *info) {
    static const char last[12];
    int fd = openat(directory, base, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    struct stat now;
    if (fd < 0 || fstat(fd, &now) < 0) fail();
    if (now.st_ino != info->st_ino || now.st_size != info->st_size) fail_with(EBUSY);
    for (off_t at = 0, end; at < info->st_size; at = end) {
        at = lseek(fd, at, SEEK_DATA);
        if (at < 0 && errno == ENXIO) break; /* a hole to the end */
        if (at < 0 || (end = lseek(fd, at, SEEK_HOLE)) < 0) fail();
        put_extent(fd, at, end < info->st_size ? end : info->st_size);
    }
    worker_put(last, sizeof last);
    close(fd);
}

static void put_directory(int fd, size_t length);

static void put_entry(int directory, const char *base, size_t length) {
    struct stat info;
    if (fchdir(directory) < 0 || lstat(base, &info) < 0) fail();
    bool is_whiteout = S_ISCHR(info.st_mode) && info.st_rdev == 0; /* overlayfs links them, as many as a file can have names */
    const char *first = !S_ISDIR(info.st_mode) && !is_whiteout && info.st_nlink > 1 ? first_name(info.st_ino) : NULL;
    put_head(&info, base, first);
    if (first) return;
    if (S_ISREG(info.st_mode)) put_content(directory, base, &info);
    if (S_ISDIR(info.st_mode)) put_directory(openat(directory, base, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), length);
}

/* Takes `fd` over; `length` is that of the directory's own name. */
static void put_directory(int fd, size_t length) {
    DIR *list = fd < 0 ? NULL : fdopendir(fd);
    if (!list) fail();
    for (struct dirent *entry; (errno = 0, entry = readdir(list));) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        size_t at = length ? length + 1 : 0, base = strlen(entry->d_name);
        if (at + base >= MAX_NAME) fail_with(ENAMETOOLONG);
        if (length) name[length] = '/';
        strcpy(name + at, entry->d_name);
        put_entry(dirfd(list), entry->d_name, at + base);
        name[length] = '\0';
    }
    if (errno) fail();
    closedir(list);
}

void file_upper(struct request *request) {
    static const char end[4];
    struct stat info;
    (void)request;
    int upper = openat(WORKER_ROOT, "w/upper", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (upper < 0 || fchdir(upper) < 0 || fstat(upper, &info) < 0) fail();
    put_head(&info, ".", NULL);
    put_directory(upper, 0);
    worker_put(end, sizeof end);
    worker_end();
}
