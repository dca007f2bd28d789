/* Between crc32c.c and copy.c: a copy that computes the CRC on the way. Not seen by Python. */
#ifndef KVPOOL_CRC32C_H
#define KVPOOL_CRC32C_H

#include "kvpool.h"

/* Copy `size` bytes and continue `crc` over them, reading each byte of `src` once: the CRC is of
 * what was copied even if someone changes `src` meanwhile. */
uint32_t kvp_crc32c_copy(uint32_t crc, uint8_t *dst, const uint8_t *src, size_t size);

#endif
