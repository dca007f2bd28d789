/* crc32c.c: RFC 3720's vectors, the implementations against each other, and joining. */
#include "../src/crc32c.c"

#include "check.h"

static void test_vectors(void)
{
    uint8_t bytes[32];
    CHECK(kvp_crc32c(0, (const uint8_t *)"123456789", 9) == 0xe3069283);
    memset(bytes, 0, sizeof bytes);
    CHECK(kvp_crc32c(0, bytes, sizeof bytes) == 0x8a9136aa);
    memset(bytes, 0xff, sizeof bytes);
    CHECK(kvp_crc32c(0, bytes, sizeof bytes) == 0x62a8ab43);
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)i;
    CHECK(kvp_crc32c(0, bytes, sizeof bytes) == 0x46dd794e);
    CHECK(kvp_crc32c(0x1234, bytes, 0) == 0x1234);
}

/* Exact-size heap buffers, so that the sanitizer sees a byte too many. */
static void test_sizes(void)
{
    for (size_t step = 0; step < 1200; step++) {
        size_t size = step < 700 ? step : random_below(40000);
        uint8_t *src = malloc(size + 1), *dst = malloc(size + 1);
        CHECK(src != NULL && dst != NULL);
        fill_random(src, size);
        uint32_t start = (uint32_t)next_random();
        uint32_t slow = ~update_portable(~start, src, size);
        CHECK(kvp_crc32c(start, src, size) == slow);
        dst[size] = 0x5a;
        CHECK(kvp_crc32c_copy(start, dst, src, size) == slow);
        CHECK(!memcmp(src, dst, size) && dst[size] == 0x5a);
        memset(dst, 0, size);
        CHECK(kvp_crc32c_stream(start, dst, src, size, src) == slow);
        kvp_crc32c_stream_end();
        CHECK(!memcmp(src, dst, size) && dst[size] == 0x5a);
        memset(dst, 0, size);
        CHECK(kvp_crc32c_near(start, dst, src, size, src) == slow);
        CHECK(!memcmp(src, dst, size) && dst[size] == 0x5a);
        if (size > 9) { /* a destination whose words straddle lines */
            CHECK(kvp_crc32c_stream(start, dst + 1, src + 1, size - 1, NULL) ==
                  ~update_portable(~start, src + 1, size - 1));
            CHECK(!memcmp(src + 1, dst + 1, size - 1) && dst[size] == 0x5a);
        }
        size_t cut = random_below(size + 1);
        uint32_t a = kvp_crc32c(start, src, cut), b = kvp_crc32c(0, src + cut, size - cut);
        CHECK(kvp_crc32c(a, src + cut, size - cut) == slow);
        CHECK(kvp_crc32c_combine(a, b, size - cut) == slow);
        free(src);
        free(dst);
    }
}

/* The definition, bit by bit: nothing of crc32c.c is in it. */
static uint32_t by_definition(uint32_t crc, const uint8_t *bytes, size_t size)
{
    crc = ~crc;
    for (size_t i = 0; i < size; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ ((crc & 1) != 0 ? UINT32_C(0x82f63b78) : 0);
    }
    return ~crc;
}

