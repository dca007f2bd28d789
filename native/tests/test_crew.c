/* crew.c: copies shared with helpers equal copies made alone, whoever calls and whatever is bad. */
#define _GNU_SOURCE
#include <string.h>

#include "../src/crew.c"

#include "check.h"

/* 64 KiB a block: a run is 8 blocks, and a copy of all of them has several runs. */
enum { BLOCKS = 70, LAYERS = 4, HEADS = 2, CRCS = LAYERS * HEADS, CALLERS = 4, ROUNDS = 20 };

static const kvp_shape shape = {.heads = HEADS, .tokens = 16, .k_row_bytes = 256,
                                .v_row_bytes = 256};
enum { HEAD = 16 * 512, LAYER = HEADS * HEAD, BLOCK = LAYERS * LAYER };

typedef struct {
    uint8_t *bytes;
    kvp_view view;
} side;

static side make_side(void)
{
    side made = {.bytes = malloc((size_t)BLOCKS * BLOCK)};
    CHECK(made.bytes != NULL);
    fill_random(made.bytes, (size_t)BLOCKS * BLOCK);
    made.view = (kvp_view){(uintptr_t)made.bytes, BLOCK, LAYER, HEAD, HEAD / 2, 256, 256};
    return made;
}

typedef struct {
    kvp_crew *crew;
    const side *src;
    const uint32_t *sums;
    side dst;
} caller;

static kvp_status copy(const caller *from, const uint32_t *expected, uint32_t *out, size_t *bad)
{
    uint64_t ids[BLOCKS];
    for (size_t i = 0; i < BLOCKS; i++)
        ids[i] = i;
    return kvp_crew_copy_blocks(from->crew, &shape, &from->dst.view, ids, &from->src->view, ids,
                                BLOCKS, 0, LAYERS, expected, out, CRCS, bad);
}

static void *call(void *argument)
{
    const caller *self = argument;
    uint32_t out[BLOCKS * CRCS];
    for (size_t round = 0; round < ROUNDS; round++) {
        size_t bad = 0;
        memset(self->dst.bytes, 0, (size_t)BLOCKS * BLOCK);
        CHECK(copy(self, NULL, out, &bad) == KVP_OK && bad == BLOCKS);
        CHECK(!memcmp(self->dst.bytes, self->src->bytes, (size_t)BLOCKS * BLOCK));
        CHECK(!memcmp(out, self->sums, sizeof out));
        /* The first of two bad blocks is named, and all before it are whole. */
        memcpy(out, self->sums, sizeof out);
        size_t first = round * 37 % (BLOCKS - 1);
        out[first * CRCS + 3] ^= 1;
        out[(BLOCKS - 1) * CRCS] ^= 1;
        memset(self->dst.bytes, 0, (size_t)BLOCKS * BLOCK);
        CHECK(copy(self, out, NULL, &bad) == KVP_CORRUPT && bad == first);
        CHECK(!memcmp(self->dst.bytes, self->src->bytes, first * BLOCK));
    }
    return NULL;
}

static void test_callers(size_t helpers)
{
    side src = make_side(), alone = make_side();
    uint32_t sums[BLOCKS * CRCS];
    uint64_t ids[BLOCKS];
    size_t bad;
    for (size_t i = 0; i < BLOCKS; i++)
        ids[i] = i;
    CHECK(kvp_copy_blocks(&shape, &alone.view, ids, &src.view, ids, BLOCKS, 0, LAYERS, NULL, sums,
                          CRCS, &bad) == KVP_OK);
    kvp_crew *crew;
    CHECK(kvp_crew_open(helpers, &crew) == KVP_OK);
    caller callers[CALLERS];
    pthread_t threads[CALLERS];
    for (size_t i = 0; i < CALLERS; i++) {
        callers[i] = (caller){crew, &src, sums, make_side()};
        CHECK(pthread_create(&threads[i], NULL, call, &callers[i]) == 0);
    }
    for (size_t i = 0; i < CALLERS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
        free(callers[i].dst.bytes);
    }
    kvp_crew_close(crew);
    free(src.bytes);
    free(alone.bytes);
}

static void test_edges(void)
{
    kvp_crew *crew;
    side src = make_side(), dst = make_side();
    uint64_t ids[2] = {0, 1};
    size_t bad = 7;
    CHECK(kvp_crew_open(HELPERS_MAX + 1, &crew) == KVP_INVALID);
    kvp_crew_close(NULL);
    CHECK(kvp_crew_open(2, &crew) == KVP_OK);
    CHECK(kvp_crew_copy_blocks(crew, &shape, &dst.view, ids, &src.view, ids, 0, 0, LAYERS, NULL,
                               NULL, 0, &bad) == KVP_OK && bad == 0);
    CHECK(kvp_crew_copy_blocks(crew, &shape, &dst.view, ids, &src.view, ids, 2, 1, 1, NULL, NULL, 0,
                               &bad) == KVP_OK && bad == 2);
    CHECK(kvp_crew_copy_blocks(crew, &shape, &dst.view, ids, &src.view, ids, 2, 3, 1, NULL, NULL, 0,
                               &bad) == KVP_INVALID);
    ids[1] = UINT64_MAX;
    CHECK(kvp_crew_copy_blocks(crew, &shape, &dst.view, ids, &src.view, ids, 2, 0, 1, NULL, NULL, 0,
                               &bad) == KVP_INVALID);
    kvp_crew_close(crew); /* nobody is left waiting */
    free(src.bytes);
    free(dst.bytes);
}

int main(void)
{
    test_callers(0);
    test_callers(3);
    test_edges();
    return 0;
}
