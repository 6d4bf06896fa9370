/*
 * A tree stream made into files. The stream comes from outside: every name is checked, and every directory on the way
 * to an entry is opened with RESOLVE_BENEATH and RESOLVE_NO_SYMLINKS, so neither a name nor a link that is already there
 * leads out of PATH. Modes and times of directories are set at the end, or a read-only one could not be filled. Owners
 * and attributes are set when the stream has them, and the user's rights decide whether they can be.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "worker.h"

enum { MAX_ENTRY = 64 * 1024, MAX_XATTRS = 32 };

struct xattr {
    char *name, *value;
    size_t size;
};

struct entry {
    char *kind, *name, *link;
    uint64_t mode, mtime_ns, size, uid, gid;
    bool has_uid, has_gid;
    size_t xattr_count;
    struct xattr xattrs[MAX_XATTRS];
};

struct directory {
    struct directory *next;
    struct entry entry; /* its texts are in `bytes` */
    char bytes[];
};

static const char *path;
static int root_fd, parent_fd = -1;
static char parent_name[MAX_ENTRY];
static struct directory *directories; /* the last made first: children before parents */
static char *piece;
static size_t piece_length;

static void abandon(void) { /* what has been unpacked stays, as after an interrupted tar */ }

static _Noreturn void unpack_fail(int error, const struct entry *entry) {
    static char text[PATH_MAX + MAX_ENTRY];
    strncpy(text, path, PATH_MAX - 1);
    if (entry) {
        strcat(text, "/");
        strcat(text, entry->name);
    }
    worker_fail_with(error, text);
}

/* Up to `most` bytes of the stream in place; a stream that ends here was cut. */
static size_t take(char **bytes, size_t most) {
    while (!piece_length) {
        if (!worker_take(&piece, &piece_length, abandon)) unpack_fail(EPIPE, NULL);
    }
    size_t length = piece_length < most ? piece_length : most;
    *bytes = piece;
    piece += length;
    piece_length -= length;
    return length;
}

static void take_exactly(char *to, size_t length) {
    while (length) {
        char *bytes;
        size_t count = take(&bytes, length);
        memcpy(to, bytes, count);
        to += count;
        length -= count;
    }
}

/* No leading slash, and no empty, "." or ".." component. */
static bool is_good_name(const char *name) {
    for (const char *at = name;;) {
        size_t length = strcspn(at, "/");
        if (length == 0 || (length == 1 && at[0] == '.') || (length == 2 && at[0] == '.' && at[1] == '.')) return false;
        if (!at[length]) return true;
        at += length + 1;
    }
}

/* `name NUL value`. */
static bool add_xattr(struct entry *entry, const struct field *field) {
    size_t length = strnlen(field->data, field->length);
    if (length == 0 || length == field->length || entry->xattr_count == MAX_XATTRS) return false;
    entry->xattrs[entry->xattr_count++] = (struct xattr){field->data, field->data + length + 1, field->length - length - 1};
    return true;
}

static void entry_parse(struct entry *entry, char *bytes, size_t length) {
    static char empty[1];
    struct cursor cursor = {bytes, bytes + length, false};
    char *end = NULL;
    bool has_nul = false;
    *entry = (struct entry){.kind = empty, .name = empty, .link = empty};
    for (struct field field; field_next(&cursor, &field);) {
        if (end) *end = '\0';
        end = field.data + field.length;
        char **text = field.tag == TAG_KIND ? &entry->kind : field.tag == TAG_NAME ? &entry->name : NULL;
        if (field.tag == TAG_LINK) text = &entry->link;
        if (text) {
            *text = field.data;
            has_nul |= memchr(field.data, '\0', field.length) != NULL;
        }
        if (field.tag == TAG_MODE) field_u64(&cursor, &field, &entry->mode);
        if (field.tag == TAG_MTIME_NS) field_u64(&cursor, &field, &entry->mtime_ns);
        if (field.tag == TAG_SIZE) field_u64(&cursor, &field, &entry->size);
        if (field.tag == TAG_UID) entry->has_uid = field_u64(&cursor, &field, &entry->uid);
        if (field.tag == TAG_GID) entry->has_gid = field_u64(&cursor, &field, &entry->gid);
        if (field.tag == TAG_XATTR && !add_xattr(entry, &field)) unpack_fail(E2BIG, NULL);
    }
    if (end) *end = '\0';
    if (cursor.bad || has_nul) unpack_fail(EBADMSG, NULL);
    if (!is_good_name(entry->name)) unpack_fail(EINVAL, entry);
}

