/* Stands in for the guest agent in the launcher's tests: pid 1 that does single system calls on request and says how they went.
 *
 * On each connection to descriptor 3 it reads one line, `verb argument…`, does it in a child that has the sandbox's root identity, and answers with
 * `ok text` or `errno NUMBER`. `exit` ends it. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

static char out[65536];

static int do_read(char *path)
{
    int fd = open(path, O_RDONLY);
    ssize_t length = fd < 0 ? -1 : read(fd, out, sizeof(out) - 1);
    if (length >= 0)
        out[length] = '\0';
    return length < 0 ? -1 : 0;
}

static int do_write(char *path)
{
    int fd = open(path, O_WRONLY | O_CREAT, 0640);
    return fd < 0 || write(fd, "x", 1) != 1 ? -1 : 0;
}

static int do_stat(char *path)
{
    struct stat s;
    if (lstat(path, &s) < 0)
        return -1;
    snprintf(out, sizeof(out), "%u %u %o %u:%u", s.st_uid, s.st_gid, s.st_mode, major(s.st_rdev), minor(s.st_rdev));
    return 0;
}

static int do_list(char *path)
{
    char command[256];
    snprintf(command, sizeof(command), "%s", path);
    int fd = open(command, O_RDONLY | O_DIRECTORY);
    char buffer[16384];
    long length = fd < 0 ? -1 : syscall(SYS_getdents64, fd, buffer, sizeof(buffer));
    for (long at = 0; at < length;) {
        strcat(strcat(out, buffer + at + 19), " ");
        at += *(unsigned short *)(void *)(buffer + at + 16);
    }
    return length < 0 ? -1 : 0;
}

static int do_bind(char *port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((unsigned short)atoi(port)), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    return bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0 || listen(fd, 1) < 0 ? -1 : 0;
}

static int do_link(char *name)
{
    struct ifreq request = {0};
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    int result = ioctl(socket(AF_INET, SOCK_DGRAM, 0), SIOCGIFFLAGS, &request);
    snprintf(out, sizeof(out), "%s", (request.ifr_flags & IFF_UP) != 0 ? "up" : "down");
    return result;
}

static int do_hostname(char *name)
{
    return *name != '\0' ? sethostname(name, strlen(name)) : gethostname(out, sizeof(out));
}

static int do_mount(char *type)
{
    return (int)syscall(SYS_mount, "none", "/tmp", type, 0, NULL);
}

static int do_umount(char *path)
{
    return (int)syscall(SYS_umount2, path, 2);
}

static int do_unshare(char *flags)
{
    return unshare((int)strtoul(flags, NULL, 0));
}

static int do_clone3(char *flags)
{
    unsigned long long args[11] = {strtoull(flags, NULL, 0), 0, 0, 0, SIGCHLD};
    int pid = (int)syscall(435, args, sizeof(args));
    if (pid == 0)
        _exit(0);
    return pid < 0 ? -1 : 0;
}

static int do_kill(char *text)
{
    return kill(atoi(text), SIGKILL);
}

static int do_ptrace(char *text)
{
    return (int)ptrace(PTRACE_ATTACH, atoi(text), NULL, NULL);
}

static int do_mknod(char *path)
{
    return mknod(path, S_IFCHR | 0600, makedev(1, 5));
}

static int do_syscall(char *number)
{
    return (int)syscall(atoi(number), 0, 0, 0, 0, 0, 0);
}

/* NAME ARGUMENT ARGUMENT: a call that another process may be the object of. */
static int do_call(char *text)
{
    static const struct {
        const char *name;
        long number;
    } calls[] = {
        {"prlimit64", SYS_prlimit64},
        {"sched_setaffinity", SYS_sched_setaffinity},
        {"sched_setattr", SYS_sched_setattr},
        {"sched_setparam", SYS_sched_setparam},
        {"sched_setscheduler", SYS_sched_setscheduler},
        {"setpriority", SYS_setpriority},
        {"ioprio_set", SYS_ioprio_set},
    };
    char name[32];
    long first = 0, second = 0;
    sscanf(text, "%31s %ld %ld", name, &first, &second);
    for (unsigned i = 0; i < sizeof(calls) / sizeof(calls[0]); i++)
        if (strcmp(calls[i].name, name) == 0)
            return (int)syscall(calls[i].number, first, second, 0, 0, 0, 0);
    errno = ENOSYS;
    return -1;
}

