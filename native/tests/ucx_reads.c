/* Reads between two engines of one process, and messages that lie. Run by tests/native under
 * sanitizers; argv[1] is the library, argv[2] how many lies are told. The table of the library's functions is bent, so that what one
 * engine sends is dropped, changed or flipped on its way. Every wait has a deadline. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../src/ucx_engine.h"

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                        \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

enum { SLOTS = 40, LAYERS = 3, HEADS = 2, CRCS = LAYERS * HEADS, ENDPOINTS = 2, READS = 4 };
static const kvp_shape SHAPE = {HEADS, 4, 48, 16};
enum { LAYER = HEADS * 4 * 64, BLOCK = LAYERS * LAYER };
static const uint64_t SECOND = 1000000000;

/* ---- the bent table --------------------------------------------------------------------------- */

typedef enum {
    HONEST,
    FLIP_BYTES,
    DROP_ANSWERS,
    DROP_DONES,
    BEND_ASKS,
    BEND_ANSWERS,
    BEND_DONES
} bend;
static atomic_int bending;
static uint32_t seed = 1;
static int rounds;
static void *(*send_honestly)(ucx_ep *, unsigned, const void *, size_t, const void *, size_t,
                              const ucx_request_param *);
static void *(*put_honestly)(ucx_ep *, const void *, size_t, uint64_t, ucx_rkey *,
                             const ucx_request_param *);

static kvp_ucx_read_mode mode;

static uint32_t draw(void)
{
    seed = seed * 1664525 + 1013904223;
    return seed >> 8;
}

/* Copies outlive the call: the library may send them later. */
static uint8_t *kept_copy(const void *bytes, size_t size)
{
    static uint8_t room[1 << 22];
    static size_t used;
    if (used + size > sizeof(room)) {
        used = 0;
    }
    uint8_t *copy = &room[used];
    used += (size + 63) & ~(size_t)63;
    if (size != 0) {
        memcpy(copy, bytes, size);
    }
    return copy;
}

static void sign(uint8_t *header, uint16_t kind, const uint8_t *data, size_t size)
{
    kvp_wire_ask *ask = (kvp_wire_ask *)(void *)header;
    kvp_wire_answer *answer = (kvp_wire_answer *)(void *)header;
    if (kind == KVP_WIRE_ANSWER) {
        answer->crc = kvp_answer_crc(answer, data, size);
    } else if (kind != KVP_WIRE_DONE && ask->count * sizeof(kvp_wire_item) <= size) {
        ask->crc = kvp_ask_crc(ask, data);
    }
}

static void *bent_send(ucx_ep *ep, unsigned id, const void *header, size_t header_size,
                       const void *data, size_t size, const ucx_request_param *param)
{
    kvp_wire_head head;
    memcpy(&head, header, sizeof(head));
    int how = atomic_load(&bending);
    if ((how == DROP_ANSWERS && head.kind == KVP_WIRE_ANSWER) ||
        (how == DROP_DONES && head.kind == KVP_WIRE_DONE)) {
        return NULL;
    }
    if ((how == BEND_ASKS && (head.kind == KVP_WIRE_ASK || head.kind == KVP_WIRE_HOLD)) ||
        (how == BEND_DONES && head.kind == KVP_WIRE_DONE) ||
        (how == BEND_ANSWERS && head.kind == KVP_WIRE_ANSWER)) {
        uint8_t *bent_head = kept_copy(header, header_size), *bent = kept_copy(data, size);
        for (uint32_t turns = draw() % 3; turns != 0; turns--) {
            if (size == 0 || draw() % 2 != 0) {
                bent_head[sizeof(head) + draw() % (header_size - sizeof(head))] = (uint8_t)draw();
            } else {
                bent[draw() % size] = (uint8_t)draw();
            }
        }
        size -= draw() % 8 == 0 && size != 0 ? 1 : 0;
        if (draw() % 4 != 0) {
            sign(bent_head, head.kind, bent, size); /* it is no accident */
        }
        header = bent_head;
        data = bent;
    }
    return send_honestly(ep, id, header, header_size, data, size, param);
}

static void *bent_put(ucx_ep *ep, const void *local, size_t size, uint64_t remote, ucx_rkey *rkey,
                      const ucx_request_param *param)
{
    if (atomic_load(&bending) == FLIP_BYTES) {
        uint8_t *bent = kept_copy(local, size);
        bent[size - 1] ^= 4;
        local = bent;
    }
    return put_honestly(ep, local, size, remote, rkey, param);
}

