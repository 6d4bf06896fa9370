/*
 * Sessions: shells that live on, each running its commands one after the other.
 *
 * A session's two output pipes are lent to the command that runs; between commands what background jobs write is
 * discarded. The shell takes its orders from a driver of ours (shell.c): a line on its control socket means "run what
 * the text file holds", a line back is the exit status.
 */
#ifndef OPENDSEC_SESSION_H
#define OPENDSEC_SESSION_H

#include "command.h"
#include "start.h"

/* Queues the command in the session START names, made if need be; answers with ERROR when it cannot. */
void session_start(struct command *command, struct start *start);
/* The command's output is complete: its session has its pipes back and goes on. */
void session_take_back(struct command *command);
/* The command is forgotten while it waits or runs. */
void session_forget(struct command *command);
/* KILL or timeout: every process of the session but its shell. */
void session_end_command(struct command *command, uint64_t grace_ms);
/* To every process of the session but its shell. */
void session_signal(struct command *command, int signal);
/* SESSION_END; false: malformed. */
bool session_end_frame(uint32_t id, char *payload, size_t length);
void session_end_all(void);

#endif
