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
    FRAME_SESSION_END = 40, FRAME_SHUTDOWN, FRAME_SETUP, FRAME_RENEW, FRAME_USAGE,
    FRAME_ERROR = 50,
};

enum tag {
    TAG_VERSION = 1, TAG_AGENT, TAG_BOOT_ID, TAG_CAPS, TAG_FLAGS, TAG_PID, TAG_SCRIPT, TAG_ARGV, TAG_ENV, TAG_CWD, TAG_USER, TAG_ROWS, TAG_COLS,
    TAG_TIMEOUT_MS, TAG_GRACE_MS, TAG_SESSION, TAG_EXIT_CODE, TAG_SIGNAL, TAG_REASON, TAG_STDOUT_TOTAL, TAG_STDERR_TOTAL,
    TAG_DURATION_NS, TAG_UTIME_US, TAG_STIME_US, TAG_MAXRSS_KB, TAG_STDOUT_BASE, TAG_STDERR_BASE,
    TAG_OP = 30, TAG_PATH, TAG_TARGET, TAG_MODE, TAG_OFFSET, TAG_LENGTH, TAG_SIZE, TAG_MTIME_NS, TAG_UID, TAG_GID, TAG_KIND, TAG_LINK, TAG_NAME,
    TAG_COUNT, TAG_HOST, TAG_PORT, TAG_EVENT, TAG_XATTR, TAG_DEVICE, TAG_HARD_LINK,
    TAG_CODE = 50, TAG_ERRNO, TAG_MESSAGE,
    TAG_LAYER = 60, TAG_WRITABLE, TAG_DISK, TAG_PIDS_LIMIT, TAG_CLOCK_NS, TAG_ENTROPY, TAG_HOST_NAME, TAG_MACHINE_ID, TAG_GENERATION, TAG_MAC,
    TAG_ADDRESS, TAG_GATEWAY, TAG_RESOLVER, TAG_OOM_KILLS, TAG_PIDS_DENIED, TAG_MEMORY, TAG_CPU_US,
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
