/*
 * Calls: file operations and dials, numbered by the host, gone with the connection.
 *
 * A call is a pump between the connection and a descriptor: a worker's socket (one message is one frame: a type byte
 * and the payload) or a TCP connection. Both directions are held to the credit of the protocol.
 */
#ifndef OPENDSEC_CALL_H
#define OPENDSEC_CALL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "conn.h"
#include "loop.h"
#include "reap.h"
#include "wire.h"

enum { CALL_PIECE = 64 * 1024, MAX_CALLS = 256 };

struct call {
    struct garbage garbage;
    struct call *next;
    uint32_t id;
    struct source source;
    struct sender sender;
    bool is_dial;
    struct child worker; /* the process, while it lives */
    bool spare_worker;   /* it cleans up by itself when its socket ends: not to be killed */
    bool connecting, host_ended, end_passed, peer_ended;
    uint64_t may_send;   /* the host's credit for us */
    uint64_t may_accept; /* ours for the host */
    uint64_t to_grant;
    char *waiting;       /* from the host, not taken yet */
    size_t start, used;
};

/* FS and DIAL. False: malformed. */
bool call_begin(const struct header *header, char *payload);
/* DATA, END, CREDIT and CANCEL; a call that has ended meanwhile is no error. */
bool call_frame(const struct header *header, char *payload);
void call_drop_all(void);
void call_trim(void);

/* Makes a call that pumps `fd` (taken over). NULL: no memory, nothing taken. */
struct call *call_new(uint32_t id, int fd);
/* The other end of `fd` is this process; `cleans_up`: it is not to be killed. */
void call_has_worker(struct call *call, pid_t pid, bool cleans_up);
void call_end(struct call *call);
/* Ends it with ERROR. */
void call_fail(struct call *call, const char *code, int error, const char *message);
/* Looks again at what can move; a dial that has ended both ways is gone then. */
void call_wake(struct call *call);

#endif
