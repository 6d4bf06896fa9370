/* Built by a short-lived child, because the launcher itself has to stay in the host's mount namespace: only there can it clone mounted layers. */
#include "launch/slim.h"
#include "launch/sys.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>

static int fill(int root)
{
    int file = openat(root, "none", O_CREAT | O_WRONLY | O_CLOEXEC, 0);
    return file < 0 || close(file) < 0 || mkdirat(root, "empty", 0555) < 0 ? -1 : 0;
}

static int build(void)
{
    struct mount_attr private = {.propagation = MS_PRIVATE};
    struct mount_attr read_only = {.attr_set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC};
    if (sys_unshare(CLONE_NEWNS) < 0 || sys_mount_setattr(AT_FDCWD, "/", AT_RECURSIVE, &private) < 0)
        return -1;
    int fd = sys_fsopen("tmpfs", FSOPEN_CLOEXEC);
    if (fd < 0 || sys_fsconfig(fd, FSCONFIG_SET_STRING, "size", "64k", 0) < 0 || sys_fsconfig(fd, FSCONFIG_SET_STRING, "mode", "755", 0) < 0 ||
        sys_fsconfig(fd, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0)
        return -1;
    int root = sys_fsmount(fd, FSMOUNT_CLOEXEC, 0);
    if (root < 0 || sys_move_mount(root, "", AT_FDCWD, "/", MOVE_MOUNT_F_EMPTY_PATH) < 0 || fchdir(root) < 0)
        return -1;
    if (sys_pivot_root(".", ".") < 0 || sys_umount2(".", 2 /* MNT_DETACH */) < 0 || fill(root) < 0)
        return -1;
    return sys_mount_setattr(root, "", AT_EMPTY_PATH, &read_only);
}

int slim_make(int host_proc)
{
    int ready[2], go[2], error = 0, namespace = -1;
    char path[40];
    if (pipe2(ready, O_CLOEXEC) < 0 || pipe2(go, O_CLOEXEC) < 0)
        return -1;
    pid_t child = fork();
    if (child == 0) {
        char nothing;
        error = build() < 0 ? errno : 0;
        close(go[1]);
        if (write(ready[1], &error, sizeof(error)) == sizeof(error))
            (void)!read(go[0], &nothing, 1);
        _exit(0);
    }
    close(ready[1]);
    close(go[0]);
    if (child > 0 && read(ready[0], &error, sizeof(error)) == sizeof(error) && error == 0) {
        snprintf(path, sizeof(path), "%d/ns/mnt", (int)child);
        namespace = openat(host_proc, path, O_RDONLY | O_CLOEXEC);
        error = errno;
    }
    close(ready[0]);
    close(go[1]);
    if (child > 0)
        waitpid(child, NULL, 0);
    errno = error;
    return namespace;
}