/* Stands in for hardware that reads memory by itself: both sides are in this process. What libucp does
 * over TCP instead ends the process when the connection fails meanwhile. Gets the bytes beside those
 * that are wanted, as of an owner that gave the reader up, if it is to. */
static void *bent_get(ucx_ep *ep, void *local, size_t size, uint64_t remote, ucx_rkey *rkey,
                      const ucx_request_param *param)
{
    (void)ep;
    (void)param;
    CHECK(rkey != NULL);
    uint64_t off = atomic_load(&bending) == FLIP_BYTES ? 1 : 0;
    memcpy(local, (const void *)(uintptr_t)(remote + off), size);
    return NULL;
}

/* ---- two sides -------------------------------------------------------------------------------- */

typedef struct {
    kvp_ucx *engine;
    uint8_t *inbox;
    size_t part;
    uint64_t endpoint;
} side;

static const char *library;
static kvp_arena *arena;
static uint32_t slots[SLOTS], regions[SLOTS];
static uint64_t lives[SLOTS], blocks[SLOTS];
static uint8_t payload[SLOTS * BLOCK], found[SLOTS * BLOCK];
static uint32_t crcs[SLOTS * CRCS], sums[SLOTS * CRCS];

static kvp_view flat(uint8_t *at)
{
    return (kvp_view){(uintptr_t)at, BLOCK, LAYER, LAYER / HEADS, 4 * 48, 48, 16};
}

static side open_side(uint8_t name, size_t part, uint64_t answer_timeout_ns)
{
    side it = {.part = part};
    uint8_t incarnation[16];
    memset(incarnation, name, sizeof(incarnation));
    it.inbox = mmap(NULL, ENDPOINTS * part, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                    -1, 0);
    CHECK(it.inbox != MAP_FAILED);
    kvp_ucx_config config = {
        .library = library,
        .host = "127.0.0.1",
        .read_mode = mode,
        .incarnation = incarnation,
        .inbox = (uintptr_t)it.inbox,
        .inbox_part = part,
        .endpoint_max = ENDPOINTS,
        .batch_max = 8,
        .read_max = READS,
        .copy_helpers = 1,
        .look_ns = 60 * SECOND,
        .spin_ns = 50000,
        .answer_timeout_ns = answer_timeout_ns,
    };
    char reason[256] = "";
    kvp_status status = kvp_ucx_open(&config, reason, sizeof(reason), &it.engine);
    if (status != KVP_OK) {
        fprintf(stderr, "open: %d %s\n", status, reason);
    }
    CHECK(status == KVP_OK);
    return it;
}

static void close_side(side *it)
{
    kvp_ucx_close(it->engine);
    munmap(it->inbox, ENDPOINTS * it->part);
}

static kvp_ucx_event next(side *it, kvp_ucx_event_kind kind)
{
    static kvp_ucx_event event;
    CHECK(kvp_ucx_next_event(it->engine, 20 * SECOND, &event) == KVP_OK);
    if (event.kind != kind) {
        fprintf(stderr, "event %d status %d, wanted %d\n", event.kind, event.status, kind);
    }
    CHECK(event.kind == kind);
    if (kind == KVP_UCX_CLOSED) {
        CHECK(kvp_ucx_release(it->engine, event.endpoint) == KVP_OK);
    }
    return event;
}

static void meet(side *reader, side *owner, uint16_t port)
{
    CHECK(kvp_ucx_connect(reader->engine, "127.0.0.1", port, NULL, 10 * SECOND,
                          &reader->endpoint) == KVP_OK);
    next(reader, KVP_UCX_OPENED);
    owner->endpoint = next(owner, KVP_UCX_OPENED).endpoint;
}

static void part(side *reader, side *owner)
{
    kvp_ucx_disconnect(reader->engine, reader->endpoint);
    next(reader, KVP_UCX_CLOSED);
    next(owner, KVP_UCX_CLOSED);
}

/* Answers that were dropped settle their slots when they are known to be sent. */
static void require_no_grants(void)
{
    kvp_arena_counts counts;
    int turns = 0;
    do {
        CHECK(turns++ < 2000);
        kvp_arena_count(arena, &counts);
        if (counts.grants != 0) {
            usleep(10000);
        }
    } while (counts.grants != 0);
}

static kvp_status start(side *reader, const kvp_ucx_job *job, uint64_t timeout_ns, uint64_t *read)
{
    return kvp_ucx_read(reader->engine, reader->endpoint, job, timeout_ns, 5, read);
}

