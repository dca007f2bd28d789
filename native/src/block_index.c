/* Which nodes hold which block: a hash table from block hash to a set of nodes.
 *
 * Owns: the entries and the sets. Never locks: it has one owner. Most blocks are at one node, whose
 * number then is all that an entry holds; a block at several has a set of bits, one a node. A chain
 * is walked once, keeping the nodes that hold all of it so far. Places are probed as in table.c:
 * tags first, linear, no tombstones. */
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "kvpool.h"

enum { HASH_BYTES_MAX = 32, WORD_BITS = 64, PREFETCH_AHEAD = 8 };

#define SET_FLAG UINT32_C(0x80000000) /* of a holder: it numbers a set, not a node */
#define NUMBERS_MAX ((size_t)SET_FLAG)

struct kvp_block_index {
    size_t hash_bytes;
    size_t capacity;
    size_t count;
    size_t mask;           /* places - 1 */
    uint64_t seed;         /* so that nobody can choose hashes that collide here */
    size_t nodes;
    size_t words;          /* of a set */
    size_t set_capacity;
    size_t sets_used;      /* sets that were ever given out */
    uint32_t sets_free;    /* the first free one of those, else UINT32_MAX; it holds the next */
    uint32_t *tags;        /* 0: empty */
    uint32_t *holders;     /* by place */
    uint8_t *hashes;       /* by place */
    uint64_t *sets;
    uint64_t *left;        /* of a match under way: the nodes that hold all so far */
};

static uint64_t mix(const kvp_block_index *index, const uint8_t *hash)
{
    uint64_t low, high;
    memcpy(&low, hash, sizeof low);
    memcpy(&high, hash + index->hash_bytes - sizeof high, sizeof high);
    uint64_t mixed = (low ^ index->seed) * UINT64_C(0x9e3779b97f4a7c15);
    mixed ^= (mixed >> 32) ^ high;
    mixed *= UINT64_C(0xd6e8feb86659fd93);
    return mixed ^ (mixed >> 32);
}

static uint32_t tag_of(uint64_t mixed)
{
    return (uint32_t)(mixed >> 32) | 1;
}

static uint8_t *hash_at(const kvp_block_index *index, size_t place)
{
    return index->hashes + place * index->hash_bytes;
}

static uint64_t *set_at(const kvp_block_index *index, uint32_t number)
{
    return index->sets + (size_t)(number & ~SET_FLAG) * index->words;
}

static bool holds(const kvp_block_index *index, uint32_t holder, size_t node)
{
    if (!(holder & SET_FLAG))
        return holder == node;
    return set_at(index, holder)[node / WORD_BITS] >> (node % WORD_BITS) & 1;
}

static void *zeroed(size_t count, size_t size)
{
    return calloc(count ? count : 1, size);
}

kvp_block_index *kvp_block_index_open(size_t hash_bytes, size_t capacity, size_t set_capacity,
                                      size_t nodes)
{
    if (hash_bytes < sizeof(uint64_t) || hash_bytes > HASH_BYTES_MAX || nodes >= NUMBERS_MAX ||
        capacity >= NUMBERS_MAX || set_capacity >= NUMBERS_MAX)
        return NULL;
    size_t places = 16; /* at most 2/3 full, so that a miss looks at five tags on average */
    while (places < capacity * 3 / 2 + 1)
        places *= 2;
    kvp_block_index *index = calloc(1, sizeof *index);
    if (index == NULL)
        return NULL;
    index->hash_bytes = hash_bytes;
    index->capacity = capacity;
    index->mask = places - 1;
    index->nodes = nodes;
    index->words = (nodes + WORD_BITS - 1) / WORD_BITS;
    index->set_capacity = set_capacity;
    index->sets_free = UINT32_MAX;
    index->tags = zeroed(places, sizeof *index->tags);
    index->holders = zeroed(places, sizeof *index->holders);
    index->hashes = zeroed(places, hash_bytes);
    size_t set_words;
    if (!__builtin_mul_overflow(set_capacity, index->words, &set_words))
        index->sets = zeroed(set_words, sizeof *index->sets);
    index->left = zeroed(index->words, sizeof *index->left);
    if (index->tags == NULL || index->holders == NULL || index->hashes == NULL ||
        index->sets == NULL || index->left == NULL) {
        kvp_block_index_close(index);
        return NULL;
    }
    /* Without entropy (early in boot) the index still works, only predictably. */
    if (getrandom(&index->seed, sizeof index->seed, GRND_NONBLOCK) != sizeof index->seed)
        index->seed = 0;
    return index;
}

