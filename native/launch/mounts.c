/* Mounts of a sandbox, by the new mount API only: layers and trees come as descriptors, so the mount namespace never holds more than what the sandbox
 * sees. See mount_setattr(2) for idmapped mounts and Documentation/filesystems/overlayfs.rst for layers. */
#include "launch/mounts.h"
#include "launch/fail.h"
#include "launch/sys.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

/* ── in the host's mount namespace ──────────────────────────────────────────────────────────────────────────────────────────────── */

/* A private idmapped clone of one mount, from a descriptor ("" as path) or a path. */
static int idmapped(int fd, const char *path, int userns)
{
    int tree = sys_open_tree(fd, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | (*path == '\0' ? AT_EMPTY_PATH : 0));
    if (tree < 0)
        fail("open_tree %s", path);
    struct mount_attr attributes = {.attr_set = MOUNT_ATTR_IDMAP, .propagation = MS_PRIVATE, .userns_fd = (uint64_t)userns};
    must(sys_mount_setattr(tree, "", AT_EMPTY_PATH, &attributes), "mount_setattr MOUNT_ATTR_IDMAP");
    return tree;
}

/* Kernels before 6.13 take layers as strings only; the magic link is as good. */
static void overlay_layer(int overlay, const char *key, int fd)
{
    if (sys_fsconfig(overlay, FSCONFIG_SET_FD, key, NULL, fd) == 0)
        return;
    char path[40];
    if (errno == EINVAL) {
        snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
        if (sys_fsconfig(overlay, FSCONFIG_SET_STRING, key, path, 0) == 0)
            return;
    }
    fail("fsconfig overlay %s", key);
}

/* `name=value` or `name`. */
static void option(int fd, char *text)
{
    char *value = strchr(text, '=');
    int done;
    if (value == NULL) {
        done = sys_fsconfig(fd, FSCONFIG_SET_FLAG, text, NULL, 0);
    } else {
        *value = '\0';
        done = sys_fsconfig(fd, FSCONFIG_SET_STRING, text, value + 1, 0);
    }
    if (done < 0)
        fail("fsconfig option %s", text);
}

/* The upper and work directories, below one idmapped clone of the directory they are in: overlayfs wants them on one mount. */
static void overlay_upper(const struct request *request, int overlay, int userns)
{
    step("upper");
    char *upper = strrchr(request->upper, '/'), *work = strrchr(request->work, '/');
    size_t length = (size_t)(upper - request->upper);
    if (length == 0 || length != (size_t)(work - request->work) || memcmp(request->upper, request->work, length) != 0) {
        errno = EINVAL;
        fail("upper and work are not in one directory");
    }
    *upper = '\0';
    int tree = idmapped(AT_FDCWD, request->upper, userns);
    int upper_fd = must(openat(tree, upper + 1, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), "open the upper directory");
    overlay_layer(overlay, "upperdir", upper_fd);
    step("work");
    int work_fd = must(openat(tree, work + 1, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), "open the work directory");
    overlay_layer(overlay, "workdir", work_fd);
}

