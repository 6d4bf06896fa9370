/* The launcher: takes requests from the socket on descriptor 0, forks the process that becomes each sandbox's pid 1, and answers when that has
 * executed the agent or failed. It keeps no state of a sandbox beyond that. */
#include "launch/request.h"
#include "launch/sandbox.h"
#include "launch/slim.h"
#include "launch/sys.h"
#include "launch/userns.h"
#include "launch/seccomp.h"
#include "signals.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>

enum { MAX_ACTIVE = 64, RESERVED_FDS = 10, SOCKET = 0, DEATH_TIMEOUT_MS = 30000 };

/* A start under way. */
struct start {
    uint64_t seq;
    pid_t pid;   /* 0: free */
    int pidfd;
    int ended;   /* reading end of a pipe that the execution, or death, closes */
};

static struct start starts[MAX_ACTIVE];
static struct report *reports; /* one per start, shared with its process */
static unsigned active, max_active;
static struct host host;
static char packet[MAX_PACKET + 1];
static struct request request;
uint64_t sys_key;

/* ── answers ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────── */

static void answer(const char *text, size_t length, int pidfd)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {{0}};
    struct iovec part = {.iov_base = (char *)(size_t)text, .iov_len = length};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (pidfd >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof(control.bytes);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(header), &pidfd, sizeof(int));
    }
    /* The edge is gone: it will not miss a failure, and a success must not stay. */
    if (sendmsg(SOCKET, &message, MSG_NOSIGNAL) < 0 && pidfd >= 0)
        sys_pidfd_send_signal(pidfd, SIGKILL);
}

static void answer_failure(uint64_t seq, const char *step, int error, const char *text)
{
    char buffer[512];
    int length = snprintf(buffer, sizeof(buffer), "seq=%llu%cok=0%cstep=%s%cerrno=%d%cmessage=%s%s%s", (unsigned long long)seq, 0, 0, step, 0, error, 0, text,
                          error != 0 ? ": " : "", error != 0 ? strerror(error) : "");
    size_t used = (size_t)length < sizeof(buffer) ? (size_t)length : sizeof(buffer) - 1;
    answer(buffer, used + 1, -1);
}

static void answer_success(uint64_t seq, pid_t pid, int pidfd)
{
    char buffer[80];
    int length = snprintf(buffer, sizeof(buffer), "seq=%llu%cok=1%cpid=%d", (unsigned long long)seq, 0, 0, (int)pid);
    answer(buffer, (size_t)length + 1, pidfd);
}

/* ── one start ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────── */

static void begin(void)
{
    unsigned i = 0;
    int ends[2];
    int userns = userns_get(&host, request.outside, request.count);
    if (userns < 0) {
        answer_failure(request.seq, "user", errno, "make a user namespace");
        return;
    }
    while (starts[i].pid != 0)
        i++;
    struct start *start = &starts[i];
    if (pipe2(ends, O_CLOEXEC) < 0) {
        answer_failure(request.seq, "clone", errno, "pipe2");
        return;
    }
    reports[i].step = "clone";
    reports[i].error = 0;
    reports[i].message[0] = '\0';
    struct clone_args args = {
        .flags = CLONE_NEWPID | CLONE_PIDFD | CLONE_INTO_CGROUP | CLONE_CLEAR_SIGHAND,
        .pidfd = (uint64_t)(size_t)&start->pidfd,
        .exit_signal = SIGCHLD,
        .cgroup = (uint64_t)request.cgroup2,
    };
    int pid = sys_clone3(&args);
    if (pid == 0) {
        dup2(host.null, SOCKET); /* the edge must see the end of the launcher, not ours */
        close(ends[0]);
        for (unsigned other = 0; other < max_active; other++) /* or we would keep their launcher alive in their eyes */
            if (starts[other].pid != 0)
                close(starts[other].ended);
        sandbox_run(&request, &host, userns, ends[1], &reports[i]);
    }
    int error = errno;
    close(ends[1]);
    if (pid < 0) {
        close(ends[0]);
        answer_failure(request.seq, error == EBADF || error == ENODEV || error == EOPNOTSUPP ? "cgroup2" : "clone", error, "clone3");
        return;
    }
    start->seq = request.seq;
    start->pid = pid;
    start->ended = ends[0];
    active++;
}

/* The pipe has no writer any more: the agent was executed, or the process has ended. */
static void finish(unsigned i)
{
    struct start *start = &starts[i];
    const struct report *report = &reports[i];
    bool executed = report->step[0] == STEP_EXEC[0] && strcmp(report->step, STEP_EXEC) == 0 && report->error == 0;
    if (executed) {
        answer_success(start->seq, start->pid, start->pidfd);
    } else {
        struct pollfd death = {.fd = start->pidfd, .events = POLLIN};
        poll(&death, 1, DEATH_TIMEOUT_MS);
        bool silent = report->error == 0 && report->message[0] == '\0';
        answer_failure(start->seq, report->step, silent ? EINTR : report->error, silent ? "the process was killed" : report->message);
    }
    close(start->ended);
    close(start->pidfd);
    start->pid = 0;
    active--;
}

