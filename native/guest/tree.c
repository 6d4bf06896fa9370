/* See tree.h. */
#include "tree.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "loop.h"
#include "procwalk.h"

enum { MAX_DEPTH = 16, CGROUP2_MAGIC = 0x63677270 };

/* A cgroup that outlived its command: removed when `cgroup.events` says it is empty. */
struct remains {
    struct garbage garbage;
    struct source source;
    char name[24];
};

static int root = -1;
static bool counts_where_forks_are_asked_for; /* before Linux 6.11; later, where the limit is */
static uint64_t refused_in_removed, refused_found;

bool tree_has_cgroups(void) { return root >= 0; }

bool tree_init(int fd) {
    if (fd < 0) fd = open("/sys/fs/cgroup", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return false;
    struct statfs info;
    char probe[] = "cmd-probe";
    bool usable = fstatfs(fd, &info) == 0 && info.f_type == CGROUP2_MAGIC && mkdirat(fd, probe, 0755) == 0;
    if (!usable || unlinkat(fd, probe, AT_REMOVEDIR) < 0) {
        close(fd);
        return false;
    }
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    root = fd;
    struct utsname system;
    int major = 0, minor = 0;
    counts_where_forks_are_asked_for =
        uname(&system) == 0 && sscanf(system.release, "%d.%d", &major, &minor) == 2 && (major < 6 || (major == 6 && minor < 11));
    return true;
}

bool tree_make(struct tree *tree, const char *prefix, uint32_t number) {
    *tree = (struct tree){.fd = -1, .watch.fd = -1};
    snprintf(tree->name, sizeof tree->name, "%s-%u", prefix, number);
    if (root < 0) return true;
    if (mkdirat(root, tree->name, 0755) < 0 && errno != EEXIST) return false;
    tree->fd = openat(root, tree->name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (tree->fd >= 0) return true;
    int error = errno;
    unlinkat(root, tree->name, AT_REMOVEDIR);
    errno = error;
    return false;
}

static void write_file_at(int dir, const char *name, const char *text) {
    int fd = openat(dir, name, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return;
    ssize_t ignored = write(fd, text, strlen(text));
    (void)ignored;
    close(fd);
}

/* Calls `visit` for every directory below `dir`, children first. */
static void each_below(int dir, int depth, void (*visit)(int parent, const char *name, int fd)) {
    int copy = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *list = copy < 0 ? NULL : fdopendir(copy);
    if (!list) {
        if (copy >= 0) close(copy);
        return;
    }
    for (struct dirent *entry; (entry = readdir(list));) {
        if (entry->d_type != DT_DIR || entry->d_name[0] == '.') continue;
        int child = openat(dir, entry->d_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
        if (child < 0) continue;
        if (depth < MAX_DEPTH) each_below(child, depth + 1, visit);
        visit(dir, entry->d_name, child);
        close(child);
    }
    closedir(list);
}

static int signal_number, signal_count;
static pid_t signal_except;

static void signal_in(int parent, const char *name, int dir) {
    (void)parent, (void)name;
    int fd = openat(dir, "cgroup.procs", O_RDONLY | O_CLOEXEC);
    FILE *list = fd < 0 ? NULL : fdopen(fd, "r");
    if (!list) {
        if (fd >= 0) close(fd);
        return;
    }
    for (int pid; fscanf(list, "%d", &pid) == 1;) {
        if (pid <= 1 || pid == signal_except || pid == getpid()) continue;
        signal_count += kill(pid, signal_number) == 0;
    }
    fclose(list);
}

int tree_signal(const struct tree *tree, int signal, pid_t except) {
    if (tree->fd < 0) return procwalk_signal(tree->pid, signal, except);
    signal_number = signal;
    signal_except = except;
    signal_count = 0;
    signal_in(-1, "", tree->fd);
    struct stat info;
    if (fstat(tree->fd, &info) == 0 && info.st_nlink > 2) each_below(tree->fd, 0, signal_in);
    return signal_count;
}

void tree_kill(const struct tree *tree) {
    if (tree->fd < 0) procwalk_kill(tree->pid);
    else write_file_at(tree->fd, "cgroup.kill", "1");
}

void tree_freeze(const struct tree *tree, bool frozen) {
    if (tree->fd >= 0) write_file_at(tree->fd, "cgroup.freeze", frozen ? "1" : "0");
}

/* Adds what a cgroup says of forks refused in it to `refused_found`. */
static void find_refused(int parent, const char *name, int dir) {
    (void)parent, (void)name;
    char text[64] = "";
    unsigned long long count;
    int fd = openat(dir, "pids.events", O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && read(fd, text, sizeof text - 1) > 0 && sscanf(text, "max %llu", &count) == 1) refused_found += count;
    if (fd >= 0) close(fd);
}

uint64_t tree_forks_refused(void) {
    if (root < 0 || !counts_where_forks_are_asked_for) return 0;
    refused_found = refused_in_removed;
    each_below(root, 0, find_refused);
    return refused_found;
}

/* As unlinkat; what was refused in it is remembered. */
static int remove_group(int parent, const char *name) {
    refused_found = 0;
    int fd = counts_where_forks_are_asked_for ? openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW) : -1;
    if (fd >= 0) {
        find_refused(parent, name, fd);
        close(fd);
    }
    int status = unlinkat(parent, name, AT_REMOVEDIR);
    if (status == 0) refused_in_removed += refused_found;
    return status;
}

static void remove_dir(int parent, const char *name, int fd) {
    (void)fd;
    remove_group(parent, name);
}

static bool remove_tree(const char *name) {
    if (remove_group(root, name) == 0 || errno == ENOENT) return true;
    int fd = openat(root, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return errno == ENOENT;
    each_below(fd, 0, remove_dir);
    close(fd);
    return remove_group(root, name) == 0;
}

static bool is_populated(int events_fd) {
    char text[128];
    ssize_t count = pread(events_fd, text, sizeof text - 1, 0); /* also re-arms the notification */
    if (count < 0) return false;
    text[count] = '\0';
    return strstr(text, "populated 1") != NULL;
}

static void watch_changed(struct source *source, uint32_t events) {
    (void)events;
    struct tree *tree = HOLDER(source, struct tree, watch);
    if (is_populated(source->fd)) return;
    source_close(source);
    tree->emptied(tree);
}

bool tree_await_empty(struct tree *tree, void (*emptied)(struct tree *)) {
    if (tree->watch.fd >= 0) return true;
    if (tree->fd < 0) return false;
    tree->emptied = emptied;
    int fd = openat(tree->fd, "cgroup.events", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    if (is_populated(fd) && source_add(&tree->watch, fd, EPOLLPRI, watch_changed)) {
        if (is_populated(fd)) return true;
        source_release(&tree->watch);
    }
    close(fd);
    return false;
}

static void remains_changed(struct source *source, uint32_t events) {
    (void)events;
    struct remains *remains = HOLDER(source, struct remains, source);
    if (is_populated(source->fd) || !remove_tree(remains->name)) return;
    source_close(source);
    loop_free(&remains->garbage);
}

void tree_retire(struct tree *tree) {
    source_close(&tree->watch);
    if (tree->fd < 0) return;
    int dir = tree->fd;
    tree->fd = -1;
    if (!remove_tree(tree->name)) {
        struct remains *remains = calloc(1, sizeof *remains);
        int fd = openat(dir, "cgroup.events", O_RDONLY | O_CLOEXEC);
        if (remains && fd >= 0 && source_add(&remains->source, fd, EPOLLPRI, remains_changed)) {
            memcpy(remains->name, tree->name, sizeof remains->name);
            remains_changed(&remains->source, 0); /* it may have become empty meanwhile */
        } else {
            free(remains);
            if (fd >= 0) close(fd);
        }
    }
    close(dir);
}
