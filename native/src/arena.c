/* Slots in one sealed memfd: the owner's side.
 *
 * Owns: the state machine of a slot (kvpool_api.h draws it) and the mutex around it. States, pins
 * and grants lie in private memory, where no peer can even look; shared memory tells peers only
 * which life of a slot is READY. The bytes of a slot are written by whoever reserved it. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kvpool_arena.h"

typedef enum { FREE, RESERVED, READY, QUARANTINED } slot_state;

typedef struct {
    uint64_t generation; /* of this life; of the last one while FREE; 0 before the first */
    size_t pins;
    size_t grants;
    slot_state state;
    uint32_t next_free;
} slot_record;

struct kvp_arena {
    pthread_mutex_t mutex; /* guards records, free_head and counts */
    arena_geometry geometry;
    int fd;
    uint8_t *map;
    uint32_t free_head; /* meaningful while counts.free > 0 */
    kvp_arena_counts counts;
    slot_record records[];
};

static arena_slot_header *header_of(const kvp_arena *arena, uint32_t slot)
{
    return (arena_slot_header *)(void *)(arena->map + KVP_PAGE_BYTES +
                                         slot * arena->geometry.header_stride);
}

/* From here on a reader that looks again learns that the life is over. The full fence keeps every
 * later write to the slot, even a non-temporal one, behind this. */
static void hide(kvp_arena *arena, uint32_t slot)
{
    __atomic_store_n(&header_of(arena, slot)->generation, 0, __ATOMIC_RELEASE);
    atomic_thread_fence(memory_order_seq_cst);
}

static void publish(kvp_arena *arena, uint32_t slot, uint64_t generation, const uint8_t *hash,
                    const uint32_t *crcs)
{
    arena_slot_header *header = header_of(arena, slot);
    for (size_t i = 0; i < KVP_HASH_BYTES / 4; i++) {
        uint32_t word;
        memcpy(&word, hash + 4 * i, sizeof word);
        __atomic_store_n(&header->hash[i], word, __ATOMIC_RELAXED);
    }
    for (size_t i = 0; i < arena->geometry.crc_count; i++)
        __atomic_store_n(&header->crcs[i], crcs[i], __ATOMIC_RELAXED);
    __atomic_store_n(&header->generation, generation, __ATOMIC_RELEASE);
}

kvp_status kvp_arena_open(size_t slot_count, size_t slot_bytes, size_t crc_count,
                          const uint8_t *incarnation, kvp_arena **out)
{
    arena_geometry geometry;
    size_t records_bytes;
    if (!kvp_arena_lay_out(slot_count, slot_bytes, crc_count, &geometry) ||
        __builtin_mul_overflow(slot_count, sizeof(slot_record), &records_bytes))
        return KVP_INVALID;
    kvp_arena *arena = calloc(1, sizeof *arena + records_bytes);
    if (arena == NULL)
        return KVP_SYSTEM;
    void *map;
    if (kvp_memfd_open("kvpool-arena", geometry.total_bytes, &arena->fd, &map) != KVP_OK) {
        free(arena);
        return KVP_SYSTEM;
    }
    arena->map = map;
    arena->geometry = geometry;
    arena_header header = {
        .magic = KVP_ARENA_MAGIC, .version = KVP_ARENA_VERSION, .geometry = geometry};
    memcpy(header.incarnation, incarnation, sizeof header.incarnation);
    memcpy(arena->map, &header, sizeof header);
    pthread_mutex_init(&arena->mutex, NULL);
    for (uint32_t slot = 0; slot < slot_count; slot++)
        arena->records[slot].next_free = slot + 1; /* slot 0 is handed out first */
    arena->counts.free = slot_count;
    if (kvp_memfd_seal(arena->fd) != KVP_OK) {
        kvp_arena_close(arena);
        return KVP_SYSTEM;
    }
    *out = arena;
    return KVP_OK;
}

void kvp_arena_close(kvp_arena *arena)
{
    if (arena == NULL)
        return;
    munmap(arena->map, arena->geometry.total_bytes);
    close(arena->fd);
    pthread_mutex_destroy(&arena->mutex);
    free(arena);
}

int kvp_arena_fd(const kvp_arena *arena)
{
    return arena->fd;
}

uintptr_t kvp_arena_base(const kvp_arena *arena)
{
    return (uintptr_t)arena->map + arena->geometry.slots_offset;
}

size_t kvp_arena_slot_stride(const kvp_arena *arena)
{
    return arena->geometry.slot_stride;
}

/* Lock the arena and find the record of that life of the slot: KVP_INVALID past the end, KVP_STALE
 * for another life or one that is over. Only on KVP_OK is the arena locked. */
static kvp_status enter(kvp_arena *arena, uint32_t slot, uint64_t generation, slot_record **record)
{
    if (slot >= arena->geometry.slot_count)
        return KVP_INVALID;
    pthread_mutex_lock(&arena->mutex);
    *record = &arena->records[slot];
    if ((*record)->state == FREE || (*record)->generation != generation) {
        pthread_mutex_unlock(&arena->mutex);
        return KVP_STALE;
    }
    return KVP_OK;
}

