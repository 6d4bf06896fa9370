/*
 * lo is up; eth0 has the one IPv4 address it was given, and a way out, or is down.
 *
 * A card that is up stays up: Linux 6.12 waits for virtio-net's work items when the card goes down, while it holds the
 * lock they need, and after a restore the VMM may have caused one. Old addresses are removed one by one, and the last
 * one takes the card's routes along. All of it is done by a child: a kernel that does not come back is an error in
 * time, not an agent that hangs.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <net/route.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "machine.h"
#include "rtnetlink.h"

enum { MAX_PREFIX = 32, MAX_TIME_MS = 10000 };

/* What the child says. */
struct outcome {
    int error; /* 0: done */
    bool lo;
};

static bool set_up(int fd, const char *name, bool up) {
    struct ifreq request = {0};
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    if (ioctl(fd, SIOCGIFFLAGS, &request) < 0) return false;
    if (!(request.ifr_flags & IFF_UP) == !up) return true;
    request.ifr_flags = (short)(up ? request.ifr_flags | IFF_UP : request.ifr_flags & ~IFF_UP);
    return ioctl(fd, SIOCSIFFLAGS, &request) == 0;
}

/* virtio cards change it while they are up. */
static bool set_mac(int fd, const char *mac) {
    struct ifreq request = {.ifr_name = "eth0"};
    unsigned char wanted[6], *at = wanted;
    if (!*mac) return true;
    errno = EINVAL;
    if (sscanf(mac, "%hhx:%hhx:%hhx:%hhx:%hhx:%hhx", at, at + 1, at + 2, at + 3, at + 4, at + 5) != 6) return false;
    if (ioctl(fd, SIOCGIFHWADDR, &request) < 0) return false;
    if (memcmp(wanted, request.ifr_hwaddr.sa_data, sizeof wanted) == 0) return true;
    request.ifr_hwaddr.sa_family = ARPHRD_ETHER;
    memcpy(request.ifr_hwaddr.sa_data, wanted, sizeof wanted);
    return ioctl(fd, SIOCSIFHWADDR, &request) == 0;
}

static bool add_route(int fd, struct in_addr to, struct in_addr mask, struct in_addr gateway, short flags) {
    struct rtentry route = {.rt_flags = (unsigned short)(RTF_UP | flags), .rt_dev = (char[]){"eth0"}};
    struct sockaddr_in value = {.sin_family = AF_INET, .sin_addr = to};
    memcpy(&route.rt_dst, &value, sizeof value);
    value.sin_addr = mask;
    memcpy(&route.rt_genmask, &value, sizeof value);
    value.sin_addr = gateway;
    if (flags & RTF_GATEWAY) memcpy(&route.rt_gateway, &value, sizeof value);
    return ioctl(fd, SIOCADDRT, &route) == 0 || errno == EEXIST;
}

/* Another host, or another end of the link, may have its address now. */
static void forget_neighbour(int fd, struct in_addr address) {
    struct arpreq request = {.arp_dev = "eth0"};
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

static bool set_gateway(int fd, const char *text, struct in_addr address, int prefix) {
    struct in_addr gateway, all = {0}, one = {0xffffffff};
    in_addr_t mask = prefix ? htonl(~0u << (MAX_PREFIX - prefix)) : 0;
    if (!*text) return true;
    errno = EINVAL;
    if (inet_pton(AF_INET, text, &gateway) != 1) return false;
    forget_neighbour(fd, gateway);
    bool near = ((gateway.s_addr ^ address.s_addr) & mask) == 0;
    return (near || add_route(fd, gateway, one, all, RTF_HOST)) && add_route(fd, all, all, gateway, RTF_GATEWAY);
}

/* A machine that was paused comes back as itself, and its connections are left alone. */
static bool has_address(int fd, struct in_addr address) {
    struct ifreq own = {.ifr_name = "eth0"};
    struct sockaddr_in value;
    if (ioctl(fd, SIOCGIFADDR, &own) < 0) return false;
    memcpy(&value, &own.ifr_addr, sizeof value);
    return value.sin_addr.s_addr == address.s_addr;
}

static bool set_card(int fd, const struct renewal *renewal) {
    struct in_addr address;
    int prefix;
    unsigned card = if_nametoindex("eth0");
    if (!*renewal->address) return !card || (addresses_remove(card) && set_up(fd, "eth0", false));
    if (!card || !read_address(renewal->address, &address, &prefix) || !set_mac(fd, renewal->mac)) return false;
    if (!has_address(fd, address) && !(addresses_remove(card) && address_add(card, address, prefix))) return false;
    return set_up(fd, "eth0", true) && set_gateway(fd, renewal->gateway, address, prefix);
}

static struct outcome set_all(const struct renewal *renewal) {
    struct outcome outcome = {0};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    outcome.lo = fd >= 0 && set_up(fd, "lo", true);
    if (!outcome.lo || !set_card(fd, renewal)) outcome.error = errno ? errno : EIO;
    return outcome;
}

/* Reaped with the orphans. False: not in time, or not at all. */
static bool ask_child(const struct renewal *renewal, struct outcome *outcome) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) < 0) return false;
    pid_t child = fork();
    if (child == 0) {
        *outcome = set_all(renewal);
        _exit(write(ends[1], outcome, sizeof *outcome) == (ssize_t)sizeof *outcome ? 0 : 1);
    }
    int error = errno;
    close(ends[1]);
    struct pollfd said = {.fd = ends[0], .events = POLLIN};
    bool heard = child > 0 && poll(&said, 1, MAX_TIME_MS) == 1 && read(ends[0], outcome, sizeof *outcome) == sizeof *outcome;
    close(ends[0]);
    if (!heard && child > 0) kill(child, SIGKILL);
    errno = child < 0 ? error : ETIMEDOUT;
    return heard;
}

bool network_set(const struct renewal *renewal, struct problem *problem) {
    struct outcome outcome = {0};
    if (!ask_child(renewal, &outcome)) return problem_set(problem, "the network");
    errno = outcome.error;
    if (!outcome.error) return true;
    return problem_set(problem, "%s %.40s", outcome.lo ? "eth0" : "lo", outcome.lo ? renewal->address : "");
}
