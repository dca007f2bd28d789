/* SHA-256, and the chain of block hashes built from it.
 *
 * Owns: the compression function, by SHA-NI where the CPU has it. Never touches the heap: the
 * longest state is one context on the caller's stack. Why C: one prompt of 131072 tokens is 8192
 * chained hashes, and hashlib costs more in calls than in hashing. */
#include <string.h>

#include "kvpool.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

/* Tokens are hashed as they lie in memory, and the chain says little-endian. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "kvpool runs on little-endian CPUs");

enum { CHUNK_BYTES = 64, DIGEST_BYTES = 32, LENGTH_BYTES = 8, MESSAGE_BYTES_MAX = 2048 };

static const uint32_t initial_state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                          0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

static const uint32_t round_constants[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

typedef void compress_fn(uint32_t state[8], const uint8_t *data, size_t chunks);
/* Chain blocks whose message is 64 * chunks bytes: the parent's digest, then `body`, which is
 * padded already and has each block's tokens laid over its beginning. */
typedef void chain_fn(const uint8_t *root, const uint8_t *tokens, size_t token_bytes, size_t blocks,
                      uint8_t *body, size_t chunks, uint8_t *out);

static uint32_t rotate(uint32_t word, unsigned count)
{
    return (word >> count) | (word << (32 - count));
}

static void compress_portable(uint32_t state[8], const uint8_t *data, size_t chunks)
{
    for (; chunks > 0; chunks--, data += CHUNK_BYTES) {
        uint32_t w[64];
        for (size_t i = 0; i < 16; i++) {
            uint32_t word;
            memcpy(&word, data + 4 * i, sizeof word);
            w[i] = __builtin_bswap32(word);
        }
        for (size_t i = 16; i < 64; i++) {
            uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ (w[i - 15] >> 3);
            uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ (w[i - 2] >> 10);
            w[i] = w[i - 16] + s0 + w[i - 7] + s1;
        }
        uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
        uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
        for (size_t i = 0; i < 64; i++) {
            uint32_t s1 = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25);
            uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + round_constants[i] + w[i];
            uint32_t s0 = rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22);
            uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
            h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
        }
        state[0] += a, state[1] += b, state[2] += c, state[3] += d;
        state[4] += e, state[5] += f, state[6] += g, state[7] += h;
    }
}

static void store_digest(const uint32_t state[8], uint8_t *digest)
{
    for (size_t i = 0; i < 8; i++) {
        uint32_t word = __builtin_bswap32(state[i]);
        memcpy(digest + 4 * i, &word, sizeof word);
    }
}

static void chain_portable(const uint8_t *root, const uint8_t *tokens, size_t token_bytes,
                           size_t blocks, uint8_t *body, size_t chunks, uint8_t *out)
{
    uint8_t *message = body - DIGEST_BYTES;
    for (size_t i = 0; i < blocks; i++, out += DIGEST_BYTES) {
        uint32_t state[8];
        memcpy(state, initial_state, sizeof state);
        memcpy(message, i == 0 ? root : out - DIGEST_BYTES, DIGEST_BYTES);
        memcpy(body, tokens + i * token_bytes, token_bytes);
        compress_portable(state, message, chunks);
        store_digest(state, out);
    }
}

static compress_fn *compress = compress_portable;
static chain_fn *chain = chain_portable;

#if defined(__x86_64__)
#define SHA_NI __attribute__((target("sha,sse4.1")))
#define SHA_NI_INLINE SHA_NI __attribute__((always_inline)) static inline

/* The state as the instructions want it. */
typedef struct {
    __m128i abef, cdgh;
} registers;

SHA_NI_INLINE __m128i swap_words(__m128i words)
{
    return _mm_shuffle_epi8(words, _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL));
}

SHA_NI_INLINE __m128i load_words(const uint8_t *data)
{
    return swap_words(_mm_loadu_si128((const __m128i *)data));
}

SHA_NI_INLINE registers pack(__m128i abcd, __m128i efgh)
{
    __m128i cdab = _mm_shuffle_epi32(abcd, 0xB1), hgfe = _mm_shuffle_epi32(efgh, 0x1B);
    return (registers){_mm_alignr_epi8(cdab, hgfe, 8), _mm_blend_epi16(hgfe, cdab, 0xF0)};
}

