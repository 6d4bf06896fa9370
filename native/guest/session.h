/* Sessions: shells that live on, each running its commands one after the other. */
#ifndef OPENDSEC_SESSION_H
#define OPENDSEC_SESSION_H

#include "command.h"
#include "spawn.h"
#include "start.h"

/* Begins or queues the command in the session START names; answers with ERROR when it cannot. */
void session_start(struct command *command, const struct start *start, const char *payload, size_t length);
/* The command's output is complete: its session has its pipes back and goes on. */
void session_take_back(struct command *command);
/* The exec of a new session's shell failed. */
void session_lost(struct session *session, const struct spawn_failure *failure);
/* KILL or timeout: every process of the session but its shell. */
void session_end_command(struct command *command, uint64_t grace_ms);
void session_signal(struct command *command, int signal);
/* SESSION_END; false: malformed. */
bool session_end_frame(uint32_t id, char *payload, size_t length);
void session_end_all(void);

#endif
