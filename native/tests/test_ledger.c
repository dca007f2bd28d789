/* The ledger against a model that looks through everything each time: random calls, small numbers. */
#include <pthread.h>

#include "../src/ledger.c"
#include "check.h"

enum { SLOTS = 12, KEYS = 20, TURNS = 60000, BITS = 8 };

typedef struct {
    slot_state state;
    uint64_t generation, used;
    int key, parent; /* -1: none */
    unsigned pins, grants;
} model_slot;

static model_slot model[SLOTS];
static uint64_t uses, generation;

static const uint8_t *name_of(int key)
{
    static hash names[2][KEYS + 1];
    static unsigned turn;
    uint8_t *name = names[turn++ % 2][key + 1];
    memset(name, 0, HASH_BYTES);
    if (key >= 0) {
        name[0] = (uint8_t)(key % 3); /* crowded places */
        name[31] = (uint8_t)(key + 1);
    }
    return name;
}

static int at_key(int key)
{
    for (int slot = 0; slot < SLOTS; slot++)
        if (model[slot].state == READY && model[slot].key == key)
            return slot;
    return -1;
}

static bool is_parent(int key)
{
    for (int slot = 0; slot < SLOTS; slot++)
        if (model[slot].state == READY && model[slot].parent == key)
            return true;
    return false;
}

static void model_give_up(int slot)
{
    model[slot].state = model[slot].grants == 0 ? FREE : QUARANTINED;
}

static int victim(void)
{
    int oldest = -1;
    for (int slot = 0; slot < SLOTS; slot++)
        if (model[slot].state == READY && model[slot].pins == 0 && !is_parent(model[slot].key) &&
            (oldest < 0 || model[slot].used < model[oldest].used))
            oldest = slot;
    return oldest;
}

static void model_leave(int slot)
{
    model[slot].state = DROPPED;
    if (model[slot].pins == 0)
        model_give_up(slot);
}

static void check_same(kvp_ledger *ledger)
{
    kvp_ledger_counts counts, expected = {0};
    for (int slot = 0; slot < SLOTS; slot++) {
        expected.free += model[slot].state == FREE;
        expected.reserved += model[slot].state == RESERVED;
        expected.ready += model[slot].state == READY || model[slot].state == DROPPED;
        expected.quarantined += model[slot].state == QUARANTINED;
        expected.pins += model[slot].pins;
        expected.grants += model[slot].grants;
        CHECK(ledger->states[slot] == model[slot].state);
    }
    kvp_ledger_count(ledger, &counts);
    expected.stale = counts.stale;
    CHECK(memcmp(&counts, &expected, sizeof counts) == 0);
    for (int key = 0; key < KEYS; key++)
        CHECK(kvp_ledger_match(ledger, name_of(key), 1) == (at_key(key) >= 0));
}

/* Who would be taken next, by what the model would do; it is changed for that, and put back. */
static void look_ahead(kvp_ledger *ledger)
{
    uint32_t slots[SLOTS];
    model_slot before[SLOTS];
    const size_t count = random_below(SLOTS + 1);
    const size_t listed = kvp_ledger_ahead(ledger, count, slots);
    size_t free_ones = 0;
    memcpy(before, model, sizeof model);
    for (int slot = 0; slot < SLOTS; slot++)
        free_ones += model[slot].state == FREE;
    for (size_t i = 0; i < listed; i++) {
        CHECK(i < free_ones ? model[slots[i]].state == FREE : (int)slots[i] == victim());
        model[slots[i]].state = i < free_ones ? RESERVED : DROPPED;
    }
    CHECK(listed == count || (listed >= free_ones && victim() < 0));
    memcpy(model, before, sizeof model);
}

static void reserve(kvp_ledger *ledger)
{
    uint32_t slot, left;
    uint64_t life;
    const bool grants = random_below(4) == 0;
    size_t taken, gone = 0;
    if (random_below(4) == 0) {
        bool full = true;
        const int oldest = victim();
        for (int i = 0; i < SLOTS; i++)
            full = full && model[i].state != FREE;
        taken = kvp_ledger_take(ledger, 1, grants, &slot, &life, &left, &gone);
        CHECK(gone == (full && oldest >= 0));
        CHECK(gone == 0 || (int)left == oldest);
        if (gone != 0)
            model_leave(oldest);
    } else {
        taken = kvp_ledger_reserve(ledger, 1, grants, &slot, &life);
    }
    if (taken == 0) {
        for (int i = 0; i < SLOTS; i++)
            CHECK(model[i].state != FREE);
        return;
    }
    CHECK(model[slot].state == FREE && life == generation);
    model[slot] =
        (model_slot){.state = RESERVED, .generation = generation++, .key = -1, .grants = grants};
}

