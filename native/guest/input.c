/* See input.h. */
#include "input.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "wire.h"

static void input_ready(struct source *source, uint32_t events);

bool input_open(struct input *input, int fd, bool is_terminal, void (*progress)(struct input *)) {
    *input = (struct input){.source.fd = -1, .is_terminal = is_terminal, .progress = progress};
    return source_add(&input->source, fd, 0, input_ready);
}

void input_close(struct input *input) {
    free(input->waiting);
    input->waiting = NULL;
    input->used = 0;
    input->closed = true;
    source_close(&input->source);
}

/* Takes what is left of `bytes` into the buffer. */
static bool keep(struct input *input, const char *bytes, size_t length) {
    if (!length) return true;
    if (!input->waiting && !(input->waiting = malloc(WINDOW))) return false;
    for (size_t i = 0; i < length;) {
        size_t at = (input->start + input->used) % WINDOW, room = WINDOW - at;
        if (room > length - i) room = length - i;
        memcpy(input->waiting + at, bytes + i, room);
        input->used += room;
        i += room;
    }
    return true;
}

/* Returns how many bytes the program took; -1 when it will take no more. */
static ssize_t offer(struct input *input, const char *bytes, size_t length) {
    ssize_t count = write(input->source.fd, bytes, length);
    if (count >= 0) return count;
    return errno == EAGAIN || errno == EINTR ? 0 : -1;
}

static bool push_waiting(struct input *input) {
    while (input->used) {
        size_t length = WINDOW - input->start < input->used ? WINDOW - input->start : input->used;
        ssize_t count = offer(input, input->waiting + input->start, length);
        if (count < 0) return false;
        input->start = (input->start + (size_t)count) % WINDOW;
        input->used -= (size_t)count;
        input->taken += (uint64_t)count;
        if ((size_t)count < length) return true;
    }
    free(input->waiting);
    input->waiting = NULL;
    input->start = 0;
    return true;
}

/* After the last byte: closes the pipe, or types the terminal's end-of-file character. */
static void finish(struct input *input) {
    if (input->used || !input->end) return source_want(&input->source, input->used ? EPOLLOUT : 0);
    if (!input->is_terminal) return input_close(input);
    input->end = offer(input, "\004", 1) == 0;
    source_want(&input->source, input->end ? EPOLLOUT : 0);
}

static void input_ready(struct source *source, uint32_t events) {
    (void)events;
    struct input *input = HOLDER(source, struct input, source);
    if (!push_waiting(input)) input_close(input);
    else finish(input);
    input->progress(input);
}

enum input_result input_accept(struct input *input, uint64_t offset, const char *bytes, size_t length, bool end) {
    uint64_t accepted = input->taken + input->used;
    if (input->closed) return INPUT_OK; /* the program is not interested; STDIN_ACK says so */
    if (offset > accepted) return INPUT_GAP;
    uint64_t known = accepted - offset;
    if (known >= length) known = length;
    bytes += known;
    length -= (size_t)known;
    if (length > WINDOW - input->used) return INPUT_OVERFLOW;
    if (length && !input->used) {
        ssize_t count = offer(input, bytes, length);
        if (count < 0) {
            input_close(input);
            return INPUT_OK;
        }
        input->taken += (uint64_t)count;
        bytes += count;
        length -= (size_t)count;
    }
    if (!keep(input, bytes, length)) return INPUT_NO_MEMORY;
    input->end |= end;
    finish(input);
    return INPUT_OK;
}
