/* See conn.h. Frames in: parsed in place in one growing buffer. Frames out: small ones gather until the round ends. */
#include "conn.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "dispatch.h"
#include "loop.h"
#include "serial.h"
#include "wire.h"

enum {
    READ_STEP = 144 * 1024, /* above malloc's mmap threshold, so that it is given back */
    FIRST_ROOM = 2048,
    GATHER = 16 * 1024,
    OUT_LIMIT = 256 * 1024, /* un-sent answers: beyond this nothing more is read */
    PUMP_LIMIT = 32,
    HELLO_MS = 10000,
    MAX_WAITING = 8,
    RELISTEN_MS = 100,
    REST_MS = 5,
    MAX_RESTS = 400,
};

struct conn {
    struct garbage garbage;
    struct conn *next;
    struct source source;
    struct timer timer; /* until HELLO; on a serial port also: a frame that does not go on */
    bool greeted, serial, hunting, dead, blocked, has_sent, resting;
    unsigned rests;
    char *in, *out;
    size_t in_used, in_room, out_start, out_end, out_room;
};

static struct conn *conns, *live;
static struct sender senders = {&senders, &senders, NULL};
static struct source listener = {.fd = -1};
static struct timer listen_timer;
static bool listening_on_vsock;

/*
 * The one connection of a serial port, and where its frames go while they are few: memory a machine has when it is saved.
 * What it would ask for anew after each restore costs the kernel's ways to a page, which an emulated processor translates
 * first.
 */
static struct conn port;
static char first_in[FIRST_ROOM + 1], first_out[FIRST_ROOM];

bool conn_is_live(void) { return live != NULL; }

void sender_wake(struct sender *sender) {
    if (sender->next) return;
    sender->prev = senders.prev;
    sender->next = &senders;
    senders.prev->next = sender;
    senders.prev = sender;
}

void sender_stop(struct sender *sender) {
    if (!sender->next) return;
    sender->prev->next = sender->next;
    sender->next->prev = sender->prev;
    sender->next = sender->prev = NULL;
}

/* A buffer as it was at first; `first`: what it has without asking for memory. */
static void buffer_reset(const struct conn *conn, char **bytes, size_t *room, char *first) {
    if (*bytes != first) free(*bytes);
    *bytes = conn->serial ? first : NULL;
    *room = conn->serial ? FIRST_ROOM : 0;
}

static char *buffer_grow(char *bytes, char *first, size_t room) {
    if (bytes != first) return realloc(bytes, room);
    char *grown = malloc(room);
    if (grown) memcpy(grown, first, FIRST_ROOM);
    return grown;
}

static bool out_append(struct conn *conn, const char *bytes, size_t length) {
    if (conn->out_start == conn->out_end) conn->out_start = conn->out_end = 0;
    if (conn->out_room - conn->out_end < length && conn->out_start) { /* a host that is always a little behind never empties it */
        memmove(conn->out, conn->out + conn->out_start, conn->out_end - conn->out_start);
        conn->out_end -= conn->out_start;
        conn->out_start = 0;
    }
    if (conn->out_room - conn->out_end < length) {
        size_t room = conn->out_end + length + GATHER;
        char *grown = buffer_grow(conn->out, first_out, room);
        if (!grown) return false;
        conn->out = grown;
        conn->out_room = room;
    }
    memcpy(conn->out + conn->out_end, bytes, length);
    conn->out_end += length;
    return true;
}

/* Writes what is gathered and then the pieces; returns how much of the pieces was taken. */
static size_t out_flush(struct conn *conn, struct iovec *pieces, int count) {
    struct iovec all[8] = {{NULL, conn->out_end - conn->out_start}};
    if (all[0].iov_len) all[0].iov_base = conn->out + conn->out_start;
    if (count) memcpy(all + 1, pieces, (size_t)count * sizeof *pieces);
    ssize_t sent = writev(conn->source.fd, all, count + 1);
    if (sent < 0) {
        if (errno == EAGAIN || errno == ENOBUFS) conn->blocked = true;
        else if (errno != EINTR) conn->dead = true;
        return 0;
    }
    size_t wanted = 0;
    for (int i = 0; i <= count; i++) wanted += all[i].iov_len;
    conn->has_sent = true;
    if ((size_t)sent < wanted) conn->blocked = true; /* full now: asking would cost a call and gather another frame */
    size_t gathered = (size_t)sent < all[0].iov_len ? (size_t)sent : all[0].iov_len;
    conn->out_start += gathered;
    return (size_t)sent - gathered;
}

