/* Block copies between layouts, with CRC32C on the way.
 *
 * Owns: the walk over blocks, layers, heads, K and V. Never checks that an address is mapped: that
 * is its caller's promise, and the caller's regions are what bounds it. */
#include <stdbool.h>
#include <string.h>

#include "kvpool_copy.h"
#include "kvpool_crc32c.h"

/* Copies of fewer bytes stay in the cache, where their reader may be about to look. This many, read
 * and written, fill a core's L2 (512 KiB and more) anyway; streaming them measured 1.4 times as
 * fast as memcpy, because the destination's old bytes are not fetched. */
enum { STREAMING_BYTES_MIN = 256 << 10 };

/* How to go through one block: everything that does not change from block to block. */
typedef struct {
    size_t layers;
    size_t heads;
    size_t rows;
    size_t row_bytes[2]; /* K, V */
    const kvp_view *dst;
    const kvp_view *src;
    size_t dst_row_stride[2];
    size_t src_row_stride[2];
    bool streaming, near;
} block_walk;

static bool add_product(size_t *sum, size_t count, size_t stride)
{
    size_t product;
    return !__builtin_mul_overflow(count, stride, &product) &&
           !__builtin_add_overflow(*sum, product, sum);
}

/* Whether every address of the blocks is below SIZE_MAX, so that the walk cannot wrap. */
static bool view_is_sane(const kvp_shape *shape, const kvp_view *view, const uint64_t *blocks,
                         size_t block_count, size_t layer_end)
{
    if (view->base == 0)
        return false;
    size_t last_k = shape->k_row_bytes, last_v = shape->v_row_bytes;
    if (!add_product(&last_k, shape->tokens - 1, view->k_token_stride) ||
        !add_product(&last_v, shape->tokens - 1, view->v_token_stride) ||
        !add_product(&last_v, 1, view->kv_stride))
        return false;
    size_t inside = last_k > last_v ? last_k : last_v;
    if (!add_product(&inside, layer_end - 1, view->layer_stride) ||
        !add_product(&inside, shape->heads - 1, view->head_stride) ||
        !add_product(&inside, 1, view->base))
        return false;
    for (size_t i = 0; i < block_count; i++) {
        size_t last = inside;
        if (!add_product(&last, blocks[i], view->block_stride))
            return false;
    }
    return true;
}

static uint32_t copy_run(const block_walk *walk, uint32_t crc, uint8_t *dst, const uint8_t *src,
                         size_t size, const uint8_t *next)
{
    if (walk->streaming)
        return kvp_crc32c_stream(crc, dst, src, size, next);
    if (walk->near)
        return kvp_crc32c_near(crc, dst, src, size, next);
    return kvp_crc32c_copy(crc, dst, src, size);
}

/* Copy K and V of one head; `next` is where the head after it begins. */
static uint32_t copy_head(const block_walk *walk, uint8_t *dst, const uint8_t *src,
                          const uint8_t *next)
{
    uint32_t crc = 0;
    for (size_t kv = 0; kv < 2 && walk->row_bytes[kv] > 0; kv++) {
        size_t row_bytes = walk->row_bytes[kv];
        size_t dst_stride = walk->dst_row_stride[kv], src_stride = walk->src_row_stride[kv];
        uint8_t *to = dst + kv * walk->dst->kv_stride;
        const uint8_t *from = src + kv * walk->src->kv_stride;
        bool v_follows = kv == 0 && walk->row_bytes[1] > 0;
        const uint8_t *after = v_follows ? src + walk->src->kv_stride : next;
        if (dst_stride == row_bytes && src_stride == row_bytes) {
            crc = copy_run(walk, crc, to, from, walk->rows * row_bytes, after);
            continue;
        }
        for (size_t row = 0; row < walk->rows; row++) {
            const uint8_t *row_after = row + 1 < walk->rows ? from + src_stride : after;
            crc = copy_run(walk, crc, to, from, row_bytes, row_after);
            to += dst_stride;
            from += src_stride;
        }
    }
    return crc;
}

/* `dst` and `src` are where the first layer lies; `next` is where the next block's does. `expected`
 * and `out` (both nullable) are the block's. False at the first CRC that differs. */
static bool copy_block(const block_walk *walk, uint8_t *dst, const uint8_t *src,
                       const uint8_t *next, const uint32_t *expected, uint32_t *out)
{
    size_t crc_at = 0;
    for (size_t layer = 0; layer < walk->layers; layer++) {
        uint8_t *to = dst + layer * walk->dst->layer_stride;
        const uint8_t *from = src + layer * walk->src->layer_stride;
        const uint8_t *after = layer + 1 < walk->layers ? from + walk->src->layer_stride : next;
        for (size_t head = 0; head < walk->heads; head++, crc_at++) {
            const uint8_t *next_head =
                head + 1 < walk->heads ? from + walk->src->head_stride : after;
            uint32_t crc = copy_head(walk, to, from, next_head);
            if (out != NULL)
                out[crc_at] = crc;
            if (expected != NULL && expected[crc_at] != crc)
                return false;
            to += walk->dst->head_stride;
            from += walk->src->head_stride;
        }
    }
    return true;
}

