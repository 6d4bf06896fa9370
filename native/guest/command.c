/* See command.h: the table of commands and the life of one. Frames about commands are in command_frames.c. */
#include "command.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/wait.h>
#include <unistd.h>

#include "machine.h"
#include "session.h"
#include "spawn.h"
#include "terminal.h"

enum { BUCKETS = 256, MAX_LIVE = 1024, MAX_KNOWN = 8192, HANG_UP_MS = 300 };

static struct command *buckets[BUCKETS];
static unsigned known_count, live_count;

struct command *command_find(uint32_t id) {
    struct command *command = buckets[id % BUCKETS];
    while (command && command->id != id) command = command->next_in_bucket;
    return command;
}

struct command *command_each(struct command *after) {
    unsigned bucket = after ? after->id % BUCKETS + 1 : 0;
    if (after && after->next_in_bucket) return after->next_in_bucket;
    while (bucket < BUCKETS && !buckets[bucket]) bucket++;
    return bucket < BUCKETS ? buckets[bucket] : NULL;
}

unsigned command_live_count(void) { return live_count; }

static bool command_send(struct sender *sender);

struct command *command_new(uint32_t id) {
    if (live_count >= MAX_LIVE || known_count >= MAX_KNOWN) {
        error_send(id, "limit", 0, "at most %d live commands, and %d not released", MAX_LIVE, MAX_KNOWN);
        return NULL;
    }
    struct command *command = calloc(1, sizeof *command);
    if (!command) {
        error_send(id, "no_memory", ENOMEM, "no memory for another command");
        return NULL;
    }
    command->id = id;
    command->attached = true;
    command->sender.send = command_send;
    command->tree = (struct tree){.fd = -1, .watch.fd = -1};
    command->status.fd = command->input.source.fd = -1;
    for (int i = 0; i < 2; i++) command->output[i] = (struct output){.source.fd = -1, .number = (uint8_t)(i + 1)};
    command->next_in_bucket = buckets[id % BUCKETS];
    buckets[id % BUCKETS] = command;
    known_count++;
    live_count++;
    return command;
}

void command_forget(struct command *command) {
    session_forget(command);
    struct command **at = &buckets[command->id % BUCKETS];
    while (*at != command) at = &(*at)->next_in_bucket;
    *at = command->next_in_bucket;
    known_count--;
    if (!command->ended) live_count--;
    sender_stop(&command->sender);
    timer_stop(&command->timer);
    child_forget(&command->child);
    tree_retire(&command->tree);
    source_close(&command->status);
    input_close(&command->input);
    for (int i = 0; i < 2; i++) output_close(&command->output[i], command->is_terminal);
    free(command->payload);
    loop_free(&command->garbage);
}

void command_fail(struct command *command, const char *code, int error, const char *message) {
    if (command->attached) error_send(command->id, code, error, "%s", message);
    command_forget(command);
}

static void exit_send(struct command *command) {
    char bytes[256];
    struct writer writer = {bytes, 0, sizeof bytes, false};
    int status = command->wait_status;
    if (WIFEXITED(status)) write_u64(&writer, TAG_EXIT_CODE, (uint64_t)WEXITSTATUS(status));
    else write_u64(&writer, TAG_SIGNAL, (uint64_t)WTERMSIG(status));
    write_u64(&writer, TAG_REASON, command->reason);
    write_u64(&writer, TAG_STDOUT_TOTAL, command->output[0].total);
    write_u64(&writer, TAG_STDERR_TOTAL, command->output[1].total);
    write_u64(&writer, TAG_DURATION_NS, command->end_ns - command->begin_ns);
    write_u64(&writer, TAG_UTIME_US, command->user_us);
    write_u64(&writer, TAG_STIME_US, command->system_us);
    write_u64(&writer, TAG_MAXRSS_KB, command->max_rss_kb);
    write_u64(&writer, TAG_FLAGS, command->exit_flags);
    usage_send();
    frame_send(FRAME_EXIT, command->id, 0, bytes, writer.length);
    command->exit_sent = true;
}

static void started_send(struct command *command) {
    char bytes[64];
    struct writer writer = {bytes, 0, sizeof bytes, false};
    write_u64(&writer, TAG_PID, (uint64_t)command->pid);
    write_u64(&writer, TAG_FLAGS, command->say_known);
    frame_send(FRAME_STARTED, command->id, 0, bytes, writer.length);
    command->say_started = false;
}

static void input_send(struct command *command) {
    char bytes[8];
    put_u64(bytes, command->input.taken);
    frame_send(FRAME_STDIN_ACK, command->id, command->input.closed, bytes, sizeof bytes);
    command->say_input = false;
}

static bool command_send(struct sender *sender) {
    struct command *command = HOLDER(sender, struct command, sender);
    if (!command->attached) return false;
    if (command->say_started) {
        started_send(command);
        return true;
    }
    if (!command->started) return false;
    if (command->say_input) input_send(command);
    bool more = output_send(&command->output[0], command->id);
    more |= output_send(&command->output[1], command->id);
    if (!more && command->ended && !command->exit_sent) exit_send(command);
    return more;
}

void command_started(struct command *command) {
    command->started = command->say_started = true;
    sender_wake(&command->sender);
}

static void output_ready(struct command *command, struct output *output) {
    if (!output_fill(output)) return;
    if (output->sent < output->total && command->started) sender_wake(&command->sender);
    if (command->exited) command_ended(command, command->wait_status);
}

