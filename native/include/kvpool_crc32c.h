/* Between crc32c.c and copy.c: copies that compute the CRC on the way. Not seen by Python.
 *
 * All continue `crc` over what they wrote to `dst`, so it is the CRC of the copy even if someone
 * changes `src` meanwhile. */
#ifndef KVPOOL_CRC32C_H
#define KVPOOL_CRC32C_H

#include "kvpool.h"

/* Leaves `dst` in the cache. */
uint32_t kvp_crc32c_copy(uint32_t crc, uint8_t *dst, const uint8_t *src, size_t size);
/* So does this, for runs of kilobytes, whose destination is in the cache already and whose source is
 * not: in two thirds of the time, for it fetches ahead from `next` (any address), where the next run
 * begins. */
uint32_t kvp_crc32c_near(uint32_t crc, uint8_t *dst, const uint8_t *src, size_t size,
                         const uint8_t *next);
/* Stores past the cache, and fetches ahead from `next` (any address), where the next run begins.
 * Call kvp_crc32c_stream_end() before anyone is told of the copy. */
uint32_t kvp_crc32c_stream(uint32_t crc, uint8_t *dst, const uint8_t *src, size_t size,
                           const uint8_t *next);
/* Order all streamed stores of this thread before its later ones. */
void kvp_crc32c_stream_end(void);

#endif
