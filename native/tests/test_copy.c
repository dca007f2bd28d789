/* copy.c: random layouts against a copy row by row, a damaged CRC, refusals, cancelling. */
#include "../src/copy.c"

#include "check.h"

enum { BLOCKS = 4, LAYERS = 3 };

typedef struct {
    kvp_view view;
    uint8_t *bytes;
    size_t size;
} side;

/* Lay the axes out in a random order, with random gaps, without overlap. */
static side random_side(const kvp_shape *shape)
{
    side made = {0};
    size_t row = shape->k_row_bytes > shape->v_row_bytes ? shape->k_row_bytes : shape->v_row_bytes;
    size_t counts[5] = {BLOCKS, LAYERS, shape->heads, 2, shape->tokens}, order[5];
    size_t strides[5], step = row + random_below(3) * 8;
    for (size_t i = 0; i < 5; i++)
        order[i] = i;
    for (size_t i = 4; i > 0; i--) {
        size_t j = random_below(i + 1), swapped = order[i];
        order[i] = order[j], order[j] = swapped;
    }
    for (size_t i = 0; i < 5; i++) {
        strides[order[i]] = step;
        step = step * counts[order[i]] + random_below(2) * 8;
    }
    made.size = step;
    made.bytes = malloc(step);
    CHECK(made.bytes != NULL);
    fill_random(made.bytes, step);
    made.view = (kvp_view){(uintptr_t)made.bytes, strides[0], strides[1], strides[2],
                           strides[3],            strides[4], strides[4]};
    return made;
}

static side canonical_side(const kvp_shape *shape)
{
    side made = {0};
    size_t k = shape->tokens * shape->k_row_bytes, v = shape->tokens * shape->v_row_bytes;
    size_t head = k + v, layer = head * shape->heads, block = layer * LAYERS;
    made.size = block * BLOCKS;
    made.bytes = malloc(made.size);
    CHECK(made.bytes != NULL);
    fill_random(made.bytes, made.size);
    made.view = (kvp_view){(uintptr_t)made.bytes, block, layer, head, k, shape->k_row_bytes,
                           shape->v_row_bytes};
    return made;
}

static uint8_t *row_of(const kvp_view *view, size_t block, size_t layer, size_t head, size_t kv,
                       size_t token)
{
    size_t stride = kv == 0 ? view->k_token_stride : view->v_token_stride;
    return (uint8_t *)(view->base + block * view->block_stride + layer * view->layer_stride +
                       head * view->head_stride + kv * view->kv_stride + token * stride);
}

static void copy_slowly(const kvp_shape *shape, const kvp_view *dst, const uint64_t *dst_blocks,
                        const kvp_view *src, const uint64_t *src_blocks, size_t layer_begin,
                        uint32_t *crcs)
{
    for (size_t b = 0; b < BLOCKS; b++)
        for (size_t l = layer_begin; l < LAYERS; l++)
            for (size_t h = 0; h < shape->heads; h++, crcs++) {
                *crcs = 0;
                for (size_t kv = 0; kv < 2; kv++)
                    for (size_t t = 0; t < shape->tokens; t++) {
                        size_t size = kv == 0 ? shape->k_row_bytes : shape->v_row_bytes;
                        uint8_t *from = row_of(src, src_blocks[b], l, h, kv, t);
                        memcpy(row_of(dst, dst_blocks[b], l, h, kv, t), from, size);
                        *crcs = kvp_crc32c(*crcs, from, size);
                    }
            }
}