static void stdout_ready(struct source *source, uint32_t events) {
    (void)events;
    struct output *output = HOLDER(source, struct output, source);
    output_ready(HOLDER(output, struct command, output[0]), output);
}

static void stderr_ready(struct source *source, uint32_t events) {
    (void)events;
    struct output *output = HOLDER(source, struct output, source);
    output_ready(HOLDER(output, struct command, output[1]), output);
}

bool command_take_output(struct command *command, int out, int err) {
    if (out >= 0 && !source_add(&command->output[0].source, out, EPOLLIN, stdout_ready)) return false;
    return err < 0 || source_add(&command->output[1].source, err, EPOLLIN, stderr_ready);
}

static void tree_emptied(struct tree *tree) {
    struct command *command = HOLDER(tree, struct command, tree);
    command_ended(command, command->wait_status);
}

/* The terminal did not hang up although its session leader is gone: someone else holds it. */
static void hang_up_late(struct timer *timer) {
    struct command *command = HOLDER(timer, struct command, timer);
    if (!output_give_up(&command->output[0])) return timer_set(timer, HANG_UP_MS, hang_up_late);
    command_ended(command, command->wait_status);
}

/* Called again whenever something that EXIT waits for has happened. */
void command_ended(struct command *command, int status) {
    if (command->ended) return;
    command->exited = true;
    command->wait_status = status;
    /* An ended tree is ended altogether: what ignores TERM has until the grace is over. */
    if (command->reason && !command->given_up && tree_await_empty(&command->tree, tree_emptied)) return;
    if (!command->output[0].ending) {
        for (int i = 0; i < 2; i++) output_end(&command->output[i], command->is_terminal);
        timer_stop(&command->timer);
        if (command->is_terminal) timer_set(&command->timer, HANG_UP_MS, hang_up_late);
        if (command->reason && !command->session && command->tree.fd < 0) tree_kill(&command->tree); /* no cgroups */
        tree_retire(&command->tree);
    }
    if (!output_done(&command->output[0]) || !output_done(&command->output[1])) return;
    timer_stop(&command->timer);
    command->ended = true;
    live_count--;
    input_close(&command->input);
    if (command->session) session_take_back(command);
    for (int i = 0; i < 2; i++) output_retire(&command->output[i], command->is_terminal);
    sender_wake(&command->sender);
}

static void status_read(struct command *command) {
    struct spawn_failure failure;
    ssize_t count = read(command->status.fd, &failure, sizeof failure);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
    source_close(&command->status);
    if (count != sizeof failure) return command_started(command);
    failure.code[sizeof failure.code - 1] = failure.message[sizeof failure.message - 1] = '\0';
    command_fail(command, failure.code, failure.error, failure.message);
}

static void status_ready(struct source *source, uint32_t events) {
    (void)events;
    status_read(HOLDER(source, struct command, status));
}

static void process_exited(struct child *child, int status, const struct rusage *usage) {
    struct command *command = HOLDER(child, struct command, child);
    if (command->ended) return; /* given up before */
    command->end_ns = now_ns();
    command->user_us = (uint64_t)usage->ru_utime.tv_sec * 1000000u + (uint64_t)usage->ru_utime.tv_usec;
    command->system_us = (uint64_t)usage->ru_stime.tv_sec * 1000000u + (uint64_t)usage->ru_stime.tv_usec;
    command->max_rss_kb = (uint64_t)usage->ru_maxrss;
    if (command->status.fd >= 0) {
        uint32_t id = command->id;
        status_read(command);
        if (command_find(id) != command) return;
        /* Nothing was written, and somebody else holds the pipe: root inside can take it from a process that is about to execute. */
        source_close(&command->status);
        if (!command->started) command_started(command);
    }
    command_ended(command, status);
}

static void timeout_over(struct timer *timer) {
    struct command *command = HOLDER(timer, struct command, timer);
    command_end_tree(command, REASON_TIMEOUT, command->grace_ms);
}

static void linger_over(struct timer *timer) {
    struct command *command = HOLDER(timer, struct command, timer);
    command->given_up = true;
    if (!command->end_ns) command->end_ns = now_ns();
    source_close(&command->status);
    if (!command->started) command_started(command);
    command_ended(command, command->exited ? command->wait_status : SIGKILL);
}

static void grace_over(struct timer *timer) {
    tree_kill(&HOLDER(timer, struct command, timer)->tree);
    timer_set(timer, LINGER_MS, linger_over);
}

void command_end_tree(struct command *command, enum reason reason, uint64_t grace_ms) {
    if (command->exited && (!command->reason || command->output[0].ending)) return;
    if (!command->reason) command->reason = reason;
    if (command->session) return session_end_command(command, grace_ms);
    if (grace_ms) {
        tree_signal(&command->tree, SIGTERM, 0);
        tree_signal(&command->tree, SIGCONT, 0);
        timer_set(&command->timer, grace_ms, grace_over);
    } else {
        grace_over(&command->timer);
    }
}

void command_arm(struct command *command) {
    if (command->timeout_ms) timer_set(&command->timer, command->timeout_ms, timeout_over);
}

bool command_watch(struct command *command, pid_t pid, int status) {
    command->pid = command->tree.pid = pid;
    command->begin_ns = now_ns();
    child_register(&command->child, pid, process_exited);
    return source_add(&command->status, status, EPOLLIN, status_ready);
}
