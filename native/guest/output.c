/* See output.h. */
#include "output.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include "conn.h"
#include "wire.h"

enum { MAX_FRAME = 128 * 1024, PIPE_BYTES = 256 * 1024, GROW_AT = 48 * 1024 };

struct discarder {
    struct garbage garbage;
    struct source source;
};

static char *spare; /* the last freed ring: a fast stream empties its window all the time */

static void ring_free(struct output *output) {
    if (!spare) spare = output->ring;
    else free(output->ring);
    output->ring = NULL;
}

static bool ring_make(struct output *output) {
    if (output->ring) return true;
    output->ring = spare ? spare : malloc(WINDOW);
    spare = NULL;
    return output->ring != NULL;
}

void output_trim(void) {
    free(spare);
    spare = NULL;
}

/* The pieces of the ring for `length` bytes from `offset`. */
static int ring_pieces(const struct output *output, uint64_t offset, size_t length, struct iovec pieces[2]) {
    size_t start = (size_t)(offset % WINDOW), first = WINDOW - start;
    if (first > length) first = length;
    pieces[0] = (struct iovec){output->ring + start, first};
    pieces[1] = (struct iovec){output->ring, length - first};
    return length > first ? 2 : 1;
}

static void output_want(struct output *output) {
    bool wanted = output->total - output->base < WINDOW && !(output->ending && output->drain == 0);
    source_want(&output->source, wanted ? EPOLLIN : 0);
}

bool output_done(const struct output *output) {
    return output->source.fd < 0 || (output->ending && output->drain == 0);
}

bool output_fill(struct output *output) {
    size_t room = WINDOW - (size_t)(output->total - output->base);
    if (output->ending && output->drain < room) room = (size_t)output->drain;
    if (output->source.fd < 0 || room == 0 || !ring_make(output)) {
        /* Without memory for a window: wait for an acknowledgement or the next round. */
        if (output->source.fd >= 0 && room == 0) output_want(output);
        return false;
    }
    struct iovec pieces[2];
    ssize_t count = readv(output->source.fd, pieces, ring_pieces(output, output->total, room, pieces));
    if (count > 0) {
        output->total += (uint64_t)count;
        if (output->ending) output->drain -= (uint64_t)count;
        if (!output->grown && count >= GROW_AT) {
            output->grown = true;
            fcntl(output->source.fd, F_SETPIPE_SZ, PIPE_BYTES); /* refused beyond the user's share: then it stays */
        }
    } else if (count == 0 || (errno != EAGAIN && errno != EINTR)) {
        source_close(&output->source); /* a terminal ends with EIO */
    } else {
        if (output->total == output->base) ring_free(output);
        return false;
    }
    if (output->total == output->base) ring_free(output);
    output_want(output);
    return true;
}

void output_end(struct output *output, bool is_terminal) {
    int left = 0;
    if (output->source.fd >= 0 && ioctl(output->source.fd, FIONREAD, &left) < 0) left = 0;
    output->ending = true;
    output->drain = is_terminal ? UINT64_MAX : (uint64_t)left;
    output_want(output);
}

bool output_give_up(struct output *output) {
    if (output->total - output->base == WINDOW) return false;
    output->drain = 0;
    output_want(output);
    return true;
}

bool output_send(struct output *output, uint32_t id) {
    uint64_t left = output->total - output->sent;
    if (left == 0) return false;
    size_t length = left < MAX_FRAME ? (size_t)left : MAX_FRAME;
    char offset[8];
    put_u64(offset, output->sent);
    struct iovec pieces[3] = {{offset, 8}};
    int count = ring_pieces(output, output->sent, length, pieces + 1);
    frame_send_pieces(FRAME_OUT, id, output->number, pieces, count + 1);
    output->sent += length;
    return output->sent < output->total;
}

bool output_ack(struct output *output, uint64_t offset) {
    if (offset > output->sent) return false;
    if (offset <= output->base) return true;
    output->base = offset;
    if (output->base == output->total && output->ring) ring_free(output);
    output_want(output);
    return true;
}

bool output_rewind(struct output *output, uint64_t offset) {
    if (offset < output->base || offset > output->total) return false;
    output->sent = offset;
    return true;
}

void output_retire(struct output *output, bool is_terminal) {
    if (output->source.fd < 0) return;
    if (is_terminal) source_close(&output->source);
    else discard_rest(source_release(&output->source));
}

void output_close(struct output *output, bool is_terminal) {
    if (output->ring) ring_free(output);
    output_retire(output, is_terminal);
}

bool discard_some(int fd) {
    ssize_t count = splice(fd, NULL, 0, NULL, PIPE_BYTES, SPLICE_F_NONBLOCK); /* 0 is /dev/null */
    return count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR);
}

static void discard_ready(struct source *source, uint32_t events) {
    (void)events;
    if (!discard_some(source->fd)) return;
    struct discarder *discarder = HOLDER(source, struct discarder, source);
    source_close(source);
    loop_free(&discarder->garbage);
}

void discard_rest(int fd) {
    struct discarder *discarder = malloc(sizeof *discarder);
    if (discarder && source_add(&discarder->source, fd, EPOLLIN, discard_ready)) return;
    free(discarder);
    close(fd); /* no memory at all: the writers find out */
}
