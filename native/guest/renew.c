/*
 * What makes one machine out of many that were restored from the same memory: time, randomness, names, addresses.
 *
 * The generation id is written last: who sees a new one finds everything else renewed.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/random.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "machine.h"

enum { MAX_ENTROPY = 512 };

static bool set_clock(uint64_t clock_ns, struct problem *problem) {
    struct timespec now = {.tv_sec = (time_t)(clock_ns / 1000000000), .tv_nsec = (long)(clock_ns % 1000000000)};
    if (!clock_ns || clock_settime(CLOCK_REALTIME, &now) == 0) return true;
    return problem_set(problem, "the clock");
}

/* New input, and at once a new key made of it: without RNDRESEEDCRNG the old one is used for up to a minute. */
static bool stir(const struct renewal *renewal, struct problem *problem) {
    struct {
        int entropy_count, buf_size; /* struct rand_pool_info */
        char bytes[MAX_ENTROPY];
    } pool;
    if (!renewal->entropy_length) return true;
    errno = E2BIG;
    if (renewal->entropy_length > MAX_ENTROPY) return problem_set(problem, "entropy");
    pool.buf_size = (int)renewal->entropy_length;
    pool.entropy_count = pool.buf_size * 8;
    memcpy(pool.bytes, renewal->entropy, renewal->entropy_length);
    int fd = openat(machine_root(), "dev/urandom", O_RDWR | O_CLOEXEC);
    bool stirred = fd >= 0 && ioctl(fd, RNDADDENTROPY, &pool) == 0 && ioctl(fd, RNDRESEEDCRNG) == 0;
    int error = errno;
    if (fd >= 0) close(fd);
    explicit_bzero(&pool, sizeof pool);
    errno = error;
    return stirred || problem_set(problem, "the kernel's random generator");
}

bool renew_begin(const struct renewal *renewal, bool first, struct problem *problem) {
    if (!set_clock(renewal->clock_ns, problem) || !stir(renewal, problem)) return false;
    const char *name = *renewal->host_name || !first ? renewal->host_name : "sandbox";
    return !*name || sethostname(name, strlen(name)) == 0 || problem_set(problem, "the host name");
}

bool renew_finish(const struct renewal *renewal, struct problem *problem) { return facts_write(renewal, false, problem); }
