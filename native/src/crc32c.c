/* CRC-32C (Castagnoli, reflected, as in RFC 3720), alone or fused with a copy.
 *
 * Owns: the polynomial's arithmetic. Three implementations of one contract: tables (any CPU), and
 * the SSE4.2 instruction over one stream or three. */
#include <string.h>

#include "kvpool_crc32c.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

enum { POLYNOMIAL = 0x82f63b78 - 0x100000000 }; /* as a negative int: enums are ints */

typedef uint32_t update_fn(uint32_t crc, uint8_t *dst, const uint8_t *src, size_t size);

static uint32_t tables[8][256];