static void commit(kvp_ledger *ledger, uint32_t slot)
{
    const int key = (int)random_below(KEYS), parent = (int)random_below(KEYS + 1) - 1;
    uint8_t parent_name[HASH_BYTES];
    bool added;
    size_t bad;
    const bool run = random_below(2) == 0, granted = run && random_below(2) == 0;
    if (parent >= key && parent >= 0)
        return; /* no circles here: they have their own test */
    memcpy(parent_name, name_of(parent), HASH_BYTES);
    kvp_status status =
        run ? kvp_ledger_commit_run(ledger, &slot, &model[slot].generation, name_of(key),
                                    parent_name, 1, granted, &added, &bad)
            : kvp_ledger_commit(ledger, &slot, &model[slot].generation, name_of(key), parent_name,
                                1, &added, &bad);
    const bool reserved = model[slot].state == RESERVED;
    CHECK((status == KVP_OK) == (reserved && (!granted || model[slot].grants > 0)));
    if (status != KVP_OK) {
        CHECK(bad == 0 && (reserved ? status == KVP_INVALID
                                    : status == KVP_BUSY || status == KVP_STALE));
        return;
    }
    const int here = at_key(key);
    CHECK(!run || bad == (here < 0));
    model[slot].grants -= granted;
    CHECK(added == (here < 0));
    if (added) {
        model[slot].state = READY;
        model[slot].key = key;
        model[slot].parent = parent;
        model[slot].used = ++uses;
    } else {
        model[here].used = ++uses;
        model_give_up((int)slot);
    }
}

static void step(kvp_ledger *ledger, uint32_t slot, kvp_arena_step which)
{
    size_t done;
    model_slot *mine = &model[slot];
    kvp_status status = kvp_ledger_change(ledger, which, &slot, &mine->generation, 1, &done);
    CHECK(done == (status == KVP_OK));
    bool may = false;
    switch (which) {
    case KVP_ARENA_UNPIN:
        may = mine->pins > 0;
        break;
    case KVP_ARENA_GRANT:
        may = mine->state != FREE && mine->state != QUARANTINED;
        break;
    case KVP_ARENA_SETTLE:
        may = mine->state != FREE && mine->grants > 0;
        break;
    case KVP_ARENA_RELEASE:
        may = mine->state == RESERVED;
        break;
    default:
        break;
    }
    CHECK((status == KVP_OK) == may);
    if (!may)
        return;
    if (which == KVP_ARENA_UNPIN && --mine->pins == 0 && mine->state == DROPPED)
        model_give_up((int)slot);
    if (which == KVP_ARENA_GRANT)
        mine->grants++;
    if (which == KVP_ARENA_SETTLE && --mine->grants == 0 && mine->state == QUARANTINED)
        mine->state = FREE;
    if (which == KVP_ARENA_RELEASE)
        model_give_up((int)slot);
}

static bool descends(int slot, int key)
{
    for (int at = slot; at >= 0 && model[at].parent >= 0; at = at_key(model[at].parent))
        if (model[at].parent == key)
            return true;
    return false;
}

static bool model_may_vacate(int slot)
{
    bool may = model[slot].state == FREE ||
               (model[slot].state == READY && model[slot].pins == 0 && model[slot].grants == 0);
    for (int below = 0; below < SLOTS && model[slot].state == READY; below++)
        if (model[below].state == READY && model[below].pins > 0 && descends(below, model[slot].key))
            may = false;
    return may;
}

static void vacate(kvp_ledger *ledger, int first)
{
    uint64_t lives[SLOTS];
    size_t gone, expected = 0;
    const int count = 1 + (int)random_below(first + 3 < SLOTS ? 3 : 1);
    bool may = true;
    for (int slot = first; slot < first + count; slot++)
        may = may && model_may_vacate(slot);
    kvp_status status = kvp_ledger_vacate(ledger, (size_t)first, (size_t)count, lives, &gone);
    CHECK(status == (may ? KVP_OK : KVP_BUSY));
    bool going[SLOTS] = {false};
    for (int slot = first; may && slot < first + count; slot++)
        for (int at = 0; at < SLOTS && model[slot].state == READY; at++)
            if (model[at].state == READY && (at == slot || descends(at, model[slot].key)))
                going[at] = true;
    for (int at = 0; at < SLOTS; at++) {
        if (!going[at])
            continue;
        expected++;
        model_leave(at);
    }
    for (int slot = first; may && slot < first + count; slot++) {
        CHECK(lives[slot - first] == generation);
        model[slot].state = RESERVED;
        model[slot].generation = generation++;
    }
    CHECK(gone == expected);
}

