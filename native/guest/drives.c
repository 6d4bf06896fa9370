/* Which device a drive of the host's is. Devices may still be coming when the host asks: they are waited for. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "loop.h"
#include "machine.h"

enum { WAIT_MS = 4000, STEP_MS = 5, LETTERS = 26 };

static bool by_serial(const char *name, char *path, size_t room) {
    DIR *disks = opendir("/sys/block");
    bool found = false;
    for (struct dirent *entry; disks && !found && (entry = readdir(disks));) {
        char file[300], serial[64];
        snprintf(file, sizeof file, "sys/block/%s/serial", entry->d_name);
        if (entry->d_name[0] == '.' || !machine_read(file, serial, sizeof serial)) continue;
        serial[strcspn(serial, "\n")] = '\0';
        found = strcmp(serial, name) == 0;
        if (found) snprintf(path, room, "/dev/%s", entry->d_name);
    }
    if (disks) closedir(disks);
    return found;
}

/* A partition by its name, of a read-only disk: on others the name may be the sandbox's own. */
static bool by_partition(const char *name, char *path, size_t room) {
    DIR *disks = opendir("/sys/class/block");
    bool found = false;
    for (struct dirent *entry; disks && !found && (entry = readdir(disks));) {
        char file[300], text[512], wanted[64], read_only[8];
        snprintf(file, sizeof file, "sys/class/block/%s/uevent", entry->d_name);
        if (entry->d_name[0] == '.' || !machine_read(file, text, sizeof text)) continue;
        snprintf(wanted, sizeof wanted, "\nPARTNAME=%.40s\n", name);
        snprintf(file, sizeof file, "sys/class/block/%s/ro", entry->d_name);
        found = strstr(text, wanted) && machine_read(file, read_only, sizeof read_only) && read_only[0] == '1';
        if (found) snprintf(path, room, "/dev/%s", entry->d_name);
    }
    if (disks) closedir(disks);
    return found;
}

/* vda … vdz, vdaa …: as the kernel counts. */
static void by_number(unsigned long number, char *path, size_t room) {
    char letters[8] = "";
    size_t at = sizeof letters - 1;
    for (unsigned long rest = number + 1; rest && at; rest = (rest - 1) / LETTERS) letters[--at] = (char)('a' + (rest - 1) % LETTERS);
    snprintf(path, room, "/dev/vd%s", letters + at);
}

bool drive_find(const char *name, char *path, size_t room, struct problem *problem) {
    for (uint64_t end = now_ns() + WAIT_MS * 1000000ull; now_ns() < end;) {
        bool there = true;
        if (name[0] == '@') by_number(strtoul(name + 1, NULL, 10), path, room);
        else if (strncmp(name, "pmem@", 5) == 0) snprintf(path, room, "/dev/pmem%lu", strtoul(name + 5, NULL, 10));
        else if (strncmp(name, "part@", 5) == 0) there = by_partition(name + 5, path, room);
        else there = by_serial(name, path, room);
        if (there && access(path, F_OK) == 0) return true;
        usleep(STEP_MS * 1000);
    }
    errno = 0;
    return problem_set(problem, "no drive %.40s", name);
}