/* ── the loop ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────── */

/* Takes one request. Returns false at the end of the socket. */
static bool take(void)
{
    static union {
        char bytes[CMSG_SPACE(MAX_FDS * sizeof(int))];
        struct cmsghdr align;
    } control;
    struct iovec part = {.iov_base = packet, .iov_len = MAX_PACKET};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof(control.bytes)};
    ssize_t length = recvmsg(SOCKET, &message, MSG_CMSG_CLOEXEC);
    if (length <= 0)
        return length < 0 && (errno == EINTR || errno == EAGAIN);
    int fds[MAX_FDS];
    unsigned count = 0;
    for (struct cmsghdr *header = CMSG_FIRSTHDR(&message); header != NULL; header = CMSG_NXTHDR(&message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
            continue;
        count = (unsigned)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(fds, CMSG_DATA(header), count * sizeof(int));
    }
    struct mistake mistake;
    packet[length] = '\0';
    bool good = request_parse(&request, packet, (size_t)length, fds, count, &mistake);
    if ((message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0)
        answer_failure(request.seq, "request", EMSGSIZE, "more than one request holds");
    else if (!good)
        answer_failure(request.seq, mistake.key, EINVAL, mistake.message);
    else
        begin();
    for (unsigned i = 0; i < count; i++)
        close(fds[i]);
    return true;
}

static void serve(void)
{
    struct pollfd fds[MAX_ACTIVE + 1];
    unsigned which[MAX_ACTIVE + 1];
    for (;;) {
        unsigned count = 0;
        for (unsigned i = 0; i < max_active; i++) {
            if (starts[i].pid == 0)
                continue;
            which[count] = i;
            fds[count++] = (struct pollfd){.fd = starts[i].ended, .events = POLLIN};
        }
        bool room = active < max_active;
        fds[count] = (struct pollfd){.fd = SOCKET, .events = room ? POLLIN : 0};
        if (poll(fds, count + 1, -1) < 0)
            continue;
        for (unsigned i = 0; i < count; i++)
            if (fds[i].revents != 0)
                finish(which[i]);
        bool ended = (fds[count].revents & (POLLHUP | POLLERR | POLLNVAL)) != 0 && (fds[count].revents & POLLIN) == 0;
        if (ended || ((fds[count].revents & POLLIN) != 0 && !take()))
            return;
    }
}

/* Everything below RESERVED_FDS is taken, so that descriptors of requests never lie where the agent's will be. */
static bool reserve_descriptors(void)
{
    sys_close_range(3, ~0u);
    host.null = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (int fd = host.null; fd >= 0 && fd < RESERVED_FDS;)
        fd = fcntl(host.null, F_DUPFD_CLOEXEC, 0);
    return host.null >= 0;
}

static void choose_limits(void)
{
    struct rlimit descriptors = {0};
    if (getrlimit(RLIMIT_NOFILE, &descriptors) == 0) {
        descriptors.rlim_cur = descriptors.rlim_max;
        setrlimit(RLIMIT_NOFILE, &descriptors);
    }
    userns_keep(descriptors.rlim_max >= 4096 ? 1024 : 64);
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    max_active = cpus < 1 ? 4 : cpus > (MAX_ACTIVE - 2) / 2 ? MAX_ACTIVE : (unsigned)cpus * 2 + 2;
    while (prctl(PR_CAPBSET_READ, host.last_capability + 1) >= 0)
        host.last_capability++;
}

/* NULL, or what could not be had; errno says why. */
static const char *set_up(void)
{
    signals_unignore();
    signal(SIGCHLD, SIG_IGN); /* sandboxes' pid 1 are our children, and the kernel reaps them then */
    if (!reserve_descriptors())
        return "/dev/null";
    host.proc = open("/proc", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (host.proc < 0 || chdir("/") < 0)
        return "/proc";
    host.slim = slim_make(host.proc);
    if (host.slim < 0)
        return "a mount namespace";
    reports = mmap(NULL, sizeof(struct report) * MAX_ACTIVE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (reports == MAP_FAILED)
        return "shared memory";
    choose_limits();
    if (getrandom(&sys_key, sizeof(sys_key), 0) != sizeof(sys_key) || seccomp_apply(sys_key) < 0)
        return "a seccomp filter";
    return NULL;
}

int main(void)
{
    const char *missing = set_up();
    if (missing != NULL) {
        answer_failure(0, "launcher", errno, missing);
        return 1;
    }
    answer_success(0, getpid(), -1);
    serve();
    for (unsigned i = 0; i < max_active; i++)
        if (starts[i].pid != 0)
            sys_pidfd_send_signal(starts[i].pidfd, SIGKILL);
    return 0;
}
