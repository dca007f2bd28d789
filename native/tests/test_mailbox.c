/* mailbox.c: two sides in two threads, and a peer whose memory is hostile. */
#include "../src/mailbox.c"

#include <fcntl.h>
#include <pthread.h>

#include "check.h"

enum { RECORDS = 8, BYTES = 200, MESSAGES = 50000, LIES = 6000 };

static const uint8_t run_a[KVP_INCARNATION_BYTES] = "run a..........";
static const uint8_t run_b[KVP_INCARNATION_BYTES] = "run b..........";

static void open_pair(kvp_mailbox **a, kvp_mailbox **b)
{
    CHECK(kvp_mailbox_open(RECORDS, BYTES, run_a, a) == KVP_OK);
    CHECK(kvp_mailbox_open(RECORDS, BYTES, run_b, b) == KVP_OK);
    CHECK(kvp_mailbox_attach(*a, kvp_mailbox_fd(*b), run_b) == KVP_OK);
    CHECK(kvp_mailbox_attach(*b, kvp_mailbox_fd(*a), run_a) == KVP_OK);
}

static void test_order(void)
{
    kvp_mailbox *a, *b;
    uint8_t payload[BYTES] = {0}, got[BYTES];
    size_t size;
    open_pair(&a, &b);
    CHECK(kvp_mailbox_attach(a, kvp_mailbox_fd(b), run_b) == KVP_BUSY);
    CHECK(kvp_mailbox_push(a, payload, 0) == KVP_INVALID);
    CHECK(kvp_mailbox_push(a, payload, BYTES + 1) == KVP_INVALID);
    for (size_t round = 0; round < 100; round++) {
        CHECK(kvp_mailbox_pop(b, got, &size) == KVP_MISS);
        for (size_t i = 0; i < RECORDS; i++) {
            memset(payload, (int)(round + i), BYTES);
            CHECK(kvp_mailbox_push(a, payload, BYTES - i) == KVP_OK);
        }
        CHECK(kvp_mailbox_push(a, payload, 1) == KVP_FULL);
        for (size_t i = 0; i < RECORDS; i++) {
            CHECK(kvp_mailbox_pop(b, got, &size) == KVP_OK && size == BYTES - i);
            CHECK(got[0] == (uint8_t)(round + i) && got[size - 1] == got[0]);
        }
    }
    kvp_mailbox_close(a);
    CHECK(kvp_mailbox_pop(b, got, &size) == KVP_MISS); /* the peer's memory outlives it */
    kvp_mailbox_close(b);
    kvp_mailbox_close(NULL);
}

static void test_refusals(void)
{
    kvp_mailbox *a, *b;
    uint8_t payload[BYTES] = {0};
    size_t size;
    CHECK(kvp_mailbox_open(0, BYTES, run_a, &a) == KVP_INVALID);
    CHECK(kvp_mailbox_open(6, BYTES, run_a, &a) == KVP_INVALID);
    CHECK(kvp_mailbox_open(8, 0, run_a, &a) == KVP_INVALID);
    CHECK(kvp_mailbox_open(8, 4097, run_a, &a) == KVP_INVALID);
    CHECK(kvp_mailbox_open((size_t)1 << 40, 1, run_a, &a) == KVP_INVALID);
    CHECK(kvp_mailbox_open(RECORDS, BYTES, run_a, &a) == KVP_OK);
    CHECK(kvp_mailbox_open(2 * RECORDS, BYTES, run_b, &b) == KVP_OK);
    CHECK(kvp_mailbox_attach(a, kvp_mailbox_fd(b), run_b) == KVP_CORRUPT);
    CHECK(kvp_mailbox_attach(a, kvp_mailbox_fd(a), run_b) == KVP_STALE);
    CHECK(kvp_mailbox_attach(a, -1, run_b) == KVP_SYSTEM);
    CHECK(kvp_mailbox_pop(a, payload, &size) == KVP_MISS); /* nobody attached */
    for (size_t i = 0; i < RECORDS; i++)
        CHECK(kvp_mailbox_push(a, payload, 1) == KVP_OK);
    CHECK(kvp_mailbox_push(a, payload, 1) == KVP_FULL);
    kvp_mailbox_close(a);
    kvp_mailbox_close(b);
}

/* Message i has a size and bytes that follow from i. */
static void *push_all(void *argument)
{
    uint8_t payload[BYTES];
    for (size_t i = 0; i < MESSAGES; i++) {
        memset(payload, (int)i, sizeof payload);
        while (kvp_mailbox_push(argument, payload, 1 + i % BYTES) != KVP_OK)
            sched_yield();
    }
    return NULL;
}

static void *pop_all(void *argument)
{
    for (size_t i = 0; i < MESSAGES; i++) {
        uint8_t payload[BYTES];
        size_t size;
        kvp_status status;
        while ((status = kvp_mailbox_pop(argument, payload, &size)) != KVP_OK) {
            CHECK(status == KVP_MISS);
            sched_yield();
        }
        CHECK(size == 1 + i % BYTES && payload[0] == (uint8_t)i && payload[size - 1] == payload[0]);
    }
    return NULL;
}

