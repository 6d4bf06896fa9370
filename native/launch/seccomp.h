/* The seccomp filter of a sandbox.
 *
 * It is a list of what is refused, in the spirit of Docker's default profile. What the kernel learns after this file was written is refused too
 * (ENOSYS for every number above SECCOMP_LAST_SYSCALL), and so are other instruction sets (i386, x32, 32-bit ARM). Every file, process, signal,
 * socket, timer and ptrace call of ordinary programs is allowed; setuid programs work (no_new_privs is not set).
 *
 * Installing a filter costs 90 us and a page of memory (the kernel compiles it and runs it once per system call number), so the launcher does it once,
 * for itself, and every sandbox inherits it. The launcher still has to mount and to enter namespaces: the calls it needs for that are let through when
 * their unused sixth argument is a random key, which is drawn at the launcher's start and is in no memory that a sandbox could read. Whoever knew
 * it would have gained nothing but what the missing CAP_SYS_ADMIN refuses anyway.
 *
 * clone and clone3 are allowed, because the agent needs CLONE_INTO_CGROUP and no filter can see flags that lie in memory. What they could be misused
 * for is closed elsewhere: new user namespaces by the limit of 0 that the launcher sets in the sandbox's user namespace, all other namespaces by the
 * missing CAP_SYS_ADMIN.
 */
#pragma once

#include <asm/unistd.h>
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/prctl.h>

#if defined(__x86_64__)
#define SECCOMP_ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define SECCOMP_ARCH AUDIT_ARCH_AARCH64
#else
#error "no seccomp filter for this architecture"
#endif

#define SECCOMP_LAST_SYSCALL 469 /* file_setattr, Linux 6.17 */
#define SECCOMP_NR_open_tree_attr 467

/* Rules whose verdict depends on an argument; the value is the number of their block at the end of the program. */
enum { SECCOMP_KEYED = 1000, SECCOMP_IOCTL, SECCOMP_SOCKET, SECCOMP_PERSONALITY, SECCOMP_PID, SECCOMP_PRIORITY, SECCOMP_IO_PRIORITY };

struct seccomp_rule {
    uint16_t nr;
    uint16_t verdict; /* an errno, or one of the above */
};

static const struct seccomp_rule seccomp_rules[] = {
    {__NR_ioctl, SECCOMP_IOCTL},
    {__NR_socket, SECCOMP_SOCKET},
    {__NR_personality, SECCOMP_PERSONALITY},

    /* The agent, pid 1, has the same user as root inside, and that is all these ask for: no descriptors, no CPU time, no turn. */
    {__NR_prlimit64, SECCOMP_PID},
    {__NR_sched_setaffinity, SECCOMP_PID},
    {__NR_sched_setattr, SECCOMP_PID},
    {__NR_sched_setparam, SECCOMP_PID},
    {__NR_sched_setscheduler, SECCOMP_PID},
    {__NR_setpriority, SECCOMP_PRIORITY},
    {__NR_ioprio_set, SECCOMP_IO_PRIORITY},

    /* Absent, so that programs take their other way. */
    {__NR_io_uring_setup, ENOSYS},
    {__NR_io_uring_enter, ENOSYS},
    {__NR_io_uring_register, ENOSYS},

    /* Mounts, namespaces, disks. */
    {__NR_mount, EPERM},
    {__NR_umount2, EPERM},
    {__NR_pivot_root, EPERM},
    {__NR_open_tree, SECCOMP_KEYED},
    {SECCOMP_NR_open_tree_attr, EPERM},
    {__NR_move_mount, SECCOMP_KEYED},
    {__NR_fsopen, SECCOMP_KEYED},
    {__NR_fsconfig, SECCOMP_KEYED},
    {__NR_fsmount, SECCOMP_KEYED},
    {__NR_fspick, EPERM},
    {__NR_mount_setattr, SECCOMP_KEYED},
    {__NR_setns, SECCOMP_KEYED},
    {__NR_unshare, SECCOMP_KEYED},
    {__NR_open_by_handle_at, EPERM},
    {__NR_quotactl, EPERM},
    {__NR_quotactl_fd, EPERM},
    {__NR_swapon, EPERM},
    {__NR_swapoff, EPERM},
    {__NR_fanotify_init, EPERM},

    /* The kernel itself. */
    {__NR_bpf, EPERM},
    {__NR_perf_event_open, EPERM},
    {__NR_userfaultfd, EPERM},
    {__NR_keyctl, EPERM},
    {__NR_add_key, EPERM},
    {__NR_request_key, EPERM},
    {__NR_kexec_load, EPERM},
#ifdef __NR_kexec_file_load
    {__NR_kexec_file_load, EPERM},
#endif
    {__NR_init_module, EPERM},
    {__NR_finit_module, EPERM},
    {__NR_delete_module, EPERM},
    {__NR_reboot, EPERM},
    {__NR_acct, EPERM},
    {__NR_syslog, EPERM},
    {__NR_vhangup, EPERM},
    {__NR_settimeofday, EPERM},
    {__NR_clock_settime, EPERM},
    {__NR_clock_adjtime, EPERM},
#ifdef __NR_lookup_dcookie
    {__NR_lookup_dcookie, EPERM},
#endif
#ifdef __NR_nfsservctl
    {__NR_nfsservctl, EPERM},
#endif
    {__NR_mbind, EPERM},
    {__NR_set_mempolicy, EPERM},
    {__NR_migrate_pages, EPERM},
    {__NR_move_pages, EPERM},
#ifdef __x86_64__
    {__NR_iopl, EPERM},
    {__NR_ioperm, EPERM},
    {__NR_uselib, EPERM},
    {__NR_ustat, EPERM},
    {__NR_sysfs, EPERM},
    {__NR__sysctl, EPERM},
#endif
};

