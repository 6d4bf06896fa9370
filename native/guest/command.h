/*
 * Commands: known by the host's id from START to RELEASE, whatever becomes of connections in between.
 *
 *   queued (sessions only) -> starting (forked, exec not confirmed) -> running -> exited (process gone)
 *     -> ending (the rest of its tree is being ended, after KILL or timeout) -> ended (EXIT can be sent)
 */
#ifndef OPENDSEC_COMMAND_H
#define OPENDSEC_COMMAND_H

#include <stdbool.h>
#include <stdint.h>

#include "conn.h"
#include "input.h"
#include "loop.h"
#include "output.h"
#include "reap.h"
#include "start.h"
#include "tree.h"
#include "wire.h"

enum reason { REASON_EXITED, REASON_TIMEOUT, REASON_KILLED, REASON_SESSION };
enum { EXIT_MADE_SHELL = 1, EXIT_SHELL_GONE = 2 };
/*
 * How long EXIT waits for processes that SIGKILL did not end at once. A tracer in another tree can hold one in its exit
 * stop, a dead disk in a system call: neither executes anything of its own any more.
 */
enum { LINGER_MS = 3000 };

struct session;

struct command {
    struct garbage garbage;
    struct command *next_in_bucket, *next_in_session;
    uint32_t id;
    bool attached, started, exited, ended, given_up, exit_sent, say_started, say_known, say_input, has_input, is_terminal;
    uint8_t exit_flags;
    enum reason reason;
    int wait_status;
    pid_t pid;
    uint64_t begin_ns, end_ns, user_us, system_us, max_rss_kb, timeout_ms, grace_ms;
    struct sender sender;
    struct child child;
    struct tree tree;
    struct source status;
    struct output output[2];
    struct input input;
    struct timer timer;
    struct session *session;
    char *payload; /* START's, while queued */
    size_t payload_length;
};

struct command *command_find(uint32_t id);
struct command *command_new(uint32_t id);
/* Out of the table; its resources go back, its cgroup when empty. */
void command_forget(struct command *command);
/* ERROR as the answer to START, then forgotten. */
void command_fail(struct command *command, const char *code, int error, const char *message);
/* The program runs: STARTED may be sent. */
void command_started(struct command *command);
/* The foreground is gone (`status` as from wait). What is in the pipes is still sent, then EXIT. */
void command_ended(struct command *command, int status);
/* Arms the timeout of START. */
void command_arm(struct command *command);
/*
 * KILL or timeout: TERM, after the grace KILL, to the whole tree, and EXIT within LINGER_MS of that. Nothing when it has
 * exited of itself; again while it is being ended: the newer grace counts.
 */
void command_end_tree(struct command *command, enum reason reason, uint64_t grace_ms);
/* Takes over the read sides (-1: none), the new process, and the descriptor its exec is reported on. False: no room. */
bool command_take_output(struct command *command, int out, int err);
bool command_watch(struct command *command, pid_t pid, int status);
/* The next one in the table; NULL begins and ends. */
struct command *command_each(struct command *after);

/* Frames. False: malformed. */
bool command_start(uint32_t id, char *payload, size_t length);
bool command_frame(const struct header *header, char *payload);
void command_list(uint32_t id);
void command_detach_all(void);
void command_kill_all(uint64_t grace_ms);
unsigned command_live_count(void);
/* "limit", "pids_limit" or "no_memory": what a failed system call means to the host. */
const char *code_of(int error);

#endif