static void conn_send(struct conn *conn, struct iovec *pieces, int count, size_t total) {
    size_t taken = 0;
    if (conn->dead) return;
    if (!conn->blocked && conn->out_end - conn->out_start + total > GATHER) taken = out_flush(conn, pieces, count);
    for (int i = 0; i < count && !conn->dead; i++) {
        size_t skip = taken < pieces[i].iov_len ? taken : pieces[i].iov_len;
        taken -= skip;
        if (skip == pieces[i].iov_len) continue; /* also the empty ones */
        /* Without memory for a frame the connection is given up: the next one asks again. */
        if (!out_append(conn, (char *)pieces[i].iov_base + skip, pieces[i].iov_len - skip)) conn->dead = true;
    }
}

static void conn_frame(struct conn *conn, const struct header *header, struct iovec *pieces, int count) {
    unsigned char head[HEADER_BYTES];
    struct iovec all[7] = {{head, sizeof head}};
    header_write(head, header);
    memcpy(all + 1, pieces, (size_t)count * sizeof *pieces);
    conn_send(conn, all, count + 1, HEADER_BYTES + header->length);
}

void frame_send_pieces(uint8_t type, uint32_t id, uint8_t flags, struct iovec *pieces, int count) {
    struct header header = {.id = id, .type = type, .flags = flags};
    for (int i = 0; i < count; i++) header.length += (uint32_t)pieces[i].iov_len;
    if (live) conn_frame(live, &header, pieces, count);
}

void frame_send(uint8_t type, uint32_t id, uint8_t flags, const void *payload, size_t length) {
    struct iovec piece = {(void *)(uintptr_t)payload, length};
    frame_send_pieces(type, id, flags, &piece, 1);
}

static size_t error_write(char *bytes, size_t room, const char *code, int error, const char *message) {
    struct writer writer = {bytes, 0, room, false};
    write_text(&writer, TAG_CODE, code);
    write_u64(&writer, TAG_ERRNO, (uint64_t)error);
    write_text(&writer, TAG_MESSAGE, message);
    return writer.length;
}

void error_send(uint32_t id, const char *code, int error, const char *format, ...) {
    char message[512], payload[640];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    frame_send(FRAME_ERROR, id, 0, payload, error_write(payload, sizeof payload, code, error, message));
}

/* A connection that is not live (yet) is told why it ends. */
static void conn_refuse(struct conn *conn, const char *code, const char *message) {
    char payload[256];
    struct header header = {.type = FRAME_ERROR};
    header.length = (uint32_t)error_write(payload, sizeof payload, code, 0, message);
    struct iovec piece = {payload, header.length};
    conn_frame(conn, &header, &piece, 1);
    if (!conn->dead) out_flush(conn, NULL, 0);
    conn->dead = true;
}

static void conn_unlive(struct conn *conn) {
    if (live != conn) return;
    live = NULL;
    while (senders.next != &senders) sender_stop(senders.next);
    dispatch_detach();
}

static void conn_close(struct conn *conn) {
    struct conn **at = &conns;
    while (*at != conn) at = &(*at)->next;
    *at = conn->next;
    conn_unlive(conn);
    timer_stop(&conn->timer);
    if (conn->serial) serial_closed(source_release(&conn->source));
    else source_close(&conn->source);
    buffer_reset(conn, &conn->in, &conn->in_room, first_in);
    buffer_reset(conn, &conn->out, &conn->out_room, first_out);
    if (!conn->serial) loop_free(&conn->garbage);
}

static void conn_late(struct timer *timer) { HOLDER(timer, struct conn, timer)->dead = true; }