static void random_turn(kvp_ledger *ledger)
{
    static const kvp_arena_step steps[] = {KVP_ARENA_UNPIN, KVP_ARENA_UNPIN, KVP_ARENA_GRANT,
                                           KVP_ARENA_SETTLE, KVP_ARENA_SETTLE, KVP_ARENA_RELEASE};
    const uint32_t slot = (uint32_t)random_below(SLOTS);
    const int key = (int)random_below(KEYS), here = at_key(key);
    const bool use = random_below(2) == 0;
    uint32_t pinned, left;
    uint64_t life;
    if (random_below(8) == 0)
        look_ahead(ledger);
    switch (random_below(8)) {
    case 0:
    case 1:
        reserve(ledger);
        break;
    case 2:
    case 3:
        commit(ledger, slot);
        break;
    case 4:
        CHECK(kvp_ledger_pin(ledger, name_of(key), 1, use, &pinned, &life) == (here >= 0));
        if (here >= 0) {
            CHECK((int)pinned == here && life == model[here].generation);
            model[here].pins++;
            if (use)
                model[here].used = ++uses;
        }
        break;
    case 5:
        if (random_below(3) == 0) {
            CHECK(kvp_ledger_drop(ledger, name_of(key), &left) == (here >= 0 ? KVP_OK : KVP_MISS));
            CHECK((int)left == here); /* -1 is NONE */
            if (here >= 0)
                model_leave(here);
        } else {
            const int oldest = victim();
            CHECK(kvp_ledger_evict(ledger, 1, &left) == (oldest >= 0));
            CHECK(oldest < 0 || (int)left == oldest);
            if (oldest >= 0)
                model_leave(oldest);
        }
        break;
    case 6:
        if (random_below(4) == 0) {
            vacate(ledger, (int)slot);
            break;
        }
        /* fall through */
    default:
        step(ledger, slot, steps[random_below(sizeof steps / sizeof *steps)]);
    }
}

static void test_against_the_model(void)
{
    kvp_ledger *ledger;
    uses = 0;
    generation = 7;
    memset(model, 0, sizeof model);
    CHECK(kvp_ledger_open(SLOTS, generation, &ledger) == KVP_OK);
    for (int turn = 0; turn < TURNS; turn++) {
        random_turn(ledger);
        check_same(ledger);
    }
    kvp_ledger_close(ledger);
}

static kvp_ledger *filled(const int *keys, const int *parents, size_t count)
{
    kvp_ledger *ledger;
    uint32_t slots[SLOTS];
    uint64_t lives[SLOTS];
    CHECK(kvp_ledger_open(SLOTS, 1, &ledger) == KVP_OK);
    CHECK(kvp_ledger_reserve(ledger, count, false, slots, lives) == count);
    for (size_t i = 0; i < count; i++) {
        bool added;
        size_t bad;
        uint8_t parent[HASH_BYTES];
        memcpy(parent, name_of(parents[i]), HASH_BYTES);
        CHECK(kvp_ledger_commit(ledger, &slots[i], &lives[i], name_of(keys[i]), parent, 1, &added,
                                &bad) == KVP_OK);
        CHECK(added);
    }
    return ledger;
}

static void test_parents_in_a_circle_can_go(void)
{
    kvp_ledger *ledger = filled((int[]){0, 1, 2}, (int[]){2, 0, 1}, 3);
    CHECK(kvp_ledger_evict(ledger, SLOTS, NULL) == 3);
    kvp_ledger_close(ledger);
    ledger = filled((int[]){0, 1}, (int[]){0, 0}, 2); /* the smallest circle */
    uint8_t key[HASH_BYTES];
    memcpy(key, name_of(1), HASH_BYTES);
    CHECK(kvp_ledger_rooted(ledger, key, 1) == 1);
    uint64_t lives[SLOTS];
    size_t gone;
    CHECK(kvp_ledger_vacate(ledger, 0, 1, lives, &gone) == KVP_OK && gone == 2);
    kvp_ledger_close(ledger);
}

