/* See machine.h. Booting, the frames of machines, and the end. */
#include "machine.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "conn.h"

enum { PORT_WAIT_MS = 10000, PORT_STEP_MS = 10, SMALL_TASK = 2048, NOFILE_SOFT = 65536, NOFILE_HARD = 1048576 };

static int root = -1;
static bool has_setup, is_ready;
static char root_disk[64]; /* the device of the root, or "" */

bool machine_runs(void) { return root >= 0; }
bool machine_is_ready(void) { return is_ready; }
bool machine_has_disk(void) { return *root_disk; }
int machine_root(void) { return root; }

bool problem_set(struct problem *problem, const char *format, ...) {
    problem->error = errno;
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(problem->text, sizeof problem->text, format, arguments);
    va_end(arguments);
    if (problem->error && length >= 0 && (size_t)length < sizeof problem->text)
        snprintf(problem->text + length, sizeof problem->text - (size_t)length, ": %s", strerror(problem->error));
    return false;
}

bool machine_read(const char *path, char *text, size_t room) {
    int fd = openat(root, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    size_t length = 0;
    ssize_t count;
    while ((count = read(fd, text + length, room - 1 - length)) > 0) length += (size_t)count; /* files of /proc come by pages */
    close(fd);
    text[length] = '\0';
    return count >= 0;
}

bool machine_write(const char *path, const char *text) {
    int fd = openat(root, path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return false;
    bool written = write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    int error = errno;
    close(fd);
    errno = error;
    return written;
}

bool machine_is_init(int argc, char **argv) {
    if (getpid() != 1) return false;
    for (int i = 1; i < argc; i++) /* the kernel passes words of its command line that it does not know */
        if (strncmp(argv[i], "--", 2) == 0) return false;
    return true;
}

static _Noreturn void give_up(const char *what) {
    dprintf(2, "opendsec-guest: %s: %s\n", what, strerror(errno));
    machine_off();
}

static void load_module(const char *name) {
    int fd = openat(root, name, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    if (syscall(SYS_finit_module, fd, "", 0) < 0 && errno != EEXIST)
        dprintf(2, "opendsec-guest: module %s: %s\n", name, strerror(errno));
    close(fd);
}

/* In the order of their names: the host has put those that others need first. */
static void load_modules(void) {
    struct dirent **list;
    int count = scandir("/modules", &list, NULL, alphasort);
    for (int i = 0; i < count; i++) {
        char path[300];
        snprintf(path, sizeof path, "modules/%s", list[i]->d_name);
        if (list[i]->d_name[0] != '.') load_module(path);
        free(list[i]);
    }
    if (count >= 0) free(list);
}

static bool port_named(const char *name, char *path, size_t room) {
    DIR *ports = opendir("/sys/class/virtio-ports");
    bool found = false;
    for (struct dirent *entry; ports && !found && (entry = readdir(ports));) {
        char file[320], said[64];
        snprintf(file, sizeof file, "sys/class/virtio-ports/%s/name", entry->d_name);
        if (entry->d_name[0] == '.' || !machine_read(file, said, sizeof said)) continue;
        said[strcspn(said, "\n")] = '\0';
        found = strcmp(said, name) == 0;
        if (found) snprintf(path, room, "/dev/%s", entry->d_name);
    }
    if (ports) closedir(ports);
    return found;
}

static const char *find_port(const char *name) {
    static char path[300];
    for (int waited = 0; !port_named(name, path, sizeof path); waited += PORT_STEP_MS) {
        errno = ENODEV;
        if (waited >= PORT_WAIT_MS) give_up(name);
        usleep(PORT_STEP_MS * 1000);
    }
    return path;
}

/* A word `name=value` of the kernel's command line; false: it is not there. `name` ends with the equals sign. */
static bool word(const char *name, char *value, size_t room) {
    char line[4096];
    if (!machine_read("proc/cmdline", line, sizeof line)) return false;
    for (char *rest = line, *one; (one = strtok_r(rest, " \n", &rest));) {
        if (strncmp(one, name, strlen(name)) != 0) continue;
        snprintf(value, room, "%s", one + strlen(name));
        return true;
    }
    return false;
}

static void find_transport(const char **serial, unsigned *vsock_port) {
    char way[128];
    errno = EINVAL;
    if (!word("opendsec.transport=", way, sizeof way)) give_up("opendsec.transport is not on the kernel's command line");
    errno = EINVAL;
    if (strcmp(way, "serial") == 0) *serial = find_port("agent.0");
    else if (strncmp(way, "serial:", 7) == 0) *serial = find_port(way + 7);
    else if (strncmp(way, "vsock:", 6) == 0 && atoi(way + 6) > 0) *vsock_port = (unsigned)atoi(way + 6);
    else give_up("opendsec.transport is neither `serial`, `serial:NAME` nor `vsock:PORT`");
}

static void mount_first(const char *type, const char *target, unsigned long flags) {
    mkdir(target, 0755);
    if (mount(type, target, type, flags, "") < 0 && errno != EBUSY) give_up(target);
}

void machine_boot(const char **serial, unsigned *vsock_port) {
    mount_first("devtmpfs", "/dev", MS_NOSUID);
    mount_first("proc", "/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC);
    mount_first("sysfs", "/sys", MS_NOSUID | MS_NODEV | MS_NOEXEC);
    root = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root >= 0) root = fcntl(root, F_DUPFD_CLOEXEC, 64); /* above the numbers children are given */
    if (root < 0) give_up("/");
    struct rlimit files = {NOFILE_SOFT, NOFILE_HARD};
    setrlimit(RLIMIT_NOFILE, &files);
    word("opendsec.root=", root_disk, sizeof root_disk);
    load_modules();
    find_transport(serial, vsock_port);
}

void machine_start(void) {
    static char address[64], gateway[64], empty[1];
    struct problem problem;
    struct renewal renewal = {.host_name = empty, .machine_id = empty, .generation = empty, .mac = empty,
                              .address = address, .gateway = gateway};
    if (!machine_has_disk()) return; /* SETUP will say of what it is made */
    has_setup = true;
    word("opendsec.address=", address, sizeof address);
    word("opendsec.gateway=", gateway, sizeof gateway);
    errno = 0;
    if (!root_of_disk(root_disk, &problem) || !network_set(&renewal, &problem)) {
        dprintf(2, "opendsec-guest: %s\n", problem.text);
        machine_off();
    }
    is_ready = true;
}

/* Numbers and plain text; false: not one of RENEW's. */
static bool take_renewal(struct renewal *renewal, struct cursor *cursor, const struct field *field) {
    switch (field->tag) {
        case TAG_FLAGS: field_u64(cursor, field, &renewal->flags); break;
        case TAG_CLOCK_NS: field_u64(cursor, field, &renewal->clock_ns); break;
        case TAG_ENTROPY:
            renewal->entropy = field->data;
            renewal->entropy_length = field->length;
            break;
        case TAG_HOST_NAME: renewal->host_name = field->data; break;
        case TAG_MACHINE_ID: renewal->machine_id = field->data; break;
        case TAG_GENERATION: renewal->generation = field->data; break;
        case TAG_MAC: renewal->mac = field->data; break;
        case TAG_ADDRESS: renewal->address = field->data; break;
        case TAG_GATEWAY: renewal->gateway = field->data; break;
        case TAG_RESOLVER:
            if (renewal->resolver_count < MAX_RESOLVERS) renewal->resolvers[renewal->resolver_count++] = field->data;
            break;
        default: return false;
    }
    return true;
}

/* `two` gets what follows a NUL inside the field. False when there is none. */
static bool split(const struct field *field, char **one, char **two) {
    char *nul = memchr(field->data, '\0', field->length);
    *one = field->data;
    *two = nul ? nul + 1 : NULL;
    return nul != NULL;
}

static void take_setup(struct setup *setup, struct cursor *cursor, const struct field *field) {
    struct layer *layer = &setup->layers[setup->layer_count];
    struct disk *disk = &setup->disks[setup->disk_count];
    if (take_renewal(&setup->renewal, cursor, field)) return;
    switch (field->tag) {
        case TAG_LAYER:
            if (setup->layer_count == MAX_LAYERS) cursor->bad = true;
            else split(field, &layer->meta, &layer->data), setup->layer_count++;
            break;
        case TAG_DISK:
            if (setup->disk_count == MAX_DISKS || !split(field, &disk->drive, &disk->mount_point)) cursor->bad = true;
            else setup->disk_count++;
            break;
        case TAG_WRITABLE: setup->writable = field->data; break;
        case TAG_PIDS_LIMIT: field_u64(cursor, field, &setup->pids_limit); break;
        default: break;
    }
}

static bool setup_parse(struct setup *setup, char *payload, size_t length) {
    static char empty[1];
    struct cursor cursor = {payload, payload + length, false};
    *setup = (struct setup){.writable = empty,
                            .renewal = {.entropy = empty, .host_name = empty, .machine_id = empty, .generation = empty,
                                        .mac = empty, .address = empty, .gateway = empty}};
    char *end = NULL;
    for (struct field field; field_next(&cursor, &field);) {
        if (end) *end = '\0';
        take_setup(setup, &cursor, &field);
        end = field.data + field.length;
    }
    if (end) *end = '\0';
    return !cursor.bad;
}

/* One SETUP or RENEW that is being done. */
struct task {
    uint32_t id; /* 0: whoever asked is gone */
    bool first;
    struct setup setup; /* points into the payload */
    char payload[];
};

static struct task *task;

/* For a RENEW, which is small: no memory is asked for that would have to be found and given back right after a restore. */
static union {
    struct task task;
    char room[sizeof(struct task) + SMALL_TASK];
} small;

static struct task *task_new(size_t length) {
    if (task == &small.task || length >= SMALL_TASK) return calloc(1, sizeof *task + length + 1);
    memset(&small, 0, sizeof small);
    return &small.task;
}

static void task_free(struct task *old) {
    if (old != &small.task) free(old);
}

/* NULL: it is done. */
static void task_end(const struct problem *problem) {
    struct task *ended = task;
    task = NULL;
    if (!problem) is_ready = true;
    if (!problem && ended->first) usage_send();
    if (ended->id && problem) error_send(ended->id, "setup", problem->error, "%s", problem->text);
    else if (ended->id) frame_send(FRAME_OK, ended->id, 0, NULL, 0);
    explicit_bzero((void *)(uintptr_t)ended->setup.renewal.entropy, ended->setup.renewal.entropy_length);
    task_free(ended);
}

static void network_done(const struct problem *trouble) {
    struct problem problem;
    if (!trouble && !renew_finish(&task->setup.renewal, &problem)) trouble = &problem;
    if (!trouble && task->setup.renewal.flags & RENEW_IS_NEW) usage_begin_anew();
    task_end(trouble);
}

static bool task_begin(struct problem *problem) {
    const struct setup *setup = &task->setup;
    errno = 0;
    if (task->first && has_setup) return problem_set(problem, "SETUP has been done, or has failed: it cannot be repeated");
    if (!task->first && !is_ready) return problem_set(problem, "RENEW comes after SETUP");
    has_setup = true;
    if (task->first && !root_make(setup, problem)) return false;
    return renew_begin(&setup->renewal, task->first, problem) && network_begin(&setup->renewal, network_done, problem);
}

/* A SETUP that is being done is not disturbed; a RENEW makes way for the next one, which sets the same things. */
static bool make_way(uint32_t id) {
    if (!task) return true;
    if (task->first) {
        error_send(id, "setup", 0, "SETUP is being done");
        return false;
    }
    network_stop();
    if (task->id) error_send(task->id, "cancelled", 0, "another RENEW came");
    task_free(task);
    task = NULL;
    return true;
}

void machine_detach(void) {
    if (task) task->id = 0;
}

bool machine_frame(const struct header *header, char *payload) {
    struct problem problem;
    struct task *next = header->id ? task_new(header->length) : NULL;
    if (!next) {
        if (header->id) error_send(header->id, "no_memory", ENOMEM, "no memory for a frame");
        return header->id != 0;
    }
    memcpy(next->payload, payload, header->length);
    bool is_sound = setup_parse(&next->setup, next->payload, header->length);
    if (is_sound && !machine_runs()) error_send(header->id, "unsupported", 0, "this guest agent is not init of a virtual machine");
    if (!is_sound || !machine_runs() || !make_way(header->id)) {
        task_free(next);
        return is_sound;
    }
    next->id = header->id;
    next->first = header->type == FRAME_SETUP;
    task = next;
    if (!task_begin(&problem)) task_end(&problem);
    return true;
}

bool machine_refuses(const struct header *header) {
    if (!machine_runs() || is_ready) return false;
    error_send(header->id, "setup", 0, "the machine has not been set up");
    return true;
}

void machine_off(void) {
    sync();
    /* A VMM without a power button ends on a reset (QEMU: -no-reboot); a PC would only start again. */
    reboot(machine_has_disk() ? RB_POWER_OFF : RB_AUTOBOOT);
    _exit(70);
}
