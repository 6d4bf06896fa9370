/* Pseudo-terminals from the sandbox's own /dev/pts. */
#ifndef OPENDSEC_TERMINAL_H
#define OPENDSEC_TERMINAL_H

#include <stdbool.h>
#include <stdint.h>

/* False with errno. Both descriptors are close-on-exec, the master does not block. */
bool terminal_open(uint64_t rows, uint64_t columns, int *master, int *slave);
void terminal_resize(int master, uint64_t rows, uint64_t columns);
/* To the terminal's foreground process group; false when there is none. */
bool terminal_signal(int master, int signal);

#endif
