/* CRC-32C (Castagnoli, reflected, as in RFC 3720), alone or fused with a copy.
 *
 * Owns: the polynomial's arithmetic. Two implementations of one contract: tables (any CPU), and the
 * SSE4.2 instruction over three streams, whose CRCs are joined with a carry-less product.
 *
 * A polynomial of degree < 32 is a uint32 whose bit 31 is the coefficient of x^0. */
#include <stdbool.h>
#include <string.h>

#include "kvpool_crc32c.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#define POLYNOMIAL UINT32_C(0x82f63b78)
#define ONE UINT32_C(0x80000000) /* x^0 */

/* Continue a CRC (in its inner, inverted form) over `src`; copy it to `dst` unless that is null. */
typedef uint32_t update_fn(uint32_t crc, uint8_t *dst, const uint8_t *src, size_t size);

static uint32_t byte_tables[8][256];

/* The product of two polynomials, modulo the polynomial. */
static uint32_t multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (uint32_t bit = ONE; bit != 0; bit >>= 1) {
        product ^= (a & bit) != 0 ? b : 0;
        b = (b >> 1) ^ ((b & 1) != 0 ? POLYNOMIAL : 0);
    }
    return product;
}

/* x^(8 * size) modulo the polynomial. */
static uint32_t power_of_bytes(size_t size)
{
    uint32_t power = ONE;
    uint32_t square = ONE >> 8; /* x^8 */
    for (; size != 0; size >>= 1) {
        if ((size & 1) != 0)
            power = multiply(power, square);
        square = multiply(square, square);
    }
    return power;
}

static uint32_t update_portable(uint32_t crc, uint8_t *dst, const uint8_t *src, size_t size)
{
    while (size >= 8) {
        uint64_t word;
        memcpy(&word, src, sizeof word);
        if (dst != NULL) {
            memcpy(dst, &word, sizeof word);
            dst += 8;
        }
        word ^= crc;
        crc = 0;
        for (size_t i = 0; i < 8; i++)
            crc ^= byte_tables[7 - i][(word >> (8 * i)) & 0xff];
        src += 8;
        size -= 8;
    }
    for (; size > 0; size--) {
        uint8_t byte = *src++;
        if (dst != NULL)
            *dst++ = byte;
        crc = byte_tables[0][(crc ^ byte) & 0xff] ^ (crc >> 8);
    }
    return crc;
}

static update_fn *update = update_portable;

#if defined(__x86_64__)
/* One stream of the three is at most this many 64-byte lines. 42 lines make three streams 8064
 * bytes, inside L1, and put them at different places modulo 4096: at equal places a load would wait
 * for a store of another stream that only looks like the same address. */
enum { LINE_BYTES = 64, STREAM_LINES_MAX = 42 };

/* shifts[n] is x^(8 * 64 * n - 33). The product of two reflected polynomials loses one x, and the
 * instruction that reduces it multiplies by x^32: together they make up for the 33. */
static uint32_t shifts[2 * STREAM_LINES_MAX + 1];

#define SSE42 __attribute__((target("sse4.2,pclmul")))

SSE42 static inline uint64_t load_word(const uint8_t *src)
{
    uint64_t word;
    memcpy(&word, src, sizeof word);
    return word;
}

SSE42 static inline uint32_t shift(uint32_t crc, size_t lines)
{
    __m128i product = _mm_clmulepi64_si128(_mm_cvtsi32_si128((int)crc),
                                           _mm_cvtsi32_si128((int)shifts[lines]), 0);
    return (uint32_t)_mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(product));
}

SSE42 static inline __attribute__((always_inline)) uint32_t
update_streams(uint32_t crc, uint8_t *dst, const uint8_t *src, size_t size, bool copying)
{
    while (size >= 3 * LINE_BYTES) {
        size_t lines = size / (3 * LINE_BYTES);
        if (lines > STREAM_LINES_MAX)
            lines = STREAM_LINES_MAX;
        size_t stream = lines * LINE_BYTES;
        uint64_t a = crc, b = 0, c = 0;
        for (size_t at = 0; at < stream; at += LINE_BYTES) {
#pragma GCC unroll 8
            for (size_t i = at; i < at + LINE_BYTES; i += 8) {
                uint64_t word_a = load_word(src + i);
                uint64_t word_b = load_word(src + stream + i);
                uint64_t word_c = load_word(src + 2 * stream + i);
                if (copying) {
                    memcpy(dst + i, &word_a, sizeof word_a);
                    memcpy(dst + stream + i, &word_b, sizeof word_b);
                    memcpy(dst + 2 * stream + i, &word_c, sizeof word_c);
                }
                a = _mm_crc32_u64(a, word_a);
                b = _mm_crc32_u64(b, word_b);
                c = _mm_crc32_u64(c, word_c);
            }
        }
        crc = shift((uint32_t)a, 2 * lines) ^ shift((uint32_t)b, lines) ^ (uint32_t)c;
        src += 3 * stream;
        size -= 3 * stream;
        if (copying)
            dst += 3 * stream;
    }
    for (; size >= 8; size -= 8, src += 8) {
        uint64_t word = load_word(src);
        if (copying) {
            memcpy(dst, &word, sizeof word);
            dst += 8;
        }
        crc = (uint32_t)_mm_crc32_u64(crc, word);
    }
    for (; size > 0; size--, src++) {
        uint8_t byte = *src;
        if (copying)
            *dst++ = byte;
        crc = _mm_crc32_u8(crc, byte);
    }
    return crc;
}

SSE42 static uint32_t update_sse42(uint32_t crc, uint8_t *dst, const uint8_t *src, size_t size)
{
    if (dst == NULL)
        return update_streams(crc, NULL, src, size, false);
    return update_streams(crc, dst, src, size, true);
}
#endif

/* Runs when the library is loaded, before any thread can call in. */
__attribute__((constructor)) static void prepare(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int i = 0; i < 8; i++)
            crc = (crc >> 1) ^ ((crc & 1) != 0 ? POLYNOMIAL : 0);
        byte_tables[0][byte] = crc;
    }
    for (size_t t = 1; t < 8; t++) {
        for (size_t byte = 0; byte < 256; byte++) {
            uint32_t before = byte_tables[t - 1][byte];
            byte_tables[t][byte] = byte_tables[0][before & 0xff] ^ (before >> 8);
        }
    }
#if defined(__x86_64__)
    uint32_t x31 = ONE >> 31;
    for (size_t lines = 1; lines <= 2 * STREAM_LINES_MAX; lines++) {
        /* x^(512 n - 33) = x^(8 * (64 n - 8)) * x^31 */
        shifts[lines] = multiply(power_of_bytes(lines * LINE_BYTES - 8), x31);
    }
    unsigned a, b, c, d;
    if (__get_cpuid(1, &a, &b, &c, &d) && (c & bit_SSE4_2) && (c & bit_PCLMUL))
        update = update_sse42;
#endif
}

uint32_t kvp_crc32c(uint32_t crc, const uint8_t *data, size_t size)
{
    return ~update(~crc, NULL, data, size);
}

uint32_t kvp_crc32c_copy(uint32_t crc, uint8_t *dst, const uint8_t *src, size_t size)
{
    return ~update(~crc, dst, src, size);
}

uint32_t kvp_crc32c_combine(uint32_t crc_a, uint32_t crc_b, size_t size_b)
{
    return multiply(crc_a, power_of_bytes(size_b)) ^ crc_b;
}