/* The directory that holds the entry, and the entry's own name in `base`. */
static int open_parent(const struct entry *entry, const char **base) {
    char *slash = strrchr(entry->name, '/');
    *base = slash ? slash + 1 : entry->name;
    if (!slash) return root_fd;
    *slash = '\0';
    if (parent_fd < 0 || strcmp(parent_name, entry->name) != 0) {
        struct open_how how = {
            .flags = O_PATH | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS};
        if (parent_fd >= 0) close(parent_fd);
        parent_fd = (int)syscall(SYS_openat2, root_fd, entry->name, &how, sizeof how);
        if (parent_fd < 0) unpack_fail(errno, entry);
        strcpy(parent_name, entry->name);
    }
    *slash = '/';
    return parent_fd;
}

static struct timespec time_of(const struct entry *entry) {
    int64_t ns = (int64_t)entry->mtime_ns;
    int64_t seconds = ns / 1000000000, rest = ns % 1000000000;
    if (rest < 0) {
        rest += 1000000000;
        seconds--;
    }
    return (struct timespec){.tv_sec = seconds, .tv_nsec = (long)rest};
}

static uid_t owner_of(const struct entry *entry) { return entry->has_uid ? (uid_t)entry->uid : (uid_t)-1; }

static gid_t group_of(const struct entry *entry) { return entry->has_gid ? (gid_t)entry->gid : (gid_t)-1; }

/* Owner, then mode, which a new owner takes bits from, then attributes, which a new owner takes capabilities from. */
static bool set_facts(int fd, const struct entry *entry) {
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, time_of(entry)};
    if ((entry->has_uid || entry->has_gid) && fchown(fd, owner_of(entry), group_of(entry)) < 0) return false;
    if (fchmod(fd, (mode_t)entry->mode & 07777) < 0) return false;
    for (size_t i = 0; i < entry->xattr_count; i++) {
        const struct xattr *xattr = &entry->xattrs[i];
        if (fsetxattr(fd, xattr->name, xattr->value, xattr->size, 0) < 0) return false;
    }
    return futimens(fd, times) == 0;
}

static void make_file(const struct entry *entry) {
    const char *base;
    int dir = open_parent(entry, &base), flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    int fd = openat(dir, base, flags, 0600);
    if (fd < 0 && errno == EEXIST && unlinkat(dir, base, 0) == 0) fd = openat(dir, base, flags, 0600);
    if (fd < 0) unpack_fail(errno, entry);
    for (uint64_t left = entry->size; left;) {
        char *bytes;
        size_t length = take(&bytes, left < SIZE_MAX ? (size_t)left : SIZE_MAX);
        left -= length;
        while (length) {
            ssize_t count = write(fd, bytes, length);
            if (count < 0 && errno != EINTR) unpack_fail(errno, entry);
            if (count < 0) continue;
            bytes += count;
            length -= (size_t)count;
        }
    }
    if (!set_facts(fd, entry)) unpack_fail(errno, entry);
    close(fd);
}

