/* Which block lies in which slot, for a tier that keeps no object a block.
 *
 * Owns: the life of a slot, and what changes it. Everything is in arrays by slot (kvpool_ledger.h);
 * ledger_order.c keeps their order, ledger_list.c only looks. Never touches a slot's bytes. */
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "kvpool_ledger.h"

void kvp_ledger_set_free(kvp_ledger *ledger, uint32_t slot)
{
    ledger->states[slot] = FREE;
    ledger->next[slot] = ledger->free_head;
    ledger->free_head = slot;
    ledger->counts.free++;
}

/* A RESERVED slot, or one that a block has left, is free, or quarantined while grants are out. */
void kvp_ledger_give_up(kvp_ledger *ledger, uint32_t slot)
{
    if (ledger->grants[slot] == 0) {
        kvp_ledger_set_free(ledger, slot);
        return;
    }
    ledger->states[slot] = QUARANTINED;
    ledger->counts.quarantined++;
}

void kvp_ledger_set_stale(kvp_ledger *ledger, uint32_t slot, bool stale)
{
    ledger->counts.stale += stale;
    ledger->counts.stale -= ledger->stale[slot];
    ledger->stale[slot] = stale;
}

/* A block leaves the tables, and its slot unless somebody reads it. */
void kvp_ledger_leave(kvp_ledger *ledger, uint32_t slot)
{
    kvp_ledger_empty(ledger, &ledger->by_key, kvp_ledger_find(ledger, &ledger->by_key, ledger->keys[slot]));
    kvp_ledger_part(ledger, slot);
    ledger->states[slot] = DROPPED;
    kvp_ledger_reconsider(ledger, slot);
    uint32_t above = kvp_ledger_slot(ledger, ledger->parents[slot]);
    if (above != NONE)
        kvp_ledger_reconsider(ledger, above);
    kvp_ledger_set_stale(ledger, slot, true);
    if (ledger->pins[slot] == 0) {
        ledger->counts.ready--;
        kvp_ledger_give_up(ledger, slot);
    }
}

/* Whether that life of the slot is going on: KVP_INVALID past the end, KVP_STALE if not. */
kvp_status kvp_ledger_look(const kvp_ledger *ledger, uint32_t slot, uint64_t generation)
{
    if (slot >= ledger->slot_count)
        return KVP_INVALID;
    bool lives = ledger->states[slot] != FREE && ledger->generations[slot] == generation;
    return lives ? KVP_OK : KVP_STALE;
}

static kvp_status step_once(kvp_ledger *ledger, kvp_arena_step step, uint32_t slot)
{
    const uint8_t state = ledger->states[slot];
    switch (step) {
    case KVP_ARENA_PIN:
        return KVP_INVALID; /* by key only */
    case KVP_ARENA_UNPIN:
        if (ledger->pins[slot] == 0)
            return KVP_INVALID;
        ledger->counts.pins--;
        if (--ledger->pins[slot] == 0 && state == DROPPED) {
            ledger->counts.ready--;
            kvp_ledger_give_up(ledger, slot);
        } else {
            kvp_ledger_reconsider(ledger, slot);
        }
        return KVP_OK;
    case KVP_ARENA_GRANT:
        if (state == QUARANTINED)
            return KVP_BUSY;
        ledger->grants[slot]++;
        ledger->counts.grants++;
        return KVP_OK;
    case KVP_ARENA_SETTLE:
        if (ledger->grants[slot] == 0)
            return KVP_INVALID;
        ledger->counts.grants--;
        if (--ledger->grants[slot] == 0 && state == QUARANTINED) {
            ledger->counts.quarantined--;
            kvp_ledger_set_free(ledger, slot);
        }
        return KVP_OK;
    case KVP_ARENA_RELEASE:
        if (state != RESERVED)
            return KVP_BUSY;
        ledger->counts.reserved--;
        kvp_ledger_give_up(ledger, slot);
        return KVP_OK;
    case KVP_ARENA_REQUIRE_RESERVED:
        return state == RESERVED ? KVP_OK : KVP_BUSY;
    case KVP_ARENA_REQUIRE_PINNED:
        return ledger->pins[slot] > 0 ? KVP_OK : KVP_BUSY;
    }
    return KVP_INVALID;
}

