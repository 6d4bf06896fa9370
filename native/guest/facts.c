/*
 * The files about the machine: host name, hosts, resolvers, machine id, boot id, generation.
 *
 * All but the last two lie in a layer of their own above the image's, so they are ordinary files inside and never part
 * of what the sandbox has written; a machine with a disk of its own has them there, and only those two are ours. They are
 * renewed in place, the same inode: a program that has one open reads the new text, and a file the sandbox has changed
 * is its own from then on.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "machine.h"

enum { TEXT = 1024, HOST_NAME = 64 };

/* Whole at every moment but for its end; a shorter text is cut after it is there. */
static bool put(const char *path, const char *text, bool first, struct problem *problem) {
    int fd = openat(machine_root(), path, O_WRONLY | O_CLOEXEC | (first ? O_CREAT : 0), 0644);
    ssize_t length = (ssize_t)strlen(text);
    bool done = fd >= 0 && pwrite(fd, text, (size_t)length, 0) == length;
    if (done && lseek(fd, 0, SEEK_END) != length) done = ftruncate(fd, length) == 0;
    int error = errno;
    if (fd >= 0) close(fd);
    errno = error;
    return done || problem_set(problem, "/%s", path);
}

/* Directories of the layer; /run only where the image has no link of that name, which it would hide. */
static bool make_layer(struct problem *problem) {
    static const char *const directories[] = {"/f/etc", "/f/proc", "/f/sys", "/f/dev"};
    if (mount("tmpfs", "/g", "tmpfs", 0, "mode=755") < 0) return problem_set(problem, "the generation id");
    if (machine_has_disk()) return true;
    if (mount("tmpfs", "/f", "tmpfs", 0, "mode=755") < 0) return problem_set(problem, "the layer of files about the host");
    for (size_t i = 0; i < sizeof directories / sizeof *directories; i++)
        if (mkdir(directories[i], 0755) < 0) return problem_set(problem, "%s", directories[i]);
    struct stat info;
    for (int i = 0; i < MAX_LAYERS; i++) {
        char path[32];
        snprintf(path, sizeof path, "/l/%d/run", i);
        if (lstat(path, &info) == 0 && S_ISLNK(info.st_mode)) return true;
    }
    if (mkdir("/f/run", 0755) == 0 && mkdir("/f/run/opendsec", 0755) == 0) return true;
    return problem_set(problem, "/run");
}

static bool put_resolvers(const struct renewal *renewal, bool first, struct problem *problem) {
    char text[TEXT] = "";
    size_t at = 0;
    for (size_t i = 0; i < renewal->resolver_count; i++)
        at += (size_t)snprintf(text + at, sizeof text - at, "nameserver %.64s\n", renewal->resolvers[i]);
    if (!at) strcpy(text, "# This sandbox has no network.\n");
    return put("f/etc/resolv.conf", text, first, problem);
}

static bool put_names(const char *name, bool first, struct problem *problem) {
    char text[TEXT];
    if (strlen(name) > HOST_NAME) {
        errno = ENAMETOOLONG;
        return problem_set(problem, "the host name");
    }
    snprintf(text, sizeof text, "127.0.0.1\tlocalhost %s\n::1\tlocalhost ip6-localhost ip6-loopback\n", name);
    if (!put("f/etc/hosts", text, first, problem)) return false;
    snprintf(text, sizeof text, "%s\n", name);
    return put("f/etc/hostname", text, first, problem);
}

/* RFC 9562, version 4: as the kernel writes one in /proc/sys/kernel/random/uuid, which takes longer to get at. */
static bool draw_uuid(char *text, size_t room) {
    unsigned char id[16];
    if (getrandom(id, sizeof id, 0) != (ssize_t)sizeof id) return false;
    id[6] = (id[6] & 0x0f) | 0x40;
    id[8] = (id[8] & 0x3f) | 0x80;
    size_t at = 0;
    for (size_t i = 0; i < sizeof id; i++)
        at += (size_t)snprintf(text + at, room - at, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", id[i]);
    snprintf(text + at, room - at, "\n");
    return true;
}

/*
 * The generation and, before it, a boot id. The kernel draws its own at its first reading and keeps it, so copies of that
 * memory have the same: this one is shown in its place.
 */
static bool put_generation(const char *generation, bool first, struct problem *problem) {
    char text[TEXT];
    if (!draw_uuid(text, sizeof text)) return problem_set(problem, "a boot id");
    if (!put("g/boot_id", text, first, problem)) return false;
    snprintf(text, sizeof text, "%.200s\n", generation);
    return put("g/generation", text, first, problem);
}

bool facts_write(const struct renewal *renewal, bool first, struct problem *problem) {
    char text[TEXT];
    if (first && !make_layer(problem)) return false;
    if (machine_has_disk()) return put_generation(renewal ? renewal->generation : "", first, problem);
    const char *name = *renewal->host_name || !first ? renewal->host_name : "sandbox";
    if (*name && !put_names(name, first, problem)) return false;
    if (!put_resolvers(renewal, first, problem)) return false;
    snprintf(text, sizeof text, "%.100s\n", renewal->machine_id);
    if (*renewal->machine_id && !put("f/etc/machine-id", text, first, problem)) return false;
    return put_generation(renewal->generation, first, problem);
}
