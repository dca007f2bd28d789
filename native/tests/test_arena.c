/* arena.c: the life of a slot, every misuse of it, and threads that fight over slots. */
#include "../src/arena.c"

#include "check.h"

enum { SLOTS = 4, SLOT_BYTES = 5000, CRCS = 3, THREADS = 4, ROUNDS = 3000 };

static const uint8_t incarnation[KVP_INCARNATION_BYTES] = "0123456789abcde";
static const uint8_t hash[KVP_HASH_BYTES] = "a block's hash of 32 bytes......";
static const uint32_t crcs[CRCS] = {1, 2, 3};

static kvp_arena *open_arena(void)
{
    kvp_arena *arena;
    CHECK(kvp_arena_open(SLOTS, SLOT_BYTES, CRCS, incarnation, &arena) == KVP_OK);
    return arena;
}

/* One slot at a time, as most of the tests below name them. */
static kvp_status step(kvp_arena *arena, kvp_arena_step which, uint32_t slot, uint64_t generation)
{
    size_t done = 2;
    kvp_status status = kvp_arena_change(arena, which, &slot, &generation, 1, &done);
    CHECK(done == (status == KVP_OK ? 1 : 0));
    return status;
}

static bool take(kvp_arena *arena, uint32_t *slot, uint64_t *generation)
{
    return kvp_arena_reserve(arena, 1, false, slot, generation) == 1;
}

static kvp_status commit_one(kvp_arena *arena, uint32_t slot, uint64_t generation,
                             const uint32_t *sums)
{
    size_t done;
    return kvp_arena_commit(arena, &slot, &generation, 1, hash, sums, &done);
}

static kvp_status read_one(kvp_arena *arena, uint32_t slot, uint64_t generation, uint32_t *sums)
{
    size_t done;
    return kvp_arena_crcs(arena, &slot, &generation, 1, sums, &done);
}

static uint64_t shown(kvp_arena *arena, uint32_t slot)
{
    return __atomic_load_n(&header_of(arena, slot)->generation, __ATOMIC_ACQUIRE);
}

static void test_life(void)
{
    kvp_arena *arena = open_arena();
    kvp_arena_counts counts;
    uint32_t slot, again, read[CRCS];
    uint64_t life, next;
    CHECK(kvp_arena_slot_stride(arena) == 8192 && kvp_arena_base(arena) % 4096 == 0);
    CHECK(take(arena, &slot, &life) && slot < SLOTS && life == 1);
    CHECK(shown(arena, slot) == 0);
    memset((void *)(kvp_arena_base(arena) + slot * kvp_arena_slot_stride(arena)), 1, SLOT_BYTES);
    CHECK(step(arena, KVP_ARENA_PIN, slot, life) == KVP_BUSY);
    CHECK(read_one(arena, slot, life, read) == KVP_BUSY);
    CHECK(commit_one(arena, slot, life, crcs) == KVP_OK);
    CHECK(commit_one(arena, slot, life, crcs) == KVP_BUSY);
    CHECK(shown(arena, slot) == life && !memcmp(header_of(arena, slot)->hash, hash, sizeof hash));
    CHECK(read_one(arena, slot, life, read) == KVP_OK && !memcmp(read, crcs, sizeof crcs));
    CHECK(step(arena, KVP_ARENA_UNPIN, slot, life) == KVP_INVALID);
    CHECK(step(arena, KVP_ARENA_SETTLE, slot, life) == KVP_INVALID);
    CHECK(step(arena, KVP_ARENA_PIN, slot, life) == KVP_OK);
    CHECK(step(arena, KVP_ARENA_RELEASE, slot, life) == KVP_BUSY);
    CHECK(step(arena, KVP_ARENA_UNPIN, slot, life) == KVP_OK);
    CHECK(step(arena, KVP_ARENA_GRANT, slot, life) == KVP_OK);
    CHECK(step(arena, KVP_ARENA_GRANT, slot, life) == KVP_OK);
    kvp_arena_count(arena, &counts);
    CHECK(counts.ready == 1 && counts.grants == 2 && counts.pins == 0 && counts.free == 3);
    CHECK(step(arena, KVP_ARENA_RELEASE, slot, life) == KVP_OK && shown(arena, slot) == 0);
    CHECK(step(arena, KVP_ARENA_RELEASE, slot, life) == KVP_BUSY);
    CHECK(step(arena, KVP_ARENA_GRANT, slot, life) == KVP_BUSY);
    CHECK(step(arena, KVP_ARENA_PIN, slot, life) == KVP_BUSY);
    CHECK(commit_one(arena, slot, life, crcs) == KVP_BUSY);
    for (size_t i = 0; i < SLOTS - 1; i++) {
        CHECK(take(arena, &again, &next) && again != slot);
    }
    CHECK(!take(arena, &again, &next)); /* quarantined is not free */
    CHECK(step(arena, KVP_ARENA_SETTLE, slot, life) == KVP_OK);
    CHECK(!take(arena, &again, &next));
    CHECK(step(arena, KVP_ARENA_SETTLE, slot, life) == KVP_OK);
    CHECK(step(arena, KVP_ARENA_SETTLE, slot, life) == KVP_STALE);
    CHECK(take(arena, &again, &next) && again == slot && next == 2);
    CHECK(step(arena, KVP_ARENA_RELEASE, slot, life) == KVP_STALE);
    CHECK(step(arena, KVP_ARENA_RELEASE, slot, next) == KVP_OK);
    CHECK(step(arena, KVP_ARENA_RELEASE, slot, next) == KVP_STALE);
    kvp_arena_close(arena);
}

