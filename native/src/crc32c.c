/* CRC-32C (Castagnoli, reflected, as in RFC 3720), alone or fused with a copy.
 *
 * Owns: the polynomial's arithmetic. Two implementations of one contract: tables (any CPU), and the
 * SSE4.2 instruction over three streams, whose CRCs are joined with a carry-less product.
 *
 * A polynomial of degree < 32 is a uint32 whose bit 31 is the coefficient of x^0. */
#include <string.h>

#include "kvpool_crc32c.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#define POLYNOMIAL UINT32_C(0x82f63b78)
#define ONE UINT32_C(0x80000000) /* x^0 */

enum { COPY_STRETCH_BYTES = 4096 };

/* Both take and return a CRC in its inner, inverted form. */
typedef uint32_t update_fn(uint32_t crc, const uint8_t *src, size_t size);
typedef uint32_t stream_fn(uint32_t crc, uint8_t *dst, const uint8_t *src, size_t size,
                           const uint8_t *next);

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

static uint32_t update_portable(uint32_t crc, const uint8_t *src, size_t size)
{
    for (; size >= 8; size -= 8, src += 8) {
        uint64_t word;
        memcpy(&word, src, sizeof word);
        word ^= crc;
        crc = 0;
        for (size_t i = 0; i < 8; i++)
            crc ^= byte_tables[7 - i][(word >> (8 * i)) & 0xff];
    }
    for (; size > 0; size--, src++)
        crc = byte_tables[0][(crc ^ *src) & 0xff] ^ (crc >> 8);
    return crc;
}

static update_fn *update = update_portable;
static stream_fn *stream; /* null: this CPU cannot */

#if defined(__x86_64__)
/* A lane of the three is at most this many 64-byte lines: 8064 bytes together, inside L1. */
enum { LINE_BYTES = 64, LANE_LINES_MAX = 42 };

/* shifts[n] is x^(8 * 64 * n - 33). The product of two reflected polynomials loses one x, and the
 * instruction that reduces it multiplies by x^32: together they make up for the 33. */
static uint32_t shifts[2 * LANE_LINES_MAX + 1];

#define SSE42 __attribute__((target("sse4.2,pclmul")))
#define SSE42_INLINE SSE42 __attribute__((always_inline)) static inline
#define AVX2 __attribute__((target("avx2,sse4.2,pclmul")))
#define AVX2_INLINE AVX2 __attribute__((always_inline)) static inline

SSE42_INLINE uint32_t shift(uint32_t crc, size_t lines)
{
    __m128i product = _mm_clmulepi64_si128(_mm_cvtsi32_si128((int)crc),
                                           _mm_cvtsi32_si128((int)shifts[lines]), 0);
    return (uint32_t)_mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(product));
}

/* Read 8 bytes once, take them into the CRC and, if `dst` is there, store them past the cache. */
SSE42_INLINE uint64_t take_word(uint64_t crc, uint8_t *dst, const uint8_t *src)
{
    uint64_t word;
    memcpy(&word, src, sizeof word);
    if (dst != NULL)
        _mm_stream_si64((long long *)(void *)dst, (long long)word);
    return _mm_crc32_u64(crc, word);
}

/* Take bytes one stream at a time: what is too short, or not aligned, for three lanes. */
SSE42_INLINE uint32_t take_few(uint32_t crc, uint8_t *dst, const uint8_t *src, size_t size)
{
    for (; size >= 8; size -= 8, src += 8) {
        crc = (uint32_t)take_word(crc, dst, src);
        if (dst != NULL)
            dst += 8;
    }
    for (; size > 0; size--, src++) {
        uint8_t byte = *src;
        if (dst != NULL)
            *dst++ = byte;
        crc = _mm_crc32_u8(crc, byte);
    }
    return crc;
}

/* Copy one line of 64 bytes past the cache, in wide stores: 8 bytes at a time would cost more
 * instructions than the CRC does. The CRC then reads what was stored from `held`, in L1, and never
 * `src` again: a peer may have changed that meanwhile. */
AVX2_INLINE void stream_line(uint8_t *dst, uint8_t *held, const uint8_t *src)
{
    __m256i low = _mm256_loadu_si256((const __m256i *)(const void *)src);
    __m256i high = _mm256_loadu_si256((const __m256i *)(const void *)(src + 32));
    _mm256_stream_si256((__m256i *)(void *)dst, low);
    _mm256_stream_si256((__m256i *)(void *)(dst + 32), high);
    _mm256_store_si256((__m256i *)(void *)held, low);
    _mm256_store_si256((__m256i *)(void *)(held + 32), high);
}

/* The instruction takes 3 cycles and can start every cycle: three lanes keep it busy. */
SSE42_INLINE void take_lines(uint64_t *a, uint64_t *b, uint64_t *c, const uint8_t *src, size_t lane)
{
#pragma GCC unroll 8
    for (size_t i = 0; i < LINE_BYTES; i += 8) {
        *a = take_word(*a, NULL, src + i);
        *b = take_word(*b, NULL, src + lane + i);
        *c = take_word(*c, NULL, src + 2 * lane + i);
    }
}

