/* A user namespace needs a process to be born in it, and its maps are written through that process's /proc entry by somebody privileged outside: here
 * by us, through the entry of a process that shares our memory and descriptors and has ended, but is not reaped yet. */
#include "launch/userns.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* Every sandbox's process begins with a copy of all descriptors: 1024 more cost it about 30 us. */
enum { KEPT = 1024 };

static struct kept {
    uint32_t outside, count;
    int fd; /* valid when count is not 0 */
} kept[KEPT];
static unsigned places = 1;

struct birth {
    int host_proc;
    int proc; /* /proc/PID of the process that was born */
    int userns;
    int error;
};

static int write_text(int directory, const char *path, const char *text)
{
    int fd = openat(directory, path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t length = (ssize_t)strlen(text), written = write(fd, text, (size_t)length);
    int error = errno;
    close(fd);
    errno = error;
    return written == length ? 0 : -1;
}

/* Only a process inside, with capabilities over the namespace, may set its limits. */
static int be_born(void *argument)
{
    struct birth *birth = argument;
    birth->proc = openat(birth->host_proc, "self", O_PATH | O_DIRECTORY | O_CLOEXEC);
    birth->userns = openat(birth->host_proc, "self/ns/user", O_RDONLY | O_CLOEXEC);
    if (birth->proc < 0 || birth->userns < 0 || write_text(birth->host_proc, "sys/user/max_user_namespaces", "0") < 0)
        birth->error = errno;
    return 0;
}

/* What is counted per user (pending signals, message queues, locked memory, inotify) is counted for a namespace's owner too. Root as the owner of all
 * would let one sandbox use up what the others, and root itself, are allowed. */
static int clone_owned(uint32_t owner, struct birth *birth)
{
    static char stack[16 * 1024] __attribute__((aligned(16)));
    if (syscall(SYS_setresuid, -1, owner, -1) < 0)
        return -1;
    int pid = clone(be_born, stack + sizeof(stack), CLONE_VM | CLONE_VFORK | CLONE_FILES | CLONE_NEWUSER, birth);
    int error = errno;
    if (syscall(SYS_setresuid, -1, 0, -1) < 0)
        _exit(1); /* cannot be: our real user is root */
    prctl(PR_SET_DUMPABLE, 1);
    errno = error;
    return pid;
}

static int make(const struct host *host, uint32_t outside, uint32_t count)
{
    struct birth birth = {.host_proc = host->proc, .proc = -1, .userns = -1};
    char map[64];
    int pid = clone_owned(outside, &birth);
    int error = pid < 0 ? errno : birth.error;
    snprintf(map, sizeof(map), "0 %u %u\n", outside, count);
    if (error == 0 && (write_text(birth.proc, "uid_map", map) < 0 || write_text(birth.proc, "gid_map", map) < 0))
        error = errno;
    if (pid > 0)
        waitpid(pid, NULL, __WALL);
    if (birth.proc >= 0)
        close(birth.proc);
    if (error != 0 && birth.userns >= 0)
        close(birth.userns);
    errno = error;
    return error == 0 ? birth.userns : -1;
}

void userns_keep(unsigned limit)
{
    places = limit < KEPT ? limit : KEPT;
}

int userns_get(const struct host *host, uint32_t outside, uint32_t count)
{
    struct kept *place = &kept[outside / count % places];
    if (place->count == count && place->outside == outside)
        return place->fd;
    int fd = make(host, outside, count);
    if (fd < 0)
        return -1;
    if (place->count != 0)
        close(place->fd);
    *place = (struct kept){.outside = outside, .count = count, .fd = fd};
    return fd;
}
