/* The guest protocol (docs/reference/guest-protocol.md), as far as this goes: HELLO, PING, START of the commands below,
 * LIST, SETUP, RENEW, SHUTDOWN. Everything else is ERROR `unsupported`.
 *
 *   true | echo TEXT | fill PAGES SEED | check PAGES SEED | read DISK SECTOR | write DISK SECTOR TEXT | serial DISK | spin | reset
 *
 * fill writes a number into each page from 16 MiB on; check says how many pages do not hold it.
 */
#include "tiny.h"

enum { HELLO = 1, PING, PONG, START = 10, STARTED, OUT, ACK, STDIN, EXIT = 16, KILL = 18, RELEASE = 21, LIST, OK = 31, END = 33,
       SHUTDOWN = 41, SETUP, RENEW, ERROR = 50 };
enum { VERSION = 1, AGENT, BOOT_ID, CAPS, FLAGS, PID, SCRIPT, EXIT_CODE = 17, SIGNAL, STDOUT_TOTAL = 20, STDERR_TOTAL, CODE = 50, ERRNO, MESSAGE };
enum { MEMORY = 16 << 20, PAGE = 4096, SECTOR = 512, KEPT = 2048, UNKNOWN = 127 };
struct frame { u32 length, id; u8 type, flags; u16 zero; } PACKED;
struct field { u16 tag, zero; u32 length; } PACKED;

static struct { struct frame frame; u8 payload[KEPT + 1]; } PACKED in; /* longer payloads are taken and not kept */
static u8 out[KEPT * 2];
static u32 in_bytes, out_bytes, text_bytes;
static char text[SECTOR + 1];
static int ready;
static u8 boot_id[16];

void agent_reset(void) { in_bytes = 0; }

static u32 length(const char *string) {
    u32 bytes = 0;
    while (string[bytes]) bytes++;
    return bytes;
}

static void put(const void *data, u32 bytes) {
    copy(out + sizeof(struct frame) + out_bytes, data, bytes);
    out_bytes += bytes;
}

static void put_field(u16 tag, const void *data, u32 bytes) {
    struct field field = {tag, 0, bytes};
    put(&field, sizeof field);
    put(data, bytes);
}

static void put_number(u16 tag, u64 value) { put_field(tag, &value, sizeof value); }
static void put_text(u16 tag, const char *string) { put_field(tag, string, length(string)); }

static void send(u8 type, u32 id, u8 flags) {
    *(struct frame *)out = (struct frame){out_bytes, id, type, flags, 0};
    u32 bytes = (u32)sizeof(struct frame) + out_bytes;
    out_bytes = 0;
    vsock_send(out, bytes);
}

static void on_hello(void) {
    u32 low, high;
    __asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
    if (!boot_id[0]) {
        boot_id[0] = 1;
        copy(boot_id + 1, &low, sizeof low);
        copy(boot_id + 5, &high, sizeof high);
    }
    put_number(VERSION, 1);
    put_text(AGENT, "tiny");
    put_field(BOOT_ID, boot_id, sizeof boot_id);
    put_text(CAPS, "machine");
    if (ready) put_text(CAPS, "ready");
    send(HELLO, 0, 0);
}

static void print_number(u64 value) {
    char digits[20];
    int at = sizeof digits;
    do digits[--at] = (char)('0' + value % 10); while (value /= 10);
    for (; at < (int)sizeof digits; at++) text[text_bytes++] = digits[at];
}

static u64 word(const char **at) {
    while (**at == ' ') (*at)++;
    return number(at);
}

static int use_memory(const char *at, int fill) {
    u64 pages = word(&at), seed = word(&at), wrong = 0;
    for (u64 i = 0; i < pages; i++) {
        volatile u64 *page = (volatile u64 *)(MEMORY + i * PAGE);
        if (fill) *page = seed * 1000003 + i;
        else wrong += *page != seed * 1000003 + i;
    }
    print_number(fill ? pages : wrong);
    return 0;
}

