/* See loop.h. Timers are a list sorted by deadline: there are few, and most are stopped before they fire. */
#include "loop.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

enum { BATCH = 64, IDLE_MS = 200 };

static int epoll_fd = -1;
static bool stopping;
static bool trimmed; /* nothing has happened since the last idle call */
static struct timer timers = {&timers, &timers, 0, NULL};
static struct garbage *garbage;

uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void loop_init(void) {
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (epoll_fd < 0) _exit(70);
}

void loop_stop(void) { stopping = true; }

void loop_free(struct garbage *object) {
    object->next = garbage;
    garbage = object;
}

static void nothing(struct source *source, uint32_t events) {
    (void)source;
    (void)events;
}

bool source_add(struct source *source, int fd, uint32_t events, void (*ready)(struct source *, uint32_t)) {
    struct epoll_event event = {.events = events, .data.ptr = source};
    if (events && epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0) return false;
    source->fd = fd;
    source->events = events;
    source->active = events != 0;
    source->ready = ready;
    return true;
}

void source_want(struct source *source, uint32_t events) {
    if (source->fd < 0 || events == source->events) return;
    struct epoll_event event = {.events = events, .data.ptr = source};
    int operation = !events ? EPOLL_CTL_DEL : source->active ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
    /* Fails only for lack of memory: then the source stays as it was and the next call tries again. */
    if (epoll_ctl(epoll_fd, operation, source->fd, &event) < 0) return;
    source->events = events;
    source->active = events != 0;
}

int source_release(struct source *source) {
    int fd = source->fd;
    if (fd >= 0 && source->active) epoll_ctl(epoll_fd, EPOLL_CTL_DEL, fd, NULL);
    source->fd = -1;
    source->events = 0;
    source->active = false;
    source->ready = nothing;
    return fd;
}

void source_close(struct source *source) {
    int fd = source_release(source);
    if (fd >= 0) close(fd);
}

void timer_stop(struct timer *timer) {
    if (!timer->at_ns) return;
    timer->prev->next = timer->next;
    timer->next->prev = timer->prev;
    timer->at_ns = 0;
}

void timer_set(struct timer *timer, uint64_t delay_ms, void (*fire)(struct timer *)) {
    timer_stop(timer);
    if (delay_ms > 1000u * 86400 * 3650) delay_ms = 1000ull * 86400 * 3650;
    timer->at_ns = now_ns() + delay_ms * 1000000u;
    timer->fire = fire;
    struct timer *after = timers.prev;
    while (after != &timers && after->at_ns > timer->at_ns) after = after->prev;
    timer->prev = after;
    timer->next = after->next;
    after->next->prev = timer;
    after->next = timer;
}

static void fire_due(void) {
    if (timers.next == &timers) return;
    uint64_t now = now_ns();
    while (timers.next != &timers && timers.next->at_ns <= now) {
        struct timer *timer = timers.next;
        timer_stop(timer);
        timer->fire(timer);
    }
}

static int wait_ms(void) {
    int limit = trimmed ? -1 : IDLE_MS;
    if (timers.next == &timers) return limit;
    uint64_t now = now_ns();
    if (timers.next->at_ns <= now) return 0;
    uint64_t ms = (timers.next->at_ns - now + 999999u) / 1000000u;
    if (ms > 3600000) ms = 3600000;
    return limit >= 0 && (uint64_t)limit < ms ? limit : (int)ms;
}

static void sweep(void) {
    while (garbage) {
        struct garbage *object = garbage;
        garbage = object->next;
        free(object);
    }
}

void loop_run(void (*settle)(void), void (*idle)(void)) {
    struct epoll_event events[BATCH];
    while (!stopping) {
        uint64_t before = now_ns();
        int timeout = wait_ms();
        int count = epoll_wait(epoll_fd, events, BATCH, timeout);
        if (count < 0 && errno != EINTR) _exit(71);
        if (count > 0) trimmed = false;
        if (count == 0 && !trimmed && now_ns() - before >= (IDLE_MS - 1) * 1000000ull) {
            idle();
            trimmed = true;
        }
        for (int i = 0; i < count; i++) {
            struct source *source = events[i].data.ptr;
            source->ready(source, events[i].events);
        }
        fire_due();
        settle();
        sweep();
    }
}