/* K and V of a head that follow each other on both sides are walked as one run. */
static block_walk plan_walk(const kvp_shape *shape, const kvp_view *dst, const kvp_view *src,
                            size_t layers)
{
    block_walk walk = {
        .layers = layers,
        .heads = shape->heads,
        .rows = shape->tokens,
        .row_bytes = {shape->k_row_bytes, shape->v_row_bytes},
        .dst = dst,
        .src = src,
        .dst_row_stride = {dst->k_token_stride, dst->v_token_stride},
        .src_row_stride = {src->k_token_stride, src->v_token_stride},
    };
    size_t k_bytes = shape->tokens * shape->k_row_bytes;
    bool packed = dst->kv_stride == k_bytes && src->kv_stride == k_bytes;
    for (size_t kv = 0; kv < 2; kv++)
        packed = packed && walk.dst_row_stride[kv] == walk.row_bytes[kv] &&
                 walk.src_row_stride[kv] == walk.row_bytes[kv];
    if (packed) {
        size_t head_bytes = k_bytes + shape->tokens * shape->v_row_bytes;
        walk.rows = 1;
        walk.row_bytes[0] = walk.dst_row_stride[0] = walk.src_row_stride[0] = head_bytes;
        walk.row_bytes[1] = 0;
    }
    return walk;
}

kvp_status kvp_copy_check(const kvp_shape *shape, const kvp_view *dst, const uint64_t *dst_blocks,
                          const kvp_view *src, const uint64_t *src_blocks, size_t block_count,
                          size_t layer_begin, size_t layer_end, const uint32_t *crc_expected,
                          const uint32_t *crc_out, size_t crc_block_stride)
{
    if (shape->heads == 0 || shape->tokens == 0 || shape->k_row_bytes == 0 ||
        layer_begin > layer_end)
        return KVP_INVALID;
    if (block_count == 0 || layer_begin == layer_end)
        return KVP_OK;
    size_t crcs_per_block, crc_values;
    if (__builtin_mul_overflow(layer_end - layer_begin, shape->heads, &crcs_per_block) ||
        __builtin_mul_overflow(block_count, crc_block_stride, &crc_values))
        return KVP_INVALID;
    if ((crc_expected != NULL || crc_out != NULL) && crc_block_stride < crcs_per_block)
        return KVP_INVALID;
    return view_is_sane(shape, dst, dst_blocks, block_count, layer_end) &&
                   view_is_sane(shape, src, src_blocks, block_count, layer_end)
               ? KVP_OK
               : KVP_INVALID;
}

/* `near`: never past the cache. */
static kvp_status copy_blocks(bool near, const kvp_shape *shape, const kvp_view *dst,
                              const uint64_t *dst_blocks, const kvp_view *src,
                              const uint64_t *src_blocks, size_t block_count, size_t layer_begin,
                              size_t layer_end, const uint32_t *crc_expected, uint32_t *crc_out,
                              size_t crc_block_stride, size_t *bad_block)
{
    kvp_status status =
        kvp_copy_check(shape, dst, dst_blocks, src, src_blocks, block_count, layer_begin, layer_end,
                       crc_expected, crc_out, crc_block_stride);
    if (status != KVP_OK)
        return status;
    *bad_block = block_count;
    if (block_count == 0 || layer_begin == layer_end)
        return KVP_OK;
    block_walk walk = plan_walk(shape, dst, src, layer_end - layer_begin);
    size_t block_bytes = walk.layers * shape->heads * shape->tokens * (shape->k_row_bytes + shape->v_row_bytes);
    walk.near = near;
    walk.streaming = !near && block_bytes >= STREAMING_BYTES_MIN / block_count;
    const size_t dst_first = dst->base + layer_begin * dst->layer_stride;
    const size_t src_first = src->base + layer_begin * src->layer_stride;
    size_t block = 0;
    for (; block < block_count; block++) {
        size_t to = dst_first + dst_blocks[block] * dst->block_stride;
        size_t from = src_first + src_blocks[block] * src->block_stride;
        size_t next = from;
        if (block + 1 < block_count)
            next = src_first + src_blocks[block + 1] * src->block_stride;
        size_t crc_at = block * crc_block_stride;
        if (!copy_block(&walk, (uint8_t *)to, (const uint8_t *)from, (const uint8_t *)next,
                        crc_expected == NULL ? NULL : crc_expected + crc_at,
                        crc_out == NULL ? NULL : crc_out + crc_at))
            break;
    }
    if (walk.streaming)
        kvp_crc32c_stream_end();
    *bad_block = block;
    return block == block_count ? KVP_OK : KVP_CORRUPT;
}

kvp_status kvp_copy_blocks(const kvp_shape *shape, const kvp_view *dst, const uint64_t *dst_blocks,
                           const kvp_view *src, const uint64_t *src_blocks, size_t block_count,
                           size_t layer_begin, size_t layer_end, const uint32_t *crc_expected,
                           uint32_t *crc_out, size_t crc_block_stride, size_t *bad_block)
{
    return copy_blocks(false, shape, dst, dst_blocks, src, src_blocks, block_count, layer_begin,
                       layer_end, crc_expected, crc_out, crc_block_stride, bad_block);
}

kvp_status kvp_copy_blocks_near(const kvp_shape *shape, const kvp_view *dst,
                                const uint64_t *dst_blocks, const kvp_view *src,
                                const uint64_t *src_blocks, size_t block_count, size_t layer_begin,
                                size_t layer_end, const uint32_t *crc_expected, uint32_t *crc_out,
                                size_t crc_block_stride, size_t *bad_block)
{
    return copy_blocks(true, shape, dst, dst_blocks, src, src_blocks, block_count, layer_begin,
                       layer_end, crc_expected, crc_out, crc_block_stride, bad_block);
}

kvp_status kvp_copy_spans(const uintptr_t *dst, const uintptr_t *src, const size_t *sizes,
                          size_t count, const volatile int32_t *cancel, size_t *done)
{
    for (size_t i = 0; i < count; i++) {
        if (cancel != NULL && __atomic_load_n(cancel, __ATOMIC_ACQUIRE) != 0) {
            *done = i;
            return KVP_CLOSED;
        }
        memcpy((void *)dst[i], (const void *)src[i], sizes[i]);
    }
    *done = count;
    return KVP_OK;
}
