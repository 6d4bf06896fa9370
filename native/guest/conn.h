/*
 * Connections to the host: at most one is live, others may be about to take over.
 *
 * Nothing is queued for a slow host beyond small answers: whoever has more to say (a command's output, a file's
 * bytes) is a `sender` and is asked for one frame at a time while the socket takes them.
 */
#ifndef OPENDSEC_CONN_H
#define OPENDSEC_CONN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

struct sender {
    struct sender *next, *prev; /* NULL: not waiting */
    /* Sends one frame by frame_send(); true when there is more to send now. */
    bool (*send)(struct sender *sender);
};

void conn_listen(int fd, bool vsock);
bool conn_serial(int fd); /* false for lack of memory; the caller keeps the descriptor */
void conn_settle(void);
void conn_trim(void);
bool conn_is_live(void);

/* Asks for `sender` to be called when the live connection takes frames. */
void sender_wake(struct sender *sender);
void sender_stop(struct sender *sender);

/* Without a live connection these drop the frame: everything that matters is sent again after ATTACH. */
void frame_send(uint8_t type, uint32_t id, uint8_t flags, const void *payload, size_t length);
void frame_send_pieces(uint8_t type, uint32_t id, uint8_t flags, struct iovec *pieces, int count);
void error_send(uint32_t id, const char *code, int error, const char *format, ...) __attribute__((format(printf, 4, 5)));

#endif
