/* See dispatch.h. */
#include "dispatch.h"

#include <string.h>
#include <sys/random.h>

#include "call.h"
#include "command.h"
#include "conn.h"
#include "machine.h"
#include "session.h"
#include "shutdown.h"
#include "tree.h"

#define AGENT_NAME "opendsec-guest/1"

bool dispatch(const struct header *header, char *payload) {
    bool touches_sandbox = header->type == FRAME_START || header->type == FRAME_FS || header->type == FRAME_DIAL || header->type == FRAME_SESSION_END;
    if (touches_sandbox && machine_refuses(header)) return true;
    switch (header->type) {
        case FRAME_PING:
            if (header->length > 64) return false;
            frame_send(FRAME_PONG, header->id, 0, payload, header->length);
            return true;
        case FRAME_START: return header->id != 0 && command_start(header->id, payload, header->length);
        case FRAME_LIST: command_list(header->id); return true;
        case FRAME_ACK: case FRAME_STDIN: case FRAME_ATTACH: case FRAME_KILL: case FRAME_SIGNAL: case FRAME_RESIZE: case FRAME_RELEASE:
            return command_frame(header, payload);
        case FRAME_FS: case FRAME_DIAL: return header->id != 0 && call_begin(header, payload);
        case FRAME_DATA: case FRAME_END: case FRAME_CREDIT: case FRAME_CANCEL: return call_frame(header, payload);
        case FRAME_SESSION_END: return session_end_frame(header->id, payload, header->length);
        case FRAME_SETUP: case FRAME_RENEW: return machine_frame(header, payload);
        case FRAME_SHUTDOWN: return shutdown_begin(payload, header->length);
        default: error_send(header->id, "unsupported", 0, "frame type %d", header->type); return true;
    }
}

void dispatch_detach(void) {
    command_detach_all();
    call_drop_all();
    machine_detach();
}

void dispatch_hello(void) {
    static char boot_id[16];
    static bool have_boot_id;
    if (!have_boot_id) have_boot_id = getrandom(boot_id, sizeof boot_id, 0) == (ssize_t)sizeof boot_id;
    static const char *const capabilities[] = {"files", "sessions", "terminals", "dial", "watch", "trees"};
    char bytes[512];
    struct writer writer = {bytes, 0, sizeof bytes, false};
    write_u64(&writer, TAG_VERSION, PROTOCOL_VERSION);
    write_text(&writer, TAG_AGENT, AGENT_NAME);
    write_bytes(&writer, TAG_BOOT_ID, boot_id, sizeof boot_id);
    for (size_t i = 0; i < sizeof capabilities / sizeof *capabilities; i++) write_text(&writer, TAG_CAPS, capabilities[i]);
    if (tree_has_cgroups()) write_text(&writer, TAG_CAPS, "cgroup");
    if (machine_runs()) write_text(&writer, TAG_CAPS, "machine");
    if (machine_is_ready()) write_text(&writer, TAG_CAPS, "ready");
    frame_send(FRAME_HELLO, 0, 0, bytes, writer.length);
    usage_send_soon();
}