static void test_layouts(void)
{
    static const uint64_t dst_blocks[BLOCKS] = {2, 0, 3, 1}, src_blocks[BLOCKS] = {1, 1, 3, 0};
    for (size_t step = 0; step < 400; step++) {
        /* Every eighth is large enough to be streamed past the cache. */
        size_t tokens = step % 8 == 0 ? 60 : 1 + random_below(5);
        kvp_shape shape = {1 + random_below(3), tokens, 1 + random_below(300),
                           random_below(3) * random_below(200)};
        if (step % 8 == 0)
            shape.k_row_bytes += 400;
        side src = step % 2 ? random_side(&shape) : canonical_side(&shape);
        side dst = step % 3 ? canonical_side(&shape) : random_side(&shape);
        side slow = dst;
        slow.bytes = malloc(dst.size);
        CHECK(slow.bytes != NULL);
        memcpy(slow.bytes, dst.bytes, dst.size);
        slow.view.base = (uintptr_t)slow.bytes;
        size_t begin = random_below(LAYERS), per_block = (LAYERS - begin) * shape.heads;
        uint32_t crcs[BLOCKS * LAYERS * 3], expected[BLOCKS * LAYERS * 3];
        size_t bad;
        copy_slowly(&shape, &slow.view, dst_blocks, &src.view, src_blocks, begin, expected);
        kvp_status (*const copy)(const kvp_shape *, const kvp_view *, const uint64_t *,
                                 const kvp_view *, const uint64_t *, size_t, size_t, size_t,
                                 const uint32_t *, uint32_t *, size_t, size_t *) =
            step % 16 < 8 ? kvp_copy_blocks : kvp_copy_blocks_near;
        CHECK(copy(&shape, &dst.view, dst_blocks, &src.view, src_blocks, BLOCKS, begin, LAYERS,
                   expected, crcs, per_block, &bad) == KVP_OK);
        CHECK(bad == BLOCKS);
        CHECK(!memcmp(dst.bytes, slow.bytes, dst.size)); /* gaps untouched, too */
        CHECK(!memcmp(crcs, expected, BLOCKS * per_block * sizeof *crcs));
        size_t damaged = random_below(BLOCKS * per_block);
        expected[damaged] ^= 1;
        CHECK(copy(&shape, &dst.view, dst_blocks, &src.view, src_blocks, BLOCKS, begin, LAYERS,
                   expected, NULL, per_block, &bad) == KVP_CORRUPT);
        CHECK(bad == damaged / per_block);
        free(src.bytes);
        free(dst.bytes);
        free(slow.bytes);
    }
}

static void test_refusals(void)
{
    uint8_t bytes[64] = {0};
    uint64_t ids[2] = {0, SIZE_MAX / 2};
    uint32_t crcs[2];
    size_t bad;
    kvp_shape shape = {1, 1, 8, 8};
    kvp_view view = {(uintptr_t)bytes, 16, 16, 16, 8, 8, 8};
#define COPY(shape_, view_, count, begin, end, stride)                                            \
    kvp_copy_blocks(&(shape_), &(view_), ids, &(view_), ids, count, begin, end, NULL, crcs,       \
                    stride, &bad)
    kvp_shape wrong = shape;
    CHECK(COPY(shape, view, 2, 0, 1, 1) == KVP_INVALID); /* id * stride wraps */
    CHECK(COPY(shape, view, 1, 1, 0, 1) == KVP_INVALID);
    CHECK(COPY(shape, view, 1, 0, 1, 0) == KVP_INVALID);
    CHECK(COPY(shape, view, 1, 0, SIZE_MAX, SIZE_MAX) == KVP_INVALID);
    wrong.heads = 0;
    CHECK(COPY(wrong, view, 1, 0, 1, 1) == KVP_INVALID);
    wrong = shape, wrong.tokens = 0;
    CHECK(COPY(wrong, view, 1, 0, 1, 1) == KVP_INVALID);
    wrong = shape, wrong.tokens = SIZE_MAX;
    CHECK(COPY(wrong, view, 1, 0, 1, 1) == KVP_INVALID);
    wrong = shape, wrong.k_row_bytes = 0;
    CHECK(COPY(wrong, view, 1, 0, 1, 1) == KVP_INVALID);
    kvp_view nowhere = view;
    nowhere.base = 0;
    CHECK(COPY(shape, nowhere, 1, 0, 1, 1) == KVP_INVALID);
    CHECK(COPY(shape, view, 0, 0, 1, 0) == KVP_OK && bad == 0);
    CHECK(COPY(shape, view, 1, 1, 1, 0) == KVP_OK && bad == 1);
#undef COPY
}

static void test_spans(void)
{
    uint8_t from[100], to[100] = {0};
    fill_random(from, sizeof from);
    uintptr_t dst[3] = {(uintptr_t)to, (uintptr_t)to + 10, (uintptr_t)to + 90};
    uintptr_t src[3] = {(uintptr_t)from, (uintptr_t)from + 10, (uintptr_t)from + 90};
    size_t sizes[3] = {10, 80, 10}, done;
    volatile int32_t cancel = 1;
    CHECK(kvp_copy_spans(dst, src, sizes, 3, &cancel, &done) == KVP_CLOSED && done == 0);
    cancel = 0;
    CHECK(kvp_copy_spans(dst, src, sizes, 3, &cancel, &done) == KVP_OK && done == 3);
    CHECK(!memcmp(from, to, sizeof from));
    CHECK(kvp_copy_spans(NULL, NULL, NULL, 0, NULL, &done) == KVP_OK && done == 0);
}

int main(void)
{
    test_layouts();
    test_refusals();
    test_spans();
    return 0;
}
