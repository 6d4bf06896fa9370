/* See call.h. */
#include "call.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "dial.h"
#include "worker.h"

enum { GRANT_AT = 64 * 1024, SCRATCH = CALL_PIECE + 1 };

static struct call *calls;
static unsigned call_count;
static char *scratch; /* one message on its way through; freed when idle */

void call_trim(void) {
    free(scratch);
    scratch = NULL;
}

static struct call *call_find(uint32_t id) {
    struct call *call = calls;
    while (call && call->id != id) call = call->next;
    return call;
}

void call_end(struct call *call) {
    struct call **at = &calls;
    while (*at != call) at = &(*at)->next;
    *at = call->next;
    call_count--;
    sender_stop(&call->sender);
    source_close(&call->source);
    if (call->worker.pid && !call->spare_worker) kill(call->worker.pid, SIGKILL);
    child_forget(&call->worker);
    free(call->waiting);
    loop_free(&call->garbage);
}

void call_fail(struct call *call, const char *code, int error, const char *message) {
    error_send(call->id, code, error, "%s", message);
    call_end(call);
}

void call_drop_all(void) {
    while (calls) call_end(calls);
}

/* Passes bytes of the host on; returns how many were taken, -1 when no more will be. */
static ssize_t pass(struct call *call, const char *bytes, size_t length) {
    char type = FRAME_DATA;
    struct iovec pieces[2] = {{&type, 1}, {(void *)(uintptr_t)bytes, length < CALL_PIECE ? length : CALL_PIECE}};
    struct msghdr message = {.msg_iov = call->is_dial ? pieces + 1 : pieces, .msg_iovlen = call->is_dial ? 1 : 2};
    ssize_t count = sendmsg(call->source.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0) return errno == EAGAIN || errno == EINTR || errno == ENOBUFS ? 0 : -1;
    return call->is_dial ? count : count - 1;
}

static void pass_end(struct call *call) {
    char type = FRAME_END;
    if (call->end_passed || call->used || !call->host_ended) return;
    if (call->is_dial) call->end_passed = shutdown(call->source.fd, SHUT_WR) == 0 || errno != EAGAIN;
    else call->end_passed = send(call->source.fd, &type, 1, MSG_NOSIGNAL | MSG_DONTWAIT) == 1 || errno != EAGAIN;
}

static void grant(struct call *call, size_t bytes) {
    char credit[4];
    call->to_grant += bytes;
    if (call->to_grant < GRANT_AT || call->host_ended) return;
    put_u32(credit, (uint32_t)call->to_grant);
    frame_send(FRAME_CREDIT, call->id, 0, credit, sizeof credit);
    call->may_accept += call->to_grant;
    call->to_grant = 0;
}

/* A peer that takes no more: its own last words (an ERROR, a reset) are read by the sender side. */
static void drop_waiting(struct call *call) {
    grant(call, call->used);
    call->used = call->start = 0;
    call->end_passed = true;
}

static void push(struct call *call) {
    while (call->used && !call->connecting) {
        size_t length = WINDOW - call->start < call->used ? WINDOW - call->start : call->used;
        ssize_t count = pass(call, call->waiting + call->start, length);
        if (count < 0) return drop_waiting(call);
        if (count == 0) return;
        call->start = (call->start + (size_t)count) % WINDOW;
        call->used -= (size_t)count;
        grant(call, (size_t)count);
    }
    if (!call->used) {
        free(call->waiting);
        call->waiting = NULL;
        call->start = 0;
    }
    if (!call->connecting) pass_end(call);
}

static bool keep(struct call *call, const char *bytes, size_t length) {
    if (!call->waiting && !(call->waiting = malloc(WINDOW))) return false;
    while (length) {
        size_t at = (call->start + call->used) % WINDOW, piece = WINDOW - at < length ? WINDOW - at : length;
        memcpy(call->waiting + at, bytes, piece);
        call->used += piece;
        bytes += piece;
        length -= piece;
    }
    return true;
}

static bool data_frame(struct call *call, const char *bytes, size_t length) {
    if (length > call->may_accept || call->host_ended) return false;
    call->may_accept -= length;
    if (call->end_passed) return true;
    while (length && !call->used && !call->connecting) {
        ssize_t count = pass(call, bytes, length);
        if (count < 0) {
            drop_waiting(call);
            return true;
        }
        if (count == 0) break;
        bytes += count;
        length -= (size_t)count;
        grant(call, (size_t)count);
    }
    if (length && !keep(call, bytes, length)) call_fail(call, "no_memory", ENOMEM, "no memory for a window");
    else call_wake(call);
    return true;
}

