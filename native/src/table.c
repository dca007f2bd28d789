/* A hash table from 32-byte block hashes to uint64: linear probing, no tombstones.
 *
 * Owns: the entries. Never locks: its caller does. A compact array of tags is probed first, so that
 * a miss costs one cache line and a hit two. Removal shifts the entries behind it back, so a table
 * that lives for months probes as little as a new one. */
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "kvpool.h"

enum { HASH_BYTES = 32, PREFETCH_AHEAD = 8 };

typedef struct {
    uint8_t hash[HASH_BYTES];
    uint64_t value;
} entry;

struct kvp_table {
    size_t capacity;
    size_t count;
    size_t mask;   /* places - 1 */
    uint64_t seed; /* so that nobody can choose hashes that collide here */
    uint32_t *tags; /* 0: empty */
    entry *entries;
};

static uint64_t mix(const kvp_table *table, const uint8_t *hash)
{
    uint64_t low, high;
    memcpy(&low, hash, sizeof low);
    memcpy(&high, hash + sizeof low, sizeof high);
    uint64_t mixed = (low ^ table->seed) * UINT64_C(0x9e3779b97f4a7c15);
    mixed ^= (mixed >> 32) ^ high;
    mixed *= UINT64_C(0xd6e8feb86659fd93);
    return mixed ^ (mixed >> 32);
}

static uint32_t tag_of(uint64_t mixed)
{
    return (uint32_t)(mixed >> 32) | 1;
}

kvp_table *kvp_table_open(size_t capacity)
{
    /* At most 2/3 full, so that a miss looks at five tags on average. */
    size_t wanted, places = 16, bytes;
    if (__builtin_mul_overflow(capacity, (size_t)3, &wanted))
        return NULL;
    while (places < wanted / 2 + 1) {
        if (places > SIZE_MAX / 2)
            return NULL;
        places *= 2;
    }
    if (__builtin_mul_overflow(places, sizeof(entry), &bytes))
        return NULL;
    kvp_table *table = calloc(1, sizeof *table);
    if (table == NULL)
        return NULL;
    table->capacity = capacity;
    table->mask = places - 1;
    table->tags = calloc(places, sizeof *table->tags);
    table->entries = malloc(bytes);
    if (table->tags == NULL || table->entries == NULL) {
        kvp_table_close(table);
        return NULL;
    }
    /* Without entropy (early in boot) the table still works, only predictably. */
    if (getrandom(&table->seed, sizeof table->seed, GRND_NONBLOCK) != sizeof table->seed)
        table->seed = 0;
    return table;
}

void kvp_table_close(kvp_table *table)
{
    if (table == NULL)
        return;
    free(table->tags);
    free(table->entries);
    free(table);
}

size_t kvp_table_count(kvp_table *table)
{
    return table->count;
}

/* Find the place of `hash`, or the empty place where it would go. There is always an empty one. */
static size_t find(const kvp_table *table, const uint8_t *hash, uint64_t mixed)
{
    uint32_t tag = tag_of(mixed);
    size_t place = (size_t)mixed & table->mask;
    while (table->tags[place] != 0) {
        if (table->tags[place] == tag && memcmp(table->entries[place].hash, hash, HASH_BYTES) == 0)
            break;
        place = (place + 1) & table->mask;
    }
    return place;
}

kvp_status kvp_table_put(kvp_table *table, const uint8_t *hash, uint64_t value)
{
    uint64_t mixed = mix(table, hash);
    size_t place = find(table, hash, mixed);
    if (table->tags[place] == 0) {
        if (table->count == table->capacity)
            return KVP_FULL;
        table->count++;
        table->tags[place] = tag_of(mixed);
        memcpy(table->entries[place].hash, hash, HASH_BYTES);
    }
    table->entries[place].value = value;
    return KVP_OK;
}

kvp_status kvp_table_add(kvp_table *table, const uint8_t *hashes, const uint64_t *values,
                         size_t count, bool *added)
{
    if (count > table->capacity - table->count)
        return KVP_FULL;
    for (size_t i = 0; i < count; i++) {
        const uint8_t *hash = hashes + i * HASH_BYTES;
        uint64_t mixed = mix(table, hash);
        size_t place = find(table, hash, mixed);
        added[i] = table->tags[place] == 0;
        if (!added[i])
            continue;
        table->count++;
        table->tags[place] = tag_of(mixed);
        memcpy(table->entries[place].hash, hash, HASH_BYTES);
        table->entries[place].value = values[i];
    }
    return KVP_OK;
}

kvp_status kvp_table_get(kvp_table *table, const uint8_t *hash, uint64_t *value)
{
    size_t place = find(table, hash, mix(table, hash));
    if (table->tags[place] == 0)
        return KVP_MISS;
    *value = table->entries[place].value;
    return KVP_OK;
}

/* Take out the entry at `hole`. */
static void close_up(kvp_table *table, size_t hole)
{
    /* Fill the hole with the next entry that may lie there: one whose own place is not between the
     * hole (exclusive) and where it lies now (inclusive). */
    size_t place = hole;
    for (;;) {
        place = (place + 1) & table->mask;
        if (table->tags[place] == 0)
            break;
        size_t home = (size_t)mix(table, table->entries[place].hash) & table->mask;
        if (((place - home) & table->mask) >= ((place - hole) & table->mask)) {
            table->tags[hole] = table->tags[place];
            table->entries[hole] = table->entries[place];
            hole = place;
        }
    }
    table->tags[hole] = 0;
    table->count--;
}

size_t kvp_table_remove(kvp_table *table, const uint8_t *hashes, size_t count, uint64_t *values)
{
    for (size_t i = 0; i < count; i++) {
        const uint8_t *hash = hashes + i * HASH_BYTES;
        size_t place = find(table, hash, mix(table, hash));
        if (table->tags[place] == 0)
            return i;
        if (values != NULL)
            values[i] = table->entries[place].value;
        close_up(table, place);
    }
    return count;
}

size_t kvp_table_match(kvp_table *table, const uint8_t *hashes, size_t count, uint64_t *values)
{
    size_t ahead = 0;
    for (size_t i = 0; i < count; i++) {
        for (; ahead < count && ahead < i + PREFETCH_AHEAD; ahead++) {
            size_t place = (size_t)mix(table, hashes + ahead * HASH_BYTES) & table->mask;
            __builtin_prefetch(&table->tags[place]);
            __builtin_prefetch(&table->entries[place]);
        }
        const uint8_t *hash = hashes + i * HASH_BYTES;
        size_t place = find(table, hash, mix(table, hash));
        if (table->tags[place] == 0)
            return i;
        if (values != NULL)
            values[i] = table->entries[place].value;
    }
    return count;
}

size_t kvp_table_sweep(kvp_table *table, const bool *dead, size_t numbers)
{
    size_t before = table->count;
    for (size_t place = 0; place <= table->mask;) {
        const entry *here = &table->entries[place];
        /* Closing up may bring another entry here; one that comes round from the begin was seen. */
        if (table->tags[place] != 0 && here->value < numbers && dead[here->value])
            close_up(table, place);
        else
            place++;
    }
    return before - table->count;
}

size_t kvp_table_list(kvp_table *table, uint8_t *hashes, size_t room)
{
    size_t listed = 0;
    for (size_t place = 0; place <= table->mask && listed < room; place++)
        if (table->tags[place] != 0)
            memcpy(hashes + listed++ * HASH_BYTES, table->entries[place].hash, HASH_BYTES);
    return listed;
}
