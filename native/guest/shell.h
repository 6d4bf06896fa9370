/* Running command lines by the image's own shell. Used in forked children only. */
#ifndef OPENDSEC_SHELL_H
#define OPENDSEC_SHELL_H

#include "spawn.h"

#define DEFAULT_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

enum { SHELL_CODE_FD = 7, SHELL_CONTROL_FD = 8, SHELL_TEXT_FD = 9 };

/* To a session's shell: give up the command text you are in. A real-time signal that nobody else uses. */
enum { SHELL_RETURN_SIGNAL = 63 };

/* Both return only on failure, with errno and the shell that was tried. */
const char *shell_execute_script(const struct launch *launch);
const char *shell_execute_session(const struct launch *launch);

#endif