static kvp_ucx_event run(side *reader, const kvp_ucx_job *job, uint64_t timeout_ns)
{
    uint64_t read;
    CHECK(start(reader, job, timeout_ns, &read) == KVP_OK);
    kvp_ucx_event event = next(reader, KVP_UCX_READ);
    CHECK(event.cookie == 5 && event.endpoint == reader->endpoint);
    return event;
}

static kvp_view dest;

static kvp_ucx_job all_blocks(void)
{
    dest = flat(found);
    memset(found, 7, sizeof(found));
    memset(sums, 7, sizeof(sums));
    return (kvp_ucx_job){
        .count = SLOTS,
        .regions = regions,
        .slots = slots,
        .generations = lives,
        .shape = &SHAPE,
        .dest = &dest,
        .dest_blocks = blocks,
        .layers = LAYERS,
        .sums = sums,
    };
}

/* The leading blocks came, and what was told of each is what it sums to. */
static void require_good(size_t good)
{
    CHECK(memcmp(found, payload, good * BLOCK) == 0);
    CHECK(memcmp(sums, crcs, good * CRCS * sizeof(*sums)) == 0);
}

static void require_windows(side *reader, size_t free_want, size_t owed_want)
{
    size_t free_now, owed;
    kvp_ucx_windows(reader->engine, reader->endpoint, &free_now, &owed);
    CHECK(free_now == free_want && owed == owed_want);
}

/* ---- tests ------------------------------------------------------------------------------------ */

static void test_whole(side *reader)
{
    kvp_ucx_job job = all_blocks();
    kvp_ucx_event event = run(reader, &job, 20 * SECOND);
    CHECK(event.status == KVP_OK && event.good == SLOTS);
    require_good(SLOTS);
    require_windows(reader, KVP_ASKS_MAX, 0);
    require_no_grants();
    /* What the caller expects counts, not what the owner says. */
    uint32_t expected[SLOTS * CRCS];
    memcpy(expected, crcs, sizeof(expected));
    expected[9 * CRCS + 4] ^= 1;
    job = all_blocks();
    job.crcs = expected;
    event = run(reader, &job, 20 * SECOND);
    CHECK(event.status == KVP_OK && event.good == 9);
    require_good(9);
}

static void test_spans(side *reader)
{
    enum { COUNT = 30 };
    kvp_ucx_span spans[COUNT];
    uint32_t at[COUNT];
    uint64_t life[COUNT];
    size_t put = 0;
    memset(found, 7, sizeof(found));
    for (uint32_t i = 0; i < COUNT; i++) {
        uint32_t slot = draw() % SLOTS, offset = draw() % BLOCK;
        uint32_t size = i % 5 == 0 ? BLOCK - offset : 1 + draw() % (BLOCK - offset);
        at[i] = slots[slot];
        life[i] = lives[slot];
        spans[i] = (kvp_ucx_span){(uintptr_t)found + put, size, offset};
        put += size;
    }
    CHECK(put < sizeof(found));
    kvp_ucx_job job = {.count = COUNT, .regions = regions, .slots = at, .generations = life,
                       .spans = spans};
    kvp_ucx_event event = run(reader, &job, 20 * SECOND);
    CHECK(event.status == KVP_OK && event.good == COUNT);
    for (size_t i = 0; i < COUNT; i++) {
        CHECK(memcmp((void *)(uintptr_t)spans[i].local,
                     payload + at[i] * BLOCK + spans[i].remote_offset, spans[i].size) == 0);
    }
    CHECK(found[put] == 7);
    life[17]++;
    event = run(reader, &job, 20 * SECOND);
    CHECK(event.status == KVP_STALE && event.good <= 17);
    require_no_grants();
}

static void test_stale(side *reader)
{
    kvp_ucx_job job = all_blocks();
    uint64_t life = lives[23]++;
    kvp_ucx_event event = run(reader, &job, 20 * SECOND);
    CHECK(event.status == KVP_OK && event.good == 23);
    require_good(23);
    for (size_t i = 23 * CRCS * sizeof(*sums); i < sizeof(sums); i++) {
        CHECK(((const uint8_t *)sums)[i] == 7);
    }
    for (size_t i = 23 * BLOCK; i < sizeof(found); i++) {
        CHECK(found[i] == 7);
    }
    lives[23] = life;
}

static void test_flipped(side *reader)
{
    atomic_store(&bending, FLIP_BYTES);
    kvp_ucx_job job = all_blocks();
    kvp_ucx_event event = run(reader, &job, 20 * SECOND);
    CHECK(event.status == KVP_OK && event.good < SLOTS);
    require_good(event.good);
    kvp_ucx_span span = {(uintptr_t)found, 100, 3};
    job = (kvp_ucx_job){.count = 1, .regions = regions, .slots = slots, .generations = lives,
                        .spans = &span};
    CHECK(run(reader, &job, 20 * SECOND).status == KVP_CORRUPT);
    atomic_store(&bending, HONEST);
}

