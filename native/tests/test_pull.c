/* pull.c: what is called good was one life from beginning to end, whatever its owner does in between. */
#include <string.h>

#include "kvpool_copy.h"

static void (*interrupt)(void);

/* The owner acts between the checks before a copy and the copy. */
static kvp_status interrupted_copy(const kvp_shape *shape, const kvp_view *dst,
                                   const uint64_t *dst_blocks, const kvp_view *src,
                                   const uint64_t *src_blocks, size_t block_count,
                                   size_t layer_begin, size_t layer_end, const uint32_t *expected,
                                   uint32_t *out, size_t stride, size_t *bad)
{
    if (interrupt != NULL)
        interrupt();
    return kvp_copy_blocks(shape, dst, dst_blocks, src, src_blocks, block_count, layer_begin,
                           layer_end, expected, out, stride, bad);
}

#define kvp_copy_blocks interrupted_copy
#include "../src/pull.c"
#undef kvp_copy_blocks

#include "check.h"

enum { SLOTS = 6, BLOCKS = 4, LAYERS = 2, HEADS = 3, TOKENS = 16, ROW = 32 };
enum { HEAD = TOKENS * 2 * ROW, BLOCK = LAYERS * HEADS * HEAD, CRCS = LAYERS * HEADS };

static const uint8_t incarnation[] = "0123456789abcde";
static const uint8_t hash[32];
static const kvp_shape shape = {HEADS, TOKENS, ROW, ROW};
static kvp_arena *arena;
static kvp_window *window;
static uint32_t slots[BLOCKS];
static uint64_t lives[BLOCKS], numbers[BLOCKS], ids[BLOCKS];
static uint8_t out[SLOTS * BLOCK];
static const kvp_view to = {0, BLOCK, HEADS * HEAD, HEAD, TOKENS * ROW, ROW, ROW};

static uint8_t *bytes_of(uint32_t slot)
{
    return (uint8_t *)(kvp_arena_base(arena) + slot * kvp_arena_slot_stride(arena));
}

static void sums_of(const uint8_t *block, uint32_t *crcs)
{
    for (size_t i = 0; i < CRCS; i++)
        crcs[i] = kvp_crc32c(0, block + i * HEAD, HEAD);
}

/* Fill and publish one more slot; the same bytes for the same seed. */
static void publish(uint32_t *slot, uint64_t *life, uint8_t seed)
{
    uint32_t crcs[CRCS];
    size_t done;
    CHECK(kvp_arena_reserve(arena, 1, false, slot, life) == 1);
    for (size_t i = 0; i < BLOCK; i++)
        bytes_of(*slot)[i] = (uint8_t)(seed + i * 7 + i / 251);
    sums_of(bytes_of(*slot), crcs);
    CHECK(kvp_arena_commit(arena, slot, life, 1, hash, crcs, &done) == KVP_OK);
}

static void set_up(void)
{
    CHECK(kvp_arena_open(SLOTS, BLOCK, CRCS, incarnation, &arena) == KVP_OK);
    CHECK(kvp_window_map(kvp_arena_fd(arena), incarnation, &window) == KVP_OK);
    for (size_t i = 0; i < BLOCKS; i++) {
        publish(&slots[i], &lives[i], (uint8_t)i);
        numbers[i] = slots[i];
        ids[i] = BLOCKS - i; /* another order, and not from 0 */
    }
    memset(out, 0, sizeof out);
    interrupt = NULL;
}

static void tear_down(void)
{
    kvp_window_close(window);
    kvp_arena_close(arena);
}

static kvp_status pull(kvp_crew *crew, size_t layers, const uint32_t *expected, size_t stride,
                       size_t *good)
{
    uint32_t room[BLOCKS * CRCS];
    kvp_view view = to;
    view.base = (uintptr_t)out;
    return kvp_window_pull(window, crew, &shape, layers, &view, ids, numbers, lives, BLOCKS,
                           expected, stride, room, good);
}

static void release(size_t which)
{
    size_t done;
    CHECK(kvp_arena_change(arena, KVP_ARENA_RELEASE, &slots[which], &lives[which], 1, &done) ==
          KVP_OK);
}