static void test_a_slot_that_is_named_twice_holds_the_first_block(void)
{
    kvp_ledger *ledger;
    uint32_t slots[2];
    uint64_t lives[2];
    uint8_t keys[2][HASH_BYTES];
    const uint8_t none[2][HASH_BYTES] = {{0}};
    bool added[2];
    size_t bad;
    for (int i = 0; i < 2; i++)
        memcpy(keys[i], name_of(i), HASH_BYTES);
    CHECK(kvp_ledger_open(SLOTS, 1, &ledger) == KVP_OK);
    CHECK(kvp_ledger_reserve(ledger, 1, false, slots, lives) == 1);
    slots[1] = slots[0], lives[1] = lives[0];
    CHECK(kvp_ledger_commit(ledger, slots, lives, keys[0], none[0], 2, added, &bad) == KVP_OK);
    CHECK(added[0] && !added[1]);
    CHECK(kvp_ledger_match(ledger, keys[0], 1) == 1 && kvp_ledger_match(ledger, keys[1], 1) == 0);
    kvp_ledger_counts counts;
    kvp_ledger_count(ledger, &counts);
    CHECK(counts.ready == 1 && counts.reserved == 0 && counts.free == SLOTS - 1);
    kvp_ledger_close(ledger);
}

static void test_only_whole_chains_are_rooted(void)
{
    uint8_t keys[5][HASH_BYTES];
    kvp_ledger *ledger = filled((int[]){0, 1, 2, 4}, (int[]){-1, 0, 1, 3}, 4);
    for (int key = 0; key < 5; key++)
        memcpy(keys[key], name_of(key), HASH_BYTES);
    CHECK(kvp_ledger_rooted(ledger, keys[0], 5) == 3);
    CHECK(kvp_ledger_rooted(ledger, keys[2], 1) == 1);
    CHECK(kvp_ledger_rooted(ledger, keys[4], 1) == 0); /* its parent is not here */
    uint32_t left;
    CHECK(kvp_ledger_drop(ledger, keys[0], &left) == KVP_OK);
    CHECK(kvp_ledger_rooted(ledger, keys[1], 2) == 0);
    kvp_ledger_close(ledger);
}

static void test_restored_blocks_are_as_before(void)
{
    kvp_ledger *ledger;
    uint32_t slots[] = {3, 1, 1, 99, 5};
    uint64_t lives[] = {10, 11, 12, 13, 14};
    uint8_t keys[5][HASH_BYTES], parents[5][HASH_BYTES] = {0};
    bool kept[5];
    CHECK(kvp_ledger_open(6, 100, &ledger) == KVP_OK);
    for (int i = 0; i < 5; i++)
        memcpy(keys[i], name_of(i == 4 ? 0 : i), HASH_BYTES); /* the last is the first again */
    kvp_ledger_restore(ledger, slots, lives, keys[0], parents[0], 5, kept);
    CHECK(kept[0] && kept[1] && !kept[2] && !kept[3] && !kept[4]);
    kvp_ledger_counts counts;
    kvp_ledger_count(ledger, &counts);
    CHECK(counts.free == 4 && counts.ready == 2);
    uint32_t taken[6];
    uint64_t fresh[6];
    CHECK(kvp_ledger_reserve(ledger, 6, false, taken, fresh) == 4);
    for (size_t i = 0; i < 4; i++)
        CHECK(taken[i] != 3 && taken[i] != 1 && fresh[i] >= 100);
    CHECK(kvp_ledger_evict(ledger, 1, NULL) == 1);
    CHECK(kvp_ledger_match(ledger, keys[0], 1) == 0); /* the oldest */
    size_t next = 0;
    uint8_t key[HASH_BYTES], parent[HASH_BYTES];
    CHECK(kvp_ledger_list(ledger, &next, 1, taken, fresh, key, parent) == 1);
    CHECK(taken[0] == 1 && fresh[0] == 11 && memcmp(key, keys[1], HASH_BYTES) == 0);
    CHECK(kvp_ledger_stale(ledger, 6, taken) == 1 && taken[0] == 3);
    kvp_ledger_mark(ledger, taken, 1, false);
    CHECK(kvp_ledger_stale(ledger, 6, taken) == 0);
    kvp_ledger_close(ledger);
}

static void *hammer(void *argument)
{
    kvp_ledger *ledger = argument;
    for (int turn = 0; turn < 20000; turn++) {
        uint32_t slot;
        uint64_t life;
        bool added;
        size_t done;
        hash key = {(uint8_t)(turn % 5)};
        if (kvp_ledger_reserve(ledger, 1, false, &slot, &life) == 0) {
            kvp_ledger_evict(ledger, 1, NULL);
            continue;
        }
        hash none = {0};
        key[5] = 1;
        CHECK(kvp_ledger_commit(ledger, &slot, &life, key, none, 1, &added, &done) == KVP_OK);
        if (kvp_ledger_pin(ledger, key, 1, true, &slot, &life) == 1)
            CHECK(kvp_ledger_change(ledger, KVP_ARENA_UNPIN, &slot, &life, 1, &done) == KVP_OK);
        kvp_ledger_drop(ledger, key, &slot);
    }
    return NULL;
}

