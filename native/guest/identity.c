/*
 * See identity.h. The two files belong to the sandbox, so nothing is assumed of them: regular files of at most 4 MiB,
 * opened without blocking, lines of any form. The rules are those of container engines: an unknown name is an error,
 * an unknown number is taken as it is with group 0; supplementary groups only when no group was named.
 */
#include "identity.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_FILE = 4 * 1024 * 1024, MAX_NAME = 256 };

static char *slurp(const char *path) {
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
    struct stat info;
    if (fd < 0) return NULL;
    char *text = NULL;
    if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_size <= MAX_FILE) text = malloc((size_t)info.st_size + 1);
    if (text) {
        size_t length = 0;
        ssize_t count;
        while (length < (size_t)info.st_size && (count = read(fd, text + length, (size_t)info.st_size - length)) > 0)
            length += (size_t)count;
        text[length] = '\0';
    }
    close(fd);
    return text;
}

/* Cuts the next line off `*text` and splits it at colons; returns the number of fields, 0 at the end. */
static int next_entry(char **text, char *fields[], int max) {
    if (!*text || !**text) return 0;
    char *line = *text, *end = strchr(line, '\n');
    *text = end ? end + 1 : NULL;
    if (end) *end = '\0';
    int count = 1;
    fields[0] = line;
    for (char *at = line; count < max && (at = strchr(at, ':'));) {
        *at++ = '\0';
        fields[count++] = at;
    }
    return count;
}

static bool to_number(const char *text, uint32_t *number) {
    if (*text < '0' || *text > '9') return false;
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (*end || errno || value >= UINT32_MAX) return false;
    *number = (uint32_t)value;
    return true;
}

static bool find_user(const char *user, struct identity *identity, char *name) {
    char *file = slurp("/etc/passwd"), *rest = file, *fields[7];
    uint32_t number = 0, uid, gid;
    bool numeric = to_number(user, &number), found = false;
    for (int count; !found && (count = next_entry(&rest, fields, 7));) {
        if (count < 4 || !to_number(fields[2], &uid) || !to_number(fields[3], &gid)) continue;
        if (strcmp(fields[0], user) != 0 && !(numeric && uid == number)) continue;
        found = true;
        identity->uid = uid;
        identity->gid = gid;
        strncpy(name, fields[0], MAX_NAME - 1);
        if (count > 5 && fields[5][0] == '/') strncpy(identity->home, fields[5], sizeof identity->home - 1);
    }
    free(file);
    if (found || !numeric) return found;
    identity->uid = number;
    return true;
}

static bool is_member(char *members, const char *name) {
    size_t length = strlen(name);
    for (char *at = members; length && (at = strstr(at, name)); at += length) {
        bool starts = at == members || at[-1] == ',';
        if (starts && (at[length] == '\0' || at[length] == ',')) return true;
    }
    return false;
}

static bool find_group(const char *group, gid_t *gid) {
    uint32_t number = 0, entry;
    bool numeric = to_number(group, &number), found = false;
    char *file = numeric ? NULL : slurp("/etc/group"), *rest = file, *fields[4];
    for (int count; !found && (count = next_entry(&rest, fields, 4));) {
        found = count >= 3 && strcmp(fields[0], group) == 0 && to_number(fields[2], &entry);
        if (found) number = entry;
    }
    free(file);
    *gid = number;
    return numeric || found;
}

static void find_supplementary(struct identity *identity, const char *name) {
    char *file = slurp("/etc/group"), *rest = file, *fields[4];
    uint32_t gid;
    identity->groups[identity->group_count++] = identity->gid;
    for (int count; identity->group_count < MAX_GROUPS && (count = next_entry(&rest, fields, 4));) {
        if (count < 4 || !to_number(fields[2], &gid) || gid == identity->gid) continue;
        if (is_member(fields[3], name)) identity->groups[identity->group_count++] = gid;
    }
    free(file);
}

bool identity_resolve(const char *user, struct identity *identity) {
    char name[MAX_NAME] = "", text[2 * MAX_NAME];
    *identity = (struct identity){.home = "/"};
    if (strlen(user) >= sizeof text) {
        identity->problem = "the user's name is too long";
        return false;
    }
    strcpy(text, *user ? user : "0");
    char *group = strchr(text, ':');
    if (group) *group++ = '\0';
    if (!find_user(*text ? text : "0", identity, name)) {
        identity->problem = "no such user in the sandbox's /etc/passwd";
        return false;
    }
    if (!group) {
        find_supplementary(identity, name);
        return true;
    }
    identity->problem = find_group(group, &identity->gid) ? NULL : "no such group in the sandbox's /etc/group";
    identity->groups[identity->group_count++] = identity->gid;
    return !identity->problem;
}

bool identity_assume(const struct identity *identity) {
    return setgroups(identity->group_count, identity->groups) == 0 &&
           setresgid(identity->gid, identity->gid, identity->gid) == 0 &&
           setresuid(identity->uid, identity->uid, identity->uid) == 0;
}
