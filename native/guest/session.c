/* See session.h. */
#include "session.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shell.h"
#include "spawn.h"

enum { MAX_SESSIONS = 64, MAX_NAME = 255, MAX_WAITING = 64, ROUND_MS = 5, MAX_ROUNDS = 200, AGAIN_MS = 100, RETURN_MS = 1000 };

/* How far the ending of the running command has come. */
enum stage { STAGE_NONE, STAGE_GRACE, STAGE_KILLING, STAGE_RETURNING };

struct session {
    struct garbage garbage;
    struct session *next;
    char name[MAX_NAME + 1];
    pid_t pid; /* 0: the shell is gone */
    struct child child;
    struct tree tree;
    struct source status, control, idle[2];
    struct timer timer;
    enum stage stage;
    int text, rounds, reported; /* `reported`: the shell's status while the rest is being ended, else -1 */
    bool ready, fresh, asked; /* `asked`: to give up the text */
    struct command *running, *first;
};

static void exec_reported(struct source *source, uint32_t events);
static void shell_exited(struct child *child, int status, const struct rusage *usage);
static void session_return(struct timer *timer);

static struct session *sessions;
static unsigned session_count;
static uint32_t tree_number;

static struct session *session_find(const char *name) {
    struct session *session = sessions;
    while (session && strcmp(session->name, name) != 0) session = session->next;
    return session;
}

static void idle_ready(struct source *source, uint32_t events) {
    (void)events;
    if (discard_some(source->fd)) source_close(source);
}

static void session_keep_pipe(struct session *session, int number, int fd) {
    if (fd >= 0 && !source_add(&session->idle[number], fd, EPOLLIN, idle_ready)) close(fd);
}

static void dismiss_waiting(struct session *session) {
    while (session->first) {
        struct command *command = session->first;
        session->first = command->next_in_session;
        command->session = NULL;
        command_fail(command, "cancelled", 0, "the session ended before this command began");
    }
}

/* Out of the list: its name can be used again at once. Freed when the shell is gone and no command holds its pipes. */
static void session_unlist(struct session *session) {
    struct session **at = &sessions;
    while (*at && *at != session) at = &(*at)->next;
    if (!*at) return;
    *at = session->next;
    session_count--;
}

static void session_close(struct session *session) {
    session_unlist(session);
    timer_stop(&session->timer);
    child_forget(&session->child);
    source_close(&session->status);
    source_close(&session->control);
    for (int i = 0; i < 2; i++) {
        if (session->idle[i].fd >= 0) discard_rest(source_release(&session->idle[i]));
    }
    if (session->text >= 0) close(session->text);
    session->text = -1;
    tree_retire(&session->tree);
    if (!session->running) loop_free(&session->garbage);
}

static bool put_text(int fd, const char *text, size_t length) {
    if (ftruncate(fd, 0) < 0 || lseek(fd, 0, SEEK_SET) < 0) return false;
    for (size_t done = 0; done < length;) {
        ssize_t count = pwrite(fd, text + done, length - done, (off_t)done);
        if (count < 0) return false;
        done += (size_t)count;
    }
    return true;
}

static void begin(struct session *session, struct command *command) {
    session->running = command;
    session->reported = -1;
    session->stage = STAGE_NONE;
    session->asked = false;
    command->pid = session->pid;
    command->begin_ns = now_ns();
    if (session->fresh) command->exit_flags |= EXIT_MADE_SHELL;
    session->fresh = false;
    bool told = put_text(session->text, command->payload, command->payload_length) &&
                send(session->control.fd, "\n", 1, MSG_NOSIGNAL | MSG_DONTWAIT) == 1;
    free(command->payload);
    command->payload = NULL;
    if (!told) return command_fail(command, "no_memory", errno, "the command could not be handed to the session's shell");
    int out = source_release(&session->idle[0]), err = source_release(&session->idle[1]);
    command_take_output(command, out, err); /* -1: the shell has closed its own */
    command_arm(command);
    command_started(command);
}

