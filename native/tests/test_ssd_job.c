/* The SSD tier's threads on a kernel that fails on command: short and interrupted transfers, errors,
 * calls that hang. */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "ssd_store.h"

/* ---- tests ---- */

static void test_what_was_written_is_read(mood reads, mood writes)
{
    store *mine = opened();
    reading = reads;
    writing = writes;
    CHECK(write_all(mine, UINT64_C(60) * SECOND) == KVP_OK);
    CHECK(count_results(mine, KVP_SLOT_DONE) == SLOTS);
    CHECK(read_all(mine, UINT64_C(60) * SECOND) == KVP_OK);
    CHECK(count_results(mine, KVP_SLOT_DONE) == SLOTS);
    CHECK(memcmp(mine->source, mine->dest, sizeof mine->source) == 0);
    for (size_t i = 0; i < SLOTS; i++) {
        CHECK(mine->told[i] == mine->known[i]);
        CHECK(!mine->told[i] || memcmp(mine->found[i], mine->tokens[i], sizeof mine->found[i]) == 0);
    }
    for (size_t i = 0; i < SLOTS; i++)
        for (size_t c = 0; c < CRCS; c++)
            CHECK(mine->crcs[i][c] == kvp_crc32c(0, mine->dest[mine->blocks[i]] + c * PAYLOAD / CRCS,
                                                 PAYLOAD / CRCS));
    closed(mine);
}

static void test_another_block_or_life_is_not_read(void)
{
    store *mine = opened();
    CHECK(write_all(mine, UINT64_C(60) * SECOND) == KVP_OK);
    mine->keys[1][31] ^= 1;
    mine->lives[2]++;
    CHECK(read_all(mine, UINT64_C(60) * SECOND) == KVP_OK);
    CHECK(mine->results[1] == KVP_SLOT_OTHER && mine->results[2] == KVP_SLOT_OTHER);
    CHECK(count_results(mine, KVP_SLOT_DONE) == SLOTS - 2);
    closed(mine);
}

static void test_every_flipped_bit_is_seen(void)
{
    store *mine = opened();
    uint8_t byte, flipped;
    CHECK(write_all(mine, UINT64_C(60) * SECOND) == KVP_OK);
    for (off_t at = 0; at < 4096 + PAYLOAD; at++) {
        CHECK(pread(mine->segments[0], &byte, 1, at) == 1);
        flipped = (uint8_t)(byte ^ 1 << at % 8);
        CHECK(pwrite(mine->segments[0], &flipped, 1, at) == 1);
        const kvp_view view = flat(mine->dest[0]);
        CHECK(kvp_ssd_read(mine->ssd, mine->slots, mine->lives, mine->keys[0], 1, &view,
                           mine->blocks, UINT64_C(60) * SECOND, mine->crcs[0], NULL, NULL,
                           mine->results, &mine->error) == KVP_OK);
        CHECK(mine->results[0] == KVP_SLOT_CORRUPT || mine->results[0] == KVP_SLOT_VERSION);
        CHECK(pwrite(mine->segments[0], &byte, 1, at) == 1);
    }
    closed(mine);
}