static void test_whole(void)
{
    for (size_t helpers = 0; helpers < 3; helpers++) {
        kvp_crew *crew = NULL;
        size_t good;
        uint32_t crcs[BLOCKS * (CRCS + 5)];
        set_up();
        if (helpers > 0)
            CHECK(kvp_crew_open(helpers, &crew) == KVP_OK);
        CHECK(pull(crew, LAYERS, NULL, 0, &good) == KVP_OK && good == BLOCKS);
        for (size_t i = 0; i < BLOCKS; i++) {
            CHECK(!memcmp(out + ids[i] * BLOCK, bytes_of(slots[i]), BLOCK));
            sums_of(bytes_of(slots[i]), crcs + i * (CRCS + 5));
        }
        /* Checksums that the caller has: right ones, and one that differs. */
        CHECK(pull(crew, LAYERS, crcs, CRCS + 5, &good) == KVP_OK && good == BLOCKS);
        crcs[2 * (CRCS + 5) + 1] ^= 4;
        CHECK(pull(crew, LAYERS, crcs, CRCS + 5, &good) == KVP_CORRUPT && good == 2);
        bytes_of(slots[1])[BLOCK - 1] ^= 1;
        CHECK(pull(crew, LAYERS, NULL, 0, &good) == KVP_CORRUPT && good == 1);
        kvp_crew_close(crew);
        tear_down();
    }
}

static void test_stale_before(void)
{
    for (size_t which = 0; which < BLOCKS; which++) {
        size_t good;
        set_up();
        release(which);
        CHECK(pull(NULL, LAYERS, NULL, 0, &good) == KVP_OK && good == which);
        for (size_t i = 0; i < SLOTS * BLOCK && which == 0; i++)
            CHECK(out[i] == 0);
        tear_down();
    }
}

/* The same bytes and checksums: only the life differs. */
static void reuse(void)
{
    uint64_t life;
    uint32_t slot;
    release(2);
    publish(&slot, &life, 2);
    CHECK(slot == slots[2]);
}

static void overwrite(void)
{
    uint64_t life;
    uint32_t slot;
    release(1);
    publish(&slot, &life, 77);
    CHECK(slot == slots[1]);
}

static void test_interrupted(void)
{
    size_t good;
    set_up();
    interrupt = reuse;
    CHECK(pull(NULL, LAYERS, NULL, 0, &good) == KVP_OK && good == 2);
    tear_down();
    set_up();
    interrupt = overwrite;
    CHECK(pull(NULL, LAYERS, NULL, 0, &good) == KVP_CORRUPT && good == 1);
    tear_down();
    /* The caller's own checksums say nothing of lives. */
    set_up();
    uint32_t crcs[BLOCKS * CRCS];
    for (size_t i = 0; i < BLOCKS; i++)
        sums_of(bytes_of(slots[i]), crcs + i * CRCS);
    interrupt = reuse;
    CHECK(pull(NULL, LAYERS, crcs, CRCS, &good) == KVP_OK && good == 2);
    tear_down();
}

static void test_wrong_arguments(void)
{
    size_t good = 9;
    set_up();
    CHECK(pull(NULL, LAYERS + 1, NULL, 0, &good) == KVP_INVALID && good == 0);
    CHECK(pull(NULL, SIZE_MAX, NULL, 0, &good) == KVP_INVALID && good == 0);
    const uint64_t past[] = {SLOTS, UINT32_MAX, UINT32_MAX + UINT64_C(1), UINT64_MAX};
    for (size_t i = 0; i < sizeof past / sizeof *past; i++) {
        numbers[BLOCKS - 1] = past[i];
        CHECK(pull(NULL, LAYERS, NULL, 0, &good) == KVP_INVALID && good == 0);
    }
    numbers[BLOCKS - 1] = slots[BLOCKS - 1];
    ids[0] = UINT64_MAX;
    CHECK(pull(NULL, LAYERS, NULL, 0, &good) == KVP_INVALID && good == 0);
    for (size_t i = 0; i < sizeof out; i++)
        CHECK(out[i] == 0);
    tear_down();
}

int main(void)
{
    test_whole();
    test_stale_before();
    test_interrupted();
    test_wrong_arguments();
    return 0;
}
