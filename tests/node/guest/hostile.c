/* What somebody inside may do to keep the agent from its work. Prints a line when it has begun. */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

enum { STACK = 4096, ORPHANS = 50 };

static char stacks[2][STACK] __attribute__((aligned(16)));

static int end(void *nothing) {
    (void)nothing;
    _exit(0);
}

static int make_orphans(void *nothing) {
    (void)nothing;
    for (int i = 0; i < ORPHANS; i++) clone(end, stacks[1] + STACK, CLONE_VM | SIGCHLD, NULL);
    _exit(0);
}

/* Orphans that are zombies at once, from `count` processes, faster than one process can reap them. */
static void flood(int count) {
    while (--count > 0 && fork() > 0) continue;
    for (;;) {
        int pid = clone(make_orphans, stacks[0] + STACK, CLONE_VM | CLONE_VFORK | SIGCHLD, NULL);
        if (pid > 0) waitpid(pid, NULL, 0);
    }
}

int main(int count, char **arguments) {
    if (count != 3) return 64;
    int number = atoi(arguments[2]);
    if (strcmp(arguments[1], "hold") == 0 && ptrace(PTRACE_SEIZE, number, NULL, PTRACE_O_TRACEEXIT) < 0) return 1;
    puts("begun");
    fflush(stdout);
    if (strcmp(arguments[1], "flood") == 0) flood(number);
    for (;;) pause();
}
