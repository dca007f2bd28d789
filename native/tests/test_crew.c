/* crew.c: copies shared with helpers equal copies made alone, whoever calls and whatever is bad. */
#define _GNU_SOURCE
#include <string.h>

#include "../src/crew.c"

#include "check.h"

/* The same bytes as small blocks, of which a run has several, and as large ones, which have several
 * runs, the last with fewer layers. */
enum { ALL_LAYERS = 280, HEADS = 2, ALL_CRCS = ALL_LAYERS * HEADS, CALLERS = 4, ROUNDS = 20 };
enum { BLOCKS_MAX = 70 };

static const kvp_shape shape = {.heads = HEADS, .tokens = 16, .k_row_bytes = 256,
                                .v_row_bytes = 256};
enum { HEAD = 16 * 512, LAYER = HEADS * HEAD, ALL = ALL_LAYERS * LAYER };

typedef struct {
    uint8_t *bytes;
    kvp_view view;
} side;

static side make_side(size_t layers)
{
    side made = {.bytes = malloc(ALL)};
    CHECK(made.bytes != NULL);
    fill_random(made.bytes, ALL);
    made.view = (kvp_view){(uintptr_t)made.bytes, layers * LAYER, LAYER, HEAD, HEAD / 2, 256, 256};
    return made;
}

typedef struct {
    kvp_crew *crew;
    const side *src;
    const uint32_t *sums;
    size_t layers; /* of a block */
    side dst;
} caller;

static kvp_status copy(const caller *from, const uint32_t *expected, uint32_t *out, size_t *bad)
{
    uint64_t ids[BLOCKS_MAX];
    for (size_t i = 0; i < BLOCKS_MAX; i++)
        ids[i] = i;
    return kvp_crew_copy_blocks(from->crew, &shape, &from->dst.view, ids, &from->src->view, ids,
                                ALL_LAYERS / from->layers, 0, from->layers, expected, out,
                                from->layers * HEADS, bad);
}

static void *call(void *argument)
{
    const caller *self = argument;
    uint32_t out[ALL_CRCS];
    const size_t blocks = ALL_LAYERS / self->layers, crcs = self->layers * HEADS;
    for (size_t round = 0; round < ROUNDS; round++) {
        size_t bad = 0;
        memset(self->dst.bytes, 0, ALL);
        CHECK(copy(self, NULL, out, &bad) == KVP_OK && bad == blocks);
        CHECK(!memcmp(self->dst.bytes, self->src->bytes, ALL));
        CHECK(!memcmp(out, self->sums, sizeof out));
        /* The first of two bad blocks is named, and all before it are whole. */
        memcpy(out, self->sums, sizeof out);
        size_t first = round * 37 % (blocks - 1);
        out[first * crcs + round * 13 % crcs] ^= 1;
        out[(blocks - 1) * crcs] ^= 1;
        memset(self->dst.bytes, 0, ALL);
        CHECK(copy(self, out, NULL, &bad) == KVP_CORRUPT && bad == first);
        CHECK(!memcmp(self->dst.bytes, self->src->bytes, first * self->layers * LAYER));
    }
    return NULL;
}

