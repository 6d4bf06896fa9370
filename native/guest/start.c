/* See start.h. Two passes: the first counts, the second keeps pointers; terminators are written when all is read. */
#include "start.h"

#include <stdlib.h>
#include <string.h>

#include "wire.h"

struct text {
    char *data;
    size_t length;
};

static bool count_lists(struct start *start, struct cursor cursor) {
    struct field field;
    while (field_next(&cursor, &field)) {
        start->argc += field.tag == TAG_ARGV;
        start->env_count += field.tag == TAG_ENV;
    }
    return !cursor.bad;
}

static void take_number(struct start *start, struct cursor *cursor, const struct field *field) {
    uint64_t *where = NULL;
    switch (field->tag) {
        case TAG_FLAGS: where = &start->flags; break;
        case TAG_ROWS: where = &start->rows; break;
        case TAG_COLS: where = &start->columns; break;
        case TAG_TIMEOUT_MS: where = &start->timeout_ms; break;
        case TAG_GRACE_MS: where = &start->grace_ms; break;
        default: return;
    }
    field_u64(cursor, field, where);
}

static void take_text(struct start *start, const struct field *field, size_t *argc, size_t *env_count) {
    switch (field->tag) {
        case TAG_SCRIPT:
            start->script = field->data;
            start->script_length = field->length;
            break;
        case TAG_ARGV: start->argv[(*argc)++] = field->data; break;
        case TAG_ENV: start->env[(*env_count)++] = field->data; break;
        case TAG_CWD: start->cwd = field->data; break;
        case TAG_USER: start->user = field->data; break;
        case TAG_SESSION: start->session = field->data; break;
        default: return;
    }
    if (memchr(field->data, '\0', field->length)) start->problem = "a NUL byte in SCRIPT, ARGV, ENV, CWD, USER or SESSION";
}

static void terminate_all(struct cursor cursor) {
    char *end = NULL;
    for (struct field field; field_next(&cursor, &field);) {
        if (end) *end = '\0';
        end = field.data + field.length;
    }
    if (end) *end = '\0';
}

bool start_parse(struct start *start, char *payload, size_t length) {
    struct cursor cursor = {payload, payload + length, false};
    struct field field;
    size_t argc = 0, env_count = 0;
    static char empty[1];
    *start = (struct start){.cwd = empty, .user = empty, .session = empty};
    if (!count_lists(start, cursor)) return false;
    start->argv = calloc(start->argc + 1, sizeof(char *));
    start->env = calloc(start->env_count + 2, sizeof(char *));
    if (!start->argv || !start->env) {
        start->problem = "";
        return true;
    }
    struct cursor again = cursor;
    while (field_next(&cursor, &field)) {
        take_number(start, &cursor, &field);
        take_text(start, &field, &argc, &env_count);
    }
    if (cursor.bad) return false;
    if (!start->script && !start->argc) start->problem = "neither SCRIPT nor ARGV";
    if (start->script && start->argc) start->problem = "both SCRIPT and ARGV";
    if (start->script) {
        free(start->argv);
        start->argv = NULL;
    }
    terminate_all(again);
    return true;
}

void start_free(struct start *start) {
    free(start->argv);
    free(start->env);
    start->argv = start->env = NULL;
}
