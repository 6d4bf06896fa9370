/*
 * The sandbox's root in a virtual machine: read-only EROFS layers and one writable disk under an overlay, or one disk.
 *
 * It is moved onto / and entered by chroot: chroot alone would leave it a chroot in the kernel's eyes, in which no user
 * namespace can be made and path rules do not hold.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/blkpg.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "loop.h"
#include "machine.h"
#include "tree.h"
#include "worker.h"

#define EXT4_IOC_RESIZE_FS _IOW('f', 16, uint64_t)

enum { BLOCK_SECTORS = 8, START_AT = 446 + 16 + 8, SIZE_AT = START_AT + 4 }; /* of the file system; of the second partition in an MBR */
enum { DISK_WAIT_MS = 20000, DISK_STEP_MS = 5, PATH_ROOM = 300, RESERVE_KIB = 8 * 1024, SAFE = MS_NOSUID | MS_NODEV | MS_NOEXEC };

static bool mount_layer(size_t number, const struct layer *layer, struct problem *problem) {
    char meta[PATH_ROOM], data[PATH_ROOM], target[32], plain[PATH_ROOM + 16] = "", direct[PATH_ROOM + 32];
    if (!drive_find(layer->meta, meta, sizeof meta, problem)) return false;
    if (layer->data) {
        if (!drive_find(layer->data, data, sizeof data, problem)) return false;
        snprintf(plain, sizeof plain, "device=%s", data);
    }
    snprintf(target, sizeof target, "/l/%zu", number);
    mkdir(target, 0755);
    if (strncmp(layer->meta, "pmem@", 5) == 0) {
        snprintf(direct, sizeof direct, "dax=always%s%s", layer->data ? "," : "", plain);
        if (mount(meta, target, "erofs", MS_RDONLY, direct) == 0) return true; /* else the kernel cannot: pages are copied */
    }
    if (mount(meta, target, "erofs", MS_RDONLY, plain) == 0) return true;
    return problem_set(problem, "layer %zu, drive %.40s%s%.40s", number, layer->meta, layer->data ? " and " : "",
                       layer->data ? layer->data : "");
}

/*
 * No thread of the kernel's looks around on a disk that was just mounted: machines are saved and copied soon after, and
 * each copy would do that first. Kernels before 5.13 do not know the words.
 */
static bool mount_at_rest(const char *device, const char *target, unsigned long flags) {
    if (mount(device, target, "ext4", flags, "noinit_itable,no_prefetch_block_bitmaps") == 0) return true;
    return errno == EINVAL && mount(device, target, "ext4", flags, "") == 0;
}

static bool mount_writable(const char *drive, struct problem *problem) {
    char device[PATH_ROOM];
    if (!drive_find(drive, device, sizeof device, problem)) return false;
    if (!mount_at_rest(device, "/w", MS_NOATIME)) return problem_set(problem, "writable drive %.40s", drive);
    bool made = (mkdir("/w/upper", 0755) == 0 || errno == EEXIST) && (mkdir("/w/work", 0700) == 0 || errno == EEXIST);
    return made || problem_set(problem, "writable drive %.40s", drive);
}

static bool mount_overlay(size_t layers, struct problem *problem) {
    static char options[4096];
    size_t at = (size_t)snprintf(options, sizeof options, "lowerdir=/f");
    for (size_t i = layers; i-- > 0;) at += (size_t)snprintf(options + at, sizeof options - at, ":/l/%zu", i);
    snprintf(options + at, sizeof options - at, ",upperdir=/w/upper,workdir=/w/work,redirect_dir=off,metacopy=off,index=off,xino=off");
    if (mount("overlay", "/n", "overlay", 0, options) == 0) return true;
    return problem_set(problem, "the overlay of %zu layers", layers);
}

/*
 * Programs together get what there is, but for a reserve. Otherwise a guest without swap whose memory is used up evicts
 * the programs' own pages and reads them again, for minutes, before its kernel kills anybody.
 */
static void limit_memory(void) {
    char facts[2048], text[32];
    if (!machine_read("proc/meminfo", facts, sizeof facts)) return;
    const char *at = strstr(facts, "MemAvailable:");
    uint64_t kib = at ? strtoull(at + strlen("MemAvailable:"), NULL, 10) : 0;
    if (kib <= 2 * RESERVE_KIB) return;
    snprintf(text, sizeof text, "%llu", (unsigned long long)(kib - RESERVE_KIB) * 1024);
    machine_write("c/sandbox/memory.max", text); /* a kernel without the controller has its own way */
}

/*
 * Commands get cgroups below c/sandbox, which is the root of the cgroup namespace they see: a Docker inside makes its
 * groups there, and is held and counted with them.
 */
