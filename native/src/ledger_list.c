/* What the ledger says of itself: who is here, whole chains, lists, counts. */
#include <string.h>

#include "kvpool_ledger.h"

size_t kvp_ledger_match(kvp_ledger *ledger, const uint8_t *keys, size_t count)
{
    size_t i = 0;
    pthread_mutex_lock(&ledger->mutex);
    while (i < count && kvp_ledger_slot(ledger, keys + i * HASH_BYTES) != NONE)
        i++;
    pthread_mutex_unlock(&ledger->mutex);
    return i;
}

size_t kvp_ledger_rooted(kvp_ledger *ledger, const uint8_t *keys, size_t count)
{
    size_t i = 0;
    pthread_mutex_lock(&ledger->mutex);
    for (; i < count; i++) {
        uint32_t slot = kvp_ledger_slot(ledger, keys + i * HASH_BYTES);
        if (slot == NONE)
            break;
        const uint8_t *parent = ledger->parents[slot];
        if (i > 0 && memcmp(parent, keys + (i - 1) * HASH_BYTES, HASH_BYTES) == 0)
            continue; /* whose ancestors were found in the turn before */
        while (!kvp_ledger_no_parent(parent) && (slot = kvp_ledger_slot(ledger, parent)) != NONE)
            parent = ledger->parents[slot];
        if (!kvp_ledger_no_parent(parent))
            break;
    }
    pthread_mutex_unlock(&ledger->mutex);
    return i;
}

void kvp_ledger_touch(kvp_ledger *ledger, const uint8_t *keys, size_t count, bool *here)
{
    pthread_mutex_lock(&ledger->mutex);
    for (size_t i = 0; i < count; i++) {
        uint32_t slot = kvp_ledger_slot(ledger, keys + i * HASH_BYTES);
        here[i] = slot != NONE;
        if (here[i])
            kvp_ledger_use(ledger, slot);
    }
    pthread_mutex_unlock(&ledger->mutex);
}

void kvp_ledger_names(kvp_ledger *ledger, const uint32_t *slots, const uint64_t *generations,
                      size_t count, uint8_t *keys, uint8_t *parents, bool *ready)
{
    pthread_mutex_lock(&ledger->mutex);
    for (size_t i = 0; i < count; i++) {
        bool lives = kvp_ledger_look(ledger, slots[i], generations[i]) == KVP_OK;
        uint8_t state = lives ? ledger->states[slots[i]] : FREE;
        ready[i] = state == READY;
        if (state != READY && state != DROPPED)
            continue;
        memcpy(keys + i * HASH_BYTES, ledger->keys[slots[i]], HASH_BYTES);
        memcpy(parents + i * HASH_BYTES, ledger->parents[slots[i]], HASH_BYTES);
    }
    pthread_mutex_unlock(&ledger->mutex);
}

size_t kvp_ledger_list(kvp_ledger *ledger, size_t *next, size_t count, uint32_t *slots,
                       uint64_t *generations, uint8_t *keys, uint8_t *parents)
{
    size_t listed = 0, slot = *next;
    pthread_mutex_lock(&ledger->mutex);
    for (; slot < ledger->slot_count && listed < count; slot++) {
        if (ledger->states[slot] != READY)
            continue;
        slots[listed] = (uint32_t)slot;
        generations[listed] = ledger->generations[slot];
        memcpy(keys + listed * HASH_BYTES, ledger->keys[slot], HASH_BYTES);
        memcpy(parents + listed * HASH_BYTES, ledger->parents[slot], HASH_BYTES);
        listed++;
    }
    pthread_mutex_unlock(&ledger->mutex);
    *next = slot;
    return listed;
}

size_t kvp_ledger_stale(kvp_ledger *ledger, size_t count, uint32_t *slots)
{
    size_t listed = 0;
    pthread_mutex_lock(&ledger->mutex);
    if (count > ledger->counts.stale)
        count = ledger->counts.stale;
    for (uint32_t slot = 0; slot < ledger->slot_count && listed < count; slot++)
        if (ledger->stale[slot] && (ledger->states[slot] == FREE || ledger->states[slot] == RESERVED))
            slots[listed++] = slot;
    pthread_mutex_unlock(&ledger->mutex);
    return listed;
}

void kvp_ledger_mark(kvp_ledger *ledger, const uint32_t *slots, size_t count, bool stale)
{
    pthread_mutex_lock(&ledger->mutex);
    for (size_t i = 0; i < count; i++)
        if (slots[i] < ledger->slot_count)
            kvp_ledger_set_stale(ledger, slots[i], stale);
    pthread_mutex_unlock(&ledger->mutex);
}

void kvp_ledger_count(kvp_ledger *ledger, kvp_ledger_counts *out)
{
    pthread_mutex_lock(&ledger->mutex);
    *out = ledger->counts;
    pthread_mutex_unlock(&ledger->mutex);
}
