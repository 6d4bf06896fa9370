/* How a sandbox's process names the step it is in, and gives up. */
#pragma once

#include "launch/sandbox.h"

/* The report of this process. */
extern struct report *fail_report;

static inline void step(const char *name)
{
    fail_report->step = name;
}

/* Writes errno and the message to the report and ends the process. */
_Noreturn void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* `value`, or the end of the process when it is negative. */
int must(int value, const char *what);