static void conn_greet(struct conn *conn, char *payload, size_t length) {
    struct cursor cursor = {payload, payload + length, false};
    struct field field;
    uint64_t version = 0;
    while (field_next(&cursor, &field))
        if (field.tag == TAG_VERSION && !field_u64(&cursor, &field, &version)) break;
    if (cursor.bad) return conn_refuse(conn, "protocol", "HELLO is not made of fields");
    if (version != PROTOCOL_VERSION) return conn_refuse(conn, "version", "this guest agent speaks version 1 only");
    for (struct conn *other = conns; other; other = other->next) {
        if (other != conn && other->greeted) other->dead = true;
    }
    if (live) conn_unlive(live);
    if (conn->serial) { /* an old host may have gone unnoticed: what was for it is not for this one */
        conn->out_start = conn->out_end = 0;
        conn->has_sent = false;
        conn->rests = 0;
    }
    conn->greeted = true;
    timer_stop(&conn->timer);
    live = conn;
    dispatch_hello();
}

static void conn_handle(struct conn *conn, const struct header *header, char *payload) {
    if (header->type == FRAME_HELLO && header->id == 0) return conn_greet(conn, payload, header->length);
    if (!conn->greeted) return conn_refuse(conn, "protocol", "the first frame must be HELLO");
    char after = payload[header->length]; /* one spare byte lets strings be terminated in place */
    if (!dispatch(header, payload)) conn_refuse(conn, "protocol", "a frame is malformed");
    payload[header->length] = after;
}

static size_t out_waiting(const struct conn *conn) { return conn->out_end - conn->out_start; }

static bool conn_reserve(struct conn *conn, size_t room) {
    if (conn->in_room >= room) return true;
    char *grown = buffer_grow(conn->in, first_in, room + 1);
    if (!grown) {
        conn->dead = true;
        return false;
    }
    conn->in = grown;
    conn->in_room = room;
    return true;
}

static void conn_parse(struct conn *conn) {
    size_t at = 0;
    while (!conn->dead && out_waiting(conn) < OUT_LIMIT) {
        if (conn->hunting) {
            at += serial_hunt(conn->in + at, conn->in_used - at);
            conn->hunting = conn->in_used - at < HEADER_BYTES;
        }
        if (conn->in_used - at < HEADER_BYTES) break;
        struct header header;
        if (!header_parse((unsigned char *)conn->in + at, MAX_TO_GUEST, &header)) {
            conn_refuse(conn, "protocol", "these are not frames");
            break;
        }
        if (conn->in_used - at - HEADER_BYTES < header.length) {
            if (at) memmove(conn->in, conn->in + at, conn->in_used - at);
            conn->in_used -= at;
            conn_reserve(conn, HEADER_BYTES + (size_t)header.length);
            return;
        }
        conn_handle(conn, &header, conn->in + at + HEADER_BYTES);
        at += HEADER_BYTES + header.length;
    }
    if (at) memmove(conn->in, conn->in + at, conn->in_used - at);
    conn->in_used -= at;
}

static void conn_rested(struct timer *timer) {
    struct conn *conn = HOLDER(timer, struct conn, timer);
    conn->resting = conn->blocked = false;
}

/*
 * virtio-serial brings a host's first bytes on one queue and the news that it has come on another, maybe later: till then a port that
 * has brought a HELLO still says that nobody is there, and takes no answer.
 */
static bool conn_rest(struct conn *conn) {
    if (!conn->serial || !conn->greeted || conn->has_sent || conn->rests++ >= MAX_RESTS) return false;
    conn->resting = true;
    timer_set(&conn->timer, REST_MS, conn_rested);
    return true;
}

static void conn_ready(struct source *source, uint32_t events) {
    struct conn *conn = HOLDER(source, struct conn, source);
    if (events & EPOLLOUT) conn->blocked = false;
    if (conn->dead || !(events & ~(uint32_t)EPOLLOUT)) return;
    if (conn->in_used == conn->in_room && !conn_reserve(conn, conn->in_room + READ_STEP)) return;
    ssize_t count = read(source->fd, conn->in + conn->in_used, conn->in_room - conn->in_used);
    if (count <= 0) {
        if (count == 0 && conn_rest(conn)) return;
        if (count == 0 || (errno != EAGAIN && errno != EINTR)) conn->dead = true;
        return;
    }
    conn->in_used += (size_t)count;
    if (conn->in == first_in && conn->in_used == FIRST_ROOM && !conn_reserve(conn, READ_STEP)) return;
    conn_parse(conn);
    if (!conn->serial || !conn->greeted) return;
    if (conn->in_used) timer_set(&conn->timer, SERIAL_STUCK_MS, conn_late);
    else timer_stop(&conn->timer);
}

