/*
 * See spawn.h. Everything that reads the sandbox's files (its user database, its directories, the program) happens in
 * the child, so a slow or hostile file system stalls that child only. The agent learns the outcome from a pipe.
 */
#include "spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "identity.h"
#include "machine.h"
#include "shell.h"

enum { STATUS_FD = 3, STACK_SHARE = 4 };

static struct rlimit nofile;

void spawn_init(void) {
    getrlimit(RLIMIT_NOFILE, &nofile);
    struct rlimit most = {nofile.rlim_max, nofile.rlim_max};
    setrlimit(RLIMIT_NOFILE, &most);
}

void spawn_be_mortal(void) {
    prctl(PR_SET_DUMPABLE, 1); /* or the file would not be ours to write */
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    ssize_t ignored = fd < 0 ? 0 : write(fd, "500", 3); /* best effort: without /proc the kernel chooses by size alone */
    (void)ignored;
    if (fd >= 0) close(fd);
    prctl(PR_SET_DUMPABLE, 0); /* until the execution root inside could take our descriptors or answer in our place */
}

bool spawn_has_room(int fd) {
    if ((rlim_t)fd < nofile.rlim_max / 4 * 3) return true;
    errno = EMFILE;
    return false;
}

static _Noreturn void fail(const char *code, const char *format, const char *what) {
    struct spawn_failure failure = {.error = errno};
    strncpy(failure.code, code, sizeof failure.code - 1);
    if (failure.error) snprintf(failure.message, sizeof failure.message, format, what, strerror(failure.error));
    else snprintf(failure.message, sizeof failure.message, "%s", what);
    ssize_t ignored = write(STATUS_FD, &failure, sizeof failure);
    (void)ignored;
    _exit(127);
}

static void place_descriptors(const struct launch *launch) {
    int control = launch->control, text = launch->text;
    if (control >= 0) { /* out of the way of the low numbers used below */
        control = fcntl(control, F_DUPFD_CLOEXEC, 64);
        text = fcntl(text, F_DUPFD_CLOEXEC, 64);
    }
    if (dup2(launch->in, 0) < 0 || dup2(launch->out, 1) < 0 || dup2(launch->err, 2) < 0 ||
        dup3(launch->status, STATUS_FD, O_CLOEXEC) < 0)
        _exit(126);
    if (control < 0) {
        syscall(SYS_close_range, STATUS_FD + 1, ~0u, 0);
        return;
    }
    dup2(control, SHELL_CONTROL_FD);
    dup2(text, SHELL_TEXT_FD);
    syscall(SYS_close_range, STATUS_FD + 1, SHELL_CODE_FD, 0);
    syscall(SYS_close_range, SHELL_TEXT_FD + 1, ~0u, 0);
}

static const char *env_value(const struct launch *launch, const char *name) {
    size_t length = strlen(name);
    for (size_t i = launch->env_count; i-- > 0;) {
        if (strncmp(launch->env[i], name, length) == 0 && launch->env[i][length] == '=') return launch->env[i] + length + 1;
    }
    return NULL;
}

static void complete_environment(const struct launch *launch, const struct identity *identity) {
    static char home[sizeof identity->home + 8];
    launch->env[launch->env_count] = NULL;
    if (env_value(launch, "HOME")) return;
    snprintf(home, sizeof home, "HOME=%s", identity->home);
    launch->env[launch->env_count] = home;
    launch->env[launch->env_count + 1] = NULL;
}

/* The kernel gives arguments and environment a quarter of the stack limit: make room for large ones. */
static void make_room_for_arguments(const struct launch *launch) {
    size_t bytes = launch->script_length;
    for (size_t i = 0; launch->argv && launch->argv[i]; i++) bytes += strlen(launch->argv[i]) + 1 + sizeof(char *);
    for (size_t i = 0; i < launch->env_count; i++) bytes += strlen(launch->env[i]) + 1 + sizeof(char *);
    struct rlimit stack;
    rlim_t wanted = (bytes + 256 * 1024) * STACK_SHARE;
    if (getrlimit(RLIMIT_STACK, &stack) < 0 || stack.rlim_cur >= wanted) return;
    stack.rlim_cur = stack.rlim_max < wanted ? stack.rlim_max : wanted;
    setrlimit(RLIMIT_STACK, &stack);
}