/* One array of the ledger, or null. */
static void *array(size_t count, size_t size)
{
    return calloc(count, size);
}

kvp_status kvp_ledger_open(size_t slot_count, uint64_t first_generation, kvp_ledger **out)
{
    if (slot_count == 0 || slot_count >= NONE / 2 || first_generation == 0)
        return KVP_INVALID;
    kvp_ledger *ledger = calloc(1, sizeof *ledger);
    if (ledger == NULL)
        return KVP_SYSTEM;
    pthread_mutex_init(&ledger->mutex, NULL);
    ledger->holders = 1;
    ledger->slot_count = ledger->counts.free = slot_count;
    ledger->place_count = slot_count + slot_count / 2 + 2;
    ledger->generation = first_generation;
    ledger->by_key.places = array(ledger->place_count, sizeof(uint32_t));
    ledger->by_parent.places = array(ledger->place_count, sizeof(uint32_t));
    ledger->keys = array(slot_count, HASH_BYTES);
    ledger->parents = array(slot_count, HASH_BYTES);
    ledger->generations = array(slot_count, sizeof(uint64_t));
    ledger->used = array(slot_count, sizeof(uint64_t));
    ledger->pins = array(slot_count, sizeof(uint32_t));
    ledger->grants = array(slot_count, sizeof(uint32_t));
    ledger->next = array(slot_count, sizeof(uint32_t));
    ledger->previous = array(slot_count, sizeof(uint32_t));
    ledger->heap = array(slot_count, sizeof(uint32_t));
    ledger->heap_at = array(slot_count, sizeof(uint32_t));
    ledger->states = array(slot_count, 1);
    ledger->stale = array(slot_count, sizeof(bool));
    bool whole = ledger->by_key.places && ledger->by_parent.places && ledger->keys &&
                 ledger->parents && ledger->generations && ledger->used && ledger->pins &&
                 ledger->grants && ledger->next && ledger->previous && ledger->heap &&
                 ledger->heap_at && ledger->states && ledger->stale;
    if (!whole || getrandom(&ledger->seed, sizeof ledger->seed, 0) < 0) {
        kvp_ledger_close(ledger);
        return KVP_SYSTEM;
    }
    ledger->by_key.hashes = (const hash *)ledger->keys;
    ledger->by_parent.hashes = (const hash *)ledger->parents;
    for (uint32_t slot = 0; slot < slot_count; slot++) {
        ledger->next[slot] = slot + 1; /* slot 0 is handed out first */
        ledger->heap_at[slot] = NONE;
    }
    *out = ledger;
    return KVP_OK;
}

void kvp_ledger_hold(kvp_ledger *ledger)
{
    __atomic_add_fetch(&ledger->holders, 1, __ATOMIC_RELAXED);
}

void kvp_ledger_close(kvp_ledger *ledger)
{
    if (ledger == NULL || __atomic_sub_fetch(&ledger->holders, 1, __ATOMIC_ACQ_REL) > 0)
        return;
    free(ledger->by_key.places);
    free(ledger->by_parent.places);
    free(ledger->keys);
    free(ledger->parents);
    free(ledger->generations);
    free(ledger->used);
    free(ledger->pins);
    free(ledger->grants);
    free(ledger->next);
    free(ledger->previous);
    free(ledger->heap);
    free(ledger->heap_at);
    free(ledger->states);
    free(ledger->stale);
    pthread_mutex_destroy(&ledger->mutex);
    free(ledger);
}

