/* The guest protocol's numbers and the coding of its fields (docs/reference/guest-protocol.md). */
#ifndef OPENDSEC_WIRE_H
#define OPENDSEC_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    PROTOCOL_VERSION = 1,
    HEADER_BYTES = 12,
    FIELD_BYTES = 8,
    MAX_TO_GUEST = 4 * 1024 * 1024,
    MAX_TO_HOST = 256 * 1024,
    WINDOW = 256 * 1024,
};

enum frame_type {
    FRAME_HELLO = 1, FRAME_PING = 2, FRAME_PONG = 3,
    FRAME_START = 10, FRAME_STARTED, FRAME_OUT, FRAME_ACK, FRAME_STDIN, FRAME_STDIN_ACK, FRAME_EXIT, FRAME_ATTACH, FRAME_KILL, FRAME_SIGNAL, FRAME_RESIZE,
    FRAME_RELEASE = 21, FRAME_LIST, FRAME_COMMAND,
    FRAME_FS = 30, FRAME_OK, FRAME_DATA, FRAME_END, FRAME_CREDIT, FRAME_CANCEL, FRAME_DIAL,
    FRAME_SESSION_END = 40, FRAME_SHUTDOWN,
    FRAME_ERROR = 50,
};

enum tag {
    T_VERSION = 1, T_AGENT, T_BOOT_ID, T_CAPS, T_FLAGS, T_PID, T_SCRIPT, T_ARGV, T_ENV, T_CWD, T_USER, T_ROWS, T_COLS,
    T_TIMEOUT_MS, T_GRACE_MS, T_SESSION, T_EXIT_CODE, T_SIGNAL, T_REASON, T_STDOUT_TOTAL, T_STDERR_TOTAL,
    T_DURATION_NS, T_UTIME_US, T_STIME_US, T_MAXRSS_KB, T_STDOUT_BASE, T_STDERR_BASE,
    T_OP = 30, T_PATH, T_TARGET, T_MODE, T_OFFSET, T_LENGTH, T_SIZE, T_MTIME_NS, T_UID, T_GID, T_KIND, T_LINK, T_NAME,
    T_COUNT, T_HOST, T_PORT, T_EVENT,
    T_CODE = 50, T_ERRNO, T_MESSAGE,
};

struct header {
    uint32_t length, id;
    uint8_t type, flags;
};

/* False when the reserved bytes are not zero or the length is beyond `max`. */
bool header_parse(const unsigned char *bytes, uint32_t max, struct header *header);
void header_write(unsigned char *bytes, const struct header *header);

struct field {
    uint16_t tag;
    uint32_t length;
    char *data;
};

/* Reads fields one after the other; `bad` is set when the bytes are not fields. */
struct cursor {
    char *at, *end;
    bool bad;
};

bool field_next(struct cursor *cursor, struct field *field);
/* False (and cursor->bad) unless the field is an 8-byte integer. */
bool field_u64(struct cursor *cursor, const struct field *field, uint64_t *value);

uint64_t get_u64(const char *bytes);
uint32_t get_u32(const char *bytes);
void put_u64(char *bytes, uint64_t value);
void put_u32(char *bytes, uint32_t value);

/* Writes fields into a buffer of the caller's; what does not fit is left out and `full` set. */
struct writer {
    char *bytes;
    size_t length, room;
    bool full;
};

void write_bytes(struct writer *writer, enum tag tag, const void *data, size_t length);
void write_text(struct writer *writer, enum tag tag, const char *text);
void write_u64(struct writer *writer, enum tag tag, uint64_t value);

#endif