static void test_refusals(void)
{
    kvp_arena *arena;
    size_t huge = SIZE_MAX / 2;
    CHECK(kvp_arena_open(0, 1, 0, incarnation, &arena) == KVP_INVALID);
    CHECK(kvp_arena_open(1, 0, 0, incarnation, &arena) == KVP_INVALID);
    CHECK(kvp_arena_open(huge, 1, 0, incarnation, &arena) == KVP_INVALID);
    CHECK(kvp_arena_open(2, huge, 0, incarnation, &arena) == KVP_INVALID);
    CHECK(kvp_arena_open(1, SIZE_MAX, 0, incarnation, &arena) == KVP_INVALID);
    CHECK(kvp_arena_open(1, 1, huge, incarnation, &arena) == KVP_INVALID);
    kvp_arena_close(NULL);
    arena = open_arena();
    for (uint32_t slot = 0; slot < SLOTS + 2; slot += SLOTS + 1) {
        kvp_status status = slot < SLOTS ? KVP_STALE : KVP_INVALID;
        CHECK(commit_one(arena, slot, 0, crcs) == status);
        CHECK(step(arena, KVP_ARENA_PIN, slot, 0) == status);
        CHECK(step(arena, KVP_ARENA_UNPIN, slot, 0) == status);
        CHECK(step(arena, KVP_ARENA_GRANT, slot, 0) == status);
        CHECK(step(arena, KVP_ARENA_SETTLE, slot, 0) == status);
        CHECK(step(arena, KVP_ARENA_RELEASE, slot, 0) == status);
    }
    kvp_arena_close(arena);
    CHECK(kvp_arena_open(1, 1, 0, incarnation, &arena) == KVP_OK);
    uint32_t slot, none[1];
    uint64_t life;
    CHECK(take(arena, &slot, &life));
    CHECK(commit_one(arena, slot, life, none) == KVP_OK);
    CHECK(read_one(arena, slot, life, none) == KVP_OK);
    kvp_arena_close(arena);
}