/* Under the mutex, as all that is static here. */
static size_t take_free(kvp_ledger *ledger, size_t count, bool grant, uint32_t *slots,
                      uint64_t *generations)
{
    if (count > ledger->counts.free)
        count = ledger->counts.free;
    for (size_t i = 0; i < count; i++) {
        uint32_t slot = ledger->free_head;
        ledger->free_head = ledger->next[slot];
        ledger->states[slot] = RESERVED;
        ledger->grants[slot] = grant;
        slots[i] = slot;
        generations[i] = ledger->generations[slot] = ledger->generation++;
    }
    ledger->counts.free -= count;
    ledger->counts.reserved += count;
    ledger->counts.grants += grant ? count : 0;
    return count;
}

static size_t evict_some(kvp_ledger *ledger, size_t count, uint32_t *slots)
{
    size_t gone = 0;
    for (; gone < count && ledger->heap_count > 0; gone++) {
        if (slots != NULL)
            slots[gone] = ledger->heap[0];
        kvp_ledger_leave(ledger, ledger->heap[0]);
    }
    return gone;
}

size_t kvp_ledger_reserve(kvp_ledger *ledger, size_t count, bool grant, uint32_t *slots,
                          uint64_t *generations)
{
    pthread_mutex_lock(&ledger->mutex);
    count = take_free(ledger, count, grant, slots, generations);
    pthread_mutex_unlock(&ledger->mutex);
    return count;
}

size_t kvp_ledger_evict(kvp_ledger *ledger, size_t count, uint32_t *slots)
{
    pthread_mutex_lock(&ledger->mutex);
    count = evict_some(ledger, count, slots);
    pthread_mutex_unlock(&ledger->mutex);
    return count;
}

size_t kvp_ledger_take(kvp_ledger *ledger, size_t count, bool grant, uint32_t *slots,
                       uint64_t *generations, uint32_t *evicted, size_t *gone)
{
    pthread_mutex_lock(&ledger->mutex);
    size_t taken = take_free(ledger, count, grant, slots, generations);
    *gone = evict_some(ledger, count - taken, evicted);
    taken += take_free(ledger, count - taken, grant, slots + taken, generations + taken);
    pthread_mutex_unlock(&ledger->mutex);
    return taken;
}

size_t kvp_ledger_pin(kvp_ledger *ledger, const uint8_t *keys, size_t count, bool use,
                      uint32_t *slots, uint64_t *generations)
{
    size_t i = 0;
    pthread_mutex_lock(&ledger->mutex);
    for (; i < count; i++) {
        uint32_t slot = kvp_ledger_slot(ledger, keys + i * HASH_BYTES);
        if (slot == NONE)
            break;
        ledger->pins[slot]++;
        ledger->counts.pins++;
        if (use)
            kvp_ledger_use(ledger, slot);
        else
            kvp_ledger_reconsider(ledger, slot);
        slots[i] = slot;
        generations[i] = ledger->generations[slot];
    }
    pthread_mutex_unlock(&ledger->mutex);
    return i;
}

kvp_status kvp_ledger_drop(kvp_ledger *ledger, const uint8_t *key, uint32_t *out)
{
    pthread_mutex_lock(&ledger->mutex);
    uint32_t slot = kvp_ledger_slot(ledger, key);
    if (slot != NONE)
        kvp_ledger_leave(ledger, slot);
    pthread_mutex_unlock(&ledger->mutex);
    *out = slot;
    return slot == NONE ? KVP_MISS : KVP_OK;
}

kvp_status kvp_ledger_change(kvp_ledger *ledger, kvp_arena_step step, const uint32_t *slots,
                             const uint64_t *generations, size_t count, size_t *done)
{
    kvp_status status = KVP_OK;
    size_t i = 0;
    pthread_mutex_lock(&ledger->mutex);
    for (; i < count; i++) {
        status = kvp_ledger_look(ledger, slots[i], generations[i]);
        if (status == KVP_OK)
            status = step_once(ledger, step, slots[i]);
        if (status != KVP_OK)
            break;
    }
    pthread_mutex_unlock(&ledger->mutex);
    *done = i;
    return status;
}
