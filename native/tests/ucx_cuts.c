/* How reads are cut into asks, and which asks are answered. Run by tests/native under a sanitizer. */
#include "../src/ucx_engine.h"
#include "check.h"

enum { SLOTS = 40 };

/* Cut a read: its asks name every byte once, in order, and none more than fit. Returns how many. */
static size_t cut_all(const kvp_ucx_job *job, size_t window, bool gets, size_t most)
{
    static kvp_endpoint endpoint;
    static kvp_ask ask;
    endpoint.gets = gets;
    kvp_read read = {.endpoint = &endpoint, .job = *job, .good = job->count};
    size_t item = 0, begun = 0, asks = 0;
    for (; read.next_item < job->count; asks++) {
        kvp_read_cut(&read, &ask, window);
        size_t bytes = 0;
        bool beside = true;
        CHECK(ask.head.count * ask.head.crc_count <= KVP_ASK_CRCS_MAX);
        CHECK(ask.head.count != 0 && ask.head.count <= KVP_ASK_ITEMS_MAX && ask.first == item);
        for (size_t i = 0; i < ask.head.count; i++) {
            bool blocks_of = job->shape != NULL;
            size_t size = blocks_of ? job->layers * kvp_layer_bytes(job->shape)
                                    : job->spans[item].size;
            CHECK(ask.items[i].slot == job->slots[item] && ask.items[i].size != 0);
            CHECK(job->regions[item] == ask.head.region);
            beside = beside && (i == 0 || job->slots[item] == job->slots[item - 1] + 1);
            CHECK(ask.items[i].offset == (blocks_of ? 0 : job->spans[item].remote_offset) + begun);
            bytes += ask.items[i].size;
            begun += ask.items[i].size;
            CHECK(begun <= size);
            item += begun == size;
            begun = begun == size ? 0 : begun;
        }
        CHECK(bytes <= window && bytes <= most);
        CHECK(gets || beside || bytes <= 512 << 10);
    }
    CHECK(item == job->count && begun == 0);
    return asks;
}

/* One lie at a time: none that leaves the slot, the region, its checksums or the inbox part is sound. */
static void test_what_may_be_asked(void)
{
    enum { BYTES = 1000, INBOX = 2 * BYTES, CRCS = 2 * KVP_ASK_CRCS_MAX };
    const kvp_ucx_region region = {.slot_count = 4, .slot_bytes = BYTES, .crc_count = CRCS};
    const kvp_wire_ask ask = {.at = BYTES, .count = 1};
    const kvp_wire_item item = {.slot = 3, .size = BYTES}, part = {.offset = 1, .size = BYTES - 1};
    CHECK(kvp_ask_sound(&ask, &item, &region, INBOX));
    CHECK(kvp_ask_sound(&ask, &part, &region, INBOX));
    const kvp_wire_item items[] = {
        {.slot = 4, .size = 1},          {.slot = UINT32_MAX, .size = 1},
        {.size = 0},                     {.size = BYTES + 1},
        {.size = UINT32_MAX},            {.offset = 1, .size = BYTES},
        {.offset = BYTES, .size = 1},    {.offset = UINT64_MAX, .size = 1},
        {.offset = UINT64_MAX, .size = BYTES},
    };
    for (size_t i = 0; i < sizeof items / sizeof *items; i++)
        CHECK(!kvp_ask_sound(&ask, &items[i], &region, UINT64_MAX));
    const kvp_wire_ask asks[] = {
        {.at = BYTES + 1, .count = 1},
        {.at = INBOX + 1, .count = 1},
        {.at = UINT64_MAX, .count = 1},
        {.count = 1, .first_crc = CRCS, .crc_count = 1},
        {.count = 1, .first_crc = UINT32_MAX, .crc_count = UINT32_MAX},
        {.count = 1, .crc_count = KVP_ASK_CRCS_MAX + 1},
    };
    for (size_t i = 0; i < sizeof asks / sizeof *asks; i++)
        CHECK(!kvp_ask_sound(&asks[i], &item, &region, INBOX));
    const kvp_wire_item three[] = {item, item, item};
    const kvp_wire_ask several = {.count = 3};
    CHECK(kvp_ask_sound(&several, three, &region, 3 * BYTES));
    CHECK(!kvp_ask_sound(&several, three, &region, 3 * BYTES - 1));
}

