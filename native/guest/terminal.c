/* See terminal.h. The slave is opened through the master (TIOCGPTPEER): no name in the sandbox is trusted for it. */
#include "terminal.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/tty.h>
#include <sys/ioctl.h>
#include <unistd.h>

#ifndef TIOCGPTPEER
#define TIOCGPTPEER _IO('T', 0x41)
#endif

static unsigned short clamp(uint64_t value) { return value > 65535 ? 65535 : (unsigned short)value; }

bool terminal_open(uint64_t rows, uint64_t columns, int *master, int *slave) {
    *master = open("/dev/pts/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    /* Outside a sandbox of ours /dev/pts/ptmx has mode 000 by default. */
    if (*master < 0) *master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    if (*master < 0) return false;
    int unlock = 0;
    *slave = -1;
    if (ioctl(*master, TIOCSPTLCK, &unlock) == 0) *slave = ioctl(*master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (*slave >= 0) {
        terminal_resize(*master, rows, columns);
        return true;
    }
    int error = errno;
    close(*master);
    errno = error;
    return false;
}

void terminal_resize(int master, uint64_t rows, uint64_t columns) {
    struct winsize size = {.ws_row = clamp(rows), .ws_col = clamp(columns)};
    ioctl(master, TIOCSWINSZ, &size);
}

bool terminal_signal(int master, int signal) { return ioctl(master, TIOCSIG, signal) == 0; }
