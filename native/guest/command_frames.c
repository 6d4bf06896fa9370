/* The frames about a command that exists: acknowledgements, stdin, signals, attaching, listing. */
#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <sys/types.h>

#include "command.h"
#include "session.h"
#include "terminal.h"

static bool number_of(char *payload, size_t length, enum tag tag, uint64_t *value) {
    struct cursor cursor = {payload, payload + length, false};
    struct field field;
    while (field_next(&cursor, &field)) {
        if (field.tag == tag && !field_u64(&cursor, &field, value)) return false;
    }
    return !cursor.bad;
}

static bool acknowledge(struct command *command, const char *payload, size_t length) {
    if (length != 16) return false;
    bool known = output_ack(&command->output[0], get_u64(payload)) && output_ack(&command->output[1], get_u64(payload + 8));
    if (command->exited) command_ended(command, command->wait_status);
    return known;
}

static bool attach(struct command *command, const char *payload, size_t length) {
    if (length != 16) return false;
    for (int i = 0; i < 2; i++) {
        uint64_t offset = get_u64(payload + 8 * i);
        struct output *output = &command->output[i];
        if (offset >= output->base && offset <= output->total) continue;
        error_send(command->id, "gone", 0, "stream %d: offset %llu is not within %llu to %llu", i + 1,
                   (unsigned long long)offset, (unsigned long long)output->base, (unsigned long long)output->total);
        return true;
    }
    command->attached = command->say_known = command->say_started = true;
    command->say_input = command->has_input;
    command->exit_sent = false;
    for (int i = 0; i < 2; i++) {
        output_rewind(&command->output[i], get_u64(payload + 8 * i));
        output_ack(&command->output[i], get_u64(payload + 8 * i));
    }
    sender_wake(&command->sender);
    return true;
}

static bool stdin_frame(struct command *command, const struct header *header, const char *payload) {
    if (header->length < 8) return false;
    switch (input_accept(&command->input, get_u64(payload), payload + 8, header->length - 8, header->flags & 1)) {
        case INPUT_GAP: error_send(command->id, "gap", 0, "stdin: bytes are missing before this offset"); break;
        case INPUT_OVERFLOW: return false;
        case INPUT_NO_MEMORY: error_send(command->id, "no_memory", ENOMEM, "stdin: no memory"); break;
        case INPUT_OK:
            command->say_input = true;
            sender_wake(&command->sender);
            break;
    }
    return true;
}

static bool kill_frame(struct command *command, char *payload, size_t length) {
    uint64_t grace_ms = command->grace_ms;
    if (!number_of(payload, length, TAG_GRACE_MS, &grace_ms)) return false;
    command_end_tree(command, REASON_KILLED, grace_ms);
    return true;
}

static bool signal_frame(struct command *command, char *payload, size_t length) {
    uint64_t number = 0;
    if (!number_of(payload, length, TAG_SIGNAL, &number) || number == 0 || number > 64) return false;
    if (command->exited) return true;
    if (command->is_terminal && terminal_signal(command->output[0].source.fd, (int)number)) return true;
    if (command->session) session_signal(command, (int)number);
    else kill(-command->pid, (int)number);
    return true;
}

static bool resize_frame(struct command *command, char *payload, size_t length) {
    uint64_t rows = 0, columns = 0;
    if (!number_of(payload, length, TAG_ROWS, &rows) || !number_of(payload, length, TAG_COLS, &columns)) return false;
    if (command->is_terminal && command->output[0].source.fd >= 0)
        terminal_resize(command->output[0].source.fd, rows, columns);
    return true;
}

static bool is_about_missing(const struct header *header) {
    /* These may cross an EXIT or RELEASE on the way and mean nothing then. */
    bool harmless = header->type == FRAME_ACK || header->type == FRAME_RELEASE || header->type == FRAME_KILL;
    if (!harmless) error_send(header->id, "no_command", 0, "no command %u", header->id);
    return true;
}

bool command_frame(const struct header *header, char *payload) {
    struct command *command = command_find(header->id);
    if (!command) return is_about_missing(header);
    switch (header->type) {
        case FRAME_ACK: return acknowledge(command, payload, header->length);
        case FRAME_STDIN: return stdin_frame(command, header, payload);
        case FRAME_ATTACH: return attach(command, payload, header->length);
        case FRAME_KILL: return kill_frame(command, payload, header->length);
        case FRAME_SIGNAL: return signal_frame(command, payload, header->length);
        case FRAME_RESIZE: return resize_frame(command, payload, header->length);
        case FRAME_RELEASE:
            if (command->ended) command_forget(command);
            return true;
        default: return false;
    }
}

void command_list(uint32_t id) {
    for (struct command *command = command_each(NULL); command; command = command_each(command)) {
        char bytes[128];
        struct writer writer = {bytes, 0, sizeof bytes, false};
        write_u64(&writer, TAG_PID, (uint64_t)command->pid);
        write_u64(&writer, TAG_FLAGS, command->ended);
        write_u64(&writer, TAG_STDOUT_BASE, command->output[0].base);
        write_u64(&writer, TAG_STDERR_BASE, command->output[1].base);
        write_u64(&writer, TAG_STDOUT_TOTAL, command->output[0].total);
        write_u64(&writer, TAG_STDERR_TOTAL, command->output[1].total);
        frame_send(FRAME_COMMAND, command->id, 0, bytes, writer.length);
    }
    frame_send(FRAME_END, id, 0, NULL, 0);
}

void command_detach_all(void) {
    for (struct command *command = command_each(NULL); command; command = command_each(command)) command->attached = false;
}

void command_kill_all(uint64_t grace_ms) {
    for (struct command *command = command_each(NULL); command; command = command_each(command))
        command_end_tree(command, REASON_KILLED, grace_ms);
}
