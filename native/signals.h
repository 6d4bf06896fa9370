/* Signals as both programs inherit them. Ignored ones survive executions, so what our starter ignored would reach every command; some
 * starters do (posix_spawn of glibc and musl leaves 32, which the C library keeps to itself, ignored: programs started by make have it). */
#pragma once

#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Ignored signals get their default action. The raw call, because the C library refuses its own signals; the handler comes first. */
static inline void signals_unignore(void)
{
    for (int number = 1; number <= 64; number++) {
        long action[4] = {0}, ignored = 1; /* SIG_IGN */
        if (syscall(SYS_rt_sigaction, number, NULL, action, 8) == 0 && action[0] == ignored)
            syscall(SYS_rt_sigaction, number, (long[4]){0}, NULL, 8);
    }
}
