/* How reads are cut into asks. Run by tests/native under a sanitizer. */
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
        CHECK(ask.head.count != 0 && ask.head.count <= KVP_ASK_ITEMS_MAX && ask.first == item);
        for (size_t i = 0; i < ask.head.count; i++) {
            bool blocks_of = job->shape != NULL;
            size_t size = blocks_of ? job->layers * kvp_layer_bytes(job->shape)
                                    : job->spans[item].size;
            CHECK(ask.items[i].slot == job->slots[item] && ask.items[i].size != 0);
            CHECK(ask.items[i].offset == (blocks_of ? 0 : job->spans[item].remote_offset) + begun);
            bytes += ask.items[i].size;
            begun += ask.items[i].size;
            CHECK(begun <= size);
            item += begun == size;
            begun = begun == size ? 0 : begun;
        }
        CHECK(bytes <= window && bytes <= most);
    }
    CHECK(item == job->count && begun == 0);
    return asks;
}

int main(void)
{
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
