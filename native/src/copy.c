/* Block copies between layouts, with CRC32C on the way.
 *
 * Owns: the walk over blocks, layers, heads, K and V. Never checks that an address is mapped: that
 * is its caller's promise, and the caller's regions are what bounds it. */
#include <stdbool.h>
#include <string.h>

#include "kvpool_crc32c.h"

/* A walk with everything that does not change from head to head. */
typedef struct {
    size_t rows;
    size_t row_bytes[2]; /* K, V */
    size_t dst_stride[2];
    size_t src_stride[2];
    size_t dst_kv_stride;
    size_t src_kv_stride;
} head_walk;

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

static uint32_t copy_head(const head_walk *walk, uint8_t *dst, const uint8_t *src)
{
    uint32_t crc = 0;
    for (size_t kv = 0; kv < 2; kv++) {
        size_t row_bytes = walk->row_bytes[kv];
        if (row_bytes == 0)
            continue;
        uint8_t *to = dst + kv * walk->dst_kv_stride;
        const uint8_t *from = src + kv * walk->src_kv_stride;
        if (walk->dst_stride[kv] == row_bytes && walk->src_stride[kv] == row_bytes) {
            crc = kvp_crc32c_copy(crc, to, from, walk->rows * row_bytes);
            continue;
        }
        for (size_t row = 0; row < walk->rows; row++) {
            crc = kvp_crc32c_copy(crc, to, from, row_bytes);
            to += walk->dst_stride[kv];
            from += walk->src_stride[kv];
        }
    }
    return crc;
}

/* K and V of a head that follow each other on both sides are walked as one run of rows. */
static head_walk plan_walk(const kvp_shape *shape, const kvp_view *dst, const kvp_view *src)
{
    head_walk walk = {
        .rows = shape->tokens,
        .row_bytes = {shape->k_row_bytes, shape->v_row_bytes},
        .dst_stride = {dst->k_token_stride, dst->v_token_stride},
        .src_stride = {src->k_token_stride, src->v_token_stride},
        .dst_kv_stride = dst->kv_stride,
        .src_kv_stride = src->kv_stride,
    };
    size_t k_bytes = shape->tokens * shape->k_row_bytes;
    bool packed = walk.dst_kv_stride == k_bytes && walk.src_kv_stride == k_bytes;
    for (size_t kv = 0; kv < 2; kv++)
        packed = packed && walk.dst_stride[kv] == walk.row_bytes[kv] &&
                 walk.src_stride[kv] == walk.row_bytes[kv];
    if (packed) {
        size_t head_bytes = k_bytes + shape->tokens * shape->v_row_bytes;
        walk.rows = 1;
        walk.row_bytes[0] = walk.dst_stride[0] = walk.src_stride[0] = head_bytes;
        walk.row_bytes[1] = 0;
    }
    return walk;
}

kvp_status kvp_copy_blocks(const kvp_shape *shape, const kvp_view *dst, const uint64_t *dst_blocks,
                           const kvp_view *src, const uint64_t *src_blocks, size_t block_count,
                           size_t layer_begin, size_t layer_end, const uint32_t *crc_expected,
                           uint32_t *crc_out, size_t crc_block_stride, size_t *bad_block)
{
    if (shape->heads == 0 || shape->tokens == 0 || shape->k_row_bytes == 0 ||
        layer_begin > layer_end)
        return KVP_INVALID;
    if (block_count == 0 || layer_begin == layer_end) {
        *bad_block = block_count;
        return KVP_OK;
    }
    size_t crcs_per_block, crc_values;
    if (__builtin_mul_overflow(layer_end - layer_begin, shape->heads, &crcs_per_block) ||
        __builtin_mul_overflow(block_count, crc_block_stride, &crc_values))
        return KVP_INVALID;
    if ((crc_expected != NULL || crc_out != NULL) && crc_block_stride < crcs_per_block)
        return KVP_INVALID;
    if (!view_is_sane(shape, dst, dst_blocks, block_count, layer_end) ||
        !view_is_sane(shape, src, src_blocks, block_count, layer_end))
        return KVP_INVALID;

    const head_walk walk = plan_walk(shape, dst, src);
    for (size_t block = 0; block < block_count; block++) {
        uintptr_t to_block = dst->base + dst_blocks[block] * dst->block_stride;
        uintptr_t from_block = src->base + src_blocks[block] * src->block_stride;
        size_t crc_at = block * crc_block_stride;
        for (size_t layer = layer_begin; layer < layer_end; layer++) {
            uintptr_t to = to_block + layer * dst->layer_stride;
            uintptr_t from = from_block + layer * src->layer_stride;
            for (size_t head = 0; head < shape->heads; head++, crc_at++) {
                uint32_t crc = copy_head(&walk, (uint8_t *)to, (const uint8_t *)from);
                if (crc_out != NULL)
                    crc_out[crc_at] = crc;
                if (crc_expected != NULL && crc_expected[crc_at] != crc) {
                    *bad_block = block;
                    return KVP_CORRUPT;
                }
                to += dst->head_stride;
                from += src->head_stride;
            }
        }
    }
    *bad_block = block_count;
    return KVP_OK;
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