/* Queues so many signals that nobody takes. */
static int do_pend(char *count)
{
    const union sigval nothing = {0};
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGRTMIN);
    sigprocmask(SIG_BLOCK, &set, NULL);
    for (int i = atoi(count); i > 0; i--)
        if (sigqueue(getpid(), SIGRTMIN, nothing) < 0)
            return -1;
    return 0;
}

static int do_socket(char *family)
{
    return socket(atoi(family), SOCK_STREAM, 0);
}

static int do_nofile(char *text)
{
    struct rlimit limit;
    (void)text;
    getrlimit(RLIMIT_NOFILE, &limit);
    snprintf(out, sizeof(out), "%llu %llu", (unsigned long long)limit.rlim_cur, (unsigned long long)limit.rlim_max);
    return 0;
}

/* The names below descriptor 4, and below its parent: they must be the same directory's or nothing. */
static int do_cgroup(char *path)
{
    int fd = openat(4, path, O_RDONLY | O_DIRECTORY);
    struct stat here, there;
    if (fd < 0 || fstat(fd, &there) < 0 || fstatat(4, ".", &here, 0) < 0)
        return -1;
    snprintf(out, sizeof(out), "%s", here.st_ino == there.st_ino ? "same" : "other");
    return 0;
}

static int do_mkcgroup(char *name)
{
    return mkdirat(4, name, 0755);
}

/* Executes a program as user 1000; what it creates shows which user it became. */
static int do_setuid(char *path)
{
    pid_t pid = fork();
    if (pid == 0) {
        char *argv[] = {path, "--mark", NULL};
        if (setresgid(1000, 1000, 1000) == 0 && setresuid(1000, 1000, 1000) == 0)
            execv(path, argv);
        _exit(1);
    }
    waitpid(pid, NULL, 0);
    return do_stat("/tmp/mark");
}

static int do_eat(char *mib)
{
    size_t size = (size_t)atoi(mib) << 20;
    char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    return memory == MAP_FAILED ? -1 : 0;
}

static const struct verb {
    const char *name;
    int (*run)(char *argument);
} verbs[] = {
    {"read", do_read},       {"write", do_write},     {"stat", do_stat},     {"list", do_list},         {"bind", do_bind},     {"link", do_link},
    {"hostname", do_hostname}, {"mount", do_mount},   {"umount", do_umount}, {"unshare", do_unshare},   {"clone3", do_clone3}, {"kill", do_kill},
    {"ptrace", do_ptrace},   {"mknod", do_mknod},     {"syscall", do_syscall}, {"socket", do_socket},   {"nofile", do_nofile}, {"cgroup", do_cgroup},
    {"mkcgroup", do_mkcgroup}, {"setuid", do_setuid},     {"eat", do_eat},           {"call", do_call},       {"pend", do_pend},
};

static void run(int connection, char *line)
{
    char *argument = strchr(line, ' ');
    if (argument != NULL)
        *argument++ = '\0';
    for (unsigned i = 0; i < sizeof(verbs) / sizeof(verbs[0]); i++) {
        if (strcmp(verbs[i].name, line) != 0)
            continue;
        if (verbs[i].run(argument != NULL ? argument : (char[]){""}) < 0)
            dprintf(connection, "errno %d", errno);
        else
            dprintf(connection, "ok %s", out);
        return;
    }
    dprintf(connection, "errno %d", ENOSYS);
}

int main(int argc, char **argv)
{
    char line[4096];
    if (argc > 3 && strcmp(argv[3], "--exit") == 0)
        return 7;
    if (argc == 2 && strcmp(argv[1], "--mark") == 0)
        return open("/tmp/mark", O_CREAT | O_WRONLY, 0600) < 0;
    signal(SIGCHLD, SIG_IGN);
    for (;;) {
        int connection = accept4(3, NULL, NULL, SOCK_CLOEXEC);
        ssize_t length = connection < 0 ? -1 : read(connection, line, sizeof(line) - 1);
        if (length < 0)
            continue;
        line[length] = '\0';
        if (strcmp(line, "exit") == 0)
            return 0;
        if (fork() == 0) {
            run(connection, line);
            _exit(0);
        }
        close(connection);
    }
}
