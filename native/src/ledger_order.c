/* How the ledger finds blocks and whom it lets go next.
 *
 * Owns: two tables of slot numbers (by key, by parent), and a heap of the blocks that may be evicted,
 * ordered by last use. The table by parent holds one child of each parent, here or not, at the head of
 * a list of its siblings: a block has a child if its key is found there. */
#include <string.h>

#include "kvpool_ledger.h"

/* ---- tables ---- */

static size_t home_of(const kvp_ledger *ledger, const uint8_t *name)
{
    uint64_t low, high;
    memcpy(&low, name, sizeof low);
    memcpy(&high, name + sizeof low, sizeof high);
    uint64_t mixed = (low ^ ledger->seed) * UINT64_C(0x9e3779b97f4a7c15);
    mixed ^= (mixed >> 32) ^ high;
    mixed *= UINT64_C(0xd6e8feb86659fd93);
    mixed ^= mixed >> 32;
    return (size_t)(((unsigned __int128)mixed * ledger->place_count) >> 64);
}

static size_t after(const kvp_ledger *ledger, size_t place)
{
    return place + 1 == ledger->place_count ? 0 : place + 1;
}

/* The place of `name`, or the empty place where it would go. */
size_t kvp_ledger_find(const kvp_ledger *ledger, const slot_table *table, const uint8_t *name)
{
    size_t place = home_of(ledger, name);
    while (table->places[place] != 0 &&
           memcmp(table->hashes[table->places[place] - 1], name, HASH_BYTES) != 0)
        place = after(ledger, place);
    return place;
}

/* How far `place` lies behind `start`, going round. */
static size_t distance(const kvp_ledger *ledger, size_t start, size_t place)
{
    return place >= start ? place - start : place + ledger->place_count - start;
}

/* Empty a place, and shift back those behind it that would not be found past a hole. */
void kvp_ledger_empty(const kvp_ledger *ledger, slot_table *table, size_t hole)
{
    for (size_t place = after(ledger, hole); table->places[place] != 0;
         place = after(ledger, place)) {
        size_t home = home_of(ledger, table->hashes[table->places[place] - 1]);
        if (distance(ledger, home, place) < distance(ledger, hole, place))
            continue;
        table->places[hole] = table->places[place];
        hole = place;
    }
    table->places[hole] = 0;
}

/* The slot of a block that is here, or NONE. */
uint32_t kvp_ledger_slot(const kvp_ledger *ledger, const uint8_t *key)
{
    return ledger->by_key.places[kvp_ledger_find(ledger, &ledger->by_key, key)] - 1; /* 0 - 1 is NONE */
}

bool kvp_ledger_has_child(const kvp_ledger *ledger, const uint8_t *key)
{
    return ledger->by_parent.places[kvp_ledger_find(ledger, &ledger->by_parent, key)] != 0;
}

bool kvp_ledger_no_parent(const uint8_t *parent)
{
    static const hash zeros;
    return memcmp(parent, zeros, HASH_BYTES) == 0;
}

void kvp_ledger_join(kvp_ledger *ledger, uint32_t slot)
{
    ledger->next[slot] = ledger->previous[slot] = NONE;
    if (kvp_ledger_no_parent(ledger->parents[slot]))
        return;
    size_t place = kvp_ledger_find(ledger, &ledger->by_parent, ledger->parents[slot]);
    uint32_t head = ledger->by_parent.places[place] - 1;
    if (head != NONE) {
        ledger->next[slot] = head;
        ledger->previous[head] = slot;
    }
    ledger->by_parent.places[place] = slot + 1;
}

void kvp_ledger_part(kvp_ledger *ledger, uint32_t slot)
{
    if (kvp_ledger_no_parent(ledger->parents[slot]))
        return;
    uint32_t next = ledger->next[slot], previous = ledger->previous[slot];
    if (next != NONE)
        ledger->previous[next] = previous;
    if (previous != NONE) {
        ledger->next[previous] = next;
        return;
    }
    size_t place = kvp_ledger_find(ledger, &ledger->by_parent, ledger->parents[slot]);
    if (next != NONE)
        ledger->by_parent.places[place] = next + 1;
    else
        kvp_ledger_empty(ledger, &ledger->by_parent, place);
}

