/*
 * One thread, one epoll: descriptors, deadlines and the deferred freeing of objects.
 *
 * An object that owns a source must be given to loop_free(), never to free(): events of the same round may still
 * point at it. Such an object starts with a `struct garbage`.
 */
#ifndef OPENDSEC_LOOP_H
#define OPENDSEC_LOOP_H

#include <stdbool.h>
#include <stdint.h>

struct garbage {
    struct garbage *next;
};

struct source {
    int fd; /* -1: unused */
    uint32_t events;
    bool active; /* known to epoll; a source that is not wanted is taken out, or EPOLLHUP would spin */
    void (*ready)(struct source *source, uint32_t events);
};

struct timer {
    struct timer *next, *prev;
    uint64_t at_ns; /* 0: not set */
    void (*fire)(struct timer *timer);
};

/* The pointer to the object that holds `member`. */
#define HOLDER(pointer, type, member) ((type *)(void *)((char *)(pointer) - offsetof(type, member)))

void loop_init(void);

/* Runs rounds until loop_stop(). `settle` is called after each round, `idle` once after 200 ms without events. */
void loop_run(void (*settle)(void), void (*idle)(void));
void loop_stop(void);
void loop_free(struct garbage *object);

/* Takes a descriptor over. False when epoll has no room (nothing is taken then). */
bool source_add(struct source *source, int fd, uint32_t events, void (*ready)(struct source *, uint32_t));
/* Changes what is waited for; 0 takes it out of epoll. */
void source_want(struct source *source, uint32_t events);
/* Out of epoll, descriptor handed back. */
int source_release(struct source *source);
void source_close(struct source *source);

void timer_set(struct timer *timer, uint64_t delay_ms, void (*fire)(struct timer *));
void timer_stop(struct timer *timer);
uint64_t now_ns(void);

#endif