/* Every length up to two folds and a line, and past a page; every alignment of either side. */
static void test_definition(void)
{
    enum { ROOM = 12288, SHORT = 600 };
    static uint8_t src[ROOM + 64], dst[ROOM + 64];
    fill_random(src, sizeof src);
    for (size_t size = 0; size < SHORT + 64; size++) {
        const size_t length = size < SHORT ? size : 4096 + 127 * (size - SHORT);
        const size_t from = size * 7 % 64, to = size * 24 % 64; /* `to`: whole words */
        const uint32_t right = by_definition((uint32_t)size, src + from, length);
        CHECK(kvp_crc32c((uint32_t)size, src + from, length) == right);
        CHECK(kvp_crc32c_copy((uint32_t)size, dst + to, src + from, length) == right);
        memset(dst, 0, sizeof dst);
        CHECK(kvp_crc32c_stream((uint32_t)size, dst + to, src + from, length, NULL) == right);
        kvp_crc32c_stream_end();
        CHECK(!memcmp(dst + to, src + from, length) && dst[to + length] == 0);
        memset(dst, 0, sizeof dst);
        CHECK(kvp_crc32c_near((uint32_t)size, dst + to, src + from, length, NULL) == right);
        CHECK(!memcmp(dst + to, src + from, length) && dst[to + length] == 0);
    }
    for (size_t from = 0; from < 64; from++) {
        const uint32_t right = by_definition(9, src + from, 777);
        for (size_t to = 0; to < 64; to++) {
            CHECK(kvp_crc32c_stream(9, dst + to, src + from, 777, src) == right);
            CHECK(kvp_crc32c_copy(9, dst + to, src + from, 777) == right);
            kvp_crc32c_stream_end();
            CHECK(!memcmp(dst + to, src + from, 777));
            memset(dst, 0, sizeof dst);
            CHECK(kvp_crc32c_near(9, dst + to, src + from, 777, src) == right);
            CHECK(!memcmp(dst + to, src + from, 777) && dst[to + 777] == 0);
        }
    }
}

/* Every size up to two pages, its alignments going by turns; what lies beside the copy stays. */
static void test_every_size(void)
{
    enum { LARGEST = 8192, EDGE = 64, BYTES = LARGEST + 4 * EDGE };
    static uint8_t src[BYTES], dst[BYTES], edge[EDGE];
    uint32_t *right = malloc((LARGEST + 1) * sizeof *right); /* of each size, from one place on */
    CHECK(right != NULL);
    memset(edge, 0x5a, EDGE);
    for (size_t from = 0; from < 3; from++) {
        const uint8_t *begin = src + from * 21;
        fill_random(src, sizeof src);
        right[0] = 5;
        for (size_t size = 0; size < LARGEST; size++)
            right[size + 1] = by_definition(right[size], begin + size, 1);
        for (size_t size = from; size <= LARGEST; size += 3) {
            uint8_t *to = dst + EDGE + size / 3 * 8 % EDGE; /* whole words */
            for (int way = 0; way < 3; way++) {
                memset(dst, 0x5a, sizeof dst);
                if (way == 0)
                    CHECK(kvp_crc32c_copy(5, to, begin, size) == right[size]);
                else if (way == 1)
                    CHECK(kvp_crc32c_stream(5, to, begin, size, NULL) == right[size]);
                else
                    CHECK(kvp_crc32c_near(5, to, begin, size, begin + size) == right[size]);
                kvp_crc32c_stream_end();
                CHECK(!memcmp(to, begin, size));
                CHECK(!memcmp(to + size, edge, EDGE) && !memcmp(to - EDGE, edge, EDGE));
            }
        }
    }
    free(right);
}

/* Joining is associative at sizes that no buffer has. */
static void test_combine_huge(void)
{
    for (size_t step = 0; step < 1000; step++) {
        uint32_t a = (uint32_t)next_random(), b = (uint32_t)next_random();
        uint32_t c = (uint32_t)next_random();
        size_t b_size = next_random() >> 1, c_size = next_random() >> (1 + random_below(60));
        uint32_t left = kvp_crc32c_combine(kvp_crc32c_combine(a, b, b_size), c, c_size);
        uint32_t right =
            kvp_crc32c_combine(a, kvp_crc32c_combine(b, c, c_size), b_size + c_size);
        CHECK(left == right);
    }
    CHECK(kvp_crc32c_combine(77, 0, 0) == 77);
}

static void test_all(void)
{
    test_vectors();
    test_sizes();
    test_definition();
    test_every_size();
}

int main(void)
{
    test_all();
    near = NULL; /* from here on what this CPU would not choose, too */
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        stream = stream_avx2;
        test_all();
    }
#endif
    stream = NULL;
    test_all();
    update = update_portable;
    test_all();
    test_combine_huge();
    return 0;
}