SSE42 static uint32_t update_sse42(uint32_t crc, const uint8_t *src, size_t size)
{
    while (size >= 3 * LINE_BYTES) {
        size_t lines = size / (3 * LINE_BYTES);
        if (lines > LANE_LINES_MAX)
            lines = LANE_LINES_MAX;
        const size_t lane = lines * LINE_BYTES;
        uint64_t a = crc, b = 0, c = 0;
        for (size_t at = 0; at < lane; at += LINE_BYTES)
            take_lines(&a, &b, &c, src + at, lane);
        crc = shift((uint32_t)a, 2 * lines) ^ shift((uint32_t)b, lines) ^ (uint32_t)c;
        src += 3 * lane;
        size -= 3 * lane;
    }
    return take_few(crc, NULL, src, size);
}

AVX2 static uint32_t stream_avx2(uint32_t crc, uint8_t *dst, const uint8_t *src, size_t size,
                                 const uint8_t *next)
{
    uint8_t held[3 * LINE_BYTES] __attribute__((aligned(LINE_BYTES)));
    size_t before = (size_t)-(uintptr_t)dst % LINE_BYTES;
    if (before > size)
        before = size;
    crc = take_few(crc, dst, src, before);
    dst += before;
    src += before;
    size -= before;
    while (size >= 3 * LINE_BYTES) {
        size_t lines = size / (3 * LINE_BYTES);
        if (lines > LANE_LINES_MAX)
            lines = LANE_LINES_MAX;
        const size_t lane = lines * LINE_BYTES;
        uint64_t a = crc, b = 0, c = 0;
        size -= 3 * lane;
        /* The CPU's own prefetcher starts anew at each page; this one knows what comes next, and
         * asks for it in the order in which it lies. A prefetch past the end of the memory does
         * nothing. */
        const uint8_t *ahead = size >= 3 * LINE_BYTES ? src + 3 * lane : next;
        for (size_t at = 0; at < lane; at += LINE_BYTES) {
            for (size_t i = 0; i < 3; i++) {
                _mm_prefetch((const char *)ahead, _MM_HINT_T1);
                ahead += LINE_BYTES;
                stream_line(dst + i * lane + at, held + i * LINE_BYTES, src + i * lane + at);
            }
            take_lines(&a, &b, &c, held, LINE_BYTES);
        }
        crc = shift((uint32_t)a, 2 * lines) ^ shift((uint32_t)b, lines) ^ (uint32_t)c;
        src += 3 * lane;
        dst += 3 * lane;
    }
    return take_few(crc, dst, src, size);
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
    for (size_t lines = 1; lines <= 2 * LANE_LINES_MAX; lines++) {
        /* x^(512 n - 33) = x^(8 * (64 n - 8)) * x^31 */
        shifts[lines] = multiply(power_of_bytes(lines * LINE_BYTES - 8), x31);
    }
    unsigned a, b, c, d;
    if (__get_cpuid(1, &a, &b, &c, &d) && (c & bit_SSE4_2) && (c & bit_PCLMUL)) {
        update = update_sse42;
        if (__builtin_cpu_supports("avx2"))
            stream = stream_avx2;
    }
#endif
}

uint32_t kvp_crc32c(uint32_t crc, const uint8_t *data, size_t size)
{
    return ~update(~crc, data, size);
}

/* Copy a stretch that stays in L1, then sum the copy: stores and loads of different lanes would get
 * in each other's way where two addresses are equal modulo 4096, as those of slots often are. */
uint32_t kvp_crc32c_copy(uint32_t crc, uint8_t *dst, const uint8_t *src, size_t size)
{
    crc = ~crc;
    while (size > 0) {
        size_t stretch = size < COPY_STRETCH_BYTES ? size : COPY_STRETCH_BYTES;
        memcpy(dst, src, stretch);
        crc = update(crc, dst, stretch);
        dst += stretch;
        src += stretch;
        size -= stretch;
    }
    return ~crc;
}

uint32_t kvp_crc32c_stream(uint32_t crc, uint8_t *dst, const uint8_t *src, size_t size,
                           const uint8_t *next)
{
    /* Words that straddle two lines would be slow to store. */
    if (stream == NULL || ((uintptr_t)dst & 7) != 0)
        return kvp_crc32c_copy(crc, dst, src, size);
    return ~stream(~crc, dst, src, size, next);
}

void kvp_crc32c_stream_end(void)
{
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

uint32_t kvp_crc32c_combine(uint32_t crc_a, uint32_t crc_b, size_t size_b)
{
    return multiply(crc_a, power_of_bytes(size_b)) ^ crc_b;
}