/* Any layout, any window, slots that lie beside each other for a while, regions that change. */
static void test_any_read(void)
{
    static uint32_t regions[SLOTS], slots[SLOTS];
    static uint64_t lives[SLOTS];
    for (size_t step = 0; step < 20000; step++) {
        const kvp_shape shape = {1 + random_below(step % 4 == 0 ? KVP_ASK_CRCS_MAX : 16),
                                 1 + random_below(64), 1 + random_below(400), random_below(400)};
        const kvp_ucx_job job = {.count = 1 + random_below(SLOTS),
                                 .regions = regions,
                                 .slots = slots,
                                 .generations = lives,
                                 .shape = &shape,
                                 .layers = 1 + random_below(80)};
        for (size_t i = 0; i < SLOTS; i++) {
            const bool jumps = i == 0 || random_below(1 + step % 9) == 0;
            slots[i] = jumps ? (uint32_t)next_random() : slots[i - 1] + 1;
            regions[i] = i == 0 || random_below(20) == 0 ? (uint32_t)random_below(3) : regions[i - 1];
        }
        const size_t window = 4096 << random_below(14);
        if (kvp_read_fits(&job, window))
            cut_all(&job, window, step % 3 == 0, window);
    }
}

int main(void)
{
    test_what_may_be_asked();
    test_any_read();
    static uint32_t regions[SLOTS], slots[SLOTS];
    static uint64_t lives[SLOTS];
    for (uint32_t i = 0; i < SLOTS; i++) {
        slots[i] = SLOTS - i;
    }
    enum { KIB = 1 << 10, MIB = 1 << 20, WINDOW = 2 * MIB };
    static const kvp_shape small = {1, 1, KIB, KIB}, usual = {8, 16, 256, 256};
    static const kvp_shape wide = {4, 16, 12 * KIB, 12 * KIB}; /* 1.5 MiB a layer */
    kvp_ucx_job job = {.count = SLOTS, .regions = regions, .slots = slots, .generations = lives};
    job.shape = &small, job.layers = 1;
    CHECK(cut_all(&job, WINDOW, false, 128 * KIB) == 1);
    job.shape = &usual;
    CHECK(cut_all(&job, WINDOW, false, 512 * KIB) == 5);
    CHECK(cut_all(&job, WINDOW, true, WINDOW) == 2);
    CHECK(cut_all(&job, 128 * KIB, false, 128 * KIB) == 20);
    uint32_t beside[SLOTS];
    for (uint32_t i = 0; i < SLOTS; i++) {
        beside[i] = i; /* one piece at the owner: one put */
    }
    job.slots = beside;
    CHECK(cut_all(&job, WINDOW, false, MIB) == 3);
    CHECK(cut_all(&job, 128 * KIB, false, 128 * KIB) == 20);
    beside[10]++; /* the 10 before it and it are two pieces */
    CHECK(cut_all(&job, WINDOW, false, MIB) == 4);
    job.slots = slots;
    job.layers = 16;
    CHECK(cut_all(&job, WINDOW, false, MIB) == SLOTS);
    job.layers = 36;
    CHECK(cut_all(&job, WINDOW, false, MIB) == 3 * SLOTS);
    job.shape = &wide, job.layers = 2;
    CHECK(cut_all(&job, WINDOW, false, WINDOW) == 2 * SLOTS);
    kvp_ucx_span spans[SLOTS];
    for (size_t i = 0; i < SLOTS; i++) {
        size_t size = 1 + (i % 3 == 0 ? random_below(5 * MIB) : random_below(400 * KIB));
        spans[i] = (kvp_ucx_span){1 + i, size, random_below(64)};
    }
    job.shape = NULL, job.spans = spans;
    cut_all(&job, WINDOW, false, MIB);
    cut_all(&job, WINDOW, true, WINDOW);
    cut_all(&job, 64 * KIB, false, 64 * KIB);
    return 0;
}
