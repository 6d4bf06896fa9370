/* The steps from a fresh fork to the guest agent, in order. Each either works or ends the process with a report; the kernel then takes back
 * everything it had, because nothing of it is attached anywhere outside the process. */
#include "launch/sandbox.h"
#include "launch/fail.h"
#include "launch/mounts.h"
#include "launch/sys.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>

struct report *fail_report;

void fail(const char *format, ...)
{
    fail_report->error = errno;
    va_list values;
    va_start(values, format);
    vsnprintf(fail_report->message, sizeof(fail_report->message), format, values);
    va_end(values);
    _exit(1);
}

int must(int value, const char *what)
{
    if (value < 0)
        fail("%s", what);
    return value;
}

/* ── life and death ─────────────────────────────────────────────────────────────────────────────────────────────────────────────── */

/* The launcher died: nobody would ever hear of this sandbox. */
static void must_be_awaited(int alive)
{
    struct pollfd reader = {.fd = alive};
    if (poll(&reader, 1, 0) != 0) {
        errno = EPIPE;
        fail("the launcher is gone");
    }
}

static void leave_launcher(int alive)
{
    step("clone");
    sigset_t none;
    sigemptyset(&none);
    must(prctl(PR_SET_PDEATHSIG, SIGKILL), "PR_SET_PDEATHSIG");
    must_be_awaited(alive);
    must(sigprocmask(SIG_SETMASK, &none, NULL), "sigprocmask");
    signal(SIGCHLD, SIG_DFL);
    must(setsid(), "setsid");
    umask(0);
}

static void write_file(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    ssize_t length = (ssize_t)strlen(text);
    if (fd < 0 || write(fd, text, (size_t)length) != length)
        fail("write %s", path);
    close(fd);
}

static void enter_cgroups(const struct request *request)
{
    step("cgroup1");
    for (unsigned i = 0; i < request->cgroup1s; i++)
        if (write(request->cgroup1[i], "0", 1) != 1)
            fail("write to cgroup.procs number %u", i);
}

/* ── identity ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────── */

/* Host root has no id in an idmapped tree, so nothing could be created there: not by overlayfs, which keeps the identity of its mounter, nor by us.
 * From here on file system accesses are those of the sandbox's root, with host root's capabilities: setfsuid takes some away, capset returns them. */
static void act_as_inner_root(const struct request *request)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct sets[2];
    step("confine");
    setfsgid(request->outside);
    setfsuid(request->outside);
    must((int)syscall(SYS_capget, &header, sets), "capget");
    sets[0].effective = sets[0].permitted;
    sets[1].effective = sets[1].permitted;
    must((int)syscall(SYS_capset, &header, sets), "capset");
}

/* ── namespaces and network ─────────────────────────────────────────────────────────────────────────────────────────────────────── */

static void enter_namespaces(const struct host *host)
{
    step("namespaces");
    must(sys_setns(host->slim, CLONE_NEWNS), "setns to the slim mount namespace");
    must(sys_unshare(CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWCGROUP), "unshare");
}

static void set_up_network(const struct request *request)
{
    char groups[32];
    struct ifreq loopback = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    step("network");
    int fd = must(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), "socket");
    must(ioctl(fd, SIOCSIFFLAGS, &loopback), "set lo up");
    close(fd);
    write_file("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0");
    snprintf(groups, sizeof(groups), "%u %u", request->outside, request->outside + request->count - 1);
    write_file("/proc/sys/net/ipv4/ping_group_range", groups);
}

static void set_sysctls(const struct request *request)
{
    char path[128];
    step("sysctl");
    for (unsigned i = 0; i < request->sysctl_count; i++) {
        snprintf(path, sizeof(path), "/proc/sys/%s", request->sysctls[i].name);
        write_file(path, request->sysctls[i].value);
    }
}

static void set_hostname(const struct request *request)
{
    step("hostname");
    must(sethostname(request->hostname, strlen(request->hostname)), "sethostname");
}

/* ── what the agent inherits ────────────────────────────────────────────────────────────────────────────────────────────────────── */

static void set_limits(const struct request *request)
{
    step("rlimit");
    for (unsigned i = 0; i < request->rlimit_count; i++) {
        const struct limit *wanted = &request->rlimits[i];
        struct rlimit now;
        must(getrlimit(wanted->number, &now), "getrlimit");
        rlim_t hard = wanted->hard < now.rlim_max ? wanted->hard : now.rlim_max;
        struct rlimit next = {.rlim_cur = wanted->soft < hard ? wanted->soft : hard, .rlim_max = hard};
        must(setrlimit(wanted->number, &next), "setrlimit");
    }
}

/* 0-2, 3 and 4; the launcher keeps 0-9 occupied, so no descriptor of the request is among them. All others are closed on execution. */
static void place_descriptors(const struct request *request, const struct host *host, const struct trees *trees)
{
    step("confine"); /* not `exec`: a process that is killed with that written counts as a sandbox */
    for (int i = 0; i < 3; i++)
        must(dup2(host->null, i), "dup2");
    must(dup2(request->listen, 3), "dup2");
    must(dup2(trees->cgroup, 4), "dup2");
}

/* Last, because root outside is needed for all the rest. The execution computes the capabilities anew from the bounding set. The seccomp filter is
 * there since the launcher's start. Raw calls: the C library would block all signals around each, for threads we do not have. */
static void confine(const struct request *request, const struct host *host, int userns)
{
    step("confine");
    must(sys_setns(userns, CLONE_NEWUSER), "setns to the user namespace");
    must((int)syscall(SYS_setgroups, 0, NULL), "setgroups");
    must((int)syscall(SYS_setresgid, 0, 0, 0), "setresgid");
    must((int)syscall(SYS_setresuid, 0, 0, 0), "setresuid");
    for (int capability = 0; capability <= host->last_capability; capability++)
        if ((request->caps >> capability & 1) == 0)
            must(prctl(PR_CAPBSET_DROP, capability), "PR_CAPBSET_DROP");
    umask(022);
}

static _Noreturn void execute(const struct request *request, int alive)
{
    static char name[] = "opendsec-guest", listen_fd[] = "--listen-fd=3", cgroup_fd[] = "--cgroup-fd=4";
    char *argv[MAX_ARGS + 4] = {name, listen_fd, cgroup_fd};
    char *envp[] = {NULL};
    for (unsigned i = 0; i < request->arg_count; i++)
        argv[3 + i] = (char *)(size_t)request->args[i];
    must_be_awaited(alive); /* the death signal is gone since the user namespace was entered */
    step(STEP_EXEC);
    sys_execveat(request->guest, "", argv, envp, AT_EMPTY_PATH);
    fail("execute the agent");
}

void sandbox_run(const struct request *request, const struct host *host, int userns, int alive, struct report *report)
{
    struct trees trees;
    fail_report = report;
    leave_launcher(alive);
    enter_cgroups(request);
    act_as_inner_root(request);
    mounts_prepare(request, userns, &trees);
    enter_namespaces(host);
    mounts_attach(request, &trees);
    set_up_network(request);
    set_sysctls(request);
    set_hostname(request);
    set_limits(request);
    place_descriptors(request, host, &trees);
    confine(request, host, userns);
    execute(request, alive);
}