/* So that another user may open them again by name: /dev/stdout is a link to /proc/self/fd/1. Best effort: without the capability it is as it was. */
static void give_pipes(uid_t uid) {
    struct stat found;
    for (int fd = 0; uid != 0 && fd <= 2; fd++) {
        int ignored = fstat(fd, &found) == 0 && S_ISFIFO(found.st_mode) ? fchown(fd, uid, (gid_t)-1) : 0;
        (void)ignored;
    }
}

static void assume_user(const struct launch *launch, struct identity *identity) {
    if (!identity_resolve(launch->user, identity)) {
        errno = 0; /* the sentence says it all; what the last lookup left there does not belong to it */
        fail("no_user", "%s: %s", identity->problem);
    }
    if (launch->terminal && fchown(0, identity->uid, (gid_t)-1) < 0) fail("no_user", "%s: %s", "the terminal");
    give_pipes(identity->uid);
    if (!identity_assume(identity)) fail("no_user", "%s: %s", "changing to the user");
}

static _Noreturn void execute_argv(const struct launch *launch) {
    const char *name = launch->argv[0], *path = env_value(launch, "PATH");
    if (strchr(name, '/')) {
        execve(name, launch->argv, launch->env);
        fail("exec", "%s: %s", name);
    }
    int worst = ENOENT;
    for (const char *at = path ? path : DEFAULT_PATH, *end; at; at = *end ? end + 1 : NULL) {
        char full[4096];
        end = strchrnul(at, ':');
        const char *dir = end == at ? "." : at;
        int length = end == at ? 1 : (int)(end - at);
        if (snprintf(full, sizeof full, "%.*s/%s", length, dir, name) >= (int)sizeof full) continue;
        execve(full, launch->argv, launch->env);
        if (errno != ENOENT && errno != ENOTDIR) worst = errno;
        if (errno != ENOENT && errno != ENOTDIR && errno != EACCES) break;
    }
    errno = worst;
    fail("exec", "%s: %s", name);
}

static _Noreturn void child(const struct launch *launch) {
    static struct identity identity;
    sigset_t none;
    setsid();
    place_descriptors(launch);
    spawn_be_mortal();
    if (machine_runs()) prctl(PR_CAPBSET_DROP, CAP_SYS_BOOT); /* a machine that halts itself looks alive to its VMM */
    if (launch->terminal) ioctl(0, TIOCSCTTY, 0);
    assume_user(launch, &identity);
    if (chdir(*launch->cwd ? launch->cwd : "/") < 0) fail("bad_cwd", "%s: %s", launch->cwd);
    complete_environment(launch, &identity);
    setrlimit(RLIMIT_NOFILE, &nofile);
    make_room_for_arguments(launch);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (launch->argv) execute_argv(launch);
    const char *shell = launch->script ? shell_execute_script(launch) : shell_execute_session(launch);
    if (errno == ENOENT) fail("no_shell", "%s: %s", "the image has neither /bin/bash nor /bin/sh");
    fail("exec", "%s: %s", shell);
}

static pid_t clone_into(int cgroup) {
    struct clone_args arguments = {.exit_signal = SIGCHLD};
    if (cgroup >= 0) {
        arguments.flags = CLONE_INTO_CGROUP;
        arguments.cgroup = (uint64_t)cgroup;
    }
    return (pid_t)syscall(SYS_clone3, &arguments, sizeof arguments);
}

pid_t spawn(const struct launch *launch) {
    pid_t pid = clone_into(launch->cgroup);
    if (pid == 0) child(launch);
    return pid;
}

pid_t spawn_worker(int keep, int root) {
    pid_t pid = clone_into(-1);
    if (pid != 0) return pid;
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL); /* it ends by its socket, and cleans up */
    dup3(keep, STATUS_FD, O_CLOEXEC);
    if (root >= 0) dup3(root, STATUS_FD + 1, O_CLOEXEC); /* it is far above */
    syscall(SYS_close_range, STATUS_FD + (root >= 0 ? 2 : 1), ~0u, 0);
    return 0;
}