static kvp_status leave(kvp_arena *arena, kvp_status status)
{
    pthread_mutex_unlock(&arena->mutex);
    return status;
}

static void set_free(kvp_arena *arena, uint32_t slot)
{
    slot_record *record = &arena->records[slot];
    record->state = FREE;
    record->next_free = arena->free_head;
    arena->free_head = slot;
    arena->counts.free++;
}

kvp_status kvp_arena_reserve(kvp_arena *arena, uint32_t *slot, uint64_t *generation)
{
    pthread_mutex_lock(&arena->mutex);
    if (arena->counts.free == 0)
        return leave(arena, KVP_FULL);
    uint32_t taken = arena->free_head;
    slot_record *record = &arena->records[taken];
    arena->free_head = record->next_free;
    arena->counts.free--;
    arena->counts.reserved++;
    record->state = RESERVED;
    record->generation++; /* 64 bits: never comes round to 0 */
    *slot = taken;
    *generation = record->generation;
    return leave(arena, KVP_OK);
}

kvp_status kvp_arena_commit(kvp_arena *arena, uint32_t slot, uint64_t generation,
                            const uint8_t *hash, const uint32_t *crcs)
{
    slot_record *record;
    kvp_status status = enter(arena, slot, generation, &record);
    if (status != KVP_OK)
        return status;
    if (record->state != RESERVED)
        return leave(arena, KVP_BUSY);
    publish(arena, slot, generation, hash, crcs);
    record->state = READY;
    arena->counts.reserved--;
    arena->counts.ready++;
    return leave(arena, KVP_OK);
}

kvp_status kvp_arena_pin(kvp_arena *arena, uint32_t slot, uint64_t generation)
{
    slot_record *record;
    kvp_status status = enter(arena, slot, generation, &record);
    if (status != KVP_OK)
        return status;
    if (record->state != READY)
        return leave(arena, KVP_BUSY);
    record->pins++;
    arena->counts.pins++;
    return leave(arena, KVP_OK);
}

kvp_status kvp_arena_unpin(kvp_arena *arena, uint32_t slot, uint64_t generation)
{
    slot_record *record;
    kvp_status status = enter(arena, slot, generation, &record);
    if (status != KVP_OK)
        return status;
    if (record->pins == 0)
        return leave(arena, KVP_INVALID);
    record->pins--;
    arena->counts.pins--;
    return leave(arena, KVP_OK);
}

kvp_status kvp_arena_grant(kvp_arena *arena, uint32_t slot, uint64_t generation)
{
    slot_record *record;
    kvp_status status = enter(arena, slot, generation, &record);
    if (status != KVP_OK)
        return status;
    if (record->state == QUARANTINED)
        return leave(arena, KVP_BUSY);
    record->grants++;
    arena->counts.grants++;
    return leave(arena, KVP_OK);
}

kvp_status kvp_arena_settle(kvp_arena *arena, uint32_t slot, uint64_t generation)
{
    slot_record *record;
    kvp_status status = enter(arena, slot, generation, &record);
    if (status != KVP_OK)
        return status;
    if (record->grants == 0)
        return leave(arena, KVP_INVALID);
    record->grants--;
    arena->counts.grants--;
    if (record->state == QUARANTINED && record->grants == 0) {
        arena->counts.quarantined--;
        set_free(arena, slot);
    }
    return leave(arena, KVP_OK);
}

kvp_status kvp_arena_release(kvp_arena *arena, uint32_t slot, uint64_t generation)
{
    slot_record *record;
    kvp_status status = enter(arena, slot, generation, &record);
    if (status != KVP_OK)
        return status;
    if (record->pins > 0 || record->state == QUARANTINED)
        return leave(arena, KVP_BUSY);
    if (record->state == READY) {
        hide(arena, slot);
        arena->counts.ready--;
    } else {
        arena->counts.reserved--;
    }
    if (record->grants > 0) {
        record->state = QUARANTINED;
        arena->counts.quarantined++;
    } else {
        set_free(arena, slot);
    }
    return leave(arena, KVP_OK);
}

kvp_status kvp_arena_crcs(kvp_arena *arena, uint32_t slot, uint64_t generation, uint32_t *crcs)
{
    slot_record *record;
    kvp_status status = enter(arena, slot, generation, &record);
    if (status != KVP_OK)
        return status;
    if (record->state != READY)
        return leave(arena, KVP_BUSY);
    /* Only this process writes here, under the mutex: plain reads are enough. */
    if (arena->geometry.crc_count > 0)
        memcpy(crcs, header_of(arena, slot)->crcs, arena->geometry.crc_count * sizeof *crcs);
    return leave(arena, KVP_OK);
}

void kvp_arena_count(kvp_arena *arena, kvp_arena_counts *out)
{
    pthread_mutex_lock(&arena->mutex);
    *out = arena->counts;
    pthread_mutex_unlock(&arena->mutex);
}
