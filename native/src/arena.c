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
    kvp_ledger *keeper; /* null: the records below are the slots' lives */
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
    kvp_ledger_close(arena->keeper);
    pthread_mutex_destroy(&arena->mutex);
    free(arena);
}

kvp_status kvp_arena_lock(kvp_arena *arena)
{
    return mlock(arena->map, arena->geometry.total_bytes) == 0 ? KVP_OK : KVP_SYSTEM;
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

static void set_free(kvp_arena *arena, uint32_t slot)
{
    slot_record *record = &arena->records[slot];
    record->state = FREE;
    record->next_free = arena->free_head;
    arena->free_head = slot;
    arena->counts.free++;
}

size_t kvp_arena_reserve(kvp_arena *arena, size_t count, bool grant, uint32_t *slots,
                         uint64_t *generations)
{
    if (arena->keeper != NULL)
        return 0;
    pthread_mutex_lock(&arena->mutex);
    if (count > arena->counts.free)
        count = arena->counts.free;
    for (size_t i = 0; i < count; i++) {
        uint32_t taken = arena->free_head;
        slot_record *record = &arena->records[taken];
        arena->free_head = record->next_free;
        record->state = RESERVED;
        record->generation++; /* 64 bits: never comes round to 0 */
        record->grants = grant ? 1 : 0;
        slots[i] = taken;
        generations[i] = record->generation;
    }
    arena->counts.free -= count;
    arena->counts.reserved += count;
    if (grant)
        arena->counts.grants += count;
    pthread_mutex_unlock(&arena->mutex);
    return count;
}

static kvp_status pin(kvp_arena *arena, uint32_t slot)
{
    slot_record *record = &arena->records[slot];
    if (record->state != READY)
        return KVP_BUSY;
    record->pins++;
    arena->counts.pins++;
    return KVP_OK;
}

static kvp_status unpin(kvp_arena *arena, uint32_t slot)
{
    slot_record *record = &arena->records[slot];
    if (record->pins == 0)
        return KVP_INVALID;
    record->pins--;
    arena->counts.pins--;
    return KVP_OK;
}

static kvp_status grant(kvp_arena *arena, uint32_t slot)
{
    slot_record *record = &arena->records[slot];
    if (record->state == QUARANTINED)
        return KVP_BUSY;
    record->grants++;
    arena->counts.grants++;
    return KVP_OK;
}

static kvp_status settle(kvp_arena *arena, uint32_t slot)
{
    slot_record *record = &arena->records[slot];
    if (record->grants == 0)
        return KVP_INVALID;
    record->grants--;
    arena->counts.grants--;
    if (record->state == QUARANTINED && record->grants == 0) {
        arena->counts.quarantined--;
        set_free(arena, slot);
    }
    return KVP_OK;
}

static kvp_status release(kvp_arena *arena, uint32_t slot)
{
    slot_record *record = &arena->records[slot];
    if (record->pins > 0 || record->state == QUARANTINED)
        return KVP_BUSY;
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
    return KVP_OK;
}

static kvp_status require_reserved(kvp_arena *arena, uint32_t slot)
{
    return arena->records[slot].state == RESERVED ? KVP_OK : KVP_BUSY;
}

static kvp_status require_pinned(kvp_arena *arena, uint32_t slot)
{
    return arena->records[slot].pins > 0 ? KVP_OK : KVP_BUSY;
}

/* Whether that life of the slot is going on: KVP_INVALID past the end, KVP_STALE if not. Locked. */
static kvp_status find(const kvp_arena *arena, uint32_t slot, uint64_t generation)
{
    if (slot >= arena->geometry.slot_count)
        return KVP_INVALID;
    const slot_record *record = &arena->records[slot];
    return record->state == FREE || record->generation != generation ? KVP_STALE : KVP_OK;
}

kvp_status kvp_arena_change(kvp_arena *arena, kvp_arena_step step, const uint32_t *slots,
                            const uint64_t *generations, size_t count, size_t *done)
{
    static kvp_status (*const steps[])(kvp_arena *, uint32_t) = {
        [KVP_ARENA_PIN] = pin,
        [KVP_ARENA_UNPIN] = unpin,
        [KVP_ARENA_GRANT] = grant,
        [KVP_ARENA_SETTLE] = settle,
        [KVP_ARENA_RELEASE] = release,
        [KVP_ARENA_REQUIRE_RESERVED] = require_reserved,
        [KVP_ARENA_REQUIRE_PINNED] = require_pinned,
    };
    kvp_status status = KVP_OK;
    size_t i = 0;
    *done = 0;
    if (arena->keeper != NULL)
        return kvp_ledger_change(arena->keeper, step, slots, generations, count, done);
    if ((size_t)step >= sizeof steps / sizeof *steps)
        return KVP_INVALID;
    pthread_mutex_lock(&arena->mutex);
    for (; i < count; i++) {
        status = find(arena, slots[i], generations[i]);
        if (status == KVP_OK)
            status = steps[step](arena, slots[i]);
        if (status != KVP_OK)
            break;
    }
    pthread_mutex_unlock(&arena->mutex);
    *done = i;
    return status;
}

kvp_status kvp_arena_commit(kvp_arena *arena, const uint32_t *slots, const uint64_t *generations,
                            size_t count, const uint8_t *hashes, const uint32_t *crcs, size_t *done)
{
    kvp_status status = KVP_OK;
    size_t i = 0;
    pthread_mutex_lock(&arena->mutex);
    for (; i < count; i++) {
        status = find(arena, slots[i], generations[i]);
        if (status == KVP_OK)
            status = require_reserved(arena, slots[i]);
        if (status != KVP_OK)
            break;
        publish(arena, slots[i], generations[i], hashes + i * KVP_HASH_BYTES,
                crcs + i * arena->geometry.crc_count);
        arena->records[slots[i]].state = READY;
        arena->counts.reserved--;
        arena->counts.ready++;
    }
    pthread_mutex_unlock(&arena->mutex);
    *done = i;
    return status;
}

static bool are_kept(const kvp_arena *arena, const uint32_t *slots, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (slots[i] >= arena->geometry.slot_count)
            return false;
    return arena->keeper != NULL;
}

kvp_status kvp_arena_publish(kvp_arena *arena, const uint32_t *slots, const uint64_t *generations,
                             size_t count, const uint8_t *hashes, const uint32_t *crcs)
{
    if (!are_kept(arena, slots, count))
        return KVP_INVALID;
    pthread_mutex_lock(&arena->mutex);
    for (size_t i = 0; i < count; i++)
        publish(arena, slots[i], generations[i], hashes + i * KVP_HASH_BYTES,
                crcs + i * arena->geometry.crc_count);
    pthread_mutex_unlock(&arena->mutex);
    return KVP_OK;
}

kvp_status kvp_arena_hide(kvp_arena *arena, const uint32_t *slots, size_t count)
{
    if (!are_kept(arena, slots, count))
        return KVP_INVALID;
    pthread_mutex_lock(&arena->mutex);
    for (size_t i = 0; i < count; i++)
        __atomic_store_n(&header_of(arena, slots[i])->generation, 0, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&arena->mutex);
    atomic_thread_fence(memory_order_seq_cst); /* see hide() */
    return KVP_OK;
}

kvp_status kvp_arena_keep(kvp_arena *arena, kvp_ledger *ledger)
{
    kvp_ledger_counts counts;
    kvp_ledger_count(ledger, &counts);
    if (counts.free + counts.reserved + counts.ready + counts.quarantined !=
        arena->geometry.slot_count)
        return KVP_INVALID;
    if (arena->keeper != NULL || arena->counts.free != arena->geometry.slot_count)
        return KVP_BUSY;
    kvp_ledger_hold(ledger);
    arena->keeper = ledger;
    return KVP_OK;
}

/* Whether a slot can be read in that life: as its readers see it. Locked. */
static kvp_status readable(const kvp_arena *arena, uint32_t slot, uint64_t generation)
{
    if (slot >= arena->geometry.slot_count)
        return KVP_INVALID;
    return generation != 0 && header_of(arena, slot)->generation == generation ? KVP_OK : KVP_STALE;
}

kvp_status kvp_arena_crcs(kvp_arena *arena, const uint32_t *slots, const uint64_t *generations,
                          size_t count, uint32_t *crcs, size_t *done)
{
    const size_t crc_count = arena->geometry.crc_count;
    kvp_status status = KVP_OK;
    size_t i = 0;
    pthread_mutex_lock(&arena->mutex);
    for (; i < count; i++) {
        if (arena->keeper != NULL) {
            status = readable(arena, slots[i], generations[i]);
        } else {
            status = find(arena, slots[i], generations[i]);
            if (status == KVP_OK && arena->records[slots[i]].state != READY)
                status = KVP_BUSY;
        }
        if (status != KVP_OK)
            break;
        /* Only this process writes here, under the mutex: plain reads are enough. */
        if (crc_count > 0)
            memcpy(crcs + i * crc_count, header_of(arena, slots[i])->crcs,
                   crc_count * sizeof *crcs);
    }
    pthread_mutex_unlock(&arena->mutex);
    *done = i;
    return status;
}

void kvp_arena_count(kvp_arena *arena, kvp_arena_counts *out)
{
    if (arena->keeper != NULL) {
        kvp_ledger_counts kept;
        kvp_ledger_count(arena->keeper, &kept);
        *out = (kvp_arena_counts){kept.free,        kept.reserved, kept.ready,
                                  kept.quarantined, kept.pins,     kept.grants};
        return;
    }
    pthread_mutex_lock(&arena->mutex);
    *out = arena->counts;
    pthread_mutex_unlock(&arena->mutex);
}
