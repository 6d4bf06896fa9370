/*
 * Watching a file or directory, with all below it if asked, by inotify.
 *
 * Directories that appear later are watched as soon as they are seen; what was made in them before that is reported as
 * created. When the kernel drops events, or has no watches left, the event is `overflow`: look again.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <unistd.h>

#include "worker.h"

enum {
    RECURSIVE = 1,
    MAX_DEPTH = 256,
    MASK = IN_CREATE | IN_MODIFY | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_DELETE_SELF | IN_MOVE_SELF,
};

static int inotify_fd;
static bool recursive;
static char **paths; /* by watch descriptor */
static size_t path_count;
static char last[PATH_MAX + 64]; /* the event before, not to be repeated in a row */

static void put_event(const char *kind, const char *path) {
    char bytes[PATH_MAX + 128], now[sizeof last];
    snprintf(now, sizeof now, "%s %s", kind, path);
    if (strcmp(kind, "modified") == 0 && strcmp(now, last) == 0) return;
    strcpy(last, now);
    struct writer writer = {bytes + 4, 0, sizeof bytes - 4, false};
    write_text(&writer, TAG_EVENT, kind);
    write_text(&writer, TAG_PATH, path);
    put_u32(bytes, (uint32_t)writer.length);
    worker_put(bytes, 4 + writer.length);
}

static bool watch_add(const char *path, unsigned flags) {
    int number = inotify_add_watch(inotify_fd, path, MASK | flags);
    if (number < 0) return false;
    if ((size_t)number >= path_count) {
        size_t count = (size_t)number + 64;
        char **grown = realloc(paths, count * sizeof *paths);
        if (!grown) return false;
        memset(grown + path_count, 0, (count - path_count) * sizeof *paths);
        paths = grown;
        path_count = count;
    }
    char *copy = strdup(path);
    if (!copy) return false;
    free(paths[number]);
    paths[number] = copy;
    return true;
}

static bool join(char *out, const char *dir, const char *name) {
    const char *slash = dir[0] && dir[strlen(dir) - 1] == '/' ? "" : "/";
    return snprintf(out, PATH_MAX, "%s%s%s", dir, *name ? slash : "", name) < PATH_MAX;
}

/* Watches the directories below `path`; `report`: what is found there is news. False when the kernel has no room. */
static bool watch_below(const char *path, bool report, int depth) {
    int fd = depth > MAX_DEPTH ? -1 : open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *list = fd < 0 ? NULL : fdopendir(fd);
    bool complete = true;
    if (!list) return true; /* gone again, or not for this user */
    for (struct dirent *entry; (entry = readdir(list));) {
        char child[PATH_MAX];
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (!join(child, path, entry->d_name)) continue;
        if (report) put_event("created", child);
        if (entry->d_type != DT_DIR) continue;
        if (!watch_add(child, IN_ONLYDIR | IN_DONT_FOLLOW) && errno == ENOSPC) complete = false;
        complete = watch_below(child, report, depth + 1) && complete;
    }
    closedir(list);
    return complete;
}

static void forget_below(const char *path) {
    size_t length = strlen(path);
    for (size_t i = 0; i < path_count; i++) {
        if (!paths[i] || strncmp(paths[i], path, length) != 0) continue;
        if (paths[i][length] == '/' || paths[i][length] == '\0') inotify_rm_watch(inotify_fd, (int)i);
    }
}

static void directory_came(const char *path, bool report) {
    bool complete = watch_add(path, IN_ONLYDIR | IN_DONT_FOLLOW) || errno != ENOSPC;
    if (!watch_below(path, report, 0) || !complete) put_event("overflow", path);
}

static void handle(const struct inotify_event *event, const char *root) {
    if (event->mask & IN_Q_OVERFLOW) return put_event("overflow", root);
    if (event->wd < 0 || (size_t)event->wd >= path_count || !paths[event->wd]) return;
    if (event->mask & IN_IGNORED) {
        free(paths[event->wd]);
        paths[event->wd] = NULL;
        return;
    }
    char path[PATH_MAX];
    if (!join(path, paths[event->wd], event->len ? event->name : "")) return;
    bool is_root = strcmp(path, root) == 0, is_dir = recursive && event->mask & IN_ISDIR;
    if (event->mask & IN_CREATE) put_event("created", path);
    if (event->mask & IN_MODIFY) put_event("modified", path);
    if (event->mask & IN_DELETE || (event->mask & IN_DELETE_SELF && is_root)) put_event("removed", path);
    if (event->mask & IN_MOVED_FROM || (event->mask & IN_MOVE_SELF && is_root)) put_event("moved_from", path);
    if (event->mask & IN_MOVED_TO) put_event("moved_to", path);
    if (is_dir && event->mask & IN_MOVED_FROM) forget_below(path);
    if (is_dir && event->mask & (IN_CREATE | IN_MOVED_TO)) directory_came(path, event->mask & IN_CREATE);
}

void file_watch(struct request *request) {
    static char buffer[64 * 1024] __attribute__((aligned(__alignof__(struct inotify_event))));
    recursive = request->flags & RECURSIVE;
    inotify_fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (inotify_fd < 0 || !watch_add(request->path, 0)) worker_fail(request->path);
    if (recursive && !watch_below(request->path, false, 0)) worker_fail_with(ENOSPC, request->path);
    worker_answer(NULL);
    for (;;) {
        worker_wait(inotify_fd);
        ssize_t count = read(inotify_fd, buffer, sizeof buffer);
        if (count < 0 && errno != EAGAIN && errno != EINTR) worker_fail(request->path);
        for (ssize_t at = 0; at < count;) {
            const struct inotify_event *event = (const void *)(buffer + at);
            handle(event, request->path);
            at += (ssize_t)sizeof *event + event->len;
        }
        worker_flush();
    }
}
