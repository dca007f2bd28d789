/* Verified copies of blocks out of a peer's arena: everything of one batch in one call.
 *
 * Owns: the order of a pull. Lives and checksums first, then the copy, then lives again, so that
 * what is called good was one life's from beginning to end. Never looks into a header: window.c
 * does; nor into a block: copy.c does. */

#include "kvpool.h"

typedef struct {
    kvp_window *window;
    const uint64_t *slots;
    const uint64_t *generations;
} life_list;

/* Count the leading slots that are in their lives now, up to `count`; with `crcs` (nullable) read
 * their checksums, `each` of them, too. KVP_INVALID past the end of the region. */
static kvp_status lead(const life_list *lives, size_t count, uint32_t *crcs, size_t each,
                       size_t *good)
{
    for (*good = 0; *good < count; ++*good) {
        if (lives->slots[*good] > UINT32_MAX)
            return KVP_INVALID;
        uint32_t slot = (uint32_t)lives->slots[*good];
        const uint64_t *generation = lives->generations + *good;
        size_t bad;
        kvp_status status =
            crcs == NULL
                ? kvp_window_check(lives->window, &slot, generation, 1, &bad)
                : kvp_window_crcs(lives->window, &slot, generation, 1, crcs + *good * each, &bad);
        if (status == KVP_STALE)
            return KVP_OK;
        if (status != KVP_OK)
            return status;
    }
    return KVP_OK;
}

/* Slots hold blocks in canonical order. */
static kvp_view slots_view(kvp_window *window, const kvp_shape *shape)
{
    size_t head = shape->tokens * (shape->k_row_bytes + shape->v_row_bytes);
    return (kvp_view){
        .base = kvp_window_base(window),
        .block_stride = kvp_window_slot_stride(window),
        .layer_stride = shape->heads * head,
        .head_stride = head,
        .kv_stride = shape->tokens * shape->k_row_bytes,
        .k_token_stride = shape->k_row_bytes,
        .v_token_stride = shape->v_row_bytes,
    };
}

/* Whether slots of the window hold just such blocks. */
static bool fits(kvp_window *window, const kvp_shape *shape, size_t layers)
{
    size_t row, bytes, crcs;
    return !__builtin_add_overflow(shape->k_row_bytes, shape->v_row_bytes, &row) &&
           !__builtin_mul_overflow(layers, shape->heads, &crcs) &&
           !__builtin_mul_overflow(row, shape->tokens, &bytes) &&
           !__builtin_mul_overflow(bytes, crcs, &bytes) &&
           bytes == kvp_window_slot_bytes(window) && crcs == kvp_window_crc_count(window);
}

kvp_status kvp_window_pull(kvp_window *window, kvp_crew *crew, const kvp_shape *shape,
                           size_t layers, const kvp_view *dst, const uint64_t *dst_blocks,
                           const uint64_t *slots, const uint64_t *generations, size_t count,
                           const uint32_t *expected, size_t expected_stride, uint32_t *room,
                           size_t *good)
{
    *good = 0;
    if (!fits(window, shape, layers))
        return KVP_INVALID;
    const size_t each = kvp_window_crc_count(window);
    const life_list lives = {window, slots, generations};
    size_t leading, whole;
    kvp_status status = lead(&lives, count, expected == NULL ? room : NULL, each, &leading);
    if (status != KVP_OK)
        return status;
    const kvp_view src = slots_view(window, shape);
    const uint32_t *crcs = expected == NULL ? room : expected;
    const size_t stride = expected == NULL ? each : expected_stride;
    status = crew == NULL
                 ? kvp_copy_blocks(shape, dst, dst_blocks, &src, slots, leading, 0, layers, crcs,
                                   NULL, stride, &whole)
                 : kvp_crew_copy_blocks(crew, shape, dst, dst_blocks, &src, slots, leading, 0,
                                        layers, crcs, NULL, stride, &whole);
    if (status != KVP_OK && status != KVP_CORRUPT)
        return status;
    (void)lead(&lives, whole, NULL, 0, good); /* all are within the region, as before */
    return status;
}
