/* CRC-32C (Castagnoli, reflected, as in RFC 3720), alone or fused with a copy.
 *
 * Owns: the polynomial's arithmetic. Implementations of one contract: tables (any CPU), the SSE4.2
 * instruction over three streams, whose CRCs are joined with a carry-less product, and, for copies,
 * folding with carry-less products of four words at once.
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
static stream_fn *near;   /* null: this CPU cannot */

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
#define FOLD __attribute__((target("avx2,sse4.2,pclmul,vpclmulqdq")))
#define FOLD_INLINE FOLD __attribute__((always_inline)) static inline

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

/* A stretch of 256 bytes in 8 registers is folded over the next one: multiplied by x^(8 * 256) and
 * added. Where the CPU multiplies four words at once, this keeps up with the memory, reads each byte
 * once, and in order. */
enum { FOLD_VECTORS = 8, VECTOR_BYTES = 32, FOLD_BYTES = FOLD_VECTORS * VECTOR_BYTES };
enum { FOLD_AHEAD_BYTES = 2048, PAGE_BYTES = 4096 };

/* folds[n] are, for 16 << n bytes, x^(8 * bytes + 63) and x^(8 * bytes - 1), each in the upper half
 * of a word: the product of two reflected words loses one x. */
static uint64_t folds[5][2];

FOLD_INLINE __m256i fold(__m256i sum, __m256i by, __m256i next)
{
    __m256i first = _mm256_clmulepi64_epi128(sum, by, 0x00);
    __m256i second = _mm256_clmulepi64_epi128(sum, by, 0x11);
    return _mm256_xor_si256(_mm256_xor_si256(first, second), next);
}

FOLD_INLINE __m256i folds_of(size_t n)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)folds[n]));
}

/* Past the cache, unless it is to stay `in` it. */
FOLD_INLINE __m256i move_vector(uint8_t *dst, const uint8_t *src, bool in)
{
    __m256i vector = _mm256_loadu_si256((const __m256i *)(const void *)src);
    if (in)
        _mm256_store_si256((__m256i *)(void *)dst, vector);
    else
        _mm256_stream_si256((__m256i *)(void *)dst, vector);
    return vector;
}

/* What is too short, or not aligned, for whole vectors. */
FOLD_INLINE uint32_t move_few(uint32_t crc, uint8_t *dst, const uint8_t *src, size_t size, bool in)
{
    if (!in)
        return take_few(crc, dst, src, size);
    memcpy(dst, src, size);
    return take_few(crc, NULL, dst, size);
}

/* The CRC of the bytes that the registers stand for. */
FOLD_INLINE uint32_t unfold(__m256i sums[FOLD_VECTORS])
{
    for (size_t n = 4, count = FOLD_VECTORS / 2; count > 0; count /= 2) {
        n--;
        for (size_t i = 0; i < count; i++)
            sums[i] = fold(sums[i], folds_of(n), sums[i + count]);
    }
    __m128i low = _mm256_castsi256_si128(sums[0]), high = _mm256_extracti128_si256(sums[0], 1);
    __m128i by = _mm_loadu_si128((const __m128i *)(const void *)folds[0]);
    __m128i first = _mm_clmulepi64_si128(low, by, 0x00);
    __m128i second = _mm_clmulepi64_si128(low, by, 0x11);
    high = _mm_xor_si128(high, _mm_xor_si128(first, second));
    uint64_t crc = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(high));
    return (uint32_t)_mm_crc32_u64(crc, (uint64_t)_mm_extract_epi64(high, 1));
}

FOLD_INLINE uint32_t copy_folding(uint32_t crc, uint8_t *dst, const uint8_t *src, size_t size,
                                  const uint8_t *next, bool in)
{
    size_t before = (size_t)-(uintptr_t)dst % LINE_BYTES;
    if (before > size)
        before = size;
    crc = move_few(crc, dst, src, before, in);
    dst += before;
    src += before;
    size -= before;
    if (size >= FOLD_BYTES) {
        const __m256i by = folds_of(4);
        __m256i sums[FOLD_VECTORS];
        for (size_t i = 0; i < FOLD_VECTORS; i++)
            sums[i] = move_vector(dst + i * VECTOR_BYTES, src + i * VECTOR_BYTES, in);
        sums[0] = _mm256_xor_si256(sums[0], _mm256_zextsi128_si256(_mm_cvtsi32_si128((int)crc)));
        size_t at = FOLD_BYTES;
        for (; at + FOLD_BYTES <= size; at += FOLD_BYTES) {
            /* The CPU's own prefetcher starts anew at each page; this one knows what comes next. A
             * prefetch past the end of the memory does nothing. */
            const size_t wanted = at + FOLD_AHEAD_BYTES;
            const uintptr_t ahead =
                wanted < size ? (uintptr_t)src + wanted : (uintptr_t)next + (wanted - size);
            for (size_t i = 0; i < FOLD_BYTES; i += LINE_BYTES)
                _mm_prefetch((const char *)(ahead + i), _MM_HINT_T0);
            /* Streamed stores wait for their page's translation, and the folding leaves the CPU too
             * little room to run ahead of them: one line of the next page brings it in time. */
            const uintptr_t to = (uintptr_t)dst + at;
            if (to % PAGE_BYTES < FOLD_BYTES)
                _mm_prefetch((const char *)(to + PAGE_BYTES), _MM_HINT_T0);
#pragma GCC unroll 8
            for (size_t i = 0; i < FOLD_VECTORS; i++)
                sums[i] = fold(sums[i], by,
                               move_vector(dst + at + i * VECTOR_BYTES,
                                           src + at + i * VECTOR_BYTES, in));
        }
        crc = unfold(sums);
        dst += at;
        src += at;
        size -= at;
    }
    return move_few(crc, dst, src, size, in);
}

FOLD static uint32_t stream_folding(uint32_t crc, uint8_t *dst, const uint8_t *src, size_t size,
                                    const uint8_t *next)
{
    return copy_folding(crc, dst, src, size, next, false);
}

FOLD static uint32_t near_folding(uint32_t crc, uint8_t *dst, const uint8_t *src, size_t size,
                                  const uint8_t *next)
{
    return copy_folding(crc, dst, src, size, next, true);
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
    for (size_t n = 0; n < sizeof folds / sizeof *folds; n++) {
        uint32_t x7 = ONE >> 7;
        size_t bytes = (size_t)16 << n;
        folds[n][0] = (uint64_t)multiply(power_of_bytes(bytes + 7), x7) << 32;
        folds[n][1] = (uint64_t)multiply(power_of_bytes(bytes - 1), x7) << 32;
    }
    unsigned a, b, c, d;
    if (__get_cpuid(1, &a, &b, &c, &d) && (c & bit_SSE4_2) && (c & bit_PCLMUL)) {
        update = update_sse42;
        if (__builtin_cpu_supports("avx2"))
            stream = stream_avx2;
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq")) {
            stream = stream_folding;
            near = near_folding;
        }
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

uint32_t kvp_crc32c_near(uint32_t crc, uint8_t *dst, const uint8_t *src, size_t size,
                         const uint8_t *next)
{
    if (near == NULL)
        return kvp_crc32c_copy(crc, dst, src, size);
    return ~near(~crc, dst, src, size, next);
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