void kvp_block_index_close(kvp_block_index *index)
{
    if (index == NULL)
        return;
    free(index->tags);
    free(index->holders);
    free(index->hashes);
    free(index->sets);
    free(index->left);
    free(index);
}

size_t kvp_block_index_count(const kvp_block_index *index)
{
    return index->count;
}

/* Find the place of `hash`, or the empty place where it would go. There is always an empty one. */
static size_t find(const kvp_block_index *index, const uint8_t *hash, uint64_t mixed)
{
    uint32_t tag = tag_of(mixed);
    size_t place = (size_t)mixed & index->mask;
    while (index->tags[place] != 0) {
        if (index->tags[place] == tag &&
            memcmp(hash_at(index, place), hash, index->hash_bytes) == 0)
            break;
        place = (place + 1) & index->mask;
    }
    return place;
}

/* Fill the hole with the next entry that may lie there: one whose own place is not between the hole
 * (exclusive) and where it lies now (inclusive). */
static void close_up(kvp_block_index *index, size_t hole)
{
    size_t place = hole;
    for (;;) {
        place = (place + 1) & index->mask;
        if (index->tags[place] == 0)
            break;
        size_t home = (size_t)mix(index, hash_at(index, place)) & index->mask;
        if (((place - home) & index->mask) >= ((place - hole) & index->mask)) {
            index->tags[hole] = index->tags[place];
            index->holders[hole] = index->holders[place];
            memcpy(hash_at(index, hole), hash_at(index, place), index->hash_bytes);
            hole = place;
        }
    }
    index->tags[hole] = 0;
    index->count--;
}

/* Take an empty set; false if there is none. */
static bool take_set(kvp_block_index *index, uint32_t *number)
{
    if (index->sets_free != UINT32_MAX) {
        *number = index->sets_free | SET_FLAG;
        index->sets_free = (uint32_t)set_at(index, *number)[0];
    } else if (index->sets_used < index->set_capacity) {
        *number = (uint32_t)index->sets_used++ | SET_FLAG;
    } else {
        return false;
    }
    memset(set_at(index, *number), 0, index->words * sizeof(uint64_t));
    return true;
}

static void give_set(kvp_block_index *index, uint32_t number)
{
    set_at(index, number)[0] = index->sets_free;
    index->sets_free = number & ~SET_FLAG;
}

/* Add one node to the holders at `place`; false if no set is left. */
static bool join(kvp_block_index *index, size_t place, size_t node)
{
    uint32_t holder = index->holders[place];
    if (holds(index, holder, node))
        return true;
    if (!(holder & SET_FLAG)) {
        size_t first = holder;
        if (!take_set(index, &holder))
            return false;
        set_at(index, holder)[first / WORD_BITS] |= UINT64_C(1) << (first % WORD_BITS);
        index->holders[place] = holder;
    }
    set_at(index, holder)[node / WORD_BITS] |= UINT64_C(1) << (node % WORD_BITS);
    return true;
}

size_t kvp_block_index_add(kvp_block_index *index, size_t node, const uint8_t *hashes, size_t size)
{
    size_t length = index->hash_bytes, at = 0;
    for (; node < index->nodes && at + length <= size; at += length) {
        const uint8_t *hash = hashes + at;
        uint64_t mixed = mix(index, hash);
        size_t place = find(index, hash, mixed);
        if (index->tags[place] != 0) {
            if (!join(index, place, node))
                break;
            continue;
        }
        if (index->count == index->capacity)
            break;
        index->count++;
        index->tags[place] = tag_of(mixed);
        index->holders[place] = (uint32_t)node;
        memcpy(hash_at(index, place), hash, length);
    }
    return at;
}

/* Take one node from the holders at `place`. True if nobody was left and the entry is gone. */
static bool leave(kvp_block_index *index, size_t place, size_t node)
{
    uint32_t holder = index->holders[place];
    if (!holds(index, holder, node))
        return false;
    if (!(holder & SET_FLAG)) {
        close_up(index, place);
        return true;
    }
    uint64_t *set = set_at(index, holder);
    set[node / WORD_BITS] &= ~(UINT64_C(1) << (node % WORD_BITS));
    size_t last = 0, members = 0;
    for (size_t word = 0; word < index->words; word++) {
        members += (size_t)__builtin_popcountll(set[word]);
        if (set[word] != 0)
            last = word * WORD_BITS + (size_t)__builtin_ctzll(set[word]);
    }
    if (members == 1) {
        give_set(index, holder);
        index->holders[place] = (uint32_t)last;
    }
    return false;
}

