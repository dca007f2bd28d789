/* A run of slots is taken away from whoever uses it: memory goes to another size of block.
 *
 * Owns: the order in which blocks leave then. A block goes after those that descend from it. */
#include "kvpool_ledger.h"

/* A child of the block in `slot`, or NONE. */
static uint32_t child_of(const kvp_ledger *ledger, uint32_t slot)
{
    const slot_table *table = &ledger->by_parent;
    return table->places[kvp_ledger_find(ledger, table, ledger->keys[slot])] - 1;
}

/* Whether a block that descends from the one in `top` is pinned. Walks the tree without a stack:
 * no parents go in a circle (enter() sees to it). */
static bool pinned_below(const kvp_ledger *ledger, uint32_t top)
{
    uint32_t at = child_of(ledger, top);
    if (at == NONE)
        return false;
    for (;;) {
        if (ledger->pins[at] > 0)
            return true;
        uint32_t child = child_of(ledger, at);
        if (child != NONE) {
            at = child;
            continue;
        }
        while (ledger->next[at] == NONE) {
            at = kvp_ledger_slot(ledger, ledger->parents[at]);
            if (at == top)
                return false;
        }
        at = ledger->next[at];
    }
}

static bool may_be_vacated(const kvp_ledger *ledger, uint32_t slot)
{
    if (ledger->states[slot] == FREE)
        return true;
    return ledger->states[slot] == READY && ledger->pins[slot] == 0 && ledger->grants[slot] == 0 &&
           !pinned_below(ledger, slot);
}

/* Evict a block after all that descend from it; how many went. */
static size_t evict_tree(kvp_ledger *ledger, uint32_t top)
{
    size_t gone = 0;
    for (uint32_t at = top;;) {
        for (uint32_t child; (child = child_of(ledger, at)) != NONE;)
            at = child;
        uint32_t above = kvp_ledger_slot(ledger, ledger->parents[at]);
        kvp_ledger_leave(ledger, at);
        gone++;
        if (at == top)
            return gone;
        at = above;
    }
}

/* Take the free slots of a run off the list of free ones. */
static void unlist(kvp_ledger *ledger, size_t first, size_t count)
{
    uint32_t *link = &ledger->free_head;
    for (size_t left = ledger->counts.free; left > 0; left--) {
        uint32_t slot = *link;
        if (slot >= first && slot < first + count)
            *link = ledger->next[slot];
        else
            link = &ledger->next[slot];
    }
}

kvp_status kvp_ledger_vacate(kvp_ledger *ledger, size_t first, size_t count, uint64_t *generations,
                             size_t *gone)
{
    kvp_status status = KVP_OK;
    *gone = 0;
    if (first > ledger->slot_count || count > ledger->slot_count - first)
        return KVP_INVALID;
    pthread_mutex_lock(&ledger->mutex);
    for (size_t slot = first; slot < first + count && status == KVP_OK; slot++)
        status = may_be_vacated(ledger, (uint32_t)slot) ? KVP_OK : KVP_BUSY;
    if (status == KVP_OK) {
        for (size_t slot = first; slot < first + count; slot++)
            if (ledger->states[slot] == READY)
                *gone += evict_tree(ledger, (uint32_t)slot);
        unlist(ledger, first, count);
        for (size_t i = 0; i < count; i++) {
            ledger->states[first + i] = RESERVED;
            generations[i] = ledger->generations[first + i] = ledger->generation++;
        }
        ledger->counts.free -= count;
        ledger->counts.reserved += count;
    }
    pthread_mutex_unlock(&ledger->mutex);
    return status;
}
