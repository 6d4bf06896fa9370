/* A VMM's memory without a VMM: maps SIZE bytes, hands their faults to whoever listens at SOCKET as Firecracker does,
 * and obeys lines on its standard input: `r PAGE` prints the page's first number, `f PAGE COUNT` gives pages back,
 * `w PAGE NUMBER` writes.
 *
 *   toucher SOCKET SIZE
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

enum { PAGE = 4096 };

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void hand_over(const char *path, int uffd, void *memory, size_t size) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0) fail("connect");
    char text[256];
    int length = snprintf(text, sizeof text, "[{\"base_host_virt_addr\":%llu,\"size\":%zu,\"offset\":0,\"page_size\":%d}]",
                          (unsigned long long)(uintptr_t)memory, size, PAGE);
    union { char bytes[CMSG_SPACE(sizeof(int))]; struct cmsghdr align; } control = {0};
    struct iovec part = {text, (size_t)length};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(head), &uffd, sizeof uffd);
    if (sendmsg(fd, &message, 0) < 0) fail("sendmsg");
    close(fd);
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    size_t size = strtoull(argv[2], NULL, 0);
    char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail("mmap");
    int uffd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    if (uffd < 0) fail("userfaultfd");
    struct uffdio_api api = {.api = UFFD_API, .features = UFFD_FEATURE_EVENT_REMOVE};
    if (ioctl(uffd, UFFDIO_API, &api) < 0) fail("UFFDIO_API");
    struct uffdio_register wanted = {.range = {(uintptr_t)memory, size}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    if (ioctl(uffd, UFFDIO_REGISTER, &wanted) < 0) fail("UFFDIO_REGISTER");
    hand_over(argv[1], uffd, memory, size);
    char line[128];
    while (fgets(line, sizeof line, stdin)) {
        unsigned long page = 0, number = 0;
        int words = sscanf(line + 1, "%lu %lu", &page, &number);
        if (words < 1 || page * PAGE >= size) return 3;
        if (line[0] == 'f' && madvise(memory + page * PAGE, number * PAGE, MADV_DONTNEED) < 0) fail("madvise");
        if (line[0] == 'w') *(volatile uint64_t *)(memory + page * PAGE) = number;
        printf("%llu\n", (unsigned long long)*(volatile uint64_t *)(memory + (line[0] == 'f' ? 0 : page) * PAGE));
        fflush(stdout);
    }
    return 0;
}
