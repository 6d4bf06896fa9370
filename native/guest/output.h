/*
 * One output stream of a command: a window of at most 256 KiB that the host has not acknowledged.
 *
 * Offsets count from the first byte the command ever wrote: base <= sent <= total, total - base <= WINDOW.
 * The ring exists only while it holds something.
 */
#ifndef OPENDSEC_OUTPUT_H
#define OPENDSEC_OUTPUT_H

#include <stdbool.h>
#include <stdint.h>

#include "loop.h"

struct output {
    struct source source; /* the pipe's (or terminal's) read side */
    char *ring;
    uint64_t base, sent, total;
    uint64_t drain; /* when `ending`: bytes of the pipe that still belong to the command */
    bool ending, grown;
    uint8_t number; /* 1 stdout or terminal, 2 stderr */
};

/* Reads what fits. True when something changed (bytes came, or the stream is done). */
bool output_fill(struct output *output);
/*
 * The foreground process is gone: only what is in the pipe now still counts. A terminal's last bytes may be on their way
 * through the kernel still, but its hang-up comes after them: all counts until then.
 */
void output_end(struct output *output, bool is_terminal);
/* Takes what is left as not belonging; false while the window is full, since then there may be more. */
bool output_give_up(struct output *output);
/* All that belongs to the command has been read. */
bool output_done(const struct output *output);
/* Sends one OUT frame if there is something unsent; true when there is more. */
bool output_send(struct output *output, uint32_t id);
/* False: the host says it has bytes that were never sent. */
bool output_ack(struct output *output, uint64_t offset);
/* Again from `offset`. False: the bytes below base are gone. */
bool output_rewind(struct output *output, uint64_t offset);
/* Lets the descriptor go: a pipe that someone may still write to is read and discarded until its end, a terminal hangs up. */
void output_retire(struct output *output, bool is_terminal);
/* The same, and frees what was not sent. */
void output_close(struct output *output, bool is_terminal);
/* Frees the spare ring. */
void output_trim(void);

/* Reads a pipe to its end and throws the bytes away, so that writers never block or get SIGPIPE. Takes the descriptor over. */
void discard_rest(int fd);
/* Throws away what is there now; true at the end of the pipe. */
bool discard_some(int fd);

#endif
