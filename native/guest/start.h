/* The fields of a START frame. */
#ifndef OPENDSEC_START_H
#define OPENDSEC_START_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { START_STDIN = 1, START_PTY = 2 };

struct start {
    char *script; /* NULL: argv */
    size_t script_length;
    char **argv; /* NULL-terminated */
    char **env;  /* room for two more */
    size_t argc, env_count;
    char *cwd, *user, *session;
    uint64_t flags, rows, columns, timeout_ms, grace_ms;
    const char *problem; /* why it cannot be run: the fields are well formed, their contents are not */
};

/* Strings are terminated inside `payload` (which needs one spare byte). False: malformed. start_free() in any case. */
bool start_parse(struct start *start, char *payload, size_t length);
void start_free(struct start *start);

#endif
