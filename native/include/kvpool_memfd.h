/* Between memfd.c and its users (arena.c, mailbox.c): shared memory that only its maker can write.
 * Not seen by Python. */
#ifndef KVPOOL_MEMFD_H
#define KVPOOL_MEMFD_H

#include "kvpool.h"

enum { KVP_PAGE_BYTES = 4096, KVP_INCARNATION_BYTES = 16 };

/* Round up to a multiple of `unit`, a power of two. False (nothing written) if that overflows. */
static inline int kvp_round_up(size_t size, size_t unit, size_t *rounded)
{
    size_t sum;
    if (__builtin_add_overflow(size, unit - 1, &sum))
        return 0;
    *rounded = sum & ~(unit - 1);
    return 1;
}

/* Make a memfd of `size` zero bytes (a multiple of the page), present in memory and mapped at *map,
 * which the caller unmaps. Not sealed yet. */
kvp_status kvp_memfd_open(const char *name, size_t size, int *fd, void **map);
/* From now on nobody can resize it, map it writable or write() to it; *map of its maker stays
 * writable. */
kvp_status kvp_memfd_seal(int fd);
/* Map a peer's memfd read-only, if it is sealed as above and at least a page long. The mapping
 * outlives `fd`; reading it never raises SIGBUS, because its size is sealed. KVP_CORRUPT if it is
 * another kind of file. */
kvp_status kvp_memfd_map(int fd, const void **map, size_t *size);

#endif