static void test_callers(size_t helpers, size_t layers)
{
    side src = make_side(layers), alone = make_side(layers);
    uint32_t sums[ALL_CRCS];
    uint64_t ids[BLOCKS_MAX];
    size_t bad;
    for (size_t i = 0; i < BLOCKS_MAX; i++)
        ids[i] = i;
    CHECK(kvp_copy_blocks(&shape, &alone.view, ids, &src.view, ids, ALL_LAYERS / layers, 0, layers,
                          NULL, sums, layers * HEADS, &bad) == KVP_OK);
    kvp_crew *crew;
    CHECK(kvp_crew_open(helpers, &crew) == KVP_OK);
    caller callers[CALLERS];
    pthread_t threads[CALLERS];
    for (size_t i = 0; i < CALLERS; i++) {
        callers[i] = (caller){crew, &src, sums, layers, make_side(layers)};
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

/* A range of layers of one large block, with its checksums. */
static void test_layers_of_a_block(void)
{
    enum { LAYERS = ALL_LAYERS, BEGIN = 3, END = 277, SOME = (END - BEGIN) * HEADS };
    side src = make_side(LAYERS), dst = make_side(LAYERS), alone = make_side(LAYERS);
    memcpy(alone.bytes, dst.bytes, ALL);
    uint32_t sums[SOME], out[SOME];
    const uint64_t id = 0;
    size_t bad;
    kvp_crew *crew;
    CHECK(kvp_crew_open(2, &crew) == KVP_OK);
    CHECK(kvp_copy_blocks(&shape, &alone.view, &id, &src.view, &id, 1, BEGIN, END, NULL, sums, SOME,
                          &bad) == KVP_OK);
    CHECK(kvp_crew_copy_blocks(crew, &shape, &dst.view, &id, &src.view, &id, 1, BEGIN, END, NULL,
                               out, SOME, &bad) == KVP_OK && bad == 1);
    CHECK(!memcmp(out, sums, sizeof out) && !memcmp(dst.bytes, alone.bytes, ALL));
    sums[SOME - 1] ^= 1;
    CHECK(kvp_crew_copy_blocks(crew, &shape, &dst.view, &id, &src.view, &id, 1, BEGIN, END, sums,
                               NULL, SOME, &bad) == KVP_CORRUPT && bad == 0);
    kvp_crew_close(crew);
    free(src.bytes);
    free(dst.bytes);
    free(alone.bytes);
}

/* Of several bad blocks the first counts, whoever tells of it last. */
static void test_the_first_bad_block_ends_a_job(void)
{
    kvp_crew *crew;
    CHECK(kvp_crew_open(0, &crew) == KVP_OK);
    const size_t turns[][2] = {{3, 7}, {7, 3}};
    for (size_t i = 0; i < 2; i++) {
        copy_job job = {.block_count = 10, .run_count = 10, .good = 10};
        end_before(crew, &job, turns[i][0], KVP_CORRUPT);
        end_before(crew, &job, turns[i][1], KVP_CORRUPT);
        CHECK(job.good == 3 && job.status == KVP_CORRUPT && job.next == job.run_count);
    }
    kvp_crew_close(crew);
}

static void test_edges(void)
{
    kvp_crew *crew;
    enum { LAYERS = 4 };
    side src = make_side(LAYERS), dst = make_side(LAYERS);
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
    /* Heads that share their bytes, so many that the bytes of a layer would come round to 0. */
    const kvp_shape many = {(size_t)1 << 62, 1, 2, 2};
    const kvp_view same = {.base = (uintptr_t)src.bytes, .k_token_stride = 2, .v_token_stride = 2};
    copy_job job = {.shape = &many, .block_count = 5, .layer_end = 3, .dst = &same, .src = &same};
    CHECK(kvp_copy_check(&many, &same, ids, &same, ids, 2, 0, 3, NULL, NULL, 0) == KVP_OK);
    cut(&job);
    CHECK(job.run_layers == 1 && job.run_blocks == 1 && job.run_count == 15);
    ids[1] = UINT64_MAX;
    CHECK(kvp_crew_copy_blocks(crew, &shape, &dst.view, ids, &src.view, ids, 2, 0, 1, NULL, NULL, 0,
                               &bad) == KVP_INVALID);
    kvp_crew_close(crew); /* nobody is left waiting */
    free(src.bytes);
    free(dst.bytes);
}

int main(void)
{
    test_callers(0, 4);
    test_callers(3, 4);
    test_callers(3, 70); /* 4 blocks of 24, 24 and 22 layers */
    test_layers_of_a_block();
    test_the_first_bad_block_ends_a_job();
    test_edges();
    return 0;
}
