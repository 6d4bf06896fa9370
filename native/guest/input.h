/* A command's stdin: what the host has sent and the program's pipe has not taken, at most 256 KiB. */
#ifndef OPENDSEC_INPUT_H
#define OPENDSEC_INPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "loop.h"

struct input {
    struct source source; /* the pipe's (or terminal's) write side */
    char *waiting;
    size_t start, used;
    uint64_t taken;
    bool end, closed, is_terminal;
    void (*progress)(struct input *input); /* `taken` or `closed` has changed */
};

enum input_result { INPUT_OK, INPUT_GAP, INPUT_OVERFLOW, INPUT_NO_MEMORY };

bool input_open(struct input *input, int fd, bool is_terminal, void (*progress)(struct input *));
enum input_result input_accept(struct input *input, uint64_t offset, const char *bytes, size_t length, bool end);
void input_close(struct input *input);

#endif
