/* block_index.c: against plain arrays, with hashes that collide, up to the capacities. */
#include "../src/block_index.c"

#include "check.h"

enum { NAMES = 48, NODES_MAX = 130, SHORT_BYTES = 8 };

static uint8_t names[NAMES * HASH_BYTES_MAX];

/* Name `NAMES` hashes: all collide, or none does. */
static void make_names(size_t hash_bytes, bool collide)
{
    fill_random(names, sizeof names);
    if (collide)
        memset(names, 0, sizeof names);
    for (size_t i = 0; i < NAMES; i++)
        names[i * hash_bytes + hash_bytes / 2] = (uint8_t)i; /* not where long ones are looked up by */
}

static size_t holders_of(bool held[NAMES][NODES_MAX], size_t name, size_t nodes)
{
    size_t count = 0;
    for (size_t node = 0; node < nodes; node++)
        count += held[name][node];
    return count;
}

static void check_equal(kvp_block_index *index, bool held[NAMES][NODES_MAX], size_t nodes,
                        size_t hash_bytes)
{
    size_t present = 0;
    int64_t matched[NODES_MAX];
    for (size_t i = 0; i < NAMES; i++) {
        present += holders_of(held, i, nodes) != 0;
        size_t node = random_below(nodes);
        CHECK(kvp_block_index_holds(index, node, names + i * hash_bytes) == held[i][node]);
    }
    CHECK(kvp_block_index_count(index) == present);
    size_t count = random_below(NAMES + 1);
    kvp_block_index_match(index, names, count * hash_bytes + (count & 1), matched);
    for (size_t node = 0; node < nodes; node++) {
        size_t due = 0;
        while (due < count && held[due][node])
            due++;
        CHECK((size_t)matched[node] == due);
    }
}

/* Any order of changes leaves what the arrays hold; what has no room is refused, and all the rest
 * goes into a larger index unchanged. */
static void test_against_arrays(size_t hash_bytes, size_t nodes, bool collide)
{
    static bool held[NAMES][NODES_MAX];
    memset(held, 0, sizeof held);
    make_names(hash_bytes, collide);
    size_t capacity = 30, sets = 12;
    kvp_block_index *index = kvp_block_index_open(hash_bytes, capacity, sets, nodes);
    CHECK(index != NULL);
    for (size_t step = 0; step < 1000; step++) {
        size_t node = random_below(nodes), first = random_below(NAMES);
        size_t count = random_below(NAMES - first + 1);
        const uint8_t *hashes = names + first * hash_bytes;
        size_t kind = random_below(16);
        if (kind < 9) {
            size_t size = kvp_block_index_add(index, node, hashes, count * hash_bytes);
            size_t done = size / hash_bytes;
            CHECK(done <= count && size % hash_bytes == 0);
            for (size_t i = first; i < first + done; i++)
                held[i][node] = true;
            size_t shared = 0;
            for (size_t i = 0; i < NAMES && done < count; i++)
                shared += holders_of(held, i, nodes) > 1;
            CHECK(shared <= sets);
            if (done < count && holders_of(held, first + done, nodes) == 0)
                CHECK(kvp_block_index_count(index) == capacity);
            else if (done < count)
                CHECK(shared == sets && holders_of(held, first + done, nodes) == 1);
        } else if (kind < 15) {
            kvp_block_index_remove(index, node, hashes, count * hash_bytes);
            for (size_t i = first; i < first + count; i++)
                held[i][node] = false;
        } else {
            kvp_block_index_clear(index, node);
            for (size_t i = 0; i < NAMES; i++)
                held[i][node] = false;
        }
        if (step % 4 == 0)
            check_equal(index, held, nodes, hash_bytes);
    }
    kvp_block_index *larger = kvp_block_index_open(hash_bytes, NAMES, NAMES, nodes);
    CHECK(larger != NULL && kvp_block_index_copy(index, larger) == KVP_OK);
    check_equal(larger, held, nodes, hash_bytes);
    CHECK(kvp_block_index_copy(index, larger) ==
          (kvp_block_index_count(larger) == 0 ? KVP_OK : KVP_INVALID));
    kvp_block_index_close(index);
    kvp_block_index_close(larger);
}

