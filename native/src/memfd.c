/* Shared memory that one process writes and others can only read: sealed memfds.
 *
 * Owns: creating, prefaulting, sealing and checking seals. What lies in the bytes is its users'. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kvpool_memfd.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14, newer than some libc headers */
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010 /* Linux 5.1 */
#endif

enum { READER_SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE };

/* Close what a failed open has made, keeping the errno that says why it failed. */
static kvp_status undo(int fd, void *map, size_t size)
{
    int reason = errno;
    if (map != MAP_FAILED)
        munmap(map, size);
    if (fd >= 0)
        close(fd);
    errno = reason;
    return KVP_SYSTEM;
}

static int prefault(int fd, void *map, size_t size)
{
    if (madvise(map, size, MADV_POPULATE_WRITE) == 0)
        return 0;
    if (errno != EINVAL)
        return -1;
    /* An older kernel. Reserve first: touching a page that cannot be had raises SIGBUS. */
    if (fallocate(fd, 0, 0, (off_t)size) != 0)
        return -1;
    for (size_t at = 0; at < size; at += KVP_PAGE_BYTES)
        ((volatile uint8_t *)map)[at] = 0;
    return 0;
}

kvp_status kvp_memfd_open(const char *name, size_t size, int *fd_out, void **map_out)
{
    void *map = MAP_FAILED;
    int fd = -1;
    if (size > INT64_MAX) {
        errno = EFBIG;
        return KVP_SYSTEM;
    }
    fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0 || ftruncate(fd, (off_t)size) != 0)
        return undo(fd, map, size);
    map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED)
        return undo(fd, map, size);
    (void)madvise(map, size, MADV_HUGEPAGE); /* where the host allows it: faster, nothing else */
    if (prefault(fd, map, size) != 0)
        return undo(fd, map, size);
    *fd_out = fd;
    *map_out = map;
    return KVP_OK;
}

kvp_status kvp_memory_node(int node)
{
    enum { NODES = 1024, WORD = 8 * sizeof(unsigned long), BIND = 2, DEFAULT = 0 };
    unsigned long nodes[NODES / WORD] = {0};
    if (node >= NODES)
        return KVP_INVALID;
    if (node >= 0)
        nodes[(size_t)node / WORD] = 1UL << ((size_t)node % WORD);
    long set = node < 0 ? syscall(SYS_set_mempolicy, DEFAULT, NULL, 0)
                        : syscall(SYS_set_mempolicy, BIND, nodes, (unsigned long)NODES);
    if (set == 0)
        return KVP_OK;
    return errno == EINVAL ? KVP_INVALID : KVP_SYSTEM;
}

kvp_status kvp_memfd_seal(int fd)
{
    return fcntl(fd, F_ADD_SEALS, READER_SEALS | F_SEAL_SEAL) == 0 ? KVP_OK : KVP_SYSTEM;
}

kvp_status kvp_memfd_map(int fd, const void **map_out, size_t *size_out)
{
    /* Seals first: once they are there, the size cannot change between its check and its use. */
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0)
        return errno == EINVAL ? KVP_CORRUPT : KVP_SYSTEM;
    if ((seals & READER_SEALS) != READER_SEALS)
        return KVP_CORRUPT;
    struct stat status;
    if (fstat(fd, &status) != 0)
        return KVP_SYSTEM;
    if (status.st_size < KVP_PAGE_BYTES)
        return KVP_CORRUPT;
    size_t size = (size_t)status.st_size;
    void *map = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED)
        return KVP_SYSTEM;
    *map_out = map;
    *size_out = size;
    return KVP_OK;
}
