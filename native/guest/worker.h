/*
 * Workers: one forked process per file operation, with the user's ids and a socket to the agent.
 *
 * A worker sees the sandbox's file system exactly as the user's own programs would. Whatever stalls there (a slow
 * disk, a FIFO, a full file system) stalls the worker. It ends by worker_done() or worker_fail().
 */
#ifndef OPENDSEC_WORKER_H
#define OPENDSEC_WORKER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

#include "wire.h"

enum { WORKER_PIECE = 64 * 1024, WORKER_LAST = 0x80 /* in a message's type: nothing follows */, WORKER_ROOT = 4 /* machine_root, for those who need it */ };

struct request {
    char *op, *path, *target, *user;
    uint64_t flags, mode, offset, length;
    bool has_mode, has_length;
};

/* In the agent: forks a worker for an FS frame. False: malformed. */
bool worker_begin(uint32_t id, char *payload, size_t length);

/* In the worker: */

/* ERROR `file` with errno and the path, and the end. */
_Noreturn void worker_fail(const char *path);
_Noreturn void worker_fail_with(int error, const char *path);
/* OK as the last frame (an answer without a stream), or END after a stream. */
_Noreturn void worker_done(const struct writer *answer);
_Noreturn void worker_end(void);
/* OK before a stream. */
void worker_answer(const struct writer *answer);
/* Appends to the DATA stream; sent in pieces. worker_flush() sends what is gathered. */
void worker_put(const void *bytes, size_t length);
void worker_flush(void);
/* The next piece of the host's stream: false at END. Ends the worker by `abandon` when the agent is gone or cancels. */
bool worker_take(char **bytes, size_t *length, void (*abandon)(void));
/* Called before a worker ends because nobody takes its answers any more; NULL: nothing to undo. */
extern void (*worker_leaving)(void);
/* Waits for `fd` to be readable; the worker ends when the agent lets it go. */
void worker_wait(int fd);

/* KIND, MODE, SIZE, MTIME_NS, UID, GID. */
void write_stat(struct writer *writer, const struct stat *info);
/* The same and LINK, as the last answer. */
_Noreturn void worker_done_stat(int dir, const char *name, const struct stat *info);
/* Makes the directory and its missing parents; false with errno. */
bool make_parents(char *path, mode_t mode);

/* The operations. None returns. */
_Noreturn void file_stat(struct request *request);
_Noreturn void file_list(struct request *request);
_Noreturn void file_mkdir(struct request *request);
_Noreturn void file_move(struct request *request);
_Noreturn void file_remove(struct request *request);
_Noreturn void file_chmod(struct request *request);
_Noreturn void file_read(struct request *request);
_Noreturn void file_write(struct request *request);
_Noreturn void file_watch(struct request *request);
_Noreturn void file_pack(struct request *request);
_Noreturn void file_unpack(struct request *request);
_Noreturn void file_freeze(struct request *request);
_Noreturn void file_upper(struct request *request);

#endif