static bool conn_open(int fd, bool serial) {
    struct conn *conn = serial ? &port : calloc(1, sizeof *conn);
    if (!conn) return false;
    if (serial) *conn = (struct conn){0};
    if (!source_add(&conn->source, fd, EPOLLIN, conn_ready)) {
        if (!serial) free(conn);
        return false;
    }
    conn->serial = conn->hunting = serial;
    buffer_reset(conn, &conn->in, &conn->in_room, first_in);
    buffer_reset(conn, &conn->out, &conn->out_room, first_out);
    if (serial) first_in[0] = first_out[0] = 0; /* ours to write again, if a child has had them too */
    conn->next = conns;
    conns = conn;
    if (!serial) timer_set(&conn->timer, HELLO_MS, conn_late);
    return true;
}

static void listen_again(struct timer *timer) {
    (void)timer;
    source_want(&listener, EPOLLIN);
}

static void conn_accept(struct source *source, uint32_t events) {
    (void)events;
    struct sockaddr_storage peer;
    socklen_t length = sizeof peer;
    int fd = accept4(source->fd, (struct sockaddr *)&peer, &length, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
        bool is_passing = errno == EAGAIN || errno == EINTR || errno == ECONNABORTED;
        if (is_passing) return;
        source_want(source, 0); /* out of files or memory, or the loop would do nothing else */
        return timer_set(&listen_timer, RELISTEN_MS, listen_again);
    }
    int waiting = 0;
    struct conn *oldest = NULL;
    for (struct conn *conn = conns; conn; conn = conn->next) {
        if (conn->greeted || conn->dead) continue;
        waiting++;
        oldest = conn;
    }
    if (waiting >= MAX_WAITING) oldest->dead = true; /* who does not greet makes room for who may */
    if ((listening_on_vsock && !serial_is_host(&peer)) || !conn_open(fd, false)) close(fd);
}

void conn_listen(int fd, bool vsock) {
    listening_on_vsock = vsock;
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    if (!source_add(&listener, fd, EPOLLIN, conn_accept)) _exit(72);
}

bool conn_serial(int fd) { return conn_open(fd, true); }

static void conn_update(struct conn *conn) {
    if (conn->resting && !conn->dead) return source_want(&conn->source, 0);
    if (!conn->dead && !conn->blocked && out_waiting(conn)) out_flush(conn, NULL, 0);
    if (out_waiting(conn) == 0 && conn->in_used >= HEADER_BYTES && !conn->hunting) conn_parse(conn);
    if (conn->dead) return conn_close(conn);
    bool more = out_waiting(conn) || (conn == live && senders.next != &senders);
    source_want(&conn->source, (out_waiting(conn) < OUT_LIMIT ? EPOLLIN : 0u) | (more ? EPOLLOUT : 0u));
}

void conn_settle(void) {
    for (int i = 0; i < PUMP_LIMIT && live && !live->blocked && !live->dead && senders.next != &senders; i++) {
        struct sender *sender = senders.next;
        sender_stop(sender);
        if (sender->send(sender)) sender_wake(sender);
    }
    for (struct conn *conn = conns, *next; conn; conn = next) {
        next = conn->next;
        conn_update(conn);
    }
}

void conn_trim(void) {
    for (struct conn *conn = conns; conn; conn = conn->next) {
        if (!conn->in_used) buffer_reset(conn, &conn->in, &conn->in_room, first_in);
        if (!out_waiting(conn)) {
            buffer_reset(conn, &conn->out, &conn->out_room, first_out);
            conn->out_start = conn->out_end = 0;
        }
    }
}
