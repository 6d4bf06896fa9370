/*
 * See serial.h. A serial port knows no connections, so a new host may begin in the middle of what an old one left.
 * The agent therefore skips bytes until it sees a HELLO frame whose first field is VERSION, gives up a frame that
 * does not go on for a second, and takes a hang-up (virtio-serial reports it) as the end of the connection.
 */
#include "serial.h"

#include <fcntl.h>
#include <linux/vm_sockets.h>
#include <string.h>
#include <sys/epoll.h>
#include <termios.h>
#include <unistd.h>

#include "conn.h"
#include "loop.h"
#include "wire.h"

enum { REOPEN_MS = 100, HELLO_PATTERN = HEADER_BYTES + FIELD_BYTES };

static struct source coming = {.fd = -1};
static struct timer reopen_timer;
static int serial_fd = -1;

static void serial_reopen(struct timer *timer) {
    source_release(&coming);
    timer_stop(timer);
    if (!conn_serial(serial_fd)) timer_set(timer, REOPEN_MS, serial_reopen); /* for lack of memory */
}

/* Told of every change once: a port whose host is away always has something to say. */
static void serial_came(struct source *source, uint32_t events) {
    (void)source;
    if (!(events & EPOLLHUP)) serial_reopen(&reopen_timer);
}

bool serial_open(const char *path) {
    serial_fd = open(path, O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
    if (serial_fd < 0) return false;
    struct termios raw;
    if (tcgetattr(serial_fd, &raw) == 0) {
        cfmakeraw(&raw);
        tcsetattr(serial_fd, TCSANOW, &raw);
    }
    return conn_serial(serial_fd);
}

/* Nothing runs meanwhile: a machine that is saved now is at rest, and a restored one goes straight to its host. */
void serial_closed(int fd) {
    serial_fd = fd;
    if (!source_add(&coming, fd, EPOLLIN | EPOLLET, serial_came)) timer_set(&reopen_timer, REOPEN_MS, serial_reopen);
}

static bool may_be_hello(const unsigned char *at, size_t length) {
    unsigned char want[HELLO_PATTERN] = {0};
    want[8] = FRAME_HELLO;
    want[HEADER_BYTES] = TAG_VERSION;
    want[HEADER_BYTES + 4] = 8;
    if (length > HELLO_PATTERN) length = HELLO_PATTERN;
    for (size_t i = 0; i < length; i++) {
        if (i == 0 ? at[0] < FIELD_BYTES + 8 : at[i] != want[i]) return false;
    }
    return true;
}

size_t serial_hunt(const char *bytes, size_t length) {
    size_t skip = 0;
    while (skip < length && !may_be_hello((const unsigned char *)bytes + skip, length - skip)) skip++;
    return skip;
}

int vsock_listen(unsigned port) {
    struct sockaddr_vm address = {.svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_ANY, .svm_port = port};
    int fd = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return -1;
    if (bind(fd, (struct sockaddr *)&address, sizeof address) == 0 && listen(fd, 8) == 0) return fd;
    close(fd);
    return -1;
}

bool serial_is_host(const struct sockaddr_storage *peer) {
    struct sockaddr_vm address;
    memcpy(&address, peer, sizeof address);
    return address.svm_family == AF_VSOCK && address.svm_cid == VMADDR_CID_HOST;
}