/* The same in memory, so that it can be every bit. */
static void test_every_bit_of_a_header_counts(void)
{
    const kvp_ssd_geometry made = geometry();
    slot_name name = {.slot = 3, .generation = 9}, found;
    uint8_t *buffer = malloc(SLOT_BYTES);
    uint64_t zero = 0;
    size_t bad;
    fill_random(&name.key, sizeof name.key);
    fill_random(buffer, SLOT_BYTES);
    const kvp_view view = kvp_slot_view(&made, buffer);
    uint8_t *copy = malloc(PAYLOAD);
    const kvp_view to = flat(copy);
    CHECK(kvp_copy_blocks(&made.shape, &to, &zero, &view, &zero, 1, 0, LAYERS, NULL,
                          ((slot_header *)(void *)buffer)->crcs, CRCS, &bad) == KVP_OK);
    uint32_t tokens[TOKENS];
    fill_random(tokens, sizeof tokens);
    kvp_slot_seal(&made, &name, tokens, buffer);
    CHECK(kvp_slot_open(&made, 3, buffer, &found) == KVP_SLOT_DONE);
    CHECK(memcmp(kvp_slot_tokens(buffer), tokens, sizeof tokens) == 0);
    CHECK(kvp_slot_whole(&made, buffer) && memcmp(found.key, name.key, sizeof name.key) == 0);
    CHECK(kvp_slot_open(&made, 4, buffer, &found) == KVP_SLOT_OTHER);
    for (size_t bit = 0; bit < 8 * 4096; bit++) {
        buffer[bit / 8] ^= (uint8_t)(1 << bit % 8);
        kvp_slot_result result = kvp_slot_open(&made, 3, buffer, &found);
        CHECK(result == KVP_SLOT_CORRUPT || result == KVP_SLOT_VERSION);
        buffer[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    for (size_t bit = 8 * 4096; bit < 8 * (4096 + PAYLOAD); bit += 1 + random_below(4)) {
        buffer[bit / 8] ^= (uint8_t)(1 << bit % 8);
        CHECK(!kvp_slot_whole(&made, buffer));
        buffer[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    memset(buffer, 0, 4096);
    CHECK(kvp_slot_open(&made, 3, buffer, &found) == KVP_SLOT_EMPTY);
    free(buffer);
    free(copy);
}

/* A header of `version`, whose checksum is right, and whose field that was reserved holds `tokens`. */
static kvp_slot_result opened_as(uint32_t version, uint32_t tokens)
{
    const kvp_ssd_geometry made = geometry();
    slot_name name = {.slot = 3, .generation = 9}, found;
    uint8_t *buffer = calloc(1, SLOT_BYTES);
    slot_header *header = (slot_header *)(void *)buffer;
    kvp_slot_seal(&made, &name, NULL, buffer);
    CHECK(kvp_slot_tokens(buffer) == NULL);
    header->version = version;
    header->token_count = tokens;
    header->crc = 0;
    header->crc = kvp_crc32c(0, buffer, 4096);
    kvp_slot_result result = kvp_slot_open(&made, 3, buffer, &found);
    free(buffer);
    return result;
}

static void test_headers_of_other_versions(void)
{
    CHECK(opened_as(1, 0) == KVP_SLOT_DONE);
    CHECK(opened_as(2, 0) == KVP_SLOT_DONE && opened_as(2, TOKENS) == KVP_SLOT_DONE);
    CHECK(opened_as(2, TOKENS + 1) == KVP_SLOT_OTHER);
    CHECK(opened_as(0, 0) == KVP_SLOT_VERSION && opened_as(3, 0) == KVP_SLOT_VERSION);
}

static void test_scan_tells_what_lies_there(void)
{
    store *mine = opened();
    uint8_t keys[SLOTS][KVP_NAME_BYTES], parents[SLOTS][KVP_NAME_BYTES];
    uint64_t lives[SLOTS];
    const uint8_t byte = 0x5a;
    const uint32_t erased = 4;
    CHECK(write_all(mine, UINT64_C(60) * SECOND) == KVP_OK);
    CHECK(kvp_ssd_erase(mine->ssd, &erased, 1, UINT64_C(60) * SECOND, mine->results,
                        &mine->error) == KVP_OK);
    CHECK(pwrite(mine->segments[2], &byte, 1, 4096 + 5) == 1); /* the payload of slot 6 */
    CHECK(ftruncate(mine->segments[0], 2 * SLOT_BYTES + 100) == 0);
    for (int whole = 0; whole < 2; whole++) {
        CHECK(kvp_ssd_scan(mine->ssd, mine->slots, SLOTS, whole, UINT64_C(60) * SECOND, keys[0],
                           parents[0], lives, mine->found[0], mine->told, mine->results,
                           &mine->error) == KVP_OK);
        CHECK(mine->told[1] && !mine->told[3]);
        CHECK(memcmp(mine->found[1], mine->tokens[1], sizeof mine->found[1]) == 0);
        CHECK(mine->results[2] == KVP_SLOT_CORRUPT && mine->results[4] == KVP_SLOT_EMPTY);
        CHECK(mine->results[6] == (whole ? KVP_SLOT_CORRUPT : KVP_SLOT_DONE));
        CHECK(mine->results[1] == KVP_SLOT_DONE && lives[1] == mine->lives[1]);
        CHECK(memcmp(keys[1], mine->keys[1], KVP_NAME_BYTES) == 0);
        CHECK(memcmp(parents[1], mine->parents[1], KVP_NAME_BYTES) == 0);
    }
    closed(mine);
}

static void test_a_failing_disk_says_so(void)
{
    store *mine = opened();
    CHECK(write_all(mine, UINT64_C(60) * SECOND) == KVP_OK);
    reading = BROKEN;
    CHECK(read_all(mine, UINT64_C(60) * SECOND) == KVP_SYSTEM);
    CHECK(count_results(mine, KVP_SLOT_FAILED) == SLOTS && mine->error == EIO);
    reading = ENDED; /* it says that the file ends, which does not */
    CHECK(read_all(mine, UINT64_C(60) * SECOND) == KVP_SYSTEM);
    CHECK(count_results(mine, KVP_SLOT_FAILED) == SLOTS && mine->error == EIO);
    reading = WELL;
    writing = BROKEN;
    CHECK(write_all(mine, UINT64_C(60) * SECOND) == KVP_OK); /* which speaks of none but the others */
    CHECK(count_results(mine, KVP_SLOT_FAILED) == SLOTS && mine->error == ENOSPC);
    writing = WELL;
    sync_error = EIO;
    CHECK(write_all(mine, UINT64_C(60) * SECOND) == KVP_SYSTEM && mine->error == EIO);
    sync_error = 0;
    CHECK(write_all(mine, UINT64_C(60) * SECOND) == KVP_OK);
    CHECK(read_all(mine, UINT64_C(60) * SECOND) == KVP_OK);
    CHECK(count_results(mine, KVP_SLOT_DONE) == SLOTS);
    closed(mine);
}

static void test_a_hung_read_ends_and_touches_nothing(void)
{
    store *mine = opened();
    static uint8_t untouched[SLOTS][PAYLOAD];
    CHECK(write_all(mine, UINT64_C(60) * SECOND) == KVP_OK);
    set_hung(true);
    for (size_t late = 0; late < THREADS;) { /* a slow machine needs more than one turn */
        CHECK(read_all(mine, SECOND / 10) == KVP_TIMEOUT);
        late += count_results(mine, KVP_SLOT_LATE);
        CHECK(count_results(mine, KVP_SLOT_LATE) + count_results(mine, KVP_SLOT_SKIPPED) == SLOTS);
        CHECK(kvp_ssd_late(mine->ssd) == late);
    }
    CHECK(read_all(mine, SECOND / 20) == KVP_TIMEOUT); /* no thread is free: nothing begins */
    CHECK(count_results(mine, KVP_SLOT_SKIPPED) == SLOTS);
    set_hung(false);
    while (kvp_ssd_late(mine->ssd) > 0)
        usleep(1000);
    CHECK(memcmp(mine->dest, untouched, sizeof untouched) == 0);
    CHECK(read_all(mine, UINT64_C(60) * SECOND) == KVP_OK);
    CHECK(memcmp(mine->source, mine->dest, sizeof mine->source) == 0);
    closed(mine);
}

static size_t count_spare(kvp_ssd *ssd)
{
    pthread_mutex_lock(&ssd->mutex);
    const size_t count = ssd->spare_count;
    for (size_t i = 0; i < count; i++) /* none twice, and each in its place */
        for (size_t j = 0; j < count; j++)
            CHECK(i == j || (size_t)labs(ssd->spare[i] - ssd->spare[j]) >= SLOT_BYTES);
    pthread_mutex_unlock(&ssd->mutex);
    return count;
}

static void test_a_late_write_is_told_when_it_has_ended(void)
{
    store *mine = opened();
    uint32_t slots[SLOTS];
    uint64_t lives[SLOTS];
    set_hung(true);
    while (kvp_ssd_late(mine->ssd) == 0) {
        CHECK(write_all(mine, SECOND / 10) == KVP_TIMEOUT); /* at the intent */
        CHECK(count_results(mine, KVP_SLOT_SKIPPED) == SLOTS);
    }
    CHECK(write_all(mine, SECOND) == KVP_BUSY); /* which no other may overtake */
    set_hung(false);
    while (kvp_ssd_late(mine->ssd) > 0)
        usleep(1000);
    CHECK(write_all(mine, UINT64_C(60) * SECOND) == KVP_OK);

    const kvp_view view = flat(mine->source[0]);
    set_hung(true);
    while (kvp_ssd_late(mine->ssd) < THREADS) {
        const struct timespec deadline = kvp_ssd_deadline(SECOND / 10);
        batch late = {.kind = WRITE,
                      .slots = mine->slots,
                      .generations = mine->lives,
                      .keys = mine->keys[0],
                      .parents = mine->parents[0],
                      .view = &view,
                      .blocks = mine->blocks,
                      .results = mine->results,
                      .count = SLOTS};
        CHECK(kvp_ssd_run(mine->ssd, &late, &deadline) == KVP_TIMEOUT);
    }
    CHECK(kvp_ssd_settled(mine->ssd, SLOTS, slots, lives) == 0);
    CHECK(count_spare(mine->ssd) == 0); /* the kernel has them all */
    set_hung(false);
    size_t settled = 0;
    while (settled < THREADS) {
        size_t taken = kvp_ssd_settled(mine->ssd, SLOTS, slots, lives);
        for (size_t i = 0; i < taken; i++)
            CHECK(slots[i] < SLOTS && lives[i] == mine->lives[slots[i]]);
        settled += taken;
    }
    CHECK(kvp_ssd_late(mine->ssd) == 0 && count_spare(mine->ssd) == THREADS);
    closed(mine);
}

static void test_a_write_leaves_threads_to_others(void)
{
    store *mine = opened();
    uint8_t read;
    const kvp_view from = flat(mine->source[0]), to = flat(mine->dest[0]);
    const struct timespec deadline = kvp_ssd_deadline(UINT64_C(60) * SECOND);
    batch writes = {.kind = WRITE,
                    .width = THREADS - 1,
                    .slots = mine->slots,
                    .generations = mine->lives,
                    .keys = mine->keys[0],
                    .parents = mine->parents[0],
                    .view = &from,
                    .blocks = mine->blocks,
                    .results = mine->results,
                    .count = SLOTS};
    batch reads = {.kind = READ,
                   .slots = mine->slots + SLOTS - 1,
                   .generations = mine->lives + SLOTS - 1,
                   .keys = mine->keys[SLOTS - 1],
                   .view = &to,
                   .blocks = mine->blocks + SLOTS - 1,
                   .crcs = mine->crcs[0],
                   .results = &read,
                   .count = 1};
    CHECK(write_all(mine, UINT64_C(60) * SECOND) == KVP_OK); /* an intent names them all */
    set_hung(true);
    kvp_ssd_begin(mine->ssd, &writes);
    wait_hanging(THREADS - 1);
    kvp_ssd_begin(mine->ssd, &reads);
    wait_hanging(THREADS);
    pthread_mutex_lock(&mine->ssd->mutex);
    CHECK(writes.next == THREADS - 1 && writes.taken == THREADS - 1 && reads.taken == 1);
    pthread_mutex_unlock(&mine->ssd->mutex);
    set_hung(false);
    CHECK(kvp_ssd_finish(mine->ssd, &writes, &deadline) == KVP_OK);
    CHECK(kvp_ssd_finish(mine->ssd, &reads, &deadline) == KVP_OK && read == KVP_SLOT_DONE);
    CHECK(count_results(mine, KVP_SLOT_DONE) == SLOTS);
    CHECK(mine->ssd->spare_count == THREADS && writes.taken == 0);
    closed(mine);
}

/* Who asks again and again, until nobody needs it any more. */
typedef struct {
    store *mine;
    job_kind kind;
    size_t width;
    bool *over;
} insister;

static kvp_status ask_once(const insister *self)
{
    uint8_t results[SLOTS];
    uint32_t crcs[SLOTS * CRCS];
    store *mine = self->mine;
    const struct timespec deadline = kvp_ssd_deadline(UINT64_C(60) * SECOND);
    uint8_t *dest = malloc(SLOTS * PAYLOAD);
    CHECK(dest != NULL);
    const kvp_view view = flat(self->kind == READ ? dest : mine->source[0]);
    batch asked = {.kind = self->kind,
                   .width = self->width,
                   .slots = mine->slots,
                   .generations = mine->lives,
                   .keys = mine->keys[0],
                   .parents = mine->parents[0],
                   .view = &view,
                   .blocks = mine->blocks,
                   .crcs = crcs,
                   .results = results,
                   .count = SLOTS};
    const kvp_status status = kvp_ssd_run(mine->ssd, &asked, &deadline);
    free(dest);
    return status;
}

static void *insist(void *argument)
{
    const insister *self = argument;
    while (!__atomic_load_n(self->over, __ATOMIC_ACQUIRE))
        CHECK(ask_once(self) == KVP_OK);
    return NULL;
}

/* Neither reads that never end keep writes waiting for ever, however few may be under way, nor the
 * other way round. */
static void test_everybody_has_a_turn(job_kind kind, size_t width, job_kind others)
{
    enum { OTHERS = 2 * THREADS, TURNS = 5 };
    store *mine = opened();
    bool over = false;
    pthread_t threads[OTHERS];
    insister many = {.mine = mine, .kind = others, .over = &over};
    const insister one = {.mine = mine, .kind = kind, .width = width};
    CHECK(write_all(mine, UINT64_C(60) * SECOND) == KVP_OK); /* an intent names them all */
    for (size_t i = 0; i < OTHERS; i++)
        CHECK(pthread_create(&threads[i], NULL, insist, &many) == 0);
    for (size_t i = 0; i < TURNS; i++)
        CHECK(ask_once(&one) == KVP_OK);
    __atomic_store_n(&over, true, __ATOMIC_RELEASE);
    for (size_t i = 0; i < OTHERS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(count_spare(mine->ssd) == THREADS);
    closed(mine);
}

static void test_how_many_slots_are_written_at_once(void)
{
    kvp_ssd_geometry made = geometry();
    made.slot_bytes = 2 << 20;
    CHECK(kvp_ssd_write_width(&made) == 4);
    made.slot_bytes = 32 << 20; /* no cache holds two */
    CHECK(kvp_ssd_write_width(&made) == 0);
}

static void test_a_cache_that_keeps_nothing_is_left_and_tried_again(void)
{
    copy_way way = {0};
    CHECK(!kvp_ssd_way_next(&way));
    kvp_ssd_way_learn(&way, false, 999);
    CHECK(kvp_ssd_way_next(&way)); /* the other way is not known */
    kvp_ssd_way_learn(&way, true, 100);
    for (size_t i = 0; i < 50; i++) {
        CHECK(!kvp_ssd_way_next(&way));
        kvp_ssd_way_learn(&way, false, 150);
    }
    CHECK(!kvp_ssd_way_next(&way));
    kvp_ssd_way_learn(&way, false, 151);
    for (size_t i = 0; i < 15; i++) {
        CHECK(kvp_ssd_way_next(&way));
        kvp_ssd_way_learn(&way, true, 300); /* the least counts */
    }
    CHECK(!kvp_ssd_way_next(&way));
    kvp_ssd_way_learn(&way, false, 120);
    CHECK(!kvp_ssd_way_next(&way));
    kvp_ssd_way_learn(&way, false, 200);
    CHECK(kvp_ssd_way_next(&way));
}

static void test_a_source_that_lies_is_not_written(void)
{
    store *mine = opened();
    const kvp_view view = flat(mine->source[0]);
    memset(mine->crcs, 0x11, sizeof mine->crcs);
    CHECK(kvp_ssd_write(mine->ssd, mine->slots, mine->lives, mine->keys[0], mine->parents[0], SLOTS,
                        0, &view, mine->blocks, mine->crcs[0], NULL, NULL, UINT64_C(60) * SECOND,
                        mine->results, &mine->error) == KVP_OK);
    CHECK(count_results(mine, KVP_SLOT_SOURCE) == SLOTS);
    closed(mine);
}

static void test_intents_name_the_slots(void)
{
    store *mine = opened();
    uint8_t page[KVP_SSD_INTENT_BYTES];
    uint32_t named[KVP_SSD_INTENT_SLOTS];
    const kvp_ssd_geometry made = geometry();
    CHECK(write_all(mine, UINT64_C(60) * SECOND) == KVP_OK);
    CHECK(pread(mine->intents, page, sizeof page, 0) == sizeof page);
    CHECK(kvp_ssd_intent_slots(page, sizeof page, made.store_id, 1000, named) == SLOTS);
    CHECK(memcmp(named, mine->slots, sizeof mine->slots) == 0);
    for (size_t bit = 0; bit < 8 * sizeof page; bit++) {
        page[bit / 8] ^= (uint8_t)(1 << bit % 8);
        CHECK(kvp_ssd_intent_slots(page, sizeof page, made.store_id, 1000, named) == 0);
        page[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    closed(mine);
}

/* Write slots `first` to `first` + `count` and have an intent name as many as `also` behind them. */
static kvp_status write_part(store *mine, size_t first, size_t count, size_t also,
                             uint64_t timeout_ns)
{
    const kvp_view view = flat(mine->source[0]);
    return kvp_ssd_write(mine->ssd, mine->slots + first, mine->lives + first, mine->keys[first],
                         mine->parents[first], count, also, &view, mine->blocks + first, NULL,
                         mine->tokens[first], mine->known + first, timeout_ns, mine->results,
                         &mine->error);
}

static void test_slots_named_ahead_need_no_intent(void)
{
    const uint64_t minute = UINT64_C(60) * SECOND;
    store *mine = opened();
    CHECK(!kvp_ssd_named(mine->ssd, mine->slots, 1)); /* nothing of earlier runs counts */
    CHECK(write_part(mine, 0, 2, 3, minute) == KVP_OK && intent_count == 1);
    CHECK(kvp_ssd_named(mine->ssd, mine->slots, 5) && !kvp_ssd_named(mine->ssd, mine->slots, 6));
    CHECK(write_part(mine, 2, 2, 0, minute) == KVP_OK && intent_count == 1);
    CHECK(write_part(mine, 0, 5, 0, minute) == KVP_OK && intent_count == 1); /* again */
    CHECK(write_part(mine, 4, 2, 0, minute) == KVP_OK && intent_count == 2); /* half of it */
    CHECK(!kvp_ssd_named(mine->ssd, mine->slots, 1));
    CHECK(write_part(mine, 4, 1, 2, minute) == KVP_OK && intent_count == 3); /* who is late counts */
    CHECK(read_all(mine, minute) == KVP_OK);
    CHECK(count_results(mine, KVP_SLOT_DONE) == 6);
    closed(mine);
}

static void test_an_intent_that_fails_leaves_the_last_one(void)
{
    const uint64_t minute = UINT64_C(60) * SECOND;
    store *mine = opened();
    CHECK(write_part(mine, 0, 2, 0, minute) == KVP_OK);
    for (int turn = 0; turn < 4; turn++) {
        writing = turn % 2 == 0 ? BROKEN : WELL;
        sync_error = turn % 2 == 0 ? 0 : EIO;
        CHECK(write_part(mine, 2, 2, 0, minute) == KVP_SYSTEM);
        CHECK(mine->results[0] == KVP_SLOT_SKIPPED);
        CHECK(mine->error == (turn % 2 == 0 ? ENOSPC : EIO));
        CHECK(intent_durable[0] && !intent_durable[1]);
        CHECK(!kvp_ssd_named(mine->ssd, mine->slots, 1) && !kvp_ssd_named(mine->ssd, mine->slots + 2, 1));
    }
    sync_error = 0;
    CHECK(write_part(mine, 2, 1, 0, minute) == KVP_OK && intent_count == 2);
    CHECK(write_part(mine, 0, 1, 0, minute) == KVP_OK && intent_count == 3);
    closed(mine);
}

static void test_what_does_not_fit_is_refused(void)
{
    store *mine = opened();
    kvp_ssd *other;
    kvp_ssd_geometry wrong = geometry();
    wrong.header_bytes = 100;
    CHECK(kvp_ssd_open(&wrong, mine->segments, 3, mine->intents, mine->lock, &other) == KVP_INVALID);
    wrong = geometry();
    wrong.threads = 0;
    CHECK(kvp_ssd_open(&wrong, mine->segments, 3, mine->intents, mine->lock, &other) == KVP_INVALID);
    wrong = geometry();
    CHECK(kvp_ssd_open(&wrong, mine->segments, 2, mine->intents, mine->lock, &other) == KVP_INVALID);
    wrong.layers = SIZE_MAX;
    CHECK(kvp_ssd_open(&wrong, mine->segments, 3, mine->intents, mine->lock, &other) == KVP_INVALID);
    wrong = geometry();
    wrong.slot_bytes = (size_t)1 << 61; /* of which 16 buffers would come round to nothing */
    wrong.slot_count = wrong.segment_slots = 1;
    wrong.threads = 16;
    CHECK(kvp_ssd_open(&wrong, mine->segments, 1, mine->intents, mine->lock, &other) == KVP_INVALID);
    wrong = geometry();
    CHECK(kvp_ssd_open(&wrong, mine->segments, 3, -1, mine->lock, &other) == KVP_SYSTEM);
    mine->slots[3] = SLOTS;
    CHECK(read_all(mine, SECOND) == KVP_INVALID);
    CHECK(write_all(mine, SECOND) == KVP_INVALID);
    closed(mine);
}

int main(void)
{
    test_what_was_written_is_read(WELL, WELL);
    test_what_was_written_is_read(SHORT, INTERRUPTED);
    test_what_was_written_is_read(INTERRUPTED, SHORT);
    test_another_block_or_life_is_not_read();
    test_every_flipped_bit_is_seen();
    test_every_bit_of_a_header_counts();
    test_headers_of_other_versions();
    test_scan_tells_what_lies_there();
    test_a_failing_disk_says_so();
    test_a_hung_read_ends_and_touches_nothing();
    test_a_late_write_is_told_when_it_has_ended();
    test_a_write_leaves_threads_to_others();
    test_everybody_has_a_turn(WRITE, 1, READ);
    test_everybody_has_a_turn(READ, 0, WRITE);
    test_how_many_slots_are_written_at_once();
    test_a_cache_that_keeps_nothing_is_left_and_tried_again();
    test_a_source_that_lies_is_not_written();
    test_intents_name_the_slots();
    test_slots_named_ahead_need_no_intent();
    test_an_intent_that_fails_leaves_the_last_one();
    test_what_does_not_fit_is_refused();
    return 0;
}