static void test_runs(void)
{
    kvp_arena *arena = open_arena();
    kvp_arena_counts counts;
    uint32_t slots[SLOTS + 1], read[SLOTS * CRCS];
    uint64_t lives[SLOTS + 1];
    uint8_t hashes[SLOTS * KVP_HASH_BYTES];
    uint32_t sums[SLOTS * CRCS];
    size_t done;
    for (size_t i = 0; i < SLOTS * CRCS; i++)
        sums[i] = (uint32_t)(100 + i);
    for (size_t i = 0; i < sizeof hashes; i++)
        hashes[i] = (uint8_t)i;
    CHECK(kvp_arena_reserve(arena, 0, true, slots, lives) == 0);
    CHECK(kvp_arena_reserve(arena, SLOTS + 1, true, slots, lives) == SLOTS);
    kvp_arena_count(arena, &counts);
    CHECK(counts.reserved == SLOTS && counts.grants == SLOTS && counts.free == 0);
    CHECK(kvp_arena_change(arena, KVP_ARENA_REQUIRE_RESERVED, slots, lives, SLOTS, &done) == KVP_OK);
    CHECK(kvp_arena_change(arena, KVP_ARENA_REQUIRE_PINNED, slots, lives, SLOTS, &done) == KVP_BUSY);
    CHECK(kvp_arena_change(arena, KVP_ARENA_SETTLE, slots, lives, SLOTS, &done) == KVP_OK);
    CHECK(kvp_arena_commit(arena, slots, lives, SLOTS, hashes, sums, &done) == KVP_OK);
    CHECK(done == SLOTS);
    CHECK(kvp_arena_crcs(arena, slots, lives, SLOTS, read, &done) == KVP_OK);
    CHECK(!memcmp(read, sums, sizeof read));
    CHECK(!memcmp(header_of(arena, slots[2])->hash, hashes + 2 * KVP_HASH_BYTES, KVP_HASH_BYTES));

    /* A run ends at the first slot that cannot be taken, and says so. */
    lives[2]++;
    CHECK(kvp_arena_change(arena, KVP_ARENA_PIN, slots, lives, SLOTS, &done) == KVP_STALE);
    kvp_arena_count(arena, &counts);
    CHECK(done == 2 && counts.pins == 2);
    CHECK(kvp_arena_crcs(arena, slots, lives, SLOTS, read, &done) == KVP_STALE && done == 2);
    CHECK(kvp_arena_commit(arena, slots, lives, SLOTS, hashes, sums, &done) == KVP_BUSY);
    CHECK(done == 0);
    lives[2]--;
    CHECK(kvp_arena_change(arena, KVP_ARENA_REQUIRE_PINNED, slots, lives, SLOTS, &done) == KVP_BUSY);
    CHECK(done == 2);
    CHECK(kvp_arena_change(arena, (kvp_arena_step)99, slots, lives, SLOTS, &done) == KVP_INVALID);
    CHECK(kvp_arena_change(arena, KVP_ARENA_UNPIN, slots, lives, 2, &done) == KVP_OK);
    CHECK(kvp_arena_change(arena, KVP_ARENA_RELEASE, slots, lives, SLOTS, &done) == KVP_OK);
    kvp_arena_count(arena, &counts);
    CHECK(counts.free == SLOTS && counts.pins == 0 && counts.grants == 0);
    kvp_arena_close(arena);
}

/* Each thread writes its mark over a slot that it reserved; a slot handed out twice, or while
 * granted, shows a wrong mark (and ThreadSanitizer a race). */
static void *fight(void *argument)
{
    kvp_arena *arena = argument;
    uint64_t mark = (uint64_t)pthread_self();
    for (size_t i = 0; i < ROUNDS; i++) {
        uint32_t slot;
        uint64_t life;
        if (!take(arena, &slot, &life))
            continue;
        volatile uint64_t *bytes =
            (uint64_t *)(kvp_arena_base(arena) + slot * kvp_arena_slot_stride(arena));
        bytes[0] = mark;
        CHECK(step(arena, KVP_ARENA_GRANT, slot, life) == KVP_OK);
        if (i % 2)
            CHECK(commit_one(arena, slot, life, crcs) == KVP_OK);
        CHECK(step(arena, KVP_ARENA_RELEASE, slot, life) == KVP_OK);
        bytes[1] = mark; /* still granted: still ours */
        CHECK(bytes[0] == mark && bytes[1] == mark);
        CHECK(step(arena, KVP_ARENA_SETTLE, slot, life) == KVP_OK);
    }
    return NULL;
}

