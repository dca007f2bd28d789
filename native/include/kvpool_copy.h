/* What crew.c needs of copy.c. Not seen by Python. */
#ifndef KVPOOL_COPY_H
#define KVPOOL_COPY_H

#include "kvpool.h"

/* Say what kvp_copy_blocks would say of its arguments, and copy nothing. */
kvp_status kvp_copy_check(const kvp_shape *shape, const kvp_view *dst, const uint64_t *dst_blocks,
                          const kvp_view *src, const uint64_t *src_blocks, size_t block_count,
                          size_t layer_begin, size_t layer_end, const uint32_t *crc_expected,
                          const uint32_t *crc_out, size_t crc_block_stride);
/* As kvp_copy_blocks, but what was copied is in the cache, however large: for who reads it next. */
kvp_status kvp_copy_blocks_near(const kvp_shape *shape, const kvp_view *dst,
                                const uint64_t *dst_blocks, const kvp_view *src,
                                const uint64_t *src_blocks, size_t block_count, size_t layer_begin,
                                size_t layer_end, const uint32_t *crc_expected, uint32_t *crc_out,
                                size_t crc_block_stride, size_t *bad_block);

#endif
