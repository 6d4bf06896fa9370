/*
 * lo is up; eth0 has the one IPv4 address it was given, and a way out, or is down. Until it has been given one it is up.
 *
 * A card that is up stays up: Linux 6.12 waits for virtio-net's work items when the card goes down, while it holds the
 * lock they need, and after a restore the VMM may have caused one. Old addresses are removed one by one, and the last
 * one takes the card's routes along. In a machine that runs all of it is done by a child: a kernel that does not come
 * back is an error in time, not an agent that hangs.
 *
 * The card is what was eth0 at first. The sandbox may have renamed it since; one it has moved into a namespace of its own
 * is left to it.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <net/route.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "loop.h"
#include "machine.h"
#include "reap.h"
#include "rtnetlink.h"

enum { MAX_PREFIX = 32, MAX_TIME_MS = 10000 };

/* What the child says. */
struct outcome {
    int error; /* 0: done */
    bool lo;
};

static unsigned card; /* 0: there is none */
static bool has_looked, was_set;
static struct source said = {.fd = -1};
static struct timer limit;
static struct child child;
static void (*tell)(const struct problem *);

static bool set_up(int fd, const char *name, bool up) {
    struct ifreq request = {0};
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    if (ioctl(fd, SIOCGIFFLAGS, &request) < 0) return false;
    if (!(request.ifr_flags & IFF_UP) == !up) return true;
    request.ifr_flags = (short)(up ? request.ifr_flags | IFF_UP : request.ifr_flags & ~IFF_UP);
    return ioctl(fd, SIOCSIFFLAGS, &request) == 0;
}

/*
 * virtio cards change it while they are up. The kernel then forgets whom it has met on the link, and tells the other side,
 * which may remember the old one.
 */
static bool set_mac(int fd, const char *name, const char *mac) {
    struct ifreq request = {0};
    unsigned char wanted[6], *at = wanted;
    char notify[80];
    if (!*mac) return true;
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    errno = EINVAL;
    if (sscanf(mac, "%hhx:%hhx:%hhx:%hhx:%hhx:%hhx", at, at + 1, at + 2, at + 3, at + 4, at + 5) != 6) return false;
    if (ioctl(fd, SIOCGIFHWADDR, &request) < 0) return false;
    if (memcmp(wanted, request.ifr_hwaddr.sa_data, sizeof wanted) == 0) return true;
    snprintf(notify, sizeof notify, "proc/sys/net/ipv4/conf/%s/arp_notify", name);
    machine_write(notify, "1"); /* else the other side asks again by itself, only later */
    request.ifr_hwaddr.sa_family = ARPHRD_ETHER;
    memcpy(request.ifr_hwaddr.sa_data, wanted, sizeof wanted);
    return ioctl(fd, SIOCSIFHWADDR, &request) == 0;
}

static bool add_route(int fd, char *name, struct in_addr to, struct in_addr mask, struct in_addr gateway, short flags) {
    struct rtentry route = {.rt_flags = (unsigned short)(RTF_UP | flags), .rt_dev = name};
    struct sockaddr_in value = {.sin_family = AF_INET, .sin_addr = to};
    memcpy(&route.rt_dst, &value, sizeof value);
    value.sin_addr = mask;
    memcpy(&route.rt_genmask, &value, sizeof value);
    value.sin_addr = gateway;
    if (flags & RTF_GATEWAY) memcpy(&route.rt_gateway, &value, sizeof value);
    return ioctl(fd, SIOCADDRT, &route) == 0 || errno == EEXIST;
}

/* Another host, or another end of the link, may have its address now. */
static void forget_neighbour(int fd, const char *name, struct in_addr address) {
    struct arpreq request = {0};
    strncpy(request.arp_dev, name, sizeof request.arp_dev - 1);
    struct sockaddr_in value = {.sin_family = AF_INET, .sin_addr = address};
    memcpy(&request.arp_pa, &value, sizeof value);
    ioctl(fd, SIOCDARP, &request); /* there may be none */
}

static bool read_address(const char *text, struct in_addr *address, int *prefix) {
    char copy[32];
    snprintf(copy, sizeof copy, "%s", text);
    char *slash = strchr(copy, '/');
    long bits = slash ? strtol(slash + 1, NULL, 10) : MAX_PREFIX;
    if (slash) *slash = '\0';
    *prefix = (int)bits;
    errno = EINVAL;
    return bits >= 0 && bits <= MAX_PREFIX && inet_pton(AF_INET, copy, address) == 1;
}

static bool set_gateway(int fd, char *name, const char *text, struct in_addr address, int prefix) {
    struct in_addr gateway, all = {0}, one = {0xffffffff};
    in_addr_t mask = prefix ? htonl(~0u << (MAX_PREFIX - prefix)) : 0;
    if (!*text) return true;
    errno = EINVAL;
    if (inet_pton(AF_INET, text, &gateway) != 1) return false;
    forget_neighbour(fd, name, gateway);
    bool near = ((gateway.s_addr ^ address.s_addr) & mask) == 0;
    return (near || add_route(fd, name, gateway, one, all, RTF_HOST)) && add_route(fd, name, all, all, gateway, RTF_GATEWAY);
}