static void test_copy_refuses(void)
{
    make_names(SHORT_BYTES, false);
    kvp_block_index *from = kvp_block_index_open(SHORT_BYTES, 4, 4, 65);
    CHECK(from != NULL);
    CHECK(kvp_block_index_add(from, 0, names, 2 * SHORT_BYTES + 1) == 2 * SHORT_BYTES);
    CHECK(kvp_block_index_add(from, 64, names, 2 * SHORT_BYTES) == 2 * SHORT_BYTES);
    static const struct {
        size_t hash_bytes, capacity, sets, nodes;
        kvp_status due;
    } tries[] = {
        {SHORT_BYTES, 2, 2, 65, KVP_OK},   {SHORT_BYTES, 1, 2, 65, KVP_FULL},
        {SHORT_BYTES, 2, 1, 65, KVP_FULL}, {SHORT_BYTES, 2, 2, 64, KVP_INVALID},
        {SHORT_BYTES * 2, 2, 2, 65, KVP_INVALID},
    };
    for (size_t i = 0; i < sizeof tries / sizeof *tries; i++) {
        kvp_block_index *to = kvp_block_index_open(tries[i].hash_bytes, tries[i].capacity,
                                                   tries[i].sets, tries[i].nodes);
        CHECK(to != NULL && kvp_block_index_copy(from, to) == tries[i].due);
        kvp_block_index_close(to);
    }
    kvp_block_index_close(from);
}

static void test_edges(void)
{
    int64_t matched[1] = {7};
    kvp_block_index *index = kvp_block_index_open(SHORT_BYTES, 0, 0, 0);
    CHECK(index != NULL);
    CHECK(kvp_block_index_add(index, 0, names, SHORT_BYTES) == 0);
    kvp_block_index_remove(index, 0, names, SHORT_BYTES);
    kvp_block_index_clear(index, 0);
    CHECK(!kvp_block_index_holds(index, 0, names));
    kvp_block_index_match(index, names, SHORT_BYTES, matched);
    CHECK(matched[0] == 7);
    kvp_block_index_close(index);
    index = kvp_block_index_open(SHORT_BYTES, 1, 0, 1);
    CHECK(index != NULL);
    CHECK(kvp_block_index_add(index, 1, names, SHORT_BYTES) == 0); /* there is no node 1 */
    CHECK(kvp_block_index_add(index, 0, names, SHORT_BYTES) == SHORT_BYTES);
    kvp_block_index_remove(index, 1, names, SHORT_BYTES);
    kvp_block_index_clear(index, 1);
    CHECK(!kvp_block_index_holds(index, 1, names));
    CHECK(kvp_block_index_holds(index, 0, names));
    kvp_block_index_close(index);
    kvp_block_index_close(NULL);
    CHECK(kvp_block_index_open(SHORT_BYTES - 1, 1, 1, 1) == NULL);
    CHECK(kvp_block_index_open(HASH_BYTES_MAX + 1, 1, 1, 1) == NULL);
    CHECK(kvp_block_index_open(SHORT_BYTES, SIZE_MAX, 1, 1) == NULL);
    CHECK(kvp_block_index_open(SHORT_BYTES, 1, SIZE_MAX, 1) == NULL);
    CHECK(kvp_block_index_open(SHORT_BYTES, 1, 1, SIZE_MAX) == NULL);
}

int main(void)
{
    static const size_t lengths[] = {SHORT_BYTES, 20, HASH_BYTES_MAX};
    static const size_t nodes[] = {1, 3, 64, 65, NODES_MAX};
    for (size_t i = 0; i < 3; i++)
        for (size_t j = 0; j < 5; j++)
            test_against_arrays(lengths[i], nodes[j], (i + j) & 1);
    test_copy_refuses();
    test_edges();
    return 0;
}
