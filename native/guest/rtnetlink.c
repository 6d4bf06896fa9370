/* See rtnetlink.h. */
#include "rtnetlink.h"

#include <errno.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MAX_LISTED = 32, MAX_ROUNDS = 64, ROOM = 32768 };

struct listed {
    struct in_addr address;
    int prefix;
};

struct request {
    struct nlmsghdr header;
    struct ifaddrmsg about;
    struct nlattr attribute;
    struct in_addr address;
};

/* One request with its own socket: an answer of an earlier one cannot be taken for its own. -1 with errno. */
static int asked(const void *request, size_t length) {
    struct sockaddr_nl kernel = {.nl_family = AF_NETLINK};
    int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
    if (fd < 0) return -1;
    if (sendto(fd, request, length, 0, (struct sockaddr *)&kernel, sizeof kernel) == (ssize_t)length) return fd;
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

static bool change(unsigned short type, unsigned short flags, unsigned link, const struct listed *what) {
    struct request request = {
        .header = {sizeof request, type, (unsigned short)(NLM_F_REQUEST | NLM_F_ACK | flags), 1, 0},
        .about = {.ifa_family = AF_INET, .ifa_prefixlen = (unsigned char)what->prefix, .ifa_index = link},
        .attribute = {sizeof request.attribute + sizeof request.address, IFA_LOCAL},
        .address = what->address,
    };
    struct {
        struct nlmsghdr header;
        struct nlmsgerr body;
    } answer = {0};
    int fd = asked(&request, sizeof request);
    if (fd < 0) return false;
    ssize_t count = recv(fd, &answer, sizeof answer, 0);
    close(fd);
    if (count < (ssize_t)sizeof answer || answer.header.nlmsg_type != NLMSG_ERROR) answer.body.error = -EIO;
    errno = -answer.body.error;
    return answer.body.error == 0;
}

static bool take(const struct nlmsghdr *message, unsigned link, struct listed *found) {
    const struct ifaddrmsg *about = NLMSG_DATA(message);
    if (message->nlmsg_type != RTM_NEWADDR || about->ifa_index != link) return false;
    found->prefix = about->ifa_prefixlen;
    int left = (int)IFA_PAYLOAD(message);
    for (const struct rtattr *at = IFA_RTA(about); RTA_OK(at, left); at = RTA_NEXT(at, left)) {
        if (at->rta_type != IFA_LOCAL) continue;
        memcpy(&found->address, RTA_DATA(at), sizeof found->address);
        return true;
    }
    return false;
}

/* How many of the link's addresses were written to `found`, or -1 with errno. */
static int list(unsigned link, struct listed found[MAX_LISTED]) {
    static _Alignas(struct nlmsghdr) char bytes[ROOM];
    struct request request = {.header = {NLMSG_LENGTH(sizeof request.about), RTM_GETADDR, NLM_F_REQUEST | NLM_F_DUMP, 1, 0},
                              .about = {.ifa_family = AF_INET}};
    int fd = asked(&request, request.header.nlmsg_len), count = 0;
    if (fd < 0) return -1;
    for (bool more = true; more && count >= 0;) {
        ssize_t length = recv(fd, bytes, sizeof bytes, 0);
        if (length <= 0) count = -1;
        for (struct nlmsghdr *at = (void *)bytes; count >= 0 && more && NLMSG_OK(at, (size_t)length); at = NLMSG_NEXT(at, length)) {
            more = at->nlmsg_type != NLMSG_DONE && count < MAX_LISTED;
            if (at->nlmsg_type == NLMSG_ERROR) count = -1, errno = EIO;
            else if (more && take(at, link, &found[count])) count++;
        }
    }
    int error = errno;
    close(fd);
    errno = error;
    return count;
}

bool addresses_remove(unsigned link) {
    struct listed found[MAX_LISTED];
    for (int round = 0; round < MAX_ROUNDS; round++) {
        int count = list(link, found);
        if (count <= 0) return count == 0;
        for (int i = 0; i < count; i++) /* the first one of a network may have taken others along */
            if (!change(RTM_DELADDR, 0, link, &found[i]) && errno != EADDRNOTAVAIL) return false;
    }
    errno = EBUSY;
    return false;
}

bool address_add(unsigned link, struct in_addr address, int prefix) {
    return change(RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL, link, &(struct listed){address, prefix});
}
