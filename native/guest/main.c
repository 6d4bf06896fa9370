/*
 * The guest agent: pid 1 of a sandbox, speaking the guest protocol (docs/reference/guest-protocol.md).
 *
 *   opendsec-guest [--cgroup-fd=N] (--listen-fd=N | --vsock-port=N | --serial=/dev/...)
 *
 * Started by a kernel as its init it is given none of these: see machine.h.
 *
 * One thread and one epoll loop. It never exits of its own: what fails is answered by an ERROR frame.
 */
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "call.h"
#include "conn.h"
#include "loop.h"
#include "machine.h"
#include "output.h"
#include "reap.h"
#include "serial.h"
#include "spawn.h"
#include "tree.h"

struct options {
    int listen_fd, cgroup_fd;
    unsigned vsock_port;
    const char *serial;
};

static _Noreturn void usage(const char *problem) {
    fprintf(stderr,
            "opendsec-guest: %s\nusage: opendsec-guest [--cgroup-fd=N] "
            "(--listen-fd=N | --vsock-port=N | --serial=/dev/...)\n",
            problem);
    exit(64);
}

static bool number_option(const char *argument, const char *name, long *value) {
    size_t length = strlen(name);
    if (strncmp(argument, name, length) != 0) return false;
    char *end;
    *value = strtol(argument + length, &end, 10);
    if (!argument[length] || *end || *value < 0) usage(argument);
    return true;
}

static void parse(struct options *options, int argc, char **argv) {
    *options = (struct options){.listen_fd = -1, .cgroup_fd = -1};
    for (int i = 1; i < argc; i++) {
        long value;
        if (number_option(argv[i], "--listen-fd=", &value)) options->listen_fd = (int)value;
        else if (number_option(argv[i], "--cgroup-fd=", &value)) options->cgroup_fd = (int)value;
        else if (number_option(argv[i], "--vsock-port=", &value)) options->vsock_port = (unsigned)value;
        else if (strncmp(argv[i], "--serial=", 9) == 0) options->serial = argv[i] + 9;
        else usage(argv[i]);
    }
    int ways = (options->listen_fd >= 0) + (options->vsock_port > 0) + (options->serial != NULL);
    if (ways != 1) usage("exactly one of --listen-fd, --vsock-port and --serial is needed");
}

/* 0 is /dev/null and what children get for stdin; 1 and 2 exist. */
static void settle_standard_descriptors(void) {
    int null = open("/dev/null", O_RDWR);
    if (null < 0) {
        perror("opendsec-guest: /dev/null");
        exit(66);
    }
    dup2(null, 0);
    for (int fd = 1; fd <= 2; fd++) {
        if (fcntl(fd, F_GETFD) < 0) dup2(null, fd);
    }
    if (null > 2) close(null);
}

static void become_the_last_to_go(void) {
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd < 0) return;
    ssize_t ignored = write(fd, "-1000", 5); /* needs CAP_SYS_RESOURCE on the host; commands are made likelier victims anyway */
    (void)ignored;
    close(fd);
}

static void trim(void) {
    output_trim();
    conn_trim();
    call_trim();
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

int main(int argc, char **argv) {
    struct options options;
    bool is_machine = machine_is_init(argc, argv);
    if (is_machine) options = (struct options){.listen_fd = -1, .cgroup_fd = -1};
    else parse(&options, argc, argv);
    settle_standard_descriptors();
    if (is_machine) machine_boot(&options.serial, &options.vsock_port);
    become_the_last_to_go();
    prctl(PR_SET_DUMPABLE, 0);
    if (getpid() != 1) prctl(PR_SET_CHILD_SUBREAPER, 1);
    umask(022);
#ifdef __GLIBC__
    mallopt(M_MMAP_THRESHOLD, 128 * 1024); /* and no growing: large buffers go back to the kernel */
#endif
    loop_init();
    reap_init();
    spawn_init();
    if (is_machine) machine_start();
    else tree_init(options.cgroup_fd);
    if (chdir("/") < 0) exit(66);
    int fd = options.listen_fd;
    if (options.vsock_port && (fd = vsock_listen(options.vsock_port)) < 0) {
        perror("opendsec-guest: --vsock-port");
        exit(69);
    }
    if (options.serial && !serial_open(options.serial)) {
        perror("opendsec-guest: --serial");
        exit(69);
    }
    if (fd >= 0) conn_listen(fd, options.vsock_port != 0);
    loop_run(conn_settle, trim);
    if (is_machine) machine_off();
    return 0;
}