SHA_NI_INLINE void unpack(registers r, __m128i *abcd, __m128i *efgh)
{
    __m128i feba = _mm_shuffle_epi32(r.abef, 0x1B), dchg = _mm_shuffle_epi32(r.cdgh, 0xB1);
    *abcd = _mm_blend_epi16(feba, dchg, 0xF0);
    *efgh = _mm_alignr_epi8(dchg, feba, 8);
}

/* One chunk, four rounds a step: m[i & 3] holds message words 4i..4i+3 when step i begins. */
SHA_NI_INLINE registers compress_chunk(registers before, __m128i m[4])
{
    __m128i abef = before.abef, cdgh = before.cdgh;
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        __m128i words =
            _mm_add_epi32(m[i & 3], _mm_load_si128((const __m128i *)&round_constants[4 * i]));
        cdgh = _mm_sha256rnds2_epu32(cdgh, abef, words);
        if (i >= 3 && i < 15) {
            __m128i carried = _mm_alignr_epi8(m[i & 3], m[(i + 3) & 3], 4);
            __m128i sum = _mm_add_epi32(m[(i + 1) & 3], carried);
            m[(i + 1) & 3] = _mm_sha256msg2_epu32(sum, m[i & 3]);
        }
        abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(words, 0x0E));
        if (i >= 1 && i < 13)
            m[(i + 3) & 3] = _mm_sha256msg1_epu32(m[(i + 3) & 3], m[i & 3]);
    }
    return (registers){_mm_add_epi32(abef, before.abef), _mm_add_epi32(cdgh, before.cdgh)};
}

SHA_NI static void compress_sha_ni(uint32_t state[8], const uint8_t *data, size_t chunks)
{
    __m128i abcd = _mm_loadu_si128((const __m128i *)&state[0]);
    __m128i efgh = _mm_loadu_si128((const __m128i *)&state[4]);
    registers r = pack(abcd, efgh);
    for (; chunks > 0; chunks--, data += CHUNK_BYTES) {
        __m128i m[4] = {load_words(data), load_words(data + 16), load_words(data + 32),
                        load_words(data + 48)};
        r = compress_chunk(r, m);
    }
    unpack(r, &abcd, &efgh);
    _mm_storeu_si128((__m128i *)&state[0], abcd);
    _mm_storeu_si128((__m128i *)&state[4], efgh);
}

/* A digest never leaves the registers on its way into the next message: the words of one are the
 * words of the other. That is a tenth of the time. */
SHA_NI static void chain_sha_ni(const uint8_t *root, const uint8_t *tokens, size_t token_bytes,
                                size_t blocks, uint8_t *body, size_t chunks, uint8_t *out)
{
    const registers initial = pack(_mm_loadu_si128((const __m128i *)&initial_state[0]),
                                   _mm_loadu_si128((const __m128i *)&initial_state[4]));
    __m128i abcd = load_words(root), efgh = load_words(root + 16);
    for (size_t i = 0; i < blocks; i++) {
        memcpy(body, tokens + i * token_bytes, token_bytes);
        __m128i m[4] = {abcd, efgh, load_words(body), load_words(body + 16)};
        registers r = compress_chunk(initial, m);
        for (size_t chunk = 1; chunk < chunks; chunk++) {
            const uint8_t *data = body + chunk * CHUNK_BYTES - DIGEST_BYTES;
            for (size_t j = 0; j < 4; j++)
                m[j] = load_words(data + 16 * j);
            r = compress_chunk(r, m);
        }
        unpack(r, &abcd, &efgh);
        __m128i *digest = (__m128i *)(out + i * DIGEST_BYTES);
        _mm_storeu_si128(digest, swap_words(abcd));
        _mm_storeu_si128(digest + 1, swap_words(efgh));
    }
}

/* Runs when the library is loaded, before any thread can call in. */
__attribute__((constructor)) static void choose_compress(void)
{
    unsigned a, b, c, d;
    if (__get_cpuid(1, &a, &b, &c, &d) && (c & bit_SSE4_1) &&
        __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA)) {
        compress = compress_sha_ni;
        chain = chain_sha_ni;
    }
}
#endif

/* Hash a message of several pieces, fed in order. */
typedef struct {
    uint32_t state[8];
    uint64_t fed_bytes;
    uint8_t partial[CHUNK_BYTES];
} hasher;