static int use_disk(const char *at, u32 kind, u32 bytes) {
    u64 disk = word(&at), sector = kind == 8 ? 0 : word(&at);
    clear(text, sizeof text);
    if (kind == 1) copy(text, at + 1, length(at + 1) < bytes ? length(at + 1) : bytes);
    int status = disk_transfer(disk, kind, sector, text, bytes);
    text_bytes = status || kind == 1 ? 0 : length(text);
    return status;
}

static int run(const char *script) {
    text_bytes = 0;
    if (starts(script, "true")) return 0;
    if (starts(script, "fill ")) return use_memory(script + 5, 1);
    if (starts(script, "check ")) return use_memory(script + 6, 0);
    if (starts(script, "read ")) return use_disk(script + 5, 0, SECTOR);
    if (starts(script, "write ")) return use_disk(script + 6, 1, SECTOR);
    if (starts(script, "serial ")) return use_disk(script + 7, 8, 20);
    if (starts(script, "spin")) for (;;) __asm__ volatile("pause");
    if (starts(script, "reset")) reset();
    if (starts(script, "say ")) {
        for (u64 at = 0; at < 16; at++) say(script + 4);
        return 0;
    }
    if (!starts(script, "echo ")) return UNKNOWN;
    text_bytes = length(script + 5) < SECTOR ? length(script + 5) : SECTOR;
    copy(text, script + 5, text_bytes);
    return 0;
}

static void on_start(u32 id) {
    const u8 *at = in.payload, *end = at + in.frame.length;
    const char *script = "";
    while (at + sizeof(struct field) <= end) {
        const struct field *field = (const struct field *)at;
        at += sizeof *field + field->length;
        if (field->tag == SCRIPT && at <= end) {
            static char kept[KEPT + 1];
            copy(kept, field + 1, field->length);
            kept[field->length] = 0;
            script = kept;
        }
    }
    put_number(PID, 1);
    put_number(FLAGS, 0);
    send(STARTED, id, 0);
    int status = run(script);
    u64 offset = 0;
    if (text_bytes) {
        put(&offset, sizeof offset);
        put(text, text_bytes);
        send(OUT, id, 1);
    }
    put_number(EXIT_CODE, (u64)status);
    put_number(STDOUT_TOTAL, text_bytes);
    put_number(STDERR_TOTAL, 0);
    send(EXIT, id, 0);
}

static void refuse(u32 id, const char *code, const char *message) {
    put_text(CODE, code);
    put_number(ERRNO, 0);
    put_text(MESSAGE, message);
    send(ERROR, id, 0);
}

static void on_frame(void) {
    u32 id = in.frame.id;
    if (in.frame.length > KEPT) {
        refuse(id, "limit", "too long for this guest");
        return;
    }
    in.payload[in.frame.length] = 0;
    switch (in.frame.type) {
    case HELLO: on_hello(); return;
    case PING: put(in.payload, in.frame.length); send(PONG, 0, 0); return;
    case START: on_start(id); return;
    case LIST: send(END, 0, 0); return;
    case SETUP: ready = 1; send(OK, id, 0); return;
    case RENEW: send(OK, id, 0); return;
    case SHUTDOWN: reset(); return;
    case ACK: case STDIN: case KILL: case RELEASE: return;
    default: refuse(id, "unsupported", "this guest has no operating system");
    }
}

void agent_take(const u8 *data, u32 bytes) {
    for (const u8 *end = data + bytes; data < end;) {
        u32 head = sizeof(struct frame), have = in_bytes, part = (u32)(end - data);
        u32 wanted = have < head ? head - have : head + in.frame.length - have;
        if (part > wanted) part = wanted;
        u32 room = have < sizeof in ? (u32)sizeof in - have : 0;
        copy((u8 *)&in + (room ? have : 0), data, part < room ? part : room);
        in_bytes += part;
        data += part;
        if (in_bytes >= head && in_bytes == head + in.frame.length) {
            in_bytes = 0;
            on_frame();
        }
    }
}