static void test_threads(void)
{
    kvp_arena *arena = open_arena();
    pthread_t threads[THREADS];
    for (size_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, fight, arena) == 0);
    for (size_t i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    kvp_arena_counts counts;
    kvp_arena_count(arena, &counts);
    CHECK(counts.free == SLOTS && counts.grants == 0 && counts.quarantined == 0);
    kvp_arena_close(arena);
}

static void test_kept_by_a_ledger(void)
{
    kvp_arena *arena;
    kvp_ledger *ledger, *other;
    uint32_t slots[2], sums[2] = {7, 8};
    uint64_t lives[2];
    size_t done;
    bool added;
    const uint8_t key[32] = {1}, none[32] = {0};
    CHECK(kvp_arena_open(2, 64, 1, incarnation, &arena) == KVP_OK);
    CHECK(kvp_arena_hide(arena, slots, 0) == KVP_INVALID);
    CHECK(kvp_ledger_open(2, 1, &ledger) == KVP_OK && kvp_ledger_open(3, 1, &other) == KVP_OK);
    CHECK(kvp_arena_keep(arena, other) == KVP_INVALID);
    CHECK(kvp_arena_reserve(arena, 1, false, slots, lives) == 1);
    CHECK(kvp_arena_keep(arena, ledger) == KVP_BUSY);
    CHECK(kvp_arena_change(arena, KVP_ARENA_RELEASE, slots, lives, 1, &done) == KVP_OK);
    CHECK(kvp_arena_keep(arena, ledger) == KVP_OK);
    CHECK(kvp_arena_keep(arena, ledger) == KVP_BUSY);
    kvp_ledger_close(other);
    CHECK(kvp_arena_reserve(arena, 1, false, slots, lives) == 0);
    CHECK(kvp_ledger_reserve(ledger, 1, false, slots, lives) == 1);
    CHECK(kvp_arena_crcs(arena, slots, lives, 1, sums, &done) == KVP_STALE);
    CHECK(kvp_ledger_commit(ledger, slots, lives, key, none, 1, &added, &done) == KVP_OK);
    CHECK(kvp_arena_publish(arena, slots, lives, 1, key, sums) == KVP_OK);
    slots[1] = 2;
    CHECK(kvp_arena_publish(arena, slots + 1, lives, 1, key, sums) == KVP_INVALID);
    sums[0] = 0;
    CHECK(kvp_arena_crcs(arena, slots, lives, 1, sums, &done) == KVP_OK && sums[0] == 7);
    CHECK(kvp_arena_change(arena, KVP_ARENA_GRANT, slots, lives, 1, &done) == KVP_OK);
    CHECK(kvp_ledger_evict(ledger, 1, NULL) == 1);
    CHECK(kvp_arena_hide(arena, slots, 1) == KVP_OK);
    CHECK(kvp_arena_crcs(arena, slots, lives, 1, sums, &done) == KVP_STALE);
    kvp_arena_counts counts;
    kvp_arena_count(arena, &counts);
    CHECK(counts.quarantined == 1 && counts.grants == 1 && counts.free == 1);
    kvp_ledger_close(ledger); /* the arena holds it */
    CHECK(kvp_arena_change(arena, KVP_ARENA_SETTLE, slots, lives, 1, &done) == KVP_OK);
    kvp_arena_count(arena, &counts);
    CHECK(counts.free == 2 && counts.grants == 0);
    kvp_arena_close(arena);
}

int main(void)
{
    test_life();
    test_refusals();
    test_runs();
    test_threads();
    test_kept_by_a_ledger();
    return 0;
}