/* ---- the heap of candidates ---- */

static void put(kvp_ledger *ledger, size_t at, uint32_t slot)
{
    ledger->heap[at] = slot;
    ledger->heap_at[slot] = (uint32_t)at;
}

static bool older(const kvp_ledger *ledger, size_t a, size_t b)
{
    return ledger->used[ledger->heap[a]] < ledger->used[ledger->heap[b]];
}

static void swap(kvp_ledger *ledger, size_t a, size_t b)
{
    uint32_t slot = ledger->heap[a];
    put(ledger, a, ledger->heap[b]);
    put(ledger, b, slot);
}

static void settle_in_heap(kvp_ledger *ledger, size_t at)
{
    for (; at > 0 && older(ledger, at, (at - 1) / 2); at = (at - 1) / 2)
        swap(ledger, at, (at - 1) / 2);
    for (;;) {
        size_t oldest = at;
        for (size_t child = 2 * at + 1; child <= 2 * at + 2 && child < ledger->heap_count; child++)
            if (older(ledger, child, oldest))
                oldest = child;
        if (oldest == at)
            return;
        swap(ledger, at, oldest);
        at = oldest;
    }
}

static void leave_heap(kvp_ledger *ledger, uint32_t slot)
{
    const size_t at = ledger->heap_at[slot], last = --ledger->heap_count;
    ledger->heap_at[slot] = NONE;
    if (at != last) {
        put(ledger, at, ledger->heap[last]);
        settle_in_heap(ledger, at);
    }
}

/* Look again at whether a block may be evicted, and when: something about it has changed. */
void kvp_ledger_reconsider(kvp_ledger *ledger, uint32_t slot)
{
    bool may_go = ledger->states[slot] == READY && ledger->pins[slot] == 0 &&
                  !kvp_ledger_has_child(ledger, ledger->keys[slot]);
    size_t at = ledger->heap_at[slot];
    if (may_go) {
        if (at == NONE) {
            at = ledger->heap_count++;
            put(ledger, at, slot);
        }
        settle_in_heap(ledger, at);
    } else if (at != NONE) {
        leave_heap(ledger, slot);
    }
}

void kvp_ledger_use(kvp_ledger *ledger, uint32_t slot)
{
    ledger->used[slot] = ++ledger->uses;
    kvp_ledger_reconsider(ledger, slot);
}

static void reconsider_parent(kvp_ledger *ledger, uint32_t slot)
{
    const uint32_t above = kvp_ledger_slot(ledger, ledger->parents[slot]);
    if (above != NONE)
        kvp_ledger_reconsider(ledger, above);
}

/* Blocks are taken out of the order as if they went, and put back last first. */
size_t kvp_ledger_ahead(kvp_ledger *ledger, size_t count, uint32_t *slots)
{
    size_t listed = 0;
    pthread_mutex_lock(&ledger->mutex);
    for (uint32_t slot = ledger->free_head; listed < count && listed < ledger->counts.free;
         slot = ledger->next[slot])
        slots[listed++] = slot;
    const size_t free_ones = listed;
    while (listed < count && ledger->heap_count > 0) {
        const uint32_t slot = slots[listed++] = ledger->heap[0];
        leave_heap(ledger, slot);
        kvp_ledger_part(ledger, slot);
        reconsider_parent(ledger, slot);
    }
    for (size_t i = listed; i-- > free_ones;) {
        kvp_ledger_join(ledger, slots[i]);
        reconsider_parent(ledger, slots[i]);
        kvp_ledger_reconsider(ledger, slots[i]);
    }
    pthread_mutex_unlock(&ledger->mutex);
    return listed;
}
