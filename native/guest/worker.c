/* See worker.h. */
#include "worker.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "call.h"
#include "command.h"
#include "identity.h"
#include "machine.h"
#include "spawn.h"

enum { SOCKET = 3 };

struct operation {
    const char *name;
    void (*run)(struct request *); /* does not return */
    bool cleans_up; /* on CANCEL it is not killed: it removes its temporary file when its socket ends */
    bool of_machine; /* it needs machine_root */
};

static const struct operation operations[] = {
    {"stat", file_stat, false, false},     {"list", file_list, false, false},   {"mkdir", file_mkdir, false, false},
    {"move", file_move, false, false},     {"remove", file_remove, false, false}, {"chmod", file_chmod, false, false},
    {"read", file_read, false, false},     {"write", file_write, true, false},  {"watch", file_watch, false, false},
    {"pack", file_pack, false, false},     {"unpack", file_unpack, true, false}, {"freeze", file_freeze, true, true},
    {"pack_upper", file_upper, false, true},
};

static char piece[1 + WORKER_PIECE];
static size_t gathered;

void (*worker_leaving)(void);

static void take_field(struct request *request, struct cursor *cursor, const struct field *field) {
    switch (field->tag) {
        case TAG_OP: request->op = field->data; break;
        case TAG_PATH: request->path = field->data; break;
        case TAG_TARGET: request->target = field->data; break;
        case TAG_USER: request->user = field->data; break;
        case TAG_FLAGS: field_u64(cursor, field, &request->flags); break;
        case TAG_MODE: request->has_mode = field_u64(cursor, field, &request->mode); break;
        case TAG_OFFSET: field_u64(cursor, field, &request->offset); break;
        case TAG_LENGTH: request->has_length = field_u64(cursor, field, &request->length); break;
        default: break;
    }
}

/* Strings are terminated in place; one with a NUL inside is refused. */
static bool request_parse(struct request *request, char *payload, size_t length, bool *has_nul) {
    static char empty[1];
    struct cursor cursor = {payload, payload + length, false};
    *request = (struct request){.op = empty, .path = empty, .target = empty, .user = empty};
    *has_nul = false;
    char *end = NULL;
    for (struct field field; field_next(&cursor, &field);) {
        if (end) *end = '\0';
        take_field(request, &cursor, &field);
        bool is_text = field.tag == TAG_OP || field.tag == TAG_PATH || field.tag == TAG_TARGET || field.tag == TAG_USER;
        *has_nul |= is_text && memchr(field.data, '\0', field.length);
        end = field.data + field.length;
    }
    if (end) *end = '\0';
    return !cursor.bad;
}

static _Noreturn void worker_main(struct request *request, const struct operation *operation) {
    static struct identity identity;
    spawn_be_mortal();
    umask(0);
    if (*request->user) {
        if (!identity_resolve(request->user, &identity)) {
            char bytes[512];
            struct writer writer = {bytes, 0, sizeof bytes, false};
            write_text(&writer, TAG_CODE, "no_user");
            write_text(&writer, TAG_MESSAGE, identity.problem);
            piece[0] = FRAME_ERROR;
            memcpy(piece + 1, bytes, writer.length);
            send(SOCKET, piece, 1 + writer.length, MSG_NOSIGNAL);
            _exit(0);
        }
        if (!identity_assume(&identity)) worker_fail("changing to the user");
    }
    operation->run(request);
    _exit(0);
}

bool worker_begin(uint32_t id, char *payload, size_t length) {
    struct request request;
    bool has_nul;
    if (!request_parse(&request, payload, length, &has_nul)) return false;
    const struct operation *operation = NULL;
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++) {
        if (strcmp(operations[i].name, request.op) == 0) operation = &operations[i];
    }
    if (operation && operation->of_machine && !machine_runs()) operation = NULL;
    if (!operation || has_nul || !*request.path) {
        if (!operation) error_send(id, "unsupported", 0, "OP %.32s", request.op);
        else error_send(id, "file", has_nul ? EINVAL : ENOENT, "%s", has_nul ? "a path with a NUL byte" : "an empty path");
        return true;
    }
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0) {
        error_send(id, code_of(errno), errno, "%s", strerror(errno));
        return true;
    }
    pid_t pid = spawn_has_room(pair[1]) ? spawn_worker(pair[1], operation->of_machine ? machine_root() : -1) : -1;
    if (pid == 0) worker_main(&request, operation);
    struct call *call = pid < 0 ? NULL : call_new(id, pair[0]);
    int error = errno;
    close(pair[1]);
    if (!call) {
        close(pair[0]);
        error_send(id, code_of(error), error, "%s", strerror(error));
        return true;
    }
    call_has_worker(call, pid, operation->cleans_up);
    return true;
}

static void message_send(uint8_t type, const void *bytes, size_t length) {
    char first = (char)type;
    struct iovec pieces[2] = {{&first, 1}, {(void *)(uintptr_t)bytes, length}};
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 2};
    if (sendmsg(SOCKET, &message, MSG_NOSIGNAL) >= 0) return;
    if (worker_leaving) worker_leaving(); /* cancelled */
    _exit(0);
}

void worker_fail_with(int error, const char *path) {
    char bytes[8 * 1024];
    struct writer writer = {bytes, 0, sizeof bytes, false};
    write_text(&writer, TAG_CODE, "file");
    write_u64(&writer, TAG_ERRNO, (uint64_t)error);
    char message[5000];
    size_t length = strlen(path) < 4096 ? strlen(path) : 4096;
    memcpy(message, path, length);
    strcpy(message + length, ": ");
    strncat(message, strerror(error), 200);
    write_text(&writer, TAG_MESSAGE, message);
    message_send(FRAME_ERROR, bytes, writer.length);
    _exit(0);
}

void worker_fail(const char *path) { worker_fail_with(errno, path); }

void worker_answer(const struct writer *answer) {
    message_send(FRAME_OK, answer ? answer->bytes : NULL, answer ? answer->length : 0);
}

void worker_done(const struct writer *answer) {
    message_send(FRAME_OK | WORKER_LAST, answer ? answer->bytes : NULL, answer ? answer->length : 0);
    _exit(0);
}

void worker_end(void) {
    worker_flush();
    message_send(FRAME_END, NULL, 0);
    _exit(0);
}

void worker_flush(void) {
    if (gathered) message_send(FRAME_DATA, piece, gathered);
    gathered = 0;
}

void worker_put(const void *bytes, size_t length) {
    const char *at = bytes;
    while (length) {
        size_t part = WORKER_PIECE - gathered < length ? WORKER_PIECE - gathered : length;
        memcpy(piece + gathered, at, part);
        gathered += part;
        at += part;
        length -= part;
        if (gathered == WORKER_PIECE) worker_flush();
    }
}

bool worker_take(char **bytes, size_t *length, void (*abandon)(void)) {
    static char incoming[1 + CALL_PIECE];
    ssize_t count = recv(SOCKET, incoming, sizeof incoming, 0);
    if (count <= 0) {
        abandon();
        _exit(0);
    }
    *bytes = incoming + 1;
    *length = (size_t)count - 1;
    return incoming[0] == FRAME_DATA;
}

void worker_wait(int fd) {
    struct pollfd wait[2] = {{.fd = fd, .events = POLLIN}, {.fd = SOCKET, .events = 0}};
    while (!(wait[0].revents & POLLIN)) {
        if (poll(wait, 2, -1) < 0 && errno != EINTR) _exit(0);
        if (wait[1].revents) _exit(0);
    }
}