/* Nothing is asked into a window whose answer is owed, and a read ends without its answers. */
static void test_unanswered(side *reader, side *owner)
{
    atomic_store(&bending, DROP_ANSWERS);
    kvp_ucx_job job = all_blocks();
    CHECK(run(reader, &job, SECOND / 20).status == KVP_TIMEOUT);
    require_windows(reader, 0, KVP_ASKS_MAX);
    uint64_t reads[READS], one_more;
    for (size_t i = 0; i < READS; i++) {
        CHECK(start(reader, &job, 20 * SECOND, &reads[i]) == KVP_OK);
    }
    CHECK(start(reader, &job, 20 * SECOND, &one_more) == KVP_FULL);
    kvp_ucx_cancel(reader->engine, reads[2]);
    CHECK(next(reader, KVP_UCX_READ).status == KVP_CANCELLED);
    kvp_ucx_cancel(reader->engine, reads[2]); /* harmless */
    kvp_ucx_end_reads(reader->engine, reader->endpoint);
    for (size_t i = 0; i < READS - 1; i++) {
        CHECK(next(reader, KVP_UCX_READ).status == KVP_CLOSED);
    }
    CHECK(start(reader, &job, 20 * SECOND, &one_more) == KVP_CLOSED);
    require_windows(reader, 0, KVP_ASKS_MAX);
    for (size_t i = 0; i < sizeof(found); i++) {
        CHECK(found[i] == 7);
    }
    for (size_t i = 0; i < sizeof(sums); i++) {
        CHECK(((const uint8_t *)sums)[i] == 7);
    }
    atomic_store(&bending, HONEST);
    part(reader, owner);
}

/* A peer that goes ends the reads of it, before its CLOSED. */
static void test_lost(side *reader, side *owner)
{
    atomic_store(&bending, DROP_ANSWERS);
    kvp_ucx_job job = all_blocks();
    uint64_t read;
    CHECK(start(reader, &job, 20 * SECOND, &read) == KVP_OK);
    kvp_ucx_disconnect(owner->engine, owner->endpoint);
    kvp_status status = next(reader, KVP_UCX_READ).status;
    CHECK(status == KVP_PEER);
    next(reader, KVP_UCX_CLOSED);
    next(owner, KVP_UCX_CLOSED);
    atomic_store(&bending, HONEST);
    require_no_grants();
}

static void test_liars(side *reader, side *owner, uint16_t port, bend how)
{
    bool connected = false;
    size_t cut_off = 0;
    for (int round = 0; round < rounds; round++) {
        if (!connected) {
            meet(reader, owner, port);
            connected = true;
        }
        atomic_store(&bending, how);
        kvp_ucx_job job = all_blocks();
        uint64_t read;
        /* A changed number of an answer leaves the read to its deadline. */
        kvp_status status = start(reader, &job, SECOND / 10, &read);
        kvp_ucx_event event = {.status = status};
        if (status == KVP_OK) {
            event = next(reader, KVP_UCX_READ);
        }
        atomic_store(&bending, HONEST);
        if (event.status == KVP_OK) {
            /* A reader that asks for another slot than it means gets that one. */
            if (how != BEND_ASKS) {
                require_good(event.good);
            }
        } else {
            CHECK(event.status == KVP_PEER || event.status == KVP_INVALID ||
                  event.status == KVP_TIMEOUT || event.status == KVP_CLOSED);
            kvp_ucx_disconnect(reader->engine, reader->endpoint);
            next(reader, KVP_UCX_CLOSED);
            next(owner, KVP_UCX_CLOSED);
            connected = false;
            cut_off++;
        }
    }
    CHECK(cut_off > 1);
    if (connected) {
        part(reader, owner);
    }
    require_no_grants();
}

