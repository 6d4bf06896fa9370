#include "session.h"
void session_start(struct command *command, const struct start *start, const char *payload, size_t length) {
    (void)start,(void)payload,(void)length; command_fail(command, "unsupported", 0, "sessions"); }
void session_take_back(struct command *command) {(void)command;}
void session_lost(struct session *session, const struct spawn_failure *failure){(void)session,(void)failure;}
void session_end_command(struct command *command, uint64_t grace_ms){(void)command,(void)grace_ms;}
void session_signal(struct command *command, int signal){(void)command,(void)signal;}
bool session_end_frame(uint32_t id, char *payload, size_t length){(void)id,(void)payload,(void)length;return true;}
void session_end_all(void){}