static int overlay(const struct request *request, int userns)
{
    step("root");
    int fd = must(sys_fsopen("overlay", FSOPEN_CLOEXEC), "fsopen overlay");
    step("lower");
    for (unsigned i = 0; i < request->lowers; i++)
        overlay_layer(fd, "lowerdir+", idmapped(request->lower[i], "", userns));
    overlay_upper(request, fd, userns);
    step("overlay");
    for (unsigned i = 0; i < request->overlay_count; i++)
        option(fd, request->overlay[i]);
    step("root");
    if (sys_fsconfig(fd, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0) {
        int error = errno;
        char log[160];
        ssize_t length = read(fd, log, sizeof(log) - 1); /* the kernel's own words, e.g. "e overlay: upper fs is read-only" */
        log[length > 0 ? length : 0] = '\0';
        errno = error;
        fail("fsconfig overlay create %s", log);
    }
    return must(sys_fsmount(fd, FSMOUNT_CLOEXEC, MOUNT_ATTR_NODEV), "fsmount overlay");
}

void mounts_prepare(const struct request *request, int userns, struct trees *trees)
{
    trees->root = overlay(request, userns);
    step("bind");
    for (unsigned i = 0; i < request->bind_count; i++) {
        const struct bind *bind = &request->binds[i];
        trees->binds[i] = sys_open_tree(bind->fd, "", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH | AT_RECURSIVE);
        struct mount_attr attributes = {.attr_set = bind->attributes, .propagation = MS_PRIVATE};
        if (trees->binds[i] < 0 || sys_mount_setattr(trees->binds[i], "", AT_EMPTY_PATH | AT_RECURSIVE, &attributes) < 0)
            fail("clone the tree for %s", bind->target);
    }
    step("cgroup2");
    trees->cgroup = must(sys_open_tree(request->cgroup2, "", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH), "open_tree");
    struct mount_attr attributes = {.attr_set = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC, .propagation = MS_PRIVATE};
    must(sys_mount_setattr(trees->cgroup, "", AT_EMPTY_PATH, &attributes), "mount_setattr");
}

/* ── in the sandbox's own mount namespace ───────────────────────────────────────────────────────────────────────────────────────── */

/* Makes a missing mount point, with its parents. A symbolic link in the last place that leads nowhere gives way to it. */
static void make_target(const char *target, bool directory)
{
    char path[4096];
    if (strlen(target) >= sizeof(path)) {
        errno = ENAMETOOLONG;
        fail("%s", target);
    }
    strcpy(path, target);
    for (char *slash = strchr(path + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        if (mkdir(path, 0755) < 0 && errno != EEXIST)
            fail("mkdir %s", path);
        *slash = '/';
    }
    struct stat found;
    if (lstat(path, &found) == 0 && S_ISLNK(found.st_mode) && unlink(path) < 0)
        fail("unlink %s", path);
    int made = directory ? mkdir(path, 0755) : mknod(path, S_IFREG | 0644, 0);
    if (made < 0 && errno != EEXIST)
        fail("make %s", path);
}

static void attach(int tree, const char *target)
{
    const unsigned flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_SYMLINKS;
    if (sys_move_mount(tree, "", AT_FDCWD, target, flags) == 0)
        return;
    struct stat source;
    if (errno == ENOENT && fstatat(tree, "", &source, AT_EMPTY_PATH) == 0) {
        make_target(target, S_ISDIR(source.st_mode));
        if (sys_move_mount(tree, "", AT_FDCWD, target, flags) == 0)
            return;
    }
    fail("attach %s", target);
}

/* A new file system with comma-separated options, attached. */
static void mount_new(const char *type, char *options, unsigned attributes, const char *target)
{
    int fd = sys_fsopen(type, FSOPEN_CLOEXEC);
    if (fd < 0)
        fail("fsopen %s", type);
    for (char *text = strtok(options, ","); text != NULL; text = strtok(NULL, ","))
        option(fd, text);
    if (sys_fsconfig(fd, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0)
        fail("fsconfig %s create for %s", type, target);
    int tree = sys_fsmount(fd, FSMOUNT_CLOEXEC, attributes);
    if (tree < 0)
        fail("fsmount %s for %s", type, target);
    attach(tree, target);
    close(tree);
    close(fd);
}

/* Hides a path below `none` or `empty` of the slim namespace's root. */
static void mask(int slim_root, const char *path)
{
    struct stat found;
    if (stat(path, &found) < 0) {
        if (errno == ENOENT || errno == ENOTDIR)
            return;
        fail("stat %s", path);
    }
    const char *source = S_ISDIR(found.st_mode) ? "empty" : "none";
    int tree = must(sys_open_tree(slim_root, source, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC), "open_tree of a mask");
    if (sys_move_mount(tree, "", AT_FDCWD, path, MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_SYMLINKS) < 0)
        fail("hide %s", path);
    close(tree);
}

/* The overlay is attached over the slim root and entered by chroot: pivot_root(2) would visit every task of the host. Nothing is lost by it: the
 * slim root has nothing in it, `..` at the overlay's root stays there, and nobody inside may unmount. */
static void enter_root(int root)
{
    must(sys_move_mount(root, "", AT_FDCWD, "/", MOVE_MOUNT_F_EMPTY_PATH), "attach the root");
    must(fchdir(root), "fchdir");
    must(chroot("."), "chroot");
}

void mounts_attach(const struct request *request, const struct trees *trees)
{
    char options[512];
    step("root");
    int slim_root = must(open("/", O_PATH | O_DIRECTORY | O_CLOEXEC), "open the slim root");
    enter_root(trees->root);
    step("bind");
    for (unsigned i = 0; i < request->bind_count; i++)
        attach(trees->binds[i], request->binds[i].target);
    step("tmpfs");
    for (unsigned i = 0; i < request->tmpfs_count; i++) {
        const struct tmpfs *tmpfs = &request->tmpfs[i];
        snprintf(options, sizeof(options), "uid=%u,gid=%u,%s", request->outside, request->outside, tmpfs->options);
        mount_new("tmpfs", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, tmpfs->target);
    }
    if (request->devpts != NULL) {
        step("devpts");
        snprintf(options, sizeof(options), "ptmxmode=0666,mode=0620,gid=%u", request->outside + 5); /* group tty */
        mount_new("devpts", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC, request->devpts);
    }
    step("proc");
    options[0] = '\0';
    mount_new("proc", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC, "/proc");
    step("mask");
    for (unsigned i = 0; i < request->mask_count; i++)
        mask(slim_root, request->masks[i]);
    if (request->root_attributes != 0) {
        step("root");
        struct mount_attr attributes = {.attr_set = request->root_attributes};
        must(sys_mount_setattr(AT_FDCWD, "/", 0, &attributes), "mount_setattr of the root");
    }
}
