/* table.c: against a plain array, with hashes that collide, up to the capacity. */
#include "../src/table.c"

#include "check.h"

enum { NAMES = 64 };

static void name(uint8_t *hash, size_t index)
{
    memset(hash, 0, HASH_BYTES);
    hash[HASH_BYTES - 1] = (uint8_t)index; /* equal where the table looks first: all collide */
}

static void test_against_array(void)
{
    uint64_t values[NAMES] = {0};
    int present[NAMES] = {0};
    size_t count = 0, capacity = 40;
    kvp_table *table = kvp_table_open(capacity);
    CHECK(table != NULL);
    for (size_t step = 0; step < 20000; step++) {
        size_t i = random_below(NAMES);
        uint8_t hash[HASH_BYTES];
        name(hash, i);
        if (next_random() & 1) {
            kvp_status status = kvp_table_put(table, hash, step);
            CHECK(status == (present[i] || count < capacity ? KVP_OK : KVP_FULL));
            if (status == KVP_OK) {
                count += !present[i];
                present[i] = 1;
                values[i] = step;
            }
        } else {
            uint64_t was = 0;
            CHECK(kvp_table_remove(table, hash, 1, &was) == (size_t)present[i]);
            CHECK(!present[i] || was == values[i]);
            count -= (size_t)present[i];
            present[i] = 0;
        }
        uint64_t value;
        i = random_below(NAMES);
        name(hash, i);
        kvp_status found = kvp_table_get(table, hash, &value);
        CHECK(found == (present[i] ? KVP_OK : KVP_MISS));
        CHECK(found != KVP_OK || value == values[i]);
        CHECK(kvp_table_count(table) == count);
    }
    kvp_table_close(table);
}

static void test_match(void)
{
    enum { COUNT = 100 };
    static uint8_t hashes[COUNT * HASH_BYTES];
    uint64_t values[COUNT];
    fill_random(hashes, sizeof hashes);
    kvp_table *table = kvp_table_open(COUNT);
    CHECK(table != NULL);
    for (size_t i = 0; i < COUNT; i++)
        CHECK(kvp_table_put(table, hashes + i * HASH_BYTES, i) == KVP_OK);
    CHECK(kvp_table_match(table, hashes, COUNT, values) == COUNT);
    for (size_t i = 0; i < COUNT; i++)
        CHECK(values[i] == i);
    CHECK(kvp_table_remove(table, hashes + 37 * HASH_BYTES, 1, NULL) == 1);
    CHECK(kvp_table_remove(table, hashes + 35 * HASH_BYTES, 5, values) == 2);
    CHECK(values[0] == 35 && values[1] == 36);
    CHECK(kvp_table_match(table, hashes, COUNT, NULL) == 35);
    bool added[COUNT];
    CHECK(kvp_table_add(table, hashes, values, COUNT, added) == KVP_FULL);
    CHECK(kvp_table_add(table, hashes + 34 * HASH_BYTES, values, 3, added) == KVP_OK);
    CHECK(!added[0] && added[1] && added[2]);
    CHECK(kvp_table_match(table, hashes, COUNT, NULL) == 37);
    CHECK(kvp_table_match(table, hashes, 0, NULL) == 0);
    kvp_table_close(table);
}

/* Sweep some values out of crowded tables: exactly those go, and the rest is found and listed. */
static void test_sweep(void)
{
    enum { VALUES = 8 };
    for (size_t round = 0; round < 2000; round++) {
        uint64_t values[NAMES];
        bool dead[VALUES], here[NAMES];
        size_t count = 0, left = 0;
        kvp_table *table = kvp_table_open(NAMES);
        CHECK(table != NULL);
        for (size_t value = 0; value < VALUES; value++)
            dead[value] = next_random() & 1;
        for (size_t i = 0; i < NAMES; i++) {
            uint8_t hash[HASH_BYTES];
            /* Some all collide, some are spread over all places, the last ones too. */
            name(hash, i);
            if (round & 1)
                hash[0] = (uint8_t)(i * 37);
            values[i] = random_below(VALUES + 2); /* two are past what may be dead */
            here[i] = next_random() & 1;
            if (here[i])
                CHECK(kvp_table_put(table, hash, values[i]) == KVP_OK);
            count += here[i];
            here[i] = here[i] && !(values[i] < VALUES && dead[values[i]]);
            left += here[i];
        }
        CHECK(kvp_table_sweep(table, dead, VALUES) == count - left);
        CHECK(kvp_table_count(table) == left);
        uint8_t listed[NAMES * HASH_BYTES];
        CHECK(kvp_table_list(table, listed, NAMES) == left);
        CHECK(kvp_table_match(table, listed, left, NULL) == left);
        CHECK(kvp_table_list(table, listed, 1) == (left > 0));
        for (size_t i = 0; i < NAMES; i++) {
            uint8_t hash[HASH_BYTES];
            name(hash, i);
            if (round & 1)
                hash[0] = (uint8_t)(i * 37);
            uint64_t value;
            CHECK((kvp_table_get(table, hash, &value) == KVP_OK) == here[i]);
            CHECK(!here[i] || value == values[i]);
        }
        kvp_table_close(table);
    }
}

static void test_edges(void)
{
    uint8_t hash[HASH_BYTES] = {0};
    kvp_table *empty = kvp_table_open(0);
    CHECK(empty != NULL);
    CHECK(kvp_table_put(empty, hash, 1) == KVP_FULL);
    CHECK(kvp_table_match(empty, hash, 1, NULL) == 0);
    kvp_table_close(empty);
    kvp_table_close(NULL);
    CHECK(kvp_table_open(SIZE_MAX) == NULL);
    CHECK(kvp_table_open(SIZE_MAX / 3) == NULL);
}

int main(void)
{
    test_against_array();
    test_match();
    test_sweep();
    test_edges();
    return 0;
}