void call_wake(struct call *call) {
    if (call->is_dial && call->host_ended && call->end_passed && call->peer_ended) return call_end(call);
    bool reading = !call->peer_ended && call->may_send >= CALL_PIECE && !call->sender.next && !call->connecting;
    bool writing = call->connecting || call->used || (call->host_ended && !call->end_passed);
    source_want(&call->source, (reading ? EPOLLIN : 0u) | (writing ? EPOLLOUT : 0u));
}

static void call_ready(struct source *source, uint32_t events) {
    struct call *call = HOLDER(source, struct call, source);
    if (call->connecting && !dial_connected(call)) return;
    if (events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) push(call);
    if ((events & ~(uint32_t)EPOLLOUT) && call->may_send >= CALL_PIECE && !call->peer_ended) sender_wake(&call->sender);
    call_wake(call);
}

/* One message of the worker is one frame. True: there may be more. */
static bool worker_message(struct call *call, size_t length) {
    uint8_t type = (uint8_t)scratch[0] & ~WORKER_LAST;
    frame_send(type, call->id, 0, scratch + 1, length - 1);
    if (type == FRAME_DATA) call->may_send -= length - 1;
    bool last = type != (uint8_t)scratch[0] || type == FRAME_END || type == FRAME_ERROR;
    if (!last) return true;
    call->spare_worker = true; /* it is leaving */
    call_end(call);
    return false;
}

static ssize_t receive(struct call *call) {
    ssize_t count = recv(call->source.fd, scratch, call->is_dial ? CALL_PIECE : SCRATCH, MSG_DONTWAIT);
    /* A worker that left without reading everything: its last message comes after the error. */
    if (count < 0 && errno == ECONNRESET && !call->is_dial) count = recv(call->source.fd, scratch, SCRATCH, MSG_DONTWAIT);
    return count;
}

static bool call_send(struct sender *sender) {
    struct call *call = HOLDER(sender, struct call, sender);
    if (call->may_send < CALL_PIECE) {
        call_wake(call);
        return false;
    }
    if (!scratch && !(scratch = malloc(SCRATCH))) return true;
    ssize_t count = receive(call);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) {
        call_wake(call);
        return false;
    }
    if (call->is_dial) return dial_received(call, scratch, count);
    if (count > 0) return worker_message(call, (size_t)count);
    call_fail(call, "file", EIO, "the process that did it was killed");
    return false;
}

struct call *call_new(uint32_t id, int fd) {
    struct call *call = calloc(1, sizeof *call);
    if (!call || !source_add(&call->source, fd, EPOLLIN, call_ready)) {
        free(call);
        return NULL;
    }
    call->id = id;
    call->may_send = call->may_accept = WINDOW;
    call->sender.send = call_send;
    call->next = calls;
    calls = call;
    call_count++;
    return call;
}

static void worker_exited(struct child *child, int status, const struct rusage *usage) {
    (void)child; /* not registered any more: its pid is free; its socket says the rest */
    (void)status;
    (void)usage;
}

void call_has_worker(struct call *call, pid_t pid, bool cleans_up) {
    call->spare_worker = cleans_up;
    child_register(&call->worker, pid, worker_exited);
}

bool call_begin(const struct header *header, char *payload) {
    if (call_find(header->id)) return false;
    if (call_count >= MAX_CALLS) {
        error_send(header->id, "limit", 0, "at most %d file operations and dials at once", MAX_CALLS);
        return true;
    }
    if (header->type == FRAME_DIAL) return dial_begin(header->id, payload, header->length);
    return worker_begin(header->id, payload, header->length);
}

bool call_frame(const struct header *header, char *payload) {
    struct call *call = call_find(header->id);
    if (!call) return true;
    switch (header->type) {
        case FRAME_DATA: return data_frame(call, payload, header->length);
        case FRAME_END:
            call->host_ended = true;
            push(call);
            call_wake(call);
            return true;
        case FRAME_CREDIT:
            if (header->length != 4) return false;
            call->may_send += get_u32(payload);
            call_wake(call);
            return true;
        case FRAME_CANCEL: call_fail(call, "cancelled", 0, "cancelled"); return true;
        default: return false;
    }
}