#define SECCOMP_RULES (sizeof(seccomp_rules) / sizeof(seccomp_rules[0]))
#define SECCOMP_FIELD(member) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, member))
#define SECCOMP_ARG(n) SECCOMP_FIELD(args[n]) /* the low half: both architectures are little-endian */
#define SECCOMP_ARG_HIGH(n) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[n]) + 4)
#define SECCOMP_EQUAL(value, yes, no) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (value), (yes), (no))
#define SECCOMP_FAIL(number) BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (number))
#define SECCOMP_ALLOW BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

static const struct sock_filter seccomp_head[] = {
    SECCOMP_FIELD(arch),
    SECCOMP_EQUAL(SECCOMP_ARCH, 1, 0),
    SECCOMP_FAIL(ENOSYS),
    SECCOMP_FIELD(nr),
    BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, SECCOMP_LAST_SYSCALL, 0, 1), /* x32 numbers have bit 30 set */
    SECCOMP_FAIL(ENOSYS),
};

/* Blocks for SECCOMP_KEYED and so on, in the order of that enumeration, each SECCOMP_BLOCK instructions long (the rest is never reached). The two
 * zeros of the first are replaced by the key. */
#define SECCOMP_BLOCK 9
static const struct sock_filter seccomp_blocks[][SECCOMP_BLOCK] = {
    {
        SECCOMP_ARG(5),
        SECCOMP_EQUAL(0, 0, 2),
        SECCOMP_ARG_HIGH(5),
        SECCOMP_EQUAL(0, 1, 0),
        SECCOMP_FAIL(EPERM),
        SECCOMP_ALLOW,
        [6 ... 8] = SECCOMP_ALLOW,
    },
    {
        SECCOMP_ARG(1),
        SECCOMP_EQUAL(0x5412, 2, 0),     /* TIOCSTI: types into somebody's terminal */
        SECCOMP_EQUAL(0x541c, 1, 0),     /* TIOCLINUX: the same on consoles */
        SECCOMP_EQUAL(0xc0c0586d, 0, 1), /* XFS_IOC_SWAPEXT */
        SECCOMP_FAIL(EPERM),
        SECCOMP_ALLOW,
        [6 ... 8] = SECCOMP_ALLOW,
    },
    {
        SECCOMP_ARG(0),
        SECCOMP_EQUAL(40, 1, 0), /* AF_VSOCK: reaches the hypervisor, past every network namespace */
        SECCOMP_EQUAL(38, 0, 1), /* AF_ALG */
        SECCOMP_FAIL(EAFNOSUPPORT),
        SECCOMP_ALLOW,
        [5 ... 8] = SECCOMP_ALLOW,
    },
    {
        SECCOMP_ARG(0),
        SECCOMP_EQUAL(0, 6, 0),          /* PER_LINUX */
        SECCOMP_EQUAL(0x8, 5, 0),        /* PER_LINUX32 */
        SECCOMP_EQUAL(0x20000, 4, 0),    /* UNAME26 */
        SECCOMP_EQUAL(0x20008, 3, 0),
        SECCOMP_EQUAL(0x40000, 2, 0),    /* ADDR_NO_RANDOMIZE: debuggers */
        SECCOMP_EQUAL(0xffffffff, 1, 0), /* asks only */
        SECCOMP_FAIL(EPERM),
        SECCOMP_ALLOW,
    },
    {
        SECCOMP_ARG(0),
        SECCOMP_EQUAL(1, 0, 1),
        SECCOMP_FAIL(EPERM),
        SECCOMP_ALLOW,
        [4 ... 8] = SECCOMP_ALLOW,
    },
    {
        SECCOMP_ARG(0),
        SECCOMP_EQUAL(2, 2, 0), /* PRIO_USER: everybody of root inside */
        SECCOMP_ARG(1),
        SECCOMP_EQUAL(1, 0, 1), /* a process or a group */
        SECCOMP_FAIL(EPERM),
        SECCOMP_ALLOW,
        [6 ... 8] = SECCOMP_ALLOW,
    },
    {
        SECCOMP_ARG(0),
        SECCOMP_EQUAL(3, 2, 0), /* IOPRIO_WHO_USER */
        SECCOMP_ARG(1),
        SECCOMP_EQUAL(1, 0, 1),
        SECCOMP_FAIL(EPERM),
        SECCOMP_ALLOW,
        [6 ... 8] = SECCOMP_ALLOW,
    },
};

