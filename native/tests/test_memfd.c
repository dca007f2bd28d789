/* memfd.c: what a sealed memfd lets nobody do, and what is not taken for one. */
#include "../src/memfd.c"

#include <string.h>

#include "check.h"

enum { SIZE = 3 * KVP_PAGE_BYTES };

static void test_sealed(void)
{
    int fd;
    void *map;
    const void *seen;
    size_t size;
    CHECK(kvp_memfd_open("test", SIZE, &fd, &map) == KVP_OK);
    CHECK(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    CHECK(kvp_memfd_map(fd, &seen, &size) == KVP_CORRUPT); /* not sealed yet */
    CHECK(kvp_memfd_seal(fd) == KVP_OK);
    ((uint8_t *)map)[SIZE - 1] = 7; /* its maker still writes */
    CHECK(kvp_memfd_map(fd, &seen, &size) == KVP_OK && size == SIZE);
    CHECK(((const uint8_t *)seen)[SIZE - 1] == 7);
    CHECK(ftruncate(fd, 0) != 0 && ftruncate(fd, 2 * SIZE) != 0);
    CHECK(write(fd, "x", 1) != 1);
    CHECK(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, SIZE) != 0);
    CHECK(mmap(NULL, SIZE, PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED);
    CHECK(mprotect((void *)(uintptr_t)seen, size, PROT_READ | PROT_WRITE) != 0);
    CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE) != 0);
    CHECK(kvp_memfd_seal(fd) == KVP_SYSTEM);
    munmap((void *)(uintptr_t)seen, size);
    munmap(map, SIZE);
    close(fd);
}

static void test_other_files(void)
{
    const void *seen;
    size_t size;
    int ends[2];
    CHECK(kvp_memfd_map(-1, &seen, &size) == KVP_SYSTEM && errno == EBADF);
    CHECK(pipe(ends) == 0);
    CHECK(kvp_memfd_map(ends[0], &seen, &size) == KVP_CORRUPT);
    close(ends[0]);
    close(ends[1]);
    int zero = open("/dev/zero", O_RDONLY);
    CHECK(kvp_memfd_map(zero, &seen, &size) == KVP_CORRUPT);
    close(zero);
    int small = memfd_create("small", MFD_ALLOW_SEALING);
    CHECK(ftruncate(small, KVP_PAGE_BYTES - 1) == 0 && kvp_memfd_seal(small) == KVP_OK);
    CHECK(kvp_memfd_map(small, &seen, &size) == KVP_CORRUPT);
    close(small);
}

static void test_too_large(void)
{
    int fd;
    void *map;
    CHECK(kvp_memfd_open("huge", SIZE_MAX - 4095, &fd, &map) == KVP_SYSTEM);
    CHECK(kvp_memfd_open("huge", (size_t)INT64_MAX - 4095, &fd, &map) == KVP_SYSTEM);
}

static void test_nodes(void)
{
    CHECK(kvp_memory_node(1 << 20) == KVP_INVALID);
    kvp_status first = kvp_memory_node(0); /* a kernel or container may have no say in it */
    CHECK(first == KVP_OK || first == KVP_SYSTEM);
    CHECK(first != KVP_OK || kvp_memory_node(1023) == KVP_INVALID);
    CHECK(first != KVP_OK || kvp_memory_node(-1) == KVP_OK);
}

int main(void)
{
    test_nodes();
    test_sealed();
    test_other_files();
    test_too_large();
    return 0;
}
