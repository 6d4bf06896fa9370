/* System calls the C libraries we build with do not wrap (musl has none of the new mount API). Names and arguments are those of the man pages.
 * <sys/mount.h> and <linux/mount.h> cannot be included together, so mount flags come from the kernel's header only. */
#pragma once

#include <linux/mount.h>
#include <linux/sched.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#ifndef SYS_clone3
#define SYS_clone3 435
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#ifndef SYS_mount_setattr
#define SYS_mount_setattr 442
#endif
#ifndef AT_RECURSIVE
#define AT_RECURSIVE 0x8000
#endif
#ifndef AT_EMPTY_PATH
#define AT_EMPTY_PATH 0x1000
#endif

/* The launcher's filter lets calls through that sandboxes may not make, when their sixth argument is this (see launch/seccomp.h). */
extern uint64_t sys_key;

static inline int sys_clone3(struct clone_args *args)
{
    return (int)syscall(SYS_clone3, args, sizeof(*args));
}

static inline int sys_close_range(unsigned first, unsigned last)
{
    return (int)syscall(SYS_close_range, first, last, 0);
}

static inline int sys_unshare(uint64_t flags)
{
    return (int)syscall(SYS_unshare, flags, 0, 0, 0, 0, sys_key);
}

static inline int sys_setns(int fd, int type)
{
    return (int)syscall(SYS_setns, fd, type, 0, 0, 0, sys_key);
}

static inline int sys_pidfd_send_signal(int pidfd, int number)
{
    return (int)syscall(SYS_pidfd_send_signal, pidfd, number, NULL, 0);
}

static inline int sys_execveat(int fd, const char *path, char *const argv[], char *const envp[], int flags)
{
    return (int)syscall(SYS_execveat, fd, path, argv, envp, flags);
}

static inline int sys_pivot_root(const char *new_root, const char *put_old)
{
    return (int)syscall(SYS_pivot_root, new_root, put_old);
}

static inline int sys_umount2(const char *target, int flags)
{
    return (int)syscall(SYS_umount2, target, flags);
}

static inline int sys_open_tree(int fd, const char *path, unsigned flags)
{
    return (int)syscall(SYS_open_tree, fd, path, flags, 0, 0, sys_key);
}

static inline int sys_move_mount(int from, const char *from_path, int to, const char *to_path, unsigned flags)
{
    return (int)syscall(SYS_move_mount, from, from_path, to, to_path, flags, sys_key);
}

static inline int sys_fsopen(const char *type, unsigned flags)
{
    return (int)syscall(SYS_fsopen, type, flags, 0, 0, 0, sys_key);
}

static inline int sys_fsconfig(int fd, unsigned command, const char *key, const void *value, int aux)
{
    return (int)syscall(SYS_fsconfig, fd, command, key, value, aux, sys_key);
}

static inline int sys_fsmount(int fd, unsigned flags, unsigned attributes)
{
    return (int)syscall(SYS_fsmount, fd, flags, attributes, 0, 0, sys_key);
}

static inline int sys_mount_setattr(int fd, const char *path, unsigned flags, struct mount_attr *attributes)
{
    return (int)syscall(SYS_mount_setattr, fd, path, flags, attributes, sizeof(*attributes), sys_key);
}