/* A machine that was paused comes back as itself, and its connections are left alone. */
static bool has_address(int fd, const char *name, struct in_addr address) {
    struct ifreq own = {0};
    struct sockaddr_in value;
    strncpy(own.ifr_name, name, IFNAMSIZ - 1);
    if (ioctl(fd, SIOCGIFADDR, &own) < 0) return false;
    memcpy(&value, &own.ifr_addr, sizeof value);
    return value.sin_addr.s_addr == address.s_addr;
}

/*
 * A card that has no address yet is up, and still: bringing it up is most of the work, and a machine that is saved now is
 * copied. One host is on the link, so nobody is asked whether an IPv6 address is free or who routes. Best effort: a kernel
 * may have no IPv6.
 */
static bool rest(int fd, const char *name) {
    static const char *const settings[] = {"accept_dad", "router_solicitations"};
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        char path[96];
        snprintf(path, sizeof path, "proc/sys/net/ipv6/conf/%s/%s", name, settings[i]);
        machine_write(path, "0");
    }
    return set_up(fd, name, true);
}

static bool set_card(int fd, const struct renewal *renewal) {
    struct in_addr address;
    int prefix;
    char name[IFNAMSIZ] = "";
    if (card && !if_indextoname(card, name)) return errno == ENXIO; /* the sandbox has moved it away */
    if (!*renewal->address) {
        bool down = was_set || machine_has_disk();
        return !card || (addresses_remove(card) && (down ? set_up(fd, name, false) : rest(fd, name)));
    }
    errno = ENODEV;
    if (!card || !read_address(renewal->address, &address, &prefix)) return false;
    if (!has_address(fd, name, address) && !(addresses_remove(card) && address_add(card, address, prefix))) return false;
    return set_up(fd, name, true) && set_mac(fd, name, renewal->mac) && set_gateway(fd, name, renewal->gateway, address, prefix);
}

/* Once: copies of this memory have it too. */
static void remember_card(void) {
    if (!has_looked) card = if_nametoindex("eth0");
    has_looked = true;
}

static struct outcome set_all(const struct renewal *renewal) {
    struct outcome outcome = {0};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    outcome.lo = fd >= 0 && set_up(fd, "lo", true);
    if (!outcome.lo || !set_card(fd, renewal)) outcome.error = errno ? errno : EIO;
    return outcome;
}

/* Not in time, or not at all: it may hang in the kernel, and is reaped with the orphans whenever it ends. */
void network_stop(void) {
    if (child.pid) kill(child.pid, SIGKILL);
    child_forget(&child);
    timer_stop(&limit);
    source_close(&said);
}

static void stop_with(int error) {
    struct problem problem;
    network_stop();
    errno = error;
    problem_set(&problem, "the network");
    tell(&problem);
}

static void is_late(struct timer *timer) {
    (void)timer;
    stop_with(ETIMEDOUT);
}

static void child_ended(struct child *ended, int status, const struct rusage *usage) {
    (void)ended, (void)status, (void)usage; /* what it had to say is in the pipe */
}

static bool problem_of(const struct outcome *outcome, struct problem *problem) {
    errno = outcome->error;
    return problem_set(problem, "%s", outcome->lo ? "eth0" : "lo");
}

static void child_says(struct source *source, uint32_t events) {
    (void)events;
    struct outcome outcome = {0};
    struct problem problem;
    if (source->fd < 0) return; /* closed in this round */
    ssize_t count = read(source->fd, &outcome, sizeof outcome);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (count != (ssize_t)sizeof outcome) return stop_with(EIO);
    network_stop();
    was_set = !outcome.error;
    if (was_set) return tell(NULL);
    problem_of(&outcome, &problem);
    tell(&problem);
}

bool network_set(const struct renewal *renewal, struct problem *problem) {
    remember_card();
    struct outcome outcome = set_all(renewal);
    return !outcome.error || problem_of(&outcome, problem);
}

bool network_begin(const struct renewal *renewal, void (*done)(const struct problem *), struct problem *problem) {
    int ends[2];
    remember_card();
    if (!*renewal->address && (machine_has_disk() || (was_set && !card))) { /* its system's own affair; nothing to renew */
        done(NULL);
        return true;
    }
    if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) < 0) return problem_set(problem, "the network");
    pid_t pid = source_add(&said, ends[0], EPOLLIN, child_says) ? fork() : -1;
    if (pid == 0) {
        struct outcome outcome = set_all(renewal);
        _exit(write(ends[1], &outcome, sizeof outcome) == (ssize_t)sizeof outcome ? 0 : 1);
    }
    int error = errno;
    close(ends[1]);
    if (pid < 0) {
        if (said.fd < 0) close(ends[0]);
        else source_close(&said);
        errno = error;
        return problem_set(problem, "the network");
    }
    tell = done;
    child_register(&child, pid, child_ended);
    timer_set(&limit, MAX_TIME_MS, is_late);
    return true;
}
