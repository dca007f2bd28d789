/* How blocks come into the ledger.
 *
 * Owns: the step from RESERVED to READY, and from an earlier run's slots. Everything here that is
 * static is called under the ledger's mutex. */
#include <string.h>

#include "kvpool_ledger.h"

/* A block enters the tables. */
static void enter(kvp_ledger *ledger, uint32_t slot, const uint8_t *key, const uint8_t *parent)
{
    memcpy(ledger->keys[slot], key, HASH_BYTES);
    memcpy(ledger->parents[slot], parent, HASH_BYTES);
    if (memcmp(parent, key, HASH_BYTES) == 0) {
        memset(ledger->parents[slot], 0, HASH_BYTES);
    } else if (kvp_ledger_has_child(ledger, key)) { /* whose chain may lead back here */
        const uint8_t *ancestor = parent;
        uint32_t at;
        while (memcmp(ancestor, key, HASH_BYTES) != 0 && !kvp_ledger_no_parent(ancestor) &&
               (at = kvp_ledger_slot(ledger, ancestor)) != NONE)
            ancestor = ledger->parents[at];
        if (memcmp(ancestor, key, HASH_BYTES) == 0)
            memset(ledger->parents[slot], 0, HASH_BYTES);
    }
    ledger->by_key.places[kvp_ledger_find(ledger, &ledger->by_key, key)] = slot + 1;
    kvp_ledger_join(ledger, slot);
    ledger->states[slot] = READY;
    ledger->counts.ready++;
    kvp_ledger_set_stale(ledger, slot, false);
    kvp_ledger_use(ledger, slot);
    uint32_t above = kvp_ledger_slot(ledger, ledger->parents[slot]);
    if (above != NONE)
        kvp_ledger_reconsider(ledger, above);
}

/* Where the parents of blocks stand: of the first, and of those after it, one behind another. */
typedef struct {
    const uint8_t *first, *rest;
} parent_names;

static const uint8_t *parent_of(const parent_names *parents, size_t i)
{
    return i == 0 ? parents->first : parents->rest + (i - 1) * HASH_BYTES;
}

/* Look whether all of a commit can be done; *at is the first that cannot. */
static kvp_status may_commit(const kvp_ledger *ledger, const uint32_t *slots,
                             const uint64_t *generations, size_t count, size_t grants, size_t *at)
{
    kvp_status status = KVP_OK;
    for (*at = 0; *at < count; ++*at) {
        const uint32_t slot = slots[*at];
        status = kvp_ledger_look(ledger, slot, generations[*at]);
        if (status == KVP_OK && ledger->states[slot] != RESERVED)
            status = KVP_BUSY;
        if (status == KVP_OK && ledger->grants[slot] < grants)
            status = KVP_INVALID;
        if (status != KVP_OK)
            break;
    }
    return status;
}

/* Make reserved slots ready, each with `grants` of its grants given back; how many are new. */
static size_t commit(kvp_ledger *ledger, const uint32_t *slots, const uint8_t *keys,
                     const parent_names *parents, size_t count, uint32_t grants, bool *added)
{
    size_t fresh = 0;
    for (size_t i = 0; i < count; i++) {
        const uint8_t *key = keys + i * HASH_BYTES;
        const uint32_t slot = slots[i];
        added[i] = false;
        if (ledger->states[slot] != RESERVED) /* named twice in this call */
            continue;
        ledger->counts.reserved--;
        ledger->grants[slot] -= grants;
        ledger->counts.grants -= grants;
        uint32_t here = kvp_ledger_slot(ledger, key);
        if (here == NONE) {
            enter(ledger, slot, key, parent_of(parents, i));
            added[i] = true;
            fresh++;
        } else {
            kvp_ledger_use(ledger, here);
            kvp_ledger_give_up(ledger, slot);
        }
    }
    return fresh;
}

kvp_status kvp_ledger_commit(kvp_ledger *ledger, const uint32_t *slots,
                             const uint64_t *generations, const uint8_t *keys,
                             const uint8_t *parents, size_t count, bool *added, size_t *bad)
{
    const parent_names names = {parents, parents + HASH_BYTES};
    pthread_mutex_lock(&ledger->mutex);
    kvp_status status = may_commit(ledger, slots, generations, count, 0, bad);
    if (status == KVP_OK)
        commit(ledger, slots, keys, &names, count, 0, added);
    pthread_mutex_unlock(&ledger->mutex);
    return status;
}

kvp_status kvp_ledger_commit_run(kvp_ledger *ledger, const uint32_t *slots,
                                 const uint64_t *generations, const uint8_t *keys,
                                 const uint8_t *parent, size_t count, bool granted, bool *added,
                                 size_t *at)
{
    const parent_names names = {parent, keys};
    for (*at = 0; *at < count; ++*at)
        if (memcmp(keys + *at * HASH_BYTES, parent_of(&names, *at), HASH_BYTES) == 0)
            return KVP_INVALID;
    pthread_mutex_lock(&ledger->mutex);
    kvp_status status = may_commit(ledger, slots, generations, count, granted, at);
    if (status == KVP_OK)
        *at = commit(ledger, slots, keys, &names, count, granted, added);
    pthread_mutex_unlock(&ledger->mutex);
    return status;
}

void kvp_ledger_restore(kvp_ledger *ledger, const uint32_t *slots, const uint64_t *generations,
                        const uint8_t *keys, const uint8_t *parents, size_t count, bool *kept)
{
    pthread_mutex_lock(&ledger->mutex);
    for (size_t i = 0; i < count; i++) {
        const uint8_t *key = keys + i * HASH_BYTES;
        kept[i] = slots[i] < ledger->slot_count && ledger->states[slots[i]] == FREE &&
                  kvp_ledger_slot(ledger, key) == NONE;
        if (!kept[i])
            continue;
        ledger->generations[slots[i]] = generations[i];
        enter(ledger, slots[i], key, parents + i * HASH_BYTES);
    }
    ledger->counts.free = 0;
    for (uint32_t slot = (uint32_t)ledger->slot_count; slot-- > 0;)
        if (ledger->states[slot] == FREE)
            kvp_ledger_set_free(ledger, slot);
    pthread_mutex_unlock(&ledger->mutex);
}