/* A reader that does not say when it has what was held for it is given up, and its slots are free. */
static void test_done_is_due(void)
{
    side owner = open_side(1, 1 << 16, SECOND / 4), reader = open_side(2, 1 << 16, 20 * SECOND);
    kvp_ucx_region region = {arena, SLOTS, BLOCK, CRCS};
    uint32_t number;
    CHECK(kvp_ucx_register(owner.engine, &region, &number) == KVP_OK);
    uint16_t port = 0;
    int code = 0;
    CHECK(kvp_ucx_listen(owner.engine, 0, 10 * SECOND, &port, &code) == KVP_OK);
    meet(&reader, &owner, port);
    atomic_store(&bending, DROP_DONES);
    kvp_ucx_span span = {(uintptr_t)found, 100, 3};
    kvp_ucx_job job = {.count = 1, .regions = regions, .slots = slots, .generations = lives,
                       .spans = &span};
    CHECK(run(&reader, &job, 20 * SECOND).status == KVP_OK);
    CHECK(memcmp(found, payload + 3, 100) == 0);
    CHECK(next(&owner, KVP_UCX_CLOSED).status == KVP_TIMEOUT);
    require_no_grants();
    next(&reader, KVP_UCX_CLOSED);
    atomic_store(&bending, HONEST);
    kvp_ucx_counts counts;
    kvp_ucx_count(owner.engine, &counts);
    CHECK(counts.registrations == ENDPOINTS + 1 && counts.puts == 0);
    close_side(&reader);
    close_side(&owner);
}

static void publish(void)
{
    uint8_t incarnation[16] = {1}, hashes[32 * SLOTS] = {0};
    size_t done;
    CHECK(kvp_arena_open(SLOTS, BLOCK, CRCS, incarnation, &arena) == KVP_OK);
    CHECK(kvp_arena_reserve(arena, SLOTS, false, slots, lives) == SLOTS);
    for (size_t i = 0; i < sizeof(payload); i++) {
        payload[i] = (uint8_t)draw();
    }
    for (uint64_t i = 0; i < SLOTS; i++) {
        CHECK(slots[i] == i);
        blocks[i] = i;
    }
    kvp_view from = flat(payload), to = flat((uint8_t *)kvp_arena_base(arena));
    to.block_stride = kvp_arena_slot_stride(arena);
    CHECK(kvp_copy_blocks(&SHAPE, &to, blocks, &from, blocks, SLOTS, 0, LAYERS, NULL, crcs, CRCS,
                          &done) == KVP_OK);
    CHECK(kvp_arena_commit(arena, slots, lives, SLOTS, hashes, crcs, &done) == KVP_OK);
}

static void test_all(size_t inbox_part)
{
    side owner = open_side(1, 1 << 16, 20 * SECOND), reader = open_side(2, inbox_part, 20 * SECOND);
    kvp_ucx_region region = {arena, SLOTS, BLOCK, CRCS};
    uint32_t number = 9;
    CHECK(kvp_ucx_register(owner.engine, &region, &number) == KVP_OK && number == 0);
    region.slot_count = 0;
    CHECK(kvp_ucx_register(owner.engine, &region, &number) == KVP_INVALID);
    uint16_t port = 0;
    int code = 0;
    CHECK(kvp_ucx_listen(owner.engine, 0, 10 * SECOND, &port, &code) == KVP_OK);
    meet(&reader, &owner, port);
    test_whole(&reader);
    test_spans(&reader);
    test_stale(&reader);
    test_flipped(&reader);
    kvp_ucx_job job = all_blocks();
    uint64_t read;
    job.count = 0;
    CHECK(start(&reader, &job, SECOND, &read) == KVP_INVALID);
    test_unanswered(&reader, &owner);
    meet(&reader, &owner, port);
    test_lost(&reader, &owner);
    test_liars(&reader, &owner, port, BEND_ASKS);
    test_liars(&reader, &owner, port, BEND_ANSWERS);
    if (mode == KVP_UCX_READ_GET) {
        test_liars(&reader, &owner, port, BEND_DONES);
    }
    /* A close with reads under way. */
    meet(&reader, &owner, port);
    job = all_blocks();
    CHECK(start(&reader, &job, 20 * SECOND, &read) == KVP_OK);
    close_side(&reader);
    close_side(&owner);
    require_no_grants();
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    rounds = atoi(argv[2]);
    library = argv[1];
    char reason[256] = "";
    kvp_ucp *table = (kvp_ucp *)(uintptr_t)kvp_ucp_load(library, reason, sizeof(reason));
    CHECK(table != NULL);
    send_honestly = table->am_send_nbx;
    put_honestly = table->put_nbx;
    table->am_send_nbx = bent_send;
    table->put_nbx = bent_put;
    table->get_nbx = bent_get;
    publish();
    for (mode = KVP_UCX_READ_PUT; mode <= KVP_UCX_READ_GET; mode++) {
        test_all(1 << 16);
        test_all(8192); /* a window holds two of three layers */
    }
    mode = KVP_UCX_READ_GET;
    test_done_is_due();
    kvp_arena_close(arena);
    return 0;
}