static void session_next(struct session *session) {
    if (session->running || !session->ready || !session->first) return;
    struct command *command = session->first;
    session->first = command->next_in_session;
    begin(session, command);
}

void session_take_back(struct command *command) {
    struct session *session = command->session;
    command->session = NULL;
    session->running = NULL;
    for (int i = 0; i < 2; i++) {
        int fd = source_release(&command->output[i].source);
        if (session->pid) session_keep_pipe(session, i, fd);
        else if (fd >= 0) discard_rest(fd);
    }
    if (session->pid) session_next(session);
    else session_close(session);
}

void session_forget(struct command *command) {
    struct session *session = command->session;
    if (!session) return;
    if (session->running == command) return session_take_back(command);
    struct command **at = &session->first;
    while (*at && *at != command) at = &(*at)->next_in_session;
    if (*at) *at = command->next_in_session;
    command->session = NULL;
}

static void finish_running(struct session *session, int status) {
    struct command *command = session->running;
    timer_stop(&session->timer);
    session->stage = STAGE_NONE;
    command->end_ns = now_ns();
    command_ended(command, command->reason ? SIGTERM : status);
}

/* SIGKILL to all but the shell, held still meanwhile, until none is left. */
static void kill_round(struct timer *timer) {
    struct session *session = HOLDER(timer, struct session, timer);
    int left = tree_signal(&session->tree, SIGKILL, session->pid);
    if (left && ++session->rounds < MAX_ROUNDS && tree_has_cgroups()) return timer_set(timer, ROUND_MS, kill_round);
    tree_freeze(&session->tree, false);
    if (session->reported >= 0) return finish_running(session, session->reported << 8);
    session->stage = STAGE_RETURNING;
    session_return(timer);
}

static void kill_others(struct session *session) {
    session->stage = STAGE_KILLING;
    session->rounds = 0;
    tree_freeze(&session->tree, true);
    kill_round(&session->timer);
}

static void grace_over(struct timer *timer) { kill_others(HOLDER(timer, struct session, timer)); }

/* SIGKILL did not end the shell in time: it counts as gone. */
static void shell_lost(struct timer *timer) {
    struct session *session = HOLDER(timer, struct session, timer);
    child_forget(&session->child);
    shell_exited(&session->child, SIGKILL, NULL);
}

static void session_kill(struct session *session) {
    tree_kill(&session->tree);
    timer_set(&session->timer, LINGER_MS, shell_lost);
}

static void shell_stuck(struct timer *timer) { session_kill(HOLDER(timer, struct session, timer)); }

static void ask(struct timer *timer) {
    struct session *session = HOLDER(timer, struct session, timer);
    session->asked = true;
    kill(session->pid, SHELL_RETURN_SIGNAL);
    timer_set(timer, RETURN_MS, shell_stuck);
}

/*
 * The shell is asked to give up the command text it is in; if it does not it goes too. One that was asked before the grace
 * may be about to: a second signal that comes when it has just left the text would end it.
 */
static void session_return(struct timer *timer) {
    if (HOLDER(timer, struct session, timer)->asked) return timer_set(timer, AGAIN_MS, ask);
    ask(timer);
}

void session_end_command(struct command *command, uint64_t grace_ms) {
    struct session *session = command->session;
    if (session->running != command) return command_fail(command, "cancelled", 0, "ended before it began");
    if (session->stage > STAGE_GRACE || !session->pid) return;
    if (!grace_ms) return kill_others(session);
    session->stage = STAGE_GRACE;
    if (!session->asked) kill(session->pid, SHELL_RETURN_SIGNAL);
    session->asked = true;
    tree_signal(&session->tree, SIGTERM, session->pid);
    tree_signal(&session->tree, SIGCONT, session->pid);
    timer_set(&session->timer, grace_ms, grace_over);
}

void session_signal(struct command *command, int signal) {
    if (command->session->running == command) tree_signal(&command->session->tree, signal, command->session->pid);
}

