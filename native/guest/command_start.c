/* START: from the frame to a forked process with its pipes, cgroup and watchers; all of it or nothing. */
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "command.h"
#include "session.h"
#include "spawn.h"
#include "terminal.h"

/* Descriptors of one start: ours and the child's. -1: not there. */
struct plumbing {
    int out[2], err[2], status[2], in[2];
};

const char *code_of(int error) {
    if (error == EAGAIN) return "pids_limit";
    if (error == ENOMEM || error == ENOBUFS) return "no_memory";
    return "limit";
}

static void close_pair(int pair[2]) {
    for (int i = 0; i < 2; i++) {
        if (pair[i] >= 0) close(pair[i]);
        pair[i] = -1;
    }
}

static void plumbing_close(struct plumbing *plumbing) {
    close_pair(plumbing->out);
    close_pair(plumbing->err);
    close_pair(plumbing->status);
    close_pair(plumbing->in);
}

static bool unblocked(int fd) { return fcntl(fd, F_SETFL, O_NONBLOCK) == 0; }

static bool plumbing_open_pipes(struct plumbing *plumbing, bool with_stdin) {
    if (pipe2(plumbing->out, O_CLOEXEC) < 0 || !unblocked(plumbing->out[0])) return false;
    if (pipe2(plumbing->err, O_CLOEXEC) < 0 || !unblocked(plumbing->err[0])) return false;
    if (!with_stdin) return true;
    return pipe2(plumbing->in, O_CLOEXEC) == 0 && unblocked(plumbing->in[1]);
}

/* out = {master, slave}; stdin is a second descriptor of the master, since epoll knows a descriptor once. */
static bool plumbing_open_terminal(struct plumbing *plumbing, const struct start *start) {
    if (!terminal_open(start->rows, start->columns, &plumbing->out[0], &plumbing->out[1])) return false;
    plumbing->in[1] = fcntl(plumbing->out[0], F_DUPFD_CLOEXEC, 3);
    return plumbing->in[1] >= 0;
}

static bool plumbing_open(struct plumbing *plumbing, const struct start *start) {
    *plumbing = (struct plumbing){{-1, -1}, {-1, -1}, {-1, -1}, {-1, -1}};
    if (pipe2(plumbing->status, O_CLOEXEC) < 0 || !unblocked(plumbing->status[0])) return false;
    if (!spawn_has_room(plumbing->status[1])) return false;
    if (start->flags & START_PTY) return plumbing_open_terminal(plumbing, start);
    return plumbing_open_pipes(plumbing, start->flags & START_STDIN);
}

static int take(int *fd) {
    int taken = *fd;
    *fd = -1;
    return taken;
}

static void input_progress(struct input *input) {
    struct command *command = HOLDER(input, struct command, input);
    command->say_input = true;
    sender_wake(&command->sender);
}

/* Hands our ends to the command. False: epoll has no room. */
static bool connect_command(struct command *command, struct plumbing *plumbing) {
    if (!command_take_output(command, plumbing->out[0], plumbing->err[0])) return false;
    plumbing->out[0] = plumbing->err[0] = -1;
    if (plumbing->in[1] < 0) {
        command->input.closed = true;
        return true;
    }
    command->has_input = true;
    return input_open(&command->input, take(&plumbing->in[1]), command->is_terminal, input_progress);
}

static pid_t fork_command(struct command *command, struct start *start, const struct plumbing *plumbing) {
    struct launch launch = {
        .argv = start->argv, .script = start->script, .script_length = start->script_length,
        .env = start->env, .env_count = start->env_count, .cwd = start->cwd, .user = start->user,
        .out = plumbing->out[1], .status = plumbing->status[1], .control = -1, .text = -1,
        .cgroup = command->tree.fd, .terminal = command->is_terminal,
    };
    launch.in = command->is_terminal ? plumbing->out[1] : plumbing->in[0] >= 0 ? plumbing->in[0] : 0;
    launch.err = command->is_terminal ? plumbing->out[1] : plumbing->err[1];
    return spawn(&launch);
}

static bool begin(struct command *command, struct start *start, struct plumbing *plumbing) {
    command->timeout_ms = start->timeout_ms;
    command->grace_ms = start->grace_ms;
    command->is_terminal = start->flags & START_PTY;
    if (!plumbing_open(plumbing, start) || !tree_make(&command->tree, "cmd", command->id)) return false;
    pid_t pid = fork_command(command, start, plumbing);
    if (pid < 0) return false;
    bool complete = command_watch(command, pid, plumbing->status[0]);
    if (complete) plumbing->status[0] = -1;
    if (!complete || !connect_command(command, plumbing)) {
        int error = errno;
        tree_kill(&command->tree);
        errno = error;
        return false;
    }
    command_arm(command);
    return true;
}

/* A START that was sent before (the connection broke, or the edge died): nothing starts, output comes again. */
static void start_again(struct command *command) {
    command->attached = true;
    command->say_started = command->started;
    command->say_known = true;
    command->exit_sent = false;
    command->say_input = command->has_input;
    for (int i = 0; i < 2; i++) output_rewind(&command->output[i], command->output[i].base);
    sender_wake(&command->sender);
}

bool command_start(uint32_t id, char *payload, size_t length) {
    struct command *command = command_find(id);
    if (command) {
        start_again(command);
        return true;
    }
    struct start start;
    bool well_formed = start_parse(&start, payload, length);
    if (!well_formed) {
        start_free(&start);
        return false;
    }
    command = command_new(id);
    if (command && start.problem) {
        command_fail(command, *start.problem ? "exec" : "no_memory", EINVAL, start.problem);
    } else if (command && *start.session) {
        session_start(command, &start);
    } else if (command) {
        struct plumbing plumbing;
        if (!begin(command, &start, &plumbing)) command_fail(command, code_of(errno), errno, strerror(errno));
        plumbing_close(&plumbing);
    }
    start_free(&start);
    return true;
}
