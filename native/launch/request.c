/* Parsing of requests. It refuses what is unknown, missing, doubled or too much, by the name of the key; it opens and changes nothing. */
#include "launch/request.h"

#include <errno.h>
#include <linux/mount.h>
#include <stdlib.h>
#include <string.h>

struct parser {
    struct request *request;
    const int *fds;
    unsigned fd_count;
    const char *message;
};

static bool refuse(struct parser *parser, const char *message)
{
    parser->message = message;
    return false;
}

/* ── values ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────── */

/* A number up to the end of the string or the given separator; moves *text behind both. */
static bool number(struct parser *parser, char **text, int base, char separator, uint64_t *value)
{
    char *end;
    errno = 0;
    if (**text < '0' || **text > 'z')
        return refuse(parser, "expected a number");
    *value = strtoull(*text, &end, base);
    if (errno != 0 || end == *text || (*end != '\0' && *end != separator))
        return refuse(parser, "expected a number");
    *text = *end == '\0' ? end : end + 1;
    return true;
}

static bool descriptor(struct parser *parser, char **text, int *fd)
{
    uint64_t index;
    if (**text != '@')
        return refuse(parser, "expected @N, the number of an attached descriptor");
    (*text)++;
    if (!number(parser, text, 10, ' ', &index))
        return false;
    if (index >= parser->fd_count)
        return refuse(parser, "no such descriptor is attached");
    *fd = parser->fds[index];
    return true;
}

static bool absolute(struct parser *parser, const char *path)
{
    return path[0] == '/' || refuse(parser, "expected an absolute path");
}

/* The word up to the next blank, which is overwritten; moves *text behind it. NULL: there is no blank. */
static char *word(char **text)
{
    char *start = *text, *blank = strchr(start, ' ');
    if (blank == NULL)
        return NULL;
    *blank = '\0';
    *text = blank + 1;
    return start;
}

/* ── keys ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────── */

static bool seq_key(struct parser *parser, char *text)
{
    return number(parser, &text, 10, '\0', &parser->request->seq);
}

static bool lower_key(struct parser *parser, char *text)
{
    struct request *r = parser->request;
    if (r->lowers == MAX_LOWER)
        return refuse(parser, "too many");
    return descriptor(parser, &text, &r->lower[r->lowers++]);
}

static bool upper_key(struct parser *parser, char *text)
{
    parser->request->upper = text;
    return absolute(parser, text);
}

static bool work_key(struct parser *parser, char *text)
{
    parser->request->work = text;
    return absolute(parser, text);
}

static bool idmap_key(struct parser *parser, char *text)
{
    struct request *r = parser->request;
    uint64_t inside, outside, count;
    if (!number(parser, &text, 10, ' ', &inside) || !number(parser, &text, 10, ' ', &outside) || !number(parser, &text, 10, '\0', &count))
        return false;
    if (inside != 0 || outside == 0 || count == 0 || outside + count > UINT32_MAX)
        return refuse(parser, "expected 0 OUTSIDE COUNT with OUTSIDE above 0");
    r->inside = (uint32_t)inside;
    r->outside = (uint32_t)outside;
    r->count = (uint32_t)count;
    return true;
}

static bool hostname_key(struct parser *parser, char *text)
{
    parser->request->hostname = text;
    return strlen(text) <= 64 || refuse(parser, "longer than 64 bytes");
}

static bool cgroup2_key(struct parser *parser, char *text)
{
    return descriptor(parser, &text, &parser->request->cgroup2);
}

static bool cgroup1_key(struct parser *parser, char *text)
{
    struct request *r = parser->request;
    if (r->cgroup1s == MAX_CGROUP1)
        return refuse(parser, "too many");
    return descriptor(parser, &text, &r->cgroup1[r->cgroup1s++]);
}

static bool listen_key(struct parser *parser, char *text)
{
    return descriptor(parser, &text, &parser->request->listen);
}

static bool guest_key(struct parser *parser, char *text)
{
    return descriptor(parser, &text, &parser->request->guest);
}

static bool arg_key(struct parser *parser, char *text)
{
    struct request *r = parser->request;
    if (r->arg_count == MAX_ARGS)
        return refuse(parser, "too many");
    r->args[r->arg_count++] = text;
    return true;
}

static bool bind_options(struct parser *parser, char *options, uint64_t *attributes)
{
    *attributes = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV;
    for (char *option = strtok(options, ","); option != NULL; option = strtok(NULL, ",")) {
        if (strcmp(option, "ro") == 0)
            *attributes |= MOUNT_ATTR_RDONLY;
        else if (strcmp(option, "dev") == 0)
            *attributes &= ~(uint64_t)MOUNT_ATTR_NODEV;
        else if (strcmp(option, "rw") != 0)
            return refuse(parser, "unknown option");
    }
    return true;
}

static bool bind_key(struct parser *parser, char *text)
{
    struct request *r = parser->request;
    if (r->bind_count == MAX_BINDS)
        return refuse(parser, "too many");
    struct bind *bind = &r->binds[r->bind_count++];
    if (!descriptor(parser, &text, &bind->fd))
        return false;
    char *options = word(&text);
    if (options == NULL)
        return refuse(parser, "expected @N OPTIONS TARGET");
    bind->target = text;
    return bind_options(parser, options, &bind->attributes) && absolute(parser, text);
}

static bool tmpfs_key(struct parser *parser, char *text)
{
    struct request *r = parser->request;
    if (r->tmpfs_count == MAX_TMPFS)
        return refuse(parser, "too many");
    struct tmpfs *tmpfs = &r->tmpfs[r->tmpfs_count++];
    tmpfs->options = word(&text);
    tmpfs->target = text;
    if (tmpfs->options == NULL)
        return refuse(parser, "expected OPTIONS TARGET");
    return absolute(parser, text);
}