static void make_link(const struct entry *entry) {
    const char *base;
    int dir = open_parent(entry, &base);
    bool made = symlinkat(entry->link, dir, base) == 0;
    if (!made && errno == EEXIST) made = unlinkat(dir, base, 0) == 0 && symlinkat(entry->link, dir, base) == 0;
    if (!made) unpack_fail(errno, entry);
    bool owned = entry->has_uid || entry->has_gid;
    if (owned && fchownat(dir, base, owner_of(entry), group_of(entry), AT_SYMLINK_NOFOLLOW) < 0) unpack_fail(errno, entry);
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, time_of(entry)};
    utimensat(dir, base, times, AT_SYMLINK_NOFOLLOW); /* not every file system keeps a link's time */
}

static char *keep(char **at, const char *bytes, size_t length) {
    char *kept = memcpy(*at, bytes, length);
    *at += length;
    return kept;
}

/* What is set when all below it is there. */
static void remember(const struct entry *entry) {
    size_t room = strlen(entry->name) + 1;
    for (size_t i = 0; i < entry->xattr_count; i++) room += strlen(entry->xattrs[i].name) + 1 + entry->xattrs[i].size;
    struct directory *made = malloc(sizeof *made + room);
    if (!made) unpack_fail(ENOMEM, entry);
    char *at = made->bytes;
    made->next = directories;
    made->entry = *entry;
    made->entry.name = keep(&at, entry->name, strlen(entry->name) + 1);
    for (size_t i = 0; i < entry->xattr_count; i++) {
        struct xattr *kept = &made->entry.xattrs[i];
        kept->name = keep(&at, kept->name, strlen(kept->name) + 1);
        kept->value = keep(&at, kept->value, kept->size);
    }
    directories = made;
}

static void make_directory(const struct entry *entry) {
    const char *base;
    struct stat info;
    int dir = open_parent(entry, &base);
    if (mkdirat(dir, base, 0700) < 0) {
        if (errno != EEXIST || fstatat(dir, base, &info, AT_SYMLINK_NOFOLLOW) < 0) unpack_fail(errno, entry);
        if (!S_ISDIR(info.st_mode) && (unlinkat(dir, base, 0) < 0 || mkdirat(dir, base, 0700) < 0)) unpack_fail(errno, entry);
    }
    remember(entry);
}

static void finish_directories(void) {
    for (struct directory *made = directories; made; made = made->next) {
        struct open_how how = {
            .flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS};
        int fd = (int)syscall(SYS_openat2, root_fd, made->entry.name, &how, sizeof how);
        if (fd < 0 || !set_facts(fd, &made->entry)) unpack_fail(errno, &made->entry);
        close(fd);
    }
}

static bool take_entry(struct entry *entry) {
    static char bytes[MAX_ENTRY + 1];
    char length[4];
    take_exactly(length, sizeof length);
    if (!get_u32(length)) return false;
    if (get_u32(length) > MAX_ENTRY) unpack_fail(EBADMSG, NULL);
    take_exactly(bytes, get_u32(length));
    entry_parse(entry, bytes, get_u32(length));
    return true;
}

void file_unpack(struct request *request) {
    path = request->path;
    uint64_t count = 0, size = 0;
    if (!make_parents(request->path, 0755)) worker_fail(path);
    root_fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root_fd < 0) worker_fail(path);
    for (struct entry entry; take_entry(&entry);) {
        if (strcmp(entry.kind, "directory") == 0) make_directory(&entry);
        else if (strcmp(entry.kind, "symlink") == 0) make_link(&entry);
        else if (strcmp(entry.kind, "file") == 0) {
            make_file(&entry);
            count++;
            size += entry.size;
        } else unpack_fail(EINVAL, &entry);
    }
    finish_directories();
    for (char *rest; piece_length || worker_take(&rest, &piece_length, abandon);) piece_length = 0;
    char bytes[64];
    struct writer writer = {bytes, 0, sizeof bytes, false};
    write_u64(&writer, TAG_COUNT, count);
    write_u64(&writer, TAG_SIZE, size);
    worker_done(&writer);
}
