/* See shell.h. */
#include "shell.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* The kernel takes at most 128 KiB in one argument. */
enum { MAX_ARGUMENT = 120 * 1024 };

static const char *const shells[] = {"/bin/bash", "/bin/sh"};

/* A large script is read from a memory file; its own first words close the descriptor, on line 1 so that line numbers stay. */
static const char *script_in_memory(const struct launch *launch) {
    static const char close_it[] = "exec 9<&-; ";
    int fd = memfd_create("script", 0);
    if (fd < 0 || write(fd, close_it, sizeof close_it - 1) < 0) return NULL;
    for (size_t done = 0; done < launch->script_length;) {
        ssize_t count = write(fd, launch->script + done, launch->script_length - done);
        if (count < 0) return NULL;
        done += (size_t)count;
    }
    if (fd != SHELL_TEXT_FD && (dup2(fd, SHELL_TEXT_FD) < 0 || close(fd) < 0)) return NULL;
    return ". /proc/self/fd/9";
}

const char *shell_execute_script(const struct launch *launch) {
    const char *script = launch->script_length > MAX_ARGUMENT ? script_in_memory(launch) : launch->script;
    if (!script) return "keeping the script in memory";
    for (size_t i = 0; i < 2; i++) {
        char *argv[] = {(char *)(uintptr_t)shells[i], (char *)(uintptr_t)"-c", (char *)(uintptr_t)script, NULL};
        execve(shells[i], argv, launch->env);
        if (errno != ENOENT) return shells[i];
    }
    return shells[1];
}

/*
 * The driver of a session. Its names begin with __ods. One round: a line on 8 says go; the text comes from 9 (a memory
 * file the agent fills, whose offset it shares); the code on 7 evaluates it with 7, 8 and 9 closed; the status goes to 8.
 *
 * The text is evaluated in a sourced file, at top level and inside a loop of one round, so that `return`, `break` and
 * `continue` end the text and nothing else, `declare` makes globals and `$?` of the text before is seen.
 * Tracing (set -x) is off in the driver. On SHELL_RETURN_SIGNAL the text is given up: `return` in a trap leaves the sourced file; in bash a DEBUG trap that
 * returns 2 (extdebug) leaves functions on the way as well. Between texts the signal means nothing: `return` there would end the shell.
 */
static const char code[] = "eval \"${__ods_t:+set -x; }$__ods_c\" 7<&- 8<&- 9<&-\n";

#define DRIVER(PREPARE, ABORT, READ, RECOVER)                                                  \
    PREPARE "__ods_s=0; __ods_t=; __ods_i=; __ods_r() { return $__ods_s; }\n"                              \
    "trap 'case $__ods_i in 1) " ABORT "return 143;; esac' 63\n"                               \
    "while IFS= read -r __ods_g <&8; do\n"                                                     \
    READ "\n"                                                                                  \
    "__ods_i=1\n"                                                                              \
    RECOVER "case $- in *e*) ;; *) __ods_r;; esac\n"                                           \
    "for __ods_g in 1; do . /proc/self/fd/7; done\n"                                           \
    "{ __ods_s=$?; __ods_i=; case $- in *x*) __ods_t=1; set +x;; *) __ods_t=;; esac; } 2>/dev/null\n"    \
    RECOVER "printf '%d\\n' \"$__ods_s\" >&8\n"                                                \
    "done\n"

static const char bash_driver[] =
    DRIVER("shopt -s expand_aliases; __ods_x=; __ods_a() { return 2; }; ",
           "__ods_x=1; shopt -s extdebug; trap \"((\\${#BASH_SOURCE[@]} == 0)) || __ods_a\" DEBUG; ",
           "IFS= read -r -d \"\" __ods_c <&9 || :",
           "if [[ $__ods_x ]]; then trap - DEBUG; shopt -u extdebug; __ods_x=; fi\n");

static const char sh_driver[] = DRIVER("", "", "__ods_c=$(cat <&9)", "");

const char *shell_execute_session(const struct launch *launch) {
    int fd = memfd_create("code", 0);
    if (fd < 0 || write(fd, code, sizeof code - 1) < 0) return "keeping the session's driver in memory";
    if (fd != SHELL_CODE_FD && (dup2(fd, SHELL_CODE_FD) < 0 || close(fd) < 0)) return "keeping the session's driver in memory";
    const char *bash[] = {"bash", "--norc", "--noprofile", "-c", bash_driver, "bash", NULL};
    const char *sh[] = {"sh", "-c", sh_driver, "sh", NULL};
    execve(shells[0], (char **)(uintptr_t)bash, launch->env);
    if (errno != ENOENT) return shells[0];
    execve(shells[1], (char **)(uintptr_t)sh, launch->env);
    return shells[1];
}