static void control_ready(struct source *source, uint32_t events) {
    (void)events;
    struct session *session = HOLDER(source, struct session, control);
    char line[32];
    ssize_t count = recv(source->fd, line, sizeof line - 1, MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (count <= 0) return source_close(source); /* the shell closed it or ends; its exit follows */
    line[count] = '\0';
    if (!session->running || session->reported >= 0 || session->running->exited) return;
    int status = atoi(line) & 255;
    if (!session->running->reason) return finish_running(session, status << 8);
    session->reported = status;
    if (session->stage != STAGE_KILLING) kill_others(session);
}

static void shell_exited(struct child *child, int status, const struct rusage *usage) {
    (void)usage;
    struct session *session = HOLDER(child, struct session, child);
    struct command *command = session->running;
    session->pid = 0;
    if (session->status.fd >= 0) exec_reported(&session->status, 0);
    dismiss_waiting(session);
    session_unlist(session);
    if (!command) return session_close(session);
    tree_freeze(&session->tree, false);
    command->exit_flags |= EXIT_SHELL_GONE;
    if (command->reason) tree_kill(&session->tree);
    else if (WIFSIGNALED(status)) command->reason = REASON_SESSION;
    timer_stop(&session->timer);
    command->end_ns = now_ns();
    command_ended(command, status);
}

/* The shell's exec: the end of the pipe when it happened, a failure that the first command is answered with. */
static void exec_reported(struct source *source, uint32_t events) {
    (void)events;
    struct session *session = HOLDER(source, struct session, status);
    struct spawn_failure failure;
    ssize_t count = read(source->fd, &failure, sizeof failure);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
    source_close(source);
    if (count != sizeof failure) {
        session->ready = true;
        return session_next(session);
    }
    failure.code[sizeof failure.code - 1] = failure.message[sizeof failure.message - 1] = '\0';
    while (session->first) {
        struct command *command = session->first;
        session->first = command->next_in_session;
        command->session = NULL;
        command_fail(command, failure.code, failure.error, failure.message);
    }
    session_unlist(session);
}

/* Descriptors of a new session: ours and the shell's. */
struct plumbing {
    int out[2], err[2], status[2], control[2], text;
};

static bool plumbing_open(struct plumbing *plumbing) {
    *plumbing = (struct plumbing){{-1, -1}, {-1, -1}, {-1, -1}, {-1, -1}, -1};
    bool opened = pipe2(plumbing->out, O_CLOEXEC) == 0 && pipe2(plumbing->err, O_CLOEXEC) == 0 &&
                  pipe2(plumbing->status, O_CLOEXEC) == 0 &&
                  socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, plumbing->control) == 0;
    if (!opened || (plumbing->text = memfd_create("session", MFD_CLOEXEC)) < 0 || !spawn_has_room(plumbing->text)) return false;
    return fcntl(plumbing->out[0], F_SETFL, O_NONBLOCK) == 0 && fcntl(plumbing->err[0], F_SETFL, O_NONBLOCK) == 0;
}

static void plumbing_close(struct plumbing *plumbing, bool all) {
    int *pairs[] = {plumbing->out, plumbing->err, plumbing->status, plumbing->control};
    for (size_t i = 0; i < 4; i++) {
        if (pairs[i][1] >= 0) close(pairs[i][1]);
        if (all && pairs[i][0] >= 0) close(pairs[i][0]);
    }
    if (all && plumbing->text >= 0) close(plumbing->text);
}

/* The shell gets the second of each pair but of `control`, of which either will do. */
static bool shell_spawn(struct session *session, struct start *start, const struct plumbing *plumbing) {
    struct launch launch = {
        .env = start->env, .env_count = start->env_count, .cwd = start->cwd, .user = start->user,
        .in = 0, .out = plumbing->out[1], .err = plumbing->err[1], .status = plumbing->status[1],
        .control = plumbing->control[1], .text = plumbing->text, .cgroup = session->tree.fd,
    };
    pid_t pid = spawn(&launch);
    if (pid < 0) return false;
    session->pid = session->tree.pid = pid;
    child_register(&session->child, pid, shell_exited);
    return source_add(&session->status, plumbing->status[0], EPOLLIN, exec_reported) &&
           source_add(&session->control, plumbing->control[0], EPOLLIN, control_ready);
}