static bool make_cgroups(uint64_t pids_limit, struct problem *problem) {
    char controllers[256] = "", word[64], text[32];
    if (mount("cgroup2", "/c", "cgroup2", SAFE, "") < 0) return problem_set(problem, "cgroup2");
    bool inside = mkdir("/c/sandbox", 0755) == 0 && machine_write("c/sandbox/cgroup.procs", "0") && unshare(CLONE_NEWCGROUP) == 0 &&
                  machine_write("c/cgroup.procs", "0");
    if (!inside) return problem_set(problem, "the sandbox's cgroup");
    machine_read("c/cgroup.controllers", controllers, sizeof controllers);
    for (char *rest = controllers, *name; (name = strtok_r(rest, " \n", &rest));) {
        snprintf(word, sizeof word, "+%.40s", name);
        /* One that cannot be delegated (cpu with a real-time process) is not there inside, the others are. */
        if (machine_write("c/cgroup.subtree_control", word)) machine_write("c/sandbox/cgroup.subtree_control", word);
    }
    snprintf(text, sizeof text, "%llu", (unsigned long long)pids_limit);
    limit_memory();
    if (pids_limit && !machine_write("c/sandbox/pids.max", text)) return problem_set(problem, "pids.max");
    errno = 0;
    if (tree_init(open("/c/sandbox", O_RDONLY | O_DIRECTORY | O_CLOEXEC))) return true;
    return problem_set(problem, "the sandbox's cgroup cannot be used");
}

static const struct inner {
    const char *type, *target;
    unsigned long flags;
    const char *data;
    bool optional;
} inners[] = {
    {"proc", "proc", SAFE, "", false},
    {"sysfs", "sys", SAFE, "", false},
    {"cgroup2", "sys/fs/cgroup", SAFE, "", false},
    {"devtmpfs", "dev", MS_NOSUID, "", false},
    {"devpts", "dev/pts", MS_NOSUID | MS_NOEXEC, "mode=620,ptmxmode=666,gid=5", false},
    {"tmpfs", "dev/shm", MS_NOSUID | MS_NODEV, "mode=1777", false},
    {"mqueue", "dev/mqueue", SAFE, "", true},
};

static bool mount_inners(struct problem *problem) {
    static const char *const links[][2] = {
        {"/proc/self/fd", "dev/fd"}, {"fd/0", "dev/stdin"}, {"fd/1", "dev/stdout"}, {"fd/2", "dev/stderr"}};
    for (size_t i = 0; i < sizeof inners / sizeof *inners; i++) {
        const struct inner *inner = &inners[i];
        mkdir(inner->target, 0755); /* below /dev they are not there yet */
        if (mount(inner->type, inner->target, inner->type, inner->flags, inner->data) < 0 && !inner->optional)
            return problem_set(problem, "/%s", inner->target);
    }
    for (size_t i = 0; i < sizeof links / sizeof *links; i++) {
        if (symlink(links[i][0], links[i][1]) < 0 && errno != EEXIST) return problem_set(problem, "/%s", links[i][1]);
    }
    return true;
}

static bool enter(struct problem *problem) {
    if (chdir("/n") == 0 && mount_inners(problem)) {
        if (mount(".", "/", NULL, MS_MOVE, NULL) == 0 && chroot(".") == 0 && chdir("/") == 0) return true;
        return problem_set(problem, "entering the root");
    }
    return problem->text[0] ? false : problem_set(problem, "entering the root");
}

static bool show(int directory, const char *name, const char *target, struct problem *problem) {
    char source[64];
    snprintf(source, sizeof source, "/proc/self/fd/%d%s", directory, name);
    if (mount(source, target, NULL, MS_BIND, NULL) == 0 &&
        mount(NULL, target, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | SAFE, NULL) == 0)
        return true;
    return problem_set(problem, "%s", target);
}

/*
 * The directory of the generation id, where programs look for it, and the boot id in place of the kernel's; they cannot
 * write there. The first /proc, with nothing on it, stays in the same mount namespace: user namespaces may mount theirs.
 */
static bool show_generation(int directory, struct problem *problem) {
    static char target[] = "/run/opendsec";
    if (!make_parents(target, 0755)) return problem_set(problem, "%s", target);
    return show(directory, "", target, problem) && show(directory, "/boot_id", "/proc/sys/kernel/random/boot_id", problem);
}

static bool mount_disks(const struct setup *setup, struct problem *problem) {
    for (size_t i = 0; i < setup->disk_count; i++) {
        char device[PATH_ROOM];
        char *target = setup->disks[i].mount_point;
        errno = EINVAL;
        if (*target != '/') return problem_set(problem, "mount point %.100s", target);
        if (!drive_find(setup->disks[i].drive, device, sizeof device, problem)) return false;
        if (!make_parents(target, 0755) || !mount_at_rest(device, target, 0))
            return problem_set(problem, "drive %.40s on %.100s", setup->disks[i].drive, target);
    }
    return true;
}

static void make_places(void) {
    static const char *const places[] = {"/l", "/w", "/c", "/f", "/g", "/n"};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) mkdir(places[i], 0755);
}

/* The number in a small file of the kernel's about a disk or a partition; 0: there is none. */
static uint64_t sectors(const char *name, const char *what) {
    char path[PATH_ROOM], text[32];
    snprintf(path, sizeof path, "sys/class/block/%.60s/%s", name, what);
    return machine_read(path, text, sizeof text) ? strtoull(text, NULL, 10) : 0;
}