static void test_threads(void)
{
    kvp_mailbox *a, *b;
    pthread_t threads[4];
    open_pair(&a, &b);
    CHECK(pthread_create(&threads[0], NULL, push_all, a) == 0);
    CHECK(pthread_create(&threads[1], NULL, push_all, b) == 0);
    CHECK(pthread_create(&threads[2], NULL, pop_all, a) == 0);
    CHECK(pthread_create(&threads[3], NULL, pop_all, b) == 0);
    for (size_t i = 0; i < 4; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    kvp_mailbox_close(a);
    kvp_mailbox_close(b);
}

/* One byte of a pushed record changes: that record, and none before it, is refused. */
static void test_flipped_byte(void)
{
    for (size_t at = 0; at < sizeof(mailbox_record) + 40; at++) {
        kvp_mailbox *a, *b;
        uint8_t payload[40], got[BYTES];
        size_t size;
        open_pair(&a, &b);
        fill_random(payload, sizeof payload);
        CHECK(kvp_mailbox_push(a, payload, sizeof payload) == KVP_OK);
        CHECK(kvp_mailbox_push(a, payload, sizeof payload) == KVP_OK);
        a->map[record_offset(a, 1) + at] ^= 0x10;
        CHECK(kvp_mailbox_pop(b, got, &size) == KVP_OK && !memcmp(got, payload, size));
        CHECK(kvp_mailbox_pop(b, got, &size) == KVP_CORRUPT);
        CHECK(kvp_mailbox_pop(b, got, &size) == KVP_CORRUPT); /* and stays so */
        kvp_mailbox_close(a);
        kvp_mailbox_close(b);
    }
}

static uint64_t lying_number(void)
{
    static const uint64_t edges[] = {0, 1, 8, 9, BYTES, BYTES + 1, UINT32_MAX, UINT64_MAX,
                                     1ull << 63};
    return next_random() & 1 ? edges[random_below(sizeof edges / sizeof *edges)]
                             : next_random() >> random_below(64);
}

static void test_lies(void)
{
    kvp_mailbox *a, *b;
    uint8_t payload[BYTES] = {0};
    open_pair(&a, &b);
    uint8_t *got = malloc(BYTES); /* exact, so that the sanitizer sees a byte too many */
    CHECK(got != NULL);
    mailbox_header *header = (mailbox_header *)(void *)a->map;
    for (size_t step = 0; step < LIES; step++) {
        size_t size;
        mailbox_record *record =
            (mailbox_record *)(void *)(a->map + record_offset(a, random_below(RECORDS)));
        (void)kvp_mailbox_push(a, payload, 1 + random_below(BYTES));
        switch (random_below(4)) {
        case 0:
            record->sequence = next_random() & 1 ? b->popped + 1 : lying_number();
            record->size = (uint32_t)lying_number();
            break;
        case 1:
            header->pushed = next_random() & 1 ? b->popped + random_below(20) : lying_number();
            break;
        case 2:
            header->popped = next_random() & 1 ? b->pushed - random_below(20) : lying_number();
            break;
        default:
            fill_random(a->map + KVP_PAGE_BYTES, random_below(a->total_bytes - KVP_PAGE_BYTES));
        }
        kvp_status status = kvp_mailbox_pop(b, got, &size);
        CHECK(status == KVP_MISS || status == KVP_CORRUPT || (status == KVP_OK && size <= BYTES));
        status = kvp_mailbox_push(b, payload, BYTES);
        CHECK(status == KVP_OK || status == KVP_FULL || status == KVP_CORRUPT);
    }
    kvp_mailbox_close(a);
    kvp_mailbox_close(b);
    free(got);
}

/* Files that are not a mailbox, or one of another shape. */
static void test_attach_lies(void)
{
    kvp_mailbox *a;
    CHECK(kvp_mailbox_open(RECORDS, BYTES, run_a, &a) == KVP_OK);
    size_t refused = 0;
    for (size_t step = 0; step < LIES; step++) {
        int fd = memfd_create("lie", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        size_t size = step % 2 ? a->total_bytes : random_below(2 * a->total_bytes);
        CHECK(fd >= 0 && ftruncate(fd, (off_t)size) == 0);
        mailbox_header header;
        memcpy(&header, a->map, sizeof header);
        ((uint8_t *)&header)[random_below(48)] ^= (uint8_t)(1 << random_below(8));
        size_t written = size < sizeof header ? size : sizeof header;
        CHECK(pwrite(fd, &header, written, 0) == (ssize_t)written);
        CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | 0x0010) == 0);
        refused += kvp_mailbox_attach(a, fd, run_a) != KVP_OK;
        close(fd);
        if (a->peer_map != NULL) { /* the bit was in a reserved field of a file of the right size */
            munmap((void *)(uintptr_t)a->peer_map, a->total_bytes);
            a->peer_map = NULL;
        }
    }
    CHECK(refused > LIES * 8 / 10);
    kvp_mailbox_close(a);
}

int main(void)
{
    test_order();
    test_refusals();
    test_threads();
    test_flipped_byte();
    test_lies();
    test_attach_lies();
    return 0;
}