static struct session *session_make(const char *name, struct start *start) {
    struct session *session = calloc(1, sizeof *session);
    struct plumbing plumbing;
    if (!session) return NULL;
    session->status.fd = session->control.fd = session->idle[0].fd = session->idle[1].fd = -1;
    session->tree = (struct tree){.fd = -1, .watch.fd = -1};
    session->reported = -1;
    session->fresh = true;
    strcpy(session->name, name);
    bool made = plumbing_open(&plumbing) && tree_make(&session->tree, "ses", ++tree_number) &&
                shell_spawn(session, start, &plumbing);
    int error = errno;
    if (!made) { /* out of epoll first: the child may hold the same pipes for a moment, and keep them there */
        source_release(&session->status);
        source_release(&session->control);
    }
    plumbing_close(&plumbing, !made);
    if (!made) {
        child_forget(&session->child);
        tree_kill(&session->tree);
        tree_retire(&session->tree);
        loop_free(&session->garbage);
        errno = error;
        return NULL;
    }
    session->text = plumbing.text;
    session_keep_pipe(session, 0, plumbing.out[0]);
    session_keep_pipe(session, 1, plumbing.err[0]);
    session->next = sessions;
    sessions = session;
    session_count++;
    return session;
}

static bool enqueue(struct session *session, struct command *command, const struct start *start) {
    struct command **at = &session->first;
    int waiting = 0;
    for (; *at; at = &(*at)->next_in_session) waiting++;
    if (waiting >= MAX_WAITING) {
        command_fail(command, "session_busy", 0, "too many commands wait for this session already");
        return false;
    }
    command->payload = malloc(start->script_length + 1);
    if (!command->payload) {
        command_fail(command, "no_memory", ENOMEM, strerror(ENOMEM));
        return false;
    }
    memcpy(command->payload, start->script, start->script_length);
    command->payload_length = start->script_length;
    command->session = session;
    *at = command;
    return true;
}

void session_start(struct command *command, struct start *start) {
    command->timeout_ms = start->timeout_ms;
    command->grace_ms = start->grace_ms;
    command->input.closed = true;
    if (!start->script || start->flags)
        return command_fail(command, "unsupported", 0, "a session runs SCRIPT, with neither stdin nor a terminal");
    if (strlen(start->session) > MAX_NAME)
        return command_fail(command, "limit", 0, "the name of a session has at most 255 bytes");
    struct session *session = session_find(start->session);
    if (!session && session_count >= MAX_SESSIONS) return command_fail(command, "limit", 0, "at most 64 sessions");
    if (!session) session = session_make(start->session, start);
    if (!session) return command_fail(command, code_of(errno), errno, strerror(errno));
    if (enqueue(session, command, start)) session_next(session);
}

static void session_end(struct session *session) {
    if (session->running) session->running->reason = session->running->reason ? session->running->reason : REASON_SESSION;
    session_kill(session);
}

bool session_end_frame(uint32_t id, char *payload, size_t length) {
    struct cursor cursor = {payload, payload + length, false};
    char name[MAX_NAME + 1] = "";
    for (struct field field; field_next(&cursor, &field);) {
        if (field.tag != TAG_SESSION || field.length > MAX_NAME) continue;
        memcpy(name, field.data, field.length);
        name[field.length] = '\0';
    }
    if (cursor.bad) return false;
    struct session *session = session_find(name);
    if (session) {
        session_unlist(session);
        dismiss_waiting(session);
        session_end(session);
    }
    frame_send(FRAME_OK, id, 0, NULL, 0);
    return true;
}

void session_end_all(void) {
    for (struct session *session = sessions; session; session = session->next) session_end(session);
}