static bool is_in_table(int fd, uint64_t start, uint64_t size) {
    unsigned char said[8], wanted[8] = {start & 255, start >> 8 & 255, start >> 16 & 255, start >> 24 & 255,
                                        size & 255, size >> 8 & 255, size >> 16 & 255, size >> 24 & 255};
    return start <= UINT32_MAX && pread(fd, said, sizeof said, START_AT) == sizeof said && memcmp(said, wanted, sizeof said) == 0;
}

/*
 * The sandbox's disk may be larger than its image was made: the last partition, which is the root's, is made as large as
 * there is room, in the table (an MBR's, where it is the second) and in the kernel. A disk that cannot be read or written
 * stays as it is, and so does one with a table of another kind.
 */
static void grow_partition(const char *device) {
    char whole[64];
    snprintf(whole, sizeof whole, "%s", device);
    size_t length = strlen(whole);
    if (strncmp(device, "/dev/", 5) != 0 || length < 7 || whole[length - 1] != '2') return;
    whole[length - 1] = '\0';
    uint64_t start = sectors(device + 5, "start"), size = sectors(device + 5, "size"), disk = sectors(whole + 5, "size");
    if (!start || disk <= start + size || disk - start > UINT32_MAX) return;
    uint64_t wanted = (disk - start) / BLOCK_SECTORS * BLOCK_SECTORS;
    unsigned char text[4] = {wanted & 255, wanted >> 8 & 255, wanted >> 16 & 255, wanted >> 24 & 255};
    struct blkpg_partition partition = {.start = (long long)start * 512, .length = (long long)wanted * 512, .pno = 2};
    struct blkpg_ioctl_arg request = {.op = BLKPG_RESIZE_PARTITION, .datalen = sizeof partition, .data = &partition};
    int fd = wanted > size ? open(whole, O_RDWR | O_CLOEXEC) : -1;
    bool written = fd >= 0 && is_in_table(fd, start, size) && pwrite(fd, text, sizeof text, SIZE_AT) == sizeof text;
    if (written && fsync(fd) == 0) ioctl(fd, BLKPG, &request);
    if (fd >= 0) close(fd);
}

/* The file system follows its partition. */
static void grow_files(const char *device) {
    uint64_t blocks = strncmp(device, "/dev/", 5) == 0 ? sectors(device + 5, "size") / BLOCK_SECTORS : 0;
    int fd = blocks ? open("/w", O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    struct statfs info;
    if (fd >= 0 && fstatfs(fd, &info) == 0 && info.f_bsize == BLOCK_SECTORS * 512 && ioctl(fd, EXT4_IOC_RESIZE_FS, &blocks) < 0)
        dprintf(2, "opendsec-guest: the root is not made larger: %s\n", strerror(errno));
    if (fd >= 0) close(fd);
}

/* Drivers find their devices in their own time. */
static bool mount_disk(const char *device, struct problem *problem) {
    for (uint64_t end = now_ns() + DISK_WAIT_MS * 1000000ull;;) {
        bool there = access(device, F_OK) == 0;
        if (there) grow_partition(device);
        if (there && mount(device, "/w", "ext4", MS_NOATIME, "") == 0) break;
        bool not_yet = errno == ENOENT || errno == ENXIO || errno == ENOTBLK;
        if (!not_yet || now_ns() > end) return problem_set(problem, "the root %.40s", device);
        usleep(DISK_STEP_MS * 1000);
    }
    grow_files(device);
    /* It is seen twice: once as what is written, whatever happens to the root. */
    if (mount("/w", "/n", NULL, MS_BIND, NULL) == 0) return true;
    return problem_set(problem, "the root %.40s", device);
}

static void take_host_name(void) {
    char name[65];
    if (!machine_read("w/etc/hostname", name, sizeof name)) return;
    name[strcspn(name, "\n")] = '\0';
    if (*name) sethostname(name, strlen(name));
}

bool root_of_disk(const char *device, struct problem *problem) {
    problem->text[0] = '\0';
    errno = 0;
    make_places();
    if (!mount_disk(device, problem) || !facts_write(NULL, true, problem) || !make_cgroups(0, problem)) return false;
    take_host_name();
    int generation = open("/g", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool entered = enter(problem) && show_generation(generation, problem);
    if (generation >= 0) close(generation);
    return entered;
}

bool root_make(const struct setup *setup, struct problem *problem) {
    problem->text[0] = '\0';
    errno = 0;
    if (!setup->layer_count || !*setup->writable) return problem_set(problem, "no layer, or no writable drive");
    make_places();
    for (size_t i = 0; i < setup->layer_count; i++)
        if (!mount_layer(i, &setup->layers[i], problem)) return false;
    if (!mount_writable(setup->writable, problem)) return false;
    if (!facts_write(&setup->renewal, true, problem)) return false;
    if (!mount_overlay(setup->layer_count, problem) || !make_cgroups(setup->pids_limit, problem)) return false;
    int generation = open("/g", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool entered = enter(problem) && show_generation(generation, problem) && mount_disks(setup, problem);
    if (generation >= 0) close(generation);
    return entered;
}
