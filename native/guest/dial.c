/*
 * See dial.h. Addresses only: resolving names would need the sandbox's resolver, which could stall or lie to the agent.
 * END of both sides ends the call; a reset is ERROR `file` with ECONNRESET.
 */
#include "dial.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "call.h"
#include "command.h"
#include "spawn.h"
#include "wire.h"

struct target {
    char host[64];
    uint64_t port;
    struct sockaddr_storage address;
    socklen_t length;
};

static bool parse(struct target *target, char *payload, size_t length) {
    struct cursor cursor = {payload, payload + length, false};
    strcpy(target->host, "127.0.0.1");
    target->port = 0;
    for (struct field field; field_next(&cursor, &field);) {
        if (field.tag == TAG_PORT) field_u64(&cursor, &field, &target->port);
        if (field.tag != TAG_HOST || !field.length) continue;
        size_t kept = field.length < sizeof target->host ? field.length : sizeof target->host - 1;
        memcpy(target->host, field.data, kept);
        target->host[kept] = '\0';
    }
    return !cursor.bad && target->port > 0 && target->port < 65536;
}

static bool resolve(struct target *target) {
    struct sockaddr_in *four = (void *)&target->address;
    struct sockaddr_in6 *six = (void *)&target->address;
    const char *host = strcmp(target->host, "localhost") == 0 ? "127.0.0.1" : target->host;
    memset(&target->address, 0, sizeof target->address);
    if (inet_pton(AF_INET, host, &four->sin_addr) == 1) {
        four->sin_family = AF_INET;
        four->sin_port = htons((uint16_t)target->port);
        target->length = sizeof *four;
    } else if (inet_pton(AF_INET6, host, &six->sin6_addr) == 1) {
        six->sin6_family = AF_INET6;
        six->sin6_port = htons((uint16_t)target->port);
        target->length = sizeof *six;
    } else {
        return false;
    }
    return true;
}

bool dial_begin(uint32_t id, char *payload, size_t length) {
    struct target target;
    if (!parse(&target, payload, length)) return false;
    if (!resolve(&target)) {
        error_send(id, "file", EINVAL, "%s: an IPv4 or IPv6 address or localhost is needed", target.host);
        return true;
    }
    int fd = socket(target.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), one = 1;
    if (fd >= 0) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    bool tried = fd >= 0 && spawn_has_room(fd) && (connect(fd, (struct sockaddr *)&target.address, target.length) == 0 || errno == EINPROGRESS);
    struct call *call = tried ? call_new(id, fd) : NULL;
    if (!call) {
        int error = tried ? ENOMEM : errno;
        error_send(id, tried ? "no_memory" : "file", error, "%s port %u: %s", target.host, (unsigned)target.port, strerror(error));
        if (fd >= 0) close(fd);
        return true;
    }
    call->is_dial = call->connecting = true;
    call_wake(call);
    return true;
}

bool dial_connected(struct call *call) {
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(call->source.fd, SOL_SOCKET, SO_ERROR, &error, &length);
    if (error) {
        call_fail(call, "file", error, strerror(error));
        return false;
    }
    call->connecting = false;
    frame_send(FRAME_OK, call->id, 0, NULL, 0);
    return true;
}

bool dial_received(struct call *call, const char *bytes, ssize_t count) {
    if (count < 0) {
        call_fail(call, "file", errno, strerror(errno));
        return false;
    }
    if (count > 0) {
        frame_send(FRAME_DATA, call->id, 0, bytes, (size_t)count);
        call->may_send -= (uint64_t)count;
        return true;
    }
    frame_send(FRAME_END, call->id, 0, NULL, 0);
    call->peer_ended = true;
    call_wake(call);
    return false;
}
