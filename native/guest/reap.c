/*
 * See reap.h. One place calls wait(), after registration, in one thread: whatever comes out of it is either a child
 * of ours with an owner, or an orphan.
 */
#include "reap.h"
#include "signals.h"

#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "loop.h"

enum { BUCKETS = 128, MAX_AT_ONCE = 256 };

static struct child *buckets[BUCKETS];
static struct source signals = {.fd = -1};
static struct timer again;

static struct child **find(pid_t pid) {
    struct child **at = &buckets[(unsigned)pid % BUCKETS];
    while (*at && (*at)->pid != pid) at = &(*at)->next;
    return at;
}

void child_register(struct child *child, pid_t pid, void (*exited)(struct child *, int, const struct rusage *)) {
    struct child **bucket = &buckets[(unsigned)pid % BUCKETS];
    child->pid = pid;
    child->exited = exited;
    child->next = *bucket;
    *bucket = child;
}

void child_forget(struct child *child) {
    if (!child->pid) return;
    struct child **at = find(child->pid);
    if (*at) *at = child->next;
    child->pid = 0;
}

/* Orphans can come faster than they are reaped: the loop must get its turn all the same, or no timeout would fire. */
static void reap_some(struct timer *timer) {
    struct rusage usage;
    int status;
    for (int i = 0; i < MAX_AT_ONCE; i++) {
        pid_t pid = wait4(-1, &status, WNOHANG | __WALL, &usage);
        if (pid <= 0) return;
        struct child *child = *find(pid);
        if (!child) continue;
        child_forget(child);
        child->exited(child, status, &usage);
    }
    timer_set(timer, 0, reap_some);
}

static void reap_ready(struct source *source, uint32_t events) {
    (void)events;
    struct signalfd_siginfo info;
    if (read(source->fd, &info, sizeof info) > 0) reap_some(&again); /* one at most is pending */
}

bool reap_has_children(void) {
    siginfo_t info;
    return waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT | __WALL) == 0;
}

void reap_init(void) {
    sigset_t blocked, child;
    signals_unignore();
    sigfillset(&blocked);
    if (getpid() != 1) { /* pid 1 is out of reach; elsewhere (tests) it must be possible to end it */
        sigdelset(&blocked, SIGTERM);
        sigdelset(&blocked, SIGINT);
    }
    /* The kernel drops these when they are sent to pid 1; blocked, they would queue up to the sandbox's limit. */
    for (int number = SIGRTMIN; number <= SIGRTMAX && getpid() == 1; number++) sigdelset(&blocked, number);
    sigprocmask(SIG_SETMASK, &blocked, NULL);
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    int fd = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    if (fd < 0 || !source_add(&signals, fd, EPOLLIN, reap_ready)) _exit(73);
}