static bool devpts_key(struct parser *parser, char *text)
{
    parser->request->devpts = text;
    return absolute(parser, text);
}

static bool mask_key(struct parser *parser, char *text)
{
    struct request *r = parser->request;
    if (r->mask_count == MAX_MASKS)
        return refuse(parser, "too many");
    r->masks[r->mask_count++] = text;
    return absolute(parser, text);
}

static bool overlay_key(struct parser *parser, char *text)
{
    struct request *r = parser->request;
    if (r->overlay_count == MAX_OVERLAY)
        return refuse(parser, "too many");
    r->overlay[r->overlay_count++] = text;
    return true;
}

static bool caps_key(struct parser *parser, char *text)
{
    return number(parser, &text, 16, '\0', &parser->request->caps);
}

static bool rlimit_key(struct parser *parser, char *text)
{
    struct request *r = parser->request;
    uint64_t which;
    if (r->rlimit_count == MAX_RLIMITS)
        return refuse(parser, "too many");
    struct limit *limit = &r->rlimits[r->rlimit_count++];
    if (!number(parser, &text, 10, ' ', &which) || !number(parser, &text, 10, ' ', &limit->soft) || !number(parser, &text, 10, '\0', &limit->hard))
        return false;
    limit->number = (int)which;
    return (which < 64 && limit->soft <= limit->hard) || refuse(parser, "expected NUMBER SOFT HARD with SOFT at most HARD");
}

static bool root_key(struct parser *parser, char *text)
{
    for (char *option = strtok(text, ","); option != NULL; option = strtok(NULL, ",")) {
        if (strcmp(option, "ro") == 0)
            parser->request->root_attributes |= MOUNT_ATTR_RDONLY;
        else if (strcmp(option, "nosuid") == 0)
            parser->request->root_attributes |= MOUNT_ATTR_NOSUID;
        else
            return refuse(parser, "expected ro, nosuid or both");
    }
    return true;
}

/* Only what belongs to the sandbox's own IPC namespace: anything else would be the host's. */
static bool sysctl_key(struct parser *parser, char *text)
{
    static const char *const known[] = {"kernel/shmmni", "kernel/msgmni", "kernel/sem", "fs/mqueue/queues_max"};
    struct request *r = parser->request;
    if (r->sysctl_count == MAX_SYSCTLS)
        return refuse(parser, "too many");
    struct sysctl *sysctl = &r->sysctls[r->sysctl_count++];
    sysctl->name = word(&text);
    sysctl->value = text;
    for (unsigned i = 0; sysctl->name != NULL && i < sizeof(known) / sizeof(known[0]); i++)
        if (strcmp(sysctl->name, known[i]) == 0)
            return true;
    return refuse(parser, "expected NAME VALUE, NAME one of the IPC namespace");
}

static bool netns_key(struct parser *parser, char *text)
{
    return strcmp(text, "new") == 0 || refuse(parser, "only new is known");
}

static const struct key {
    const char *name;
    bool (*parse)(struct parser *parser, char *text);
    bool list, optional;
} keys[] = {
    {"seq", seq_key, false, false},         {"lower", lower_key, true, false},      {"upper", upper_key, false, false},
    {"work", work_key, false, false},       {"idmap", idmap_key, false, false},     {"hostname", hostname_key, false, false},
    {"cgroup2", cgroup2_key, false, false}, {"cgroup1", cgroup1_key, true, true},   {"listen", listen_key, false, false},
    {"guest", guest_key, false, false},     {"arg", arg_key, true, true},           {"bind", bind_key, true, true},
    {"tmpfs", tmpfs_key, true, true},       {"devpts", devpts_key, false, true},    {"mask", mask_key, true, true},
    {"overlay", overlay_key, true, true},   {"caps", caps_key, false, false},       {"rlimit", rlimit_key, true, true},
    {"netns", netns_key, false, false},     {"root", root_key, false, true},        {"sysctl", sysctl_key, true, true},
};
enum { KEYS = sizeof(keys) / sizeof(keys[0]) };

static bool parse_pair(struct parser *parser, char *pair, struct mistake *mistake)
{
    char *value = strchr(pair, '=');
    if (value != NULL)
        *value++ = '\0';
    for (unsigned i = 0; value != NULL && i < KEYS; i++) {
        if (strcmp(pair, keys[i].name) != 0)
            continue;
        mistake->key = keys[i].name;
        if ((parser->request->seen & (1u << i)) != 0 && !keys[i].list)
            return refuse(parser, "given twice");
        parser->request->seen |= 1u << i;
        return keys[i].parse(parser, value);
    }
    mistake->key = "request";
    return refuse(parser, "holds an unknown key");
}

bool request_parse(struct request *request, char *packet, size_t length, const int *fds, unsigned fd_count, struct mistake *mistake)
{
    struct parser parser = {.request = request, .fds = fds, .fd_count = fd_count, .message = ""};
    memset(request, 0, sizeof(*request));
    mistake->key = "request";
    if (length == 0 || packet[length - 1] != '\0')
        parser.message = "does not end with a NUL";
    for (char *pair = packet; parser.message[0] == '\0' && pair < packet + length;) {
        char *next = pair + strlen(pair) + 1;
        parse_pair(&parser, pair, mistake);
        pair = next;
    }
    for (unsigned i = 0; parser.message[0] == '\0' && i < KEYS; i++) {
        if (!keys[i].optional && (request->seen & (1u << i)) == 0) {
            mistake->key = keys[i].name;
            parser.message = "is missing";
        }
    }
    mistake->message = parser.message;
    return parser.message[0] == '\0';
}
