/* lo is up; eth0 has the one IPv4 address it was given, and a way out, or is down. */
#include <arpa/inet.h>
#include <errno.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <net/route.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "machine.h"

enum { MAX_PREFIX = 32 };

static bool set_up(int fd, const char *name, bool up) {
    struct ifreq request = {0};
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    if (ioctl(fd, SIOCGIFFLAGS, &request) < 0) return false;
    request.ifr_flags = (short)(up ? request.ifr_flags | IFF_UP : request.ifr_flags & ~IFF_UP);
    return ioctl(fd, SIOCSIFFLAGS, &request) == 0;
}

static bool set_mac(int fd, const char *mac) {
    struct ifreq request = {.ifr_name = "eth0"};
    unsigned char *at = (unsigned char *)request.ifr_hwaddr.sa_data;
    request.ifr_hwaddr.sa_family = ARPHRD_ETHER;
    if (!*mac) return true;
    errno = EINVAL;
    return sscanf(mac, "%hhx:%hhx:%hhx:%hhx:%hhx:%hhx", at, at + 1, at + 2, at + 3, at + 4, at + 5) == 6 &&
           ioctl(fd, SIOCSIFHWADDR, &request) == 0;
}

static bool set_address(int fd, unsigned long what, struct in_addr address) {
    struct ifreq request = {.ifr_name = "eth0"};
    struct sockaddr_in value = {.sin_family = AF_INET, .sin_addr = address};
    memcpy(&request.ifr_addr, &value, sizeof value);
    return ioctl(fd, (int)what, &request) == 0;
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

static bool read_address(const char *text, struct in_addr *address, struct in_addr *mask) {
    char copy[32];
    snprintf(copy, sizeof copy, "%s", text);
    char *slash = strchr(copy, '/');
    long prefix = slash ? strtol(slash + 1, NULL, 10) : MAX_PREFIX;
    if (slash) *slash = '\0';
    errno = EINVAL;
    mask->s_addr = prefix ? htonl(~0u << (MAX_PREFIX - prefix)) : 0;
    return prefix >= 0 && prefix <= MAX_PREFIX && inet_pton(AF_INET, copy, address) == 1;
}

static bool set_gateway(int fd, const char *text, struct in_addr address, struct in_addr mask) {
    struct in_addr gateway, all = {0}, one = {0xffffffff};
    if (!*text) return true;
    errno = EINVAL;
    if (inet_pton(AF_INET, text, &gateway) != 1) return false;
    bool near = ((gateway.s_addr ^ address.s_addr) & mask.s_addr) == 0;
    return (near || add_route(fd, gateway, one, all, RTF_HOST)) && add_route(fd, all, all, gateway, RTF_GATEWAY);
}

/* Is eth0 as it is wanted? A machine that was paused comes back as itself, and its connections are left alone. */
static bool is_set(int fd, const struct renewal *renewal) {
    struct ifreq flags = {.ifr_name = "eth0"}, hardware = {.ifr_name = "eth0"}, own = {.ifr_name = "eth0"};
    struct in_addr address, mask;
    unsigned char mac[6];
    if (!*renewal->address || !read_address(renewal->address, &address, &mask)) return false;
    if (ioctl(fd, SIOCGIFFLAGS, &flags) < 0 || !(flags.ifr_flags & IFF_UP) || ioctl(fd, SIOCGIFADDR, &own) < 0) return false;
    struct sockaddr_in value;
    memcpy(&value, &own.ifr_addr, sizeof value);
    if (value.sin_addr.s_addr != address.s_addr) return false;
    if (!*renewal->mac) return true;
    return ioctl(fd, SIOCGIFHWADDR, &hardware) == 0 &&
           sscanf(renewal->mac, "%hhx:%hhx:%hhx:%hhx:%hhx:%hhx", mac, mac + 1, mac + 2, mac + 3, mac + 4, mac + 5) == 6 &&
           memcmp(mac, hardware.ifr_hwaddr.sa_data, sizeof mac) == 0;
}

/* Down first: that takes old routes along, and a card changes its MAC only then. */
static bool set_card(int fd, const struct renewal *renewal) {
    struct in_addr address, mask;
    if (is_set(fd, renewal)) return true;
    if (!set_up(fd, "eth0", false)) return !*renewal->address;
    if (!set_mac(fd, renewal->mac)) return false;
    if (!*renewal->address) {
        set_address(fd, SIOCSIFADDR, (struct in_addr){0}); /* there may have been none */
        return true;
    }
    return read_address(renewal->address, &address, &mask) && set_address(fd, SIOCSIFADDR, address) &&
           set_address(fd, SIOCSIFNETMASK, mask) && set_up(fd, "eth0", true) &&
           set_gateway(fd, renewal->gateway, address, mask);
}

bool network_set(const struct renewal *renewal, struct problem *problem) {
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return problem_set(problem, "the network");
    bool lo = set_up(fd, "lo", true);
    bool card = lo && set_card(fd, renewal);
    int error = errno;
    close(fd);
    errno = error;
    return card || problem_set(problem, "%s %.40s", lo ? "eth0" : "lo", lo ? renewal->address : "");
}