void kvp_block_index_remove(kvp_block_index *index, size_t node, const uint8_t *hashes, size_t size)
{
    for (size_t at = 0; at + index->hash_bytes <= size; at += index->hash_bytes) {
        const uint8_t *hash = hashes + at;
        size_t place = find(index, hash, mix(index, hash));
        if (index->tags[place] != 0 && node < index->nodes)
            (void)leave(index, place, node);
    }
}

void kvp_block_index_clear(kvp_block_index *index, size_t node)
{
    /* Closing up may bring another entry to a place; one that comes round from the begin was seen. */
    for (size_t place = 0; place <= index->mask && node < index->nodes;)
        if (index->tags[place] == 0 || !leave(index, place, node))
            place++;
}

bool kvp_block_index_holds(const kvp_block_index *index, size_t node, const uint8_t *hash)
{
    size_t place = find(index, hash, mix(index, hash));
    return index->tags[place] != 0 && node < index->nodes &&
           holds(index, index->holders[place], node);
}

/* Write `matched` for the nodes of one word. */
static void write_matched(int64_t *matched, size_t word, uint64_t bits, size_t blocks)
{
    for (; bits != 0; bits &= bits - 1)
        matched[word * WORD_BITS + (size_t)__builtin_ctzll(bits)] = (int64_t)blocks;
}

/* Keep of `left` who holds the block at `place` too; the others match `blocks`. Is anybody left? */
static bool narrow(kvp_block_index *index, uint32_t holder, int64_t *matched, size_t blocks)
{
    uint64_t *left = index->left, any = 0;
    if (holder & SET_FLAG) {
        const uint64_t *set = set_at(index, holder);
        for (size_t word = 0; word < index->words; word++) {
            uint64_t lost = left[word] & ~set[word];
            if (lost != 0)
                write_matched(matched, word, lost, blocks);
            any |= left[word] &= set[word];
        }
        return any != 0;
    }
    for (size_t word = 0; word < index->words; word++) {
        uint64_t kept = word == holder / WORD_BITS ? UINT64_C(1) << (holder % WORD_BITS) : 0;
        write_matched(matched, word, left[word] & ~kept, blocks);
        any |= left[word] &= kept;
    }
    return any != 0;
}

void kvp_block_index_match(kvp_block_index *index, const uint8_t *hashes, size_t size,
                           int64_t *matched)
{
    size_t count = size / index->hash_bytes;
    memset(index->left, 0xff, index->words * sizeof(uint64_t));
    if (index->nodes % WORD_BITS != 0) /* bits beyond the nodes are no nodes */
        index->left[index->words - 1] = (UINT64_C(1) << (index->nodes % WORD_BITS)) - 1;
    uint64_t mixed[PREFETCH_AHEAD];
    for (size_t i = 0, ahead = 0; i < count; i++) {
        for (; ahead < count && ahead < i + PREFETCH_AHEAD; ahead++) {
            uint64_t next = mix(index, hashes + ahead * index->hash_bytes);
            mixed[ahead % PREFETCH_AHEAD] = next;
            size_t place = (size_t)next & index->mask;
            __builtin_prefetch(&index->tags[place]);
            __builtin_prefetch(&index->holders[place]);
            __builtin_prefetch(hash_at(index, place));
        }
        size_t place = find(index, hashes + i * index->hash_bytes, mixed[i % PREFETCH_AHEAD]);
        if (index->tags[place] == 0) {
            for (size_t word = 0; word < index->words; word++)
                write_matched(matched, word, index->left[word], i);
            return;
        }
        if (!narrow(index, index->holders[place], matched, i))
            return;
    }
    for (size_t word = 0; word < index->words; word++)
        write_matched(matched, word, index->left[word], count);
}

kvp_status kvp_block_index_copy(const kvp_block_index *from, kvp_block_index *to)
{
    if (to->count != 0 || to->hash_bytes != from->hash_bytes || to->words < from->words)
        return KVP_INVALID;
    for (size_t place = 0; place <= from->mask; place++) {
        if (from->tags[place] == 0)
            continue;
        if (to->count == to->capacity)
            return KVP_FULL;
        const uint8_t *hash = hash_at(from, place);
        uint64_t mixed = mix(to, hash);
        size_t there = find(to, hash, mixed);
        uint32_t holder = from->holders[place], number = holder;
        if (holder & SET_FLAG) {
            if (!take_set(to, &number))
                return KVP_FULL;
            memcpy(set_at(to, number), set_at(from, holder), from->words * sizeof(uint64_t));
        }
        to->count++;
        to->tags[there] = tag_of(mixed);
        to->holders[there] = number;
        memcpy(hash_at(to, there), hash, to->hash_bytes);
    }
    return KVP_OK;
}
