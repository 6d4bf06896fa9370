/* Writes to a file in ways that leave its bytes in the page cache, or never let them in: for tests of packing.
 *
 * `mapped PATH` counts up in every 4 KiB page of 4 MiB through a shared mapping; `direct PATH` does so with O_DIRECT,
 * in pages of 4 KiB that hold one number each. Both write a round number first to last, for ever, so at any moment a
 * file holds at most two neighbouring numbers, the higher ones first.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 1024 };

static void fail(const char *what) {
    perror(what);
    exit(1);
}

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    int direct = strcmp(argv[1], "direct") == 0;
    int fd = open(argv[2], O_RDWR | O_CREAT | (direct ? O_DIRECT : 0), 0644);
    if (fd < 0 || ftruncate(fd, (off_t)PAGE * PAGES) != 0)
        fail(argv[2]);
    uint64_t *page;
    volatile uint64_t *mapped = NULL;
    if (posix_memalign((void **)&page, PAGE, PAGE) != 0)
        fail("memory");
    if (!direct && (mapped = mmap(NULL, (size_t)PAGE * PAGES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) == MAP_FAILED)
        fail("mmap");
    for (uint64_t round = 1;; round++) {
        for (int number = 0; number < PAGES; number++) {
            if (!direct) {
                mapped[(size_t)number * PAGE / sizeof *mapped] = round;
                continue;
            }
            page[0] = round;
            if (pwrite(fd, page, PAGE, (off_t)number * PAGE) != PAGE)
                fail("pwrite");
        }
    }
}