#define SECCOMP_MAX_PROGRAM 320
static struct sock_filter seccomp_program[SECCOMP_MAX_PROGRAM];
static unsigned short seccomp_length;

static inline void seccomp_emit(struct sock_filter instruction)
{
    seccomp_program[seccomp_length++] = instruction;
}

/* The tree over rules[low, high): at most three comparisons in a leaf. Jumps to blocks are patched by seccomp_build. */
static inline void seccomp_tree(const struct seccomp_rule *rules, unsigned low, unsigned high)
{
    if (high - low <= 3) {
        for (; low < high; low++) {
            seccomp_emit((struct sock_filter)SECCOMP_EQUAL(rules[low].nr, 0, 1));
            if (rules[low].verdict >= SECCOMP_KEYED)
                seccomp_emit((struct sock_filter)BPF_STMT(BPF_JMP | BPF_JA, rules[low].verdict));
            else
                seccomp_emit((struct sock_filter)SECCOMP_FAIL(rules[low].verdict));
        }
        seccomp_emit((struct sock_filter)SECCOMP_ALLOW);
        return;
    }
    unsigned middle = (low + high) / 2;
    unsigned short branch = seccomp_length;
    seccomp_emit((struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, rules[middle].nr, 0, 0));
    seccomp_tree(rules, low, middle);
    seccomp_program[branch].jt = (uint8_t)(seccomp_length - branch - 1); /* at most half of the tree: below 255 */
    seccomp_tree(rules, middle, high);
}

static inline void seccomp_build(uint64_t key)
{
    struct seccomp_rule rules[SECCOMP_RULES];
    unsigned count = 0;
    for (unsigned i = 0; i < SECCOMP_RULES; i++) {
        unsigned at = count++;
        for (; at > 0 && rules[at - 1].nr > seccomp_rules[i].nr; at--)
            rules[at] = rules[at - 1];
        rules[at] = seccomp_rules[i];
    }
    seccomp_length = 0;
    for (unsigned i = 0; i < sizeof(seccomp_head) / sizeof(seccomp_head[0]); i++)
        seccomp_emit(seccomp_head[i]);
    seccomp_tree(rules, 0, count);
    unsigned short blocks = seccomp_length;
    for (unsigned i = 0; i < sizeof(seccomp_blocks) / sizeof(seccomp_blocks[0]); i++)
        for (unsigned j = 0; j < SECCOMP_BLOCK; j++)
            seccomp_emit(seccomp_blocks[i][j]);
    seccomp_program[blocks + 1].k = (uint32_t)key;
    seccomp_program[blocks + 3].k = (uint32_t)(key >> 32);
    for (unsigned short i = 0; i < blocks; i++)
        if (seccomp_program[i].code == (BPF_JMP | BPF_JA))
            seccomp_program[i].k = blocks + (seccomp_program[i].k - SECCOMP_KEYED) * SECCOMP_BLOCK - i - 1u;
}

/* Installs the filter for the calling thread and everything it starts or executes. Needs CAP_SYS_ADMIN over its user namespace (no_new_privs would do
 * too, and would break setuid programs). Returns 0, or -1 with errno. */
static inline int seccomp_apply(uint64_t key)
{
    seccomp_build(key);
    const struct sock_fprog program = {.len = seccomp_length, .filter = seccomp_program};
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0);
}
