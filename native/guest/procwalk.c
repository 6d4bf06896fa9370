/*
 * See procwalk.h. A process belongs to the tree when it is in the session of the tree's first process (which is a
 * session leader) or when its parent belongs. Processes that did setsid and then lost their parent are not found.
 */
#include "procwalk.h"

#include <dirent.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_ROUNDS = 10 };

struct process {
    pid_t pid, parent, session;
    bool inside;
};

static bool process_read(const char *name, struct process *process) {
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%.20s/stat", name);
    FILE *file = fopen(path, "re");
    if (!file) return false;
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = '\0';
    char *after = strrchr(text, ')'); /* the name may hold anything */
    int parent, group, session;
    if (!after || sscanf(after + 1, " %*c %d %d %d", &parent, &group, &session) != 3) return false;
    *process = (struct process){(pid_t)atoi(name), parent, session, false};
    return true;
}

static size_t process_list(struct process **list) {
    DIR *proc = opendir("/proc");
    size_t count = 0, room = 0;
    *list = NULL;
    if (!proc) return 0;
    for (struct dirent *entry; (entry = readdir(proc));) {
        if (entry->d_name[0] < '1' || entry->d_name[0] > '9') continue;
        if (count == room) {
            struct process *grown = realloc(*list, (room += 256) * sizeof **list);
            if (!grown) break;
            *list = grown;
        }
        if (process_read(entry->d_name, *list + count)) count++;
    }
    closedir(proc);
    return count;
}

static void mark_inside(struct process *list, size_t count, pid_t first) {
    for (bool again = true; again;) {
        again = false;
        for (size_t i = 0; i < count; i++) {
            if (list[i].inside || list[i].pid == getpid()) continue;
            bool in = list[i].pid == first || list[i].session == first;
            for (size_t j = 0; j < count && !in; j++) in = list[j].inside && list[j].pid == list[i].parent;
            if (in) list[i].inside = again = true;
        }
    }
}

int procwalk_signal(pid_t first, int signal, pid_t except) {
    struct process *list;
    int signalled = 0;
    if (first <= 1) return 0;
    size_t count = process_list(&list);
    mark_inside(list, count, first);
    for (size_t i = 0; i < count; i++) {
        if (list[i].inside && list[i].pid != except) signalled += kill(list[i].pid, signal) == 0;
    }
    free(list);
    return signalled;
}

void procwalk_kill(pid_t first) {
    int before = 0, now;
    for (int round = 0; round < MAX_ROUNDS && (now = procwalk_signal(first, SIGSTOP, 0)) != before; round++) before = now;
    procwalk_signal(first, SIGKILL, 0);
}