static void hasher_start(hasher *h)
{
    memcpy(h->state, initial_state, sizeof h->state);
    h->fed_bytes = 0;
}

static void hasher_feed(hasher *h, const void *piece, size_t size)
{
    const uint8_t *data = piece;
    size_t held = (size_t)(h->fed_bytes % CHUNK_BYTES);
    h->fed_bytes += size;
    if (held > 0) {
        size_t taken = size < CHUNK_BYTES - held ? size : CHUNK_BYTES - held;
        if (taken > 0)
            memcpy(h->partial + held, data, taken);
        if (held + taken < CHUNK_BYTES)
            return;
        compress(h->state, h->partial, 1);
        data += taken;
        size -= taken;
    }
    size_t chunks = size / CHUNK_BYTES;
    if (chunks > 0)
        compress(h->state, data, chunks);
    if (size % CHUNK_BYTES > 0)
        memcpy(h->partial, data + chunks * CHUNK_BYTES, size % CHUNK_BYTES);
}

/* Write what follows a message of `size` bytes, whose last `size % 64` lie at `tail`: one bit,
 * zeros, the length in bits. Returns the chunks that `tail` (128 bytes) now holds. */
static size_t pad(uint8_t *tail, uint64_t size)
{
    size_t held = (size_t)(size % CHUNK_BYTES);
    size_t chunks = held + 1 + LENGTH_BYTES <= CHUNK_BYTES ? 1 : 2;
    memset(tail + held, 0, chunks * CHUNK_BYTES - held);
    tail[held] = 0x80;
    uint64_t bits = __builtin_bswap64(size * 8);
    memcpy(tail + chunks * CHUNK_BYTES - LENGTH_BYTES, &bits, sizeof bits);
    return chunks;
}

static void hasher_finish(hasher *h, uint8_t *digest)
{
    uint8_t tail[2 * CHUNK_BYTES];
    memcpy(tail, h->partial, (size_t)(h->fed_bytes % CHUNK_BYTES));
    size_t chunks = pad(tail, h->fed_bytes);
    compress(h->state, tail, chunks);
    store_digest(h->state, digest);
}

void kvp_sha256(const uint8_t *data, size_t size, uint8_t *digest)
{
    hasher h;
    hasher_start(&h);
    hasher_feed(&h, data, size);
    hasher_finish(&h, digest);
}

kvp_status kvp_hash_chain(const uint8_t *root, const uint32_t *tokens, size_t token_count,
                          size_t block_tokens, const uint8_t *extras, const size_t *extra_ends,
                          uint8_t *out)
{
    if (block_tokens == 0)
        return KVP_INVALID;
    size_t blocks = token_count / block_tokens;
    if (extra_ends != NULL) {
        size_t previous = 0;
        for (size_t i = 0; i < blocks; i++) {
            if (extra_ends[i] < previous)
                return KVP_INVALID;
            previous = extra_ends[i];
        }
    }
    if (blocks == 0)
        return KVP_OK;
    const size_t token_bytes = block_tokens * sizeof *tokens, size = DIGEST_BYTES + token_bytes;
    uint8_t message[MESSAGE_BYTES_MAX];
    if (extra_ends == NULL && size <= MESSAGE_BYTES_MAX - 2 * CHUNK_BYTES) {
        size_t whole = size / CHUNK_BYTES;
        size_t chunks = whole + pad(message + whole * CHUNK_BYTES, size);
        chain(root, (const uint8_t *)tokens, token_bytes, blocks, message + DIGEST_BYTES, chunks,
              out);
        return KVP_OK;
    }
    const uint8_t *parent = root;
    size_t extra_begin = 0;
    for (size_t i = 0; i < blocks; i++, tokens += block_tokens, out += DIGEST_BYTES) {
        hasher h;
        hasher_start(&h);
        hasher_feed(&h, parent, DIGEST_BYTES);
        hasher_feed(&h, tokens, token_bytes);
        if (extra_ends != NULL && extra_ends[i] > extra_begin) {
            hasher_feed(&h, extras + extra_begin, extra_ends[i] - extra_begin);
            extra_begin = extra_ends[i];
        }
        hasher_finish(&h, out);
        parent = out;
    }
    return KVP_OK;
}