static void test_threads(void)
{
    kvp_ledger *ledger;
    pthread_t threads[4];
    CHECK(kvp_ledger_open(3, 1, &ledger) == KVP_OK);
    for (size_t i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, hammer, ledger) == 0);
    for (size_t i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    kvp_ledger_counts counts;
    kvp_ledger_evict(ledger, 3, NULL);
    kvp_ledger_count(ledger, &counts);
    CHECK(counts.free == 3 && counts.pins == 0);
    kvp_ledger_close(ledger);
}

/* A chain goes in as a whole, each block the parent of the next, and comes out leaf by leaf. */
static void test_run(void)
{
    enum { RUN = 4 };
    kvp_ledger *ledger;
    uint32_t slots[RUN], evicted[RUN];
    uint64_t lives[RUN];
    uint8_t keys[RUN * HASH_BYTES] = {0}, none[HASH_BYTES] = {0};
    bool added[RUN];
    size_t at, gone;
    kvp_ledger_counts counts;
    for (size_t i = 0; i < RUN; i++)
        keys[i * HASH_BYTES] = (uint8_t)(i + 1);
    CHECK(kvp_ledger_open(RUN, 1, &ledger) == KVP_OK);
    CHECK(kvp_ledger_take(ledger, RUN, true, slots, lives, evicted, &gone) == RUN && gone == 0);

    /* Nothing happens where one of them is wrong. */
    uint8_t doubled[RUN * HASH_BYTES];
    memcpy(doubled, keys, sizeof doubled);
    doubled[2 * HASH_BYTES] = 2; /* as the one before it */
    CHECK(kvp_ledger_commit_run(ledger, slots, lives, doubled, none, RUN, true, added, &at) ==
              KVP_INVALID && at == 2);
    CHECK(kvp_ledger_commit_run(ledger, slots, lives, keys, keys, RUN, true, added, &at) ==
              KVP_INVALID && at == 0);
    lives[3]++;
    CHECK(kvp_ledger_commit_run(ledger, slots, lives, keys, none, RUN, true, added, &at) ==
              KVP_STALE && at == 3);
    lives[3]--;
    kvp_ledger_count(ledger, &counts);
    CHECK(counts.reserved == RUN && counts.grants == RUN);

    CHECK(kvp_ledger_commit_run(ledger, slots, lives, keys, none, RUN, true, added, &at) ==
              KVP_OK && at == RUN);
    kvp_ledger_count(ledger, &counts);
    CHECK(counts.ready == RUN && counts.grants == 0);
    for (size_t i = 0; i < RUN; i++)
        CHECK(memcmp(ledger->parents[slots[i]], i == 0 ? none : keys + (i - 1) * HASH_BYTES,
                     HASH_BYTES) == 0);

    /* The leaf goes first, and the slots come back in the order of the chain. */
    CHECK(kvp_ledger_take(ledger, 2, false, slots, lives, evicted, &gone) == 2 && gone == 2);
    CHECK(evicted[0] == 3 && evicted[1] == 2 && slots[0] == 2 && slots[1] == 3);
    CHECK(kvp_ledger_match(ledger, keys, RUN) == 2);
    /* What is pinned stays: fewer are taken. */
    uint32_t pinned;
    uint64_t life;
    CHECK(kvp_ledger_pin(ledger, keys, 1, true, &pinned, &life) == 1);
    CHECK(kvp_ledger_take(ledger, RUN, false, slots, lives, evicted, &gone) == 1 && gone == 1);
    kvp_ledger_close(ledger);
}

int main(void)
{
    kvp_ledger *ledger;
    CHECK(kvp_ledger_open(0, 1, &ledger) == KVP_INVALID);
    CHECK(kvp_ledger_open(1, 0, &ledger) == KVP_INVALID);
    CHECK(kvp_ledger_open(4, 1, &ledger) == KVP_OK);
    uint64_t lives[5];
    size_t gone;
    CHECK(kvp_ledger_vacate(ledger, 3, 2, lives, &gone) == KVP_INVALID);
    CHECK(kvp_ledger_vacate(ledger, 5, SIZE_MAX, lives, &gone) == KVP_INVALID);
    kvp_ledger_close(ledger);
    kvp_ledger_close(NULL);
    test_against_the_model();
    test_parents_in_a_circle_can_go();
    test_a_slot_that_is_named_twice_holds_the_first_block();
    test_only_whole_chains_are_rooted();
    test_run();
    test_restored_blocks_are_as_before();
    test_threads();
    return 0;
}
