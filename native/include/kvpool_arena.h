/* The bytes of an arena's memfd, which arena.c writes and window.c reads. Not seen by Python.
 *
 *   page 0                  arena_header
 *   from page 1             slot_count slot headers, header_stride bytes apart
 *   from slots_offset       slot_count slots, slot_stride bytes apart
 *
 * A slot header is a seqlock. Its generation is 0 while the slot's owner may write to the slot or
 * to the header, and that life's generation while neither changes. */
#ifndef KVPOOL_ARENA_H
#define KVPOOL_ARENA_H

#include <stdbool.h>

#include "kvpool_memfd.h"

#define KVP_ARENA_MAGIC UINT64_C(0x414e455241504b56) /* "VKPARENA" as it lies in memory */
enum { KVP_ARENA_VERSION = 1, KVP_HASH_BYTES = 32, KVP_LINE_BYTES = 64 };

/* Everything but magic, version and incarnation follows from the first three counts. */
typedef struct {
    uint64_t slot_count;
    uint64_t slot_bytes;
    uint64_t crc_count;
    uint64_t header_stride;
    uint64_t slot_stride;
    uint64_t slots_offset;
    uint64_t total_bytes;
} arena_geometry;

typedef struct {
    uint64_t magic;
    uint32_t version;
    uint32_t reserved; /* 0 */
    uint8_t incarnation[KVP_INCARNATION_BYTES];
    arena_geometry geometry;
} arena_header;

_Static_assert(sizeof(arena_header) == 88, "the arena's header is fixed");
_Static_assert(offsetof(arena_header, incarnation) == 16, "the arena's header is fixed");
_Static_assert(offsetof(arena_header, geometry) == 32, "the arena's header is fixed");

/* Read and written as 32-bit atomics, because a reader may look while the owner writes. */
typedef struct {
    uint64_t generation;
    uint32_t hash[KVP_HASH_BYTES / 4];
    uint32_t crcs[];
} arena_slot_header;

_Static_assert(sizeof(arena_slot_header) == 40, "the slot's header is fixed");
_Static_assert(offsetof(arena_slot_header, crcs) == 40, "the slot's header is fixed");

/* Derive the geometry; false if a count is 0 (crc_count may be), or a size overflows. */
static inline bool kvp_arena_lay_out(uint64_t slot_count, uint64_t slot_bytes, uint64_t crc_count,
                                     arena_geometry *out)
{
    size_t header, slot, headers, slots, offset, total;
    if (slot_count == 0 || slot_count > UINT32_MAX || slot_bytes == 0 || crc_count > UINT32_MAX)
        return false;
    header = sizeof(arena_slot_header) + (size_t)crc_count * sizeof(uint32_t);
    if (!kvp_round_up(header, KVP_LINE_BYTES, &header) ||
        !kvp_round_up(slot_bytes, KVP_PAGE_BYTES, &slot) ||
        __builtin_mul_overflow(header, slot_count, &headers) ||
        __builtin_mul_overflow(slot, slot_count, &slots) ||
        __builtin_add_overflow(headers, (size_t)KVP_PAGE_BYTES, &headers) ||
        !kvp_round_up(headers, KVP_PAGE_BYTES, &offset) ||
        __builtin_add_overflow(offset, slots, &total) || total > INT64_MAX)
        return false;
    *out = (arena_geometry){slot_count, slot_bytes, crc_count, header, slot, offset, total};
    return true;
}

#endif
