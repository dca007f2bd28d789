/* hash.c: known digests, the two compression functions against each other, and the chain. */
#include "../src/hash.c"

#include "check.h"

static void hex(const uint8_t *digest, char *out)
{
    for (size_t i = 0; i < DIGEST_BYTES; i++)
        snprintf(out + 2 * i, 3, "%02x", digest[i]);
}

static void test_known_digests(void)
{
    char text[2 * DIGEST_BYTES + 1];
    uint8_t digest[DIGEST_BYTES];
    kvp_sha256((const uint8_t *)"", 0, digest);
    hex(digest, text);
    CHECK(!strcmp(text, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"));
    kvp_sha256((const uint8_t *)"abc", 3, digest);
    hex(digest, text);
    CHECK(!strcmp(text, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"));
    uint8_t *million = malloc(1000000);
    CHECK(million != NULL);
    memset(million, 'a', 1000000);
    kvp_sha256(million, 1000000, digest);
    hex(digest, text);
    CHECK(!strcmp(text, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"));
    free(million);
}

static void test_portable_agrees(void)
{
    compress_fn *chosen = compress;
    for (size_t size = 0; size < 300; size++) {
        uint8_t *data = malloc(size + 1), one[DIGEST_BYTES], two[DIGEST_BYTES];
        CHECK(data != NULL);
        fill_random(data, size + 1);
        compress = chosen;
        kvp_sha256(data, size, one);
        compress = compress_portable;
        kvp_sha256(data, size, two);
        CHECK(!memcmp(one, two, DIGEST_BYTES));
        free(data);
    }
    compress = chosen;
}

/* Every block size and extra length around the chunk's edges, against one hash of the whole. */
static void test_chain(void)
{
    enum { BLOCKS = 3 };
    uint8_t root[DIGEST_BYTES];
    fill_random(root, sizeof root);
    for (size_t step = 1; step <= 42; step++) {
        /* The last two are on either side of what fits the prepared message. */
        size_t block_tokens = step <= 40 ? step : step == 41 ? 472 : 473;
        for (size_t extra = 0; extra <= 70; extra += 7) {
            size_t token_count = BLOCKS * block_tokens + block_tokens - 1;
            uint32_t *tokens = malloc(token_count * sizeof *tokens);
            uint8_t *extras = malloc(BLOCKS * extra + 1), *out = malloc(BLOCKS * DIGEST_BYTES);
            size_t ends[BLOCKS] = {extra, extra, 2 * extra};
            CHECK(tokens != NULL && extras != NULL && out != NULL);
            fill_random(tokens, token_count * sizeof *tokens);
            fill_random(extras, BLOCKS * extra + 1);
            CHECK(kvp_hash_chain(root, tokens, token_count, block_tokens, extras,
                                 extra == 0 ? NULL : ends, out) == KVP_OK);
            const uint8_t *parent = root;
            for (size_t i = 0; i < BLOCKS; i++) {
                uint8_t whole[32 + 473 * 4 + 140], digest[DIGEST_BYTES];
                size_t begin = i == 0 ? 0 : ends[i - 1], size = ends[i] - begin;
                memcpy(whole, parent, 32);
                memcpy(whole + 32, tokens + i * block_tokens, 4 * block_tokens);
                memcpy(whole + 32 + 4 * block_tokens, extras + begin, size);
                kvp_sha256(whole, 32 + 4 * block_tokens + size, digest);
                CHECK(!memcmp(digest, out + i * DIGEST_BYTES, DIGEST_BYTES));
                parent = out + i * DIGEST_BYTES;
            }
            free(tokens);
            free(extras);
            free(out);
        }
    }
}

static void test_refusals(void)
{
    uint8_t root[32] = {0}, out[64];
    uint32_t tokens[2] = {1, 2};
    size_t falling[2] = {4, 3};
    CHECK(kvp_hash_chain(root, tokens, 2, 0, NULL, NULL, out) == KVP_INVALID);
    CHECK(kvp_hash_chain(root, tokens, 2, 1, root, falling, out) == KVP_INVALID);
    CHECK(kvp_hash_chain(root, tokens, 2, 3, NULL, NULL, NULL) == KVP_OK);
    CHECK(kvp_hash_chain(root, NULL, 0, 16, NULL, NULL, NULL) == KVP_OK);
}

int main(void)
{
    test_known_digests();
    test_portable_agrees();
    test_chain();
    chain = chain_portable;
    test_chain();
    test_refusals();
    return 0;
}
