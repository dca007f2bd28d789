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
    CHECK(kvp_arena_reserve(arena, &slot, &life) == KVP_OK && slot < SLOTS && life == 1);
    CHECK(shown(arena, slot) == 0);
    memset((void *)(kvp_arena_base(arena) + slot * kvp_arena_slot_stride(arena)), 1, SLOT_BYTES);
    CHECK(kvp_arena_pin(arena, slot, life) == KVP_BUSY);
    CHECK(kvp_arena_crcs(arena, slot, life, read) == KVP_BUSY);
    CHECK(kvp_arena_commit(arena, slot, life, hash, crcs) == KVP_OK);
    CHECK(kvp_arena_commit(arena, slot, life, hash, crcs) == KVP_BUSY);
    CHECK(shown(arena, slot) == life && !memcmp(header_of(arena, slot)->hash, hash, sizeof hash));
    CHECK(kvp_arena_crcs(arena, slot, life, read) == KVP_OK && !memcmp(read, crcs, sizeof crcs));
    CHECK(kvp_arena_unpin(arena, slot, life) == KVP_INVALID);
    CHECK(kvp_arena_settle(arena, slot, life) == KVP_INVALID);
    CHECK(kvp_arena_pin(arena, slot, life) == KVP_OK);
    CHECK(kvp_arena_release(arena, slot, life) == KVP_BUSY);
    CHECK(kvp_arena_unpin(arena, slot, life) == KVP_OK);
    CHECK(kvp_arena_grant(arena, slot, life) == KVP_OK);
    CHECK(kvp_arena_grant(arena, slot, life) == KVP_OK);
    kvp_arena_count(arena, &counts);
    CHECK(counts.ready == 1 && counts.grants == 2 && counts.pins == 0 && counts.free == 3);
    CHECK(kvp_arena_release(arena, slot, life) == KVP_OK && shown(arena, slot) == 0);
    CHECK(kvp_arena_release(arena, slot, life) == KVP_BUSY);
    CHECK(kvp_arena_grant(arena, slot, life) == KVP_BUSY);
    CHECK(kvp_arena_pin(arena, slot, life) == KVP_BUSY);
    CHECK(kvp_arena_commit(arena, slot, life, hash, crcs) == KVP_BUSY);
    for (size_t i = 0; i < SLOTS - 1; i++) {
        CHECK(kvp_arena_reserve(arena, &again, &next) == KVP_OK && again != slot);
    }
    CHECK(kvp_arena_reserve(arena, &again, &next) == KVP_FULL); /* quarantined is not free */
    CHECK(kvp_arena_settle(arena, slot, life) == KVP_OK);
    CHECK(kvp_arena_reserve(arena, &again, &next) == KVP_FULL);
    CHECK(kvp_arena_settle(arena, slot, life) == KVP_OK);
    CHECK(kvp_arena_settle(arena, slot, life) == KVP_STALE);
    CHECK(kvp_arena_reserve(arena, &again, &next) == KVP_OK && again == slot && next == 2);
    CHECK(kvp_arena_release(arena, slot, life) == KVP_STALE);
    CHECK(kvp_arena_release(arena, slot, next) == KVP_OK);
    CHECK(kvp_arena_release(arena, slot, next) == KVP_STALE);
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
        CHECK(kvp_arena_commit(arena, slot, 0, hash, crcs) == status);
        CHECK(kvp_arena_pin(arena, slot, 0) == status);
        CHECK(kvp_arena_unpin(arena, slot, 0) == status);
        CHECK(kvp_arena_grant(arena, slot, 0) == status);
        CHECK(kvp_arena_settle(arena, slot, 0) == status);
        CHECK(kvp_arena_release(arena, slot, 0) == status);
    }
    kvp_arena_close(arena);
    CHECK(kvp_arena_open(1, 1, 0, incarnation, &arena) == KVP_OK);
    uint32_t slot, none[1];
    uint64_t life;
    CHECK(kvp_arena_reserve(arena, &slot, &life) == KVP_OK);
    CHECK(kvp_arena_commit(arena, slot, life, hash, none) == KVP_OK);
    CHECK(kvp_arena_crcs(arena, slot, life, none) == KVP_OK);
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
        if (kvp_arena_reserve(arena, &slot, &life) != KVP_OK)
            continue;
        volatile uint64_t *bytes =
            (uint64_t *)(kvp_arena_base(arena) + slot * kvp_arena_slot_stride(arena));
        bytes[0] = mark;
        CHECK(kvp_arena_grant(arena, slot, life) == KVP_OK);
        if (i % 2)
            CHECK(kvp_arena_commit(arena, slot, life, hash, crcs) == KVP_OK);
        CHECK(kvp_arena_release(arena, slot, life) == KVP_OK);
        bytes[1] = mark; /* still granted: still ours */
        CHECK(bytes[0] == mark && bytes[1] == mark);
        CHECK(kvp_arena_settle(arena, slot, life) == KVP_OK);
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

int main(void)
{
    test_life();
    test_refusals();
    test_threads();
    return 0;
}
