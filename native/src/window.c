/* A peer's arena, mapped read-only.
 *
 * Owns: the mapping, and a private copy of the geometry that was checked once. The peer may write
 * anything at any time; nothing that is read from it is used as a size or an offset. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "kvpool_arena.h"

struct kvp_window {
    const uint8_t *map;
    arena_geometry geometry;
};

static kvp_status check_header(const uint8_t *map, size_t size, const uint8_t *incarnation,
                               arena_geometry *out)
{
    arena_header header; /* one copy: what is checked is what is used */
    memcpy(&header, map, sizeof header);
    if (header.magic != KVP_ARENA_MAGIC || header.version != KVP_ARENA_VERSION)
        return KVP_CORRUPT;
    const arena_geometry *told = &header.geometry;
    if (!kvp_arena_lay_out(told->slot_count, told->slot_bytes, told->crc_count, out) ||
        memcmp(told, out, sizeof *out) != 0 || out->total_bytes != size)
        return KVP_CORRUPT;
    if (memcmp(header.incarnation, incarnation, KVP_INCARNATION_BYTES) != 0)
        return KVP_STALE;
    return KVP_OK;
}

kvp_status kvp_window_map(int fd, const uint8_t *incarnation, kvp_window **out)
{
    const void *map;
    size_t size;
    kvp_status status = kvp_memfd_map(fd, &map, &size);
    if (status != KVP_OK)
        return status;
    arena_geometry geometry;
    status = check_header(map, size, incarnation, &geometry);
    kvp_window *window = status == KVP_OK ? malloc(sizeof *window) : NULL;
    if (window == NULL) {
        munmap((void *)(uintptr_t)map, size);
        return status == KVP_OK ? KVP_SYSTEM : status;
    }
    window->map = map;
    window->geometry = geometry;
    *out = window;
    return KVP_OK;
}

void kvp_window_close(kvp_window *window)
{
    if (window == NULL)
        return;
    munmap((void *)(uintptr_t)window->map, window->geometry.total_bytes);
    free(window);
}

uintptr_t kvp_window_base(const kvp_window *window)
{
    return (uintptr_t)window->map + window->geometry.slots_offset;
}

size_t kvp_window_slot_count(const kvp_window *window)
{
    return window->geometry.slot_count;
}

size_t kvp_window_slot_bytes(const kvp_window *window)
{
    return window->geometry.slot_bytes;
}

size_t kvp_window_slot_stride(const kvp_window *window)
{
    return window->geometry.slot_stride;
}

size_t kvp_window_crc_count(const kvp_window *window)
{
    return window->geometry.crc_count;
}

static const arena_slot_header *header_of(const kvp_window *window, uint32_t slot)
{
    return (const arena_slot_header *)(const void *)(window->map + KVP_PAGE_BYTES +
                                                     slot * window->geometry.header_stride);
}

/* Whether the slot is in that life and READY now. No life is 0, but a caller may ask for it. */
static kvp_status check_slot(const kvp_window *window, uint32_t slot, uint64_t generation)
{
    if (slot >= window->geometry.slot_count)
        return KVP_INVALID;
    uint64_t now = __atomic_load_n(&header_of(window, slot)->generation, __ATOMIC_ACQUIRE);
    return generation != 0 && now == generation ? KVP_OK : KVP_STALE;
}

kvp_status kvp_window_check(kvp_window *window, const uint32_t *slots,
                            const uint64_t *generations, size_t count, size_t *bad)
{
    /* After a copy: the copy's loads come before the loads here. */
    atomic_thread_fence(memory_order_acquire);
    for (size_t i = 0; i < count; i++) {
        kvp_status status = check_slot(window, slots[i], generations[i]);
        if (status != KVP_OK) {
            *bad = i;
            return status;
        }
    }
    *bad = count;
    return KVP_OK;
}

kvp_status kvp_window_crcs(kvp_window *window, const uint32_t *slots,
                           const uint64_t *generations, size_t count, uint32_t *crcs, size_t *bad)
{
    size_t crc_count = window->geometry.crc_count;
    kvp_status status = kvp_window_check(window, slots, generations, count, bad);
    if (status != KVP_OK)
        return status;
    for (size_t i = 0; i < count; i++) {
        const arena_slot_header *header = header_of(window, slots[i]);
        for (size_t j = 0; j < crc_count; j++)
            crcs[i * crc_count + j] = __atomic_load_n(&header->crcs[j], __ATOMIC_RELAXED);
    }
    return kvp_window_check(window, slots, generations, count, bad);
}
