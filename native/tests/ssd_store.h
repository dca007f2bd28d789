/* A store of the SSD tier over a kernel that fails on command, and copies that last as long as they are
 * told to. Includes ssd_job.c, the source that calls both. */
#ifndef KVPOOL_TEST_SSD_STORE_H
#define KVPOOL_TEST_SSD_STORE_H

#include "kvpool_copy.h"
#include "ssd_kernel.h"

enum { LAYERS = 3, HEADS = 2, TOKENS = 16, K_BYTES = 12, V_BYTES = 4, SLOTS = 8, THREADS = 3 };
enum { PAYLOAD = LAYERS * HEADS * TOKENS * (K_BYTES + V_BYTES), CRCS = LAYERS * HEADS };

/* Copies that last as long as they are told to. */
static pthread_mutex_t copies = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t copies_changed = PTHREAD_COND_INITIALIZER;
static bool copies_held;
static size_t copying, copies_free; /* that may pass, of those held */

static kvp_status held_copy(const kvp_shape *shape, const kvp_view *dst, const uint64_t *dst_blocks,
                            const kvp_view *src, const uint64_t *src_blocks, size_t block_count,
                            size_t layer_begin, size_t layer_end, const uint32_t *crc_expected,
                            uint32_t *crc_out, size_t crc_block_stride, size_t *bad_block)
{
    pthread_mutex_lock(&copies);
    copying++;
    pthread_cond_broadcast(&copies_changed);
    while (copies_held && copies_free == 0)
        pthread_cond_wait(&copies_changed, &copies);
    if (copies_held)
        copies_free--;
    pthread_mutex_unlock(&copies);
    const kvp_status status =
        kvp_copy_blocks(shape, dst, dst_blocks, src, src_blocks, block_count, layer_begin, layer_end,
                        crc_expected, crc_out, crc_block_stride, bad_block);
    pthread_mutex_lock(&copies);
    copying--;
    pthread_mutex_unlock(&copies);
    return status;
}

static inline void hold_copies(bool value)
{
    pthread_mutex_lock(&copies);
    copies_held = value;
    pthread_cond_broadcast(&copies_changed);
    pthread_mutex_unlock(&copies);
}

static inline void free_one_copy(void)
{
    pthread_mutex_lock(&copies);
    copies_free++;
    pthread_cond_broadcast(&copies_changed);
    pthread_mutex_unlock(&copies);
}

static inline size_t count_copying(void)
{
    pthread_mutex_lock(&copies);
    const size_t count = copying;
    pthread_mutex_unlock(&copies);
    return count;
}

static inline void wait_copying(size_t count)
{
    pthread_mutex_lock(&copies);
    while (copying < count)
        pthread_cond_wait(&copies_changed, &copies);
    pthread_mutex_unlock(&copies);
}

#define kvp_copy_blocks held_copy
#define kvp_copy_blocks_near held_copy
#define pread fake_pread
#define pwrite fake_pwrite
#define fdatasync fake_fdatasync
#include "../src/ssd_job.c"
#undef pread
#undef pwrite
#undef fdatasync
#undef kvp_copy_blocks
#undef kvp_copy_blocks_near

/* ---- a store ---- */

typedef struct {
    kvp_ssd *ssd;
    int segments[3], intents, lock;
    uint32_t slots[SLOTS];
    uint64_t lives[SLOTS], blocks[SLOTS];
    uint8_t keys[SLOTS][KVP_NAME_BYTES], parents[SLOTS][KVP_NAME_BYTES];
    uint8_t source[SLOTS][PAYLOAD], dest[SLOTS][PAYLOAD];
    uint32_t crcs[SLOTS][CRCS];
    uint32_t tokens[SLOTS][TOKENS], found[SLOTS][TOKENS];
    bool known[SLOTS], told[SLOTS];
    uint8_t results[SLOTS];
    int error;
} store;

static inline kvp_view flat(const uint8_t *base)
{
    return (kvp_view){.base = (uintptr_t)base,
                      .block_stride = PAYLOAD,
                      .layer_stride = PAYLOAD / LAYERS,
                      .head_stride = PAYLOAD / LAYERS / HEADS,
                      .kv_stride = TOKENS * K_BYTES,
                      .k_token_stride = K_BYTES,
                      .v_token_stride = V_BYTES};
}

static inline int temporary(size_t size)
{
    char path[] = "/tmp/kvpool-test-XXXXXX";
    int fd = mkstemp(path);
    CHECK(fd >= 0 && unlink(path) == 0 && ftruncate(fd, (off_t)size) == 0);
    return fd;
}

static inline kvp_ssd_geometry geometry(void)
{
    kvp_ssd_geometry made = {.shape = {HEADS, TOKENS, K_BYTES, V_BYTES},
                             .layers = LAYERS,
                             .header_bytes = 4096,
                             .slot_bytes = SLOT_BYTES,
                             .slot_count = SLOTS,
                             .segment_slots = 3,
                             .threads = THREADS};
    memset(made.store_id, 7, sizeof made.store_id);
    return made;
}

static inline store *opened(void)
{
    store *mine = calloc(1, sizeof *mine);
    const kvp_ssd_geometry made = geometry();
    reading = writing = WELL;
    sync_error = 0;
    set_hung(false);
    for (size_t i = 0; i < 3; i++)
        mine->segments[i] = temporary(3 * SLOT_BYTES);
    mine->intents = temporary(2 * KVP_SSD_INTENT_BYTES);
    mine->lock = temporary(0);
    intent_file = inode(mine->intents);
    for (size_t i = 0; i < 3; i++)
        segment_files[i] = inode(mine->segments[i]);
    intent_durable[0] = intent_durable[1] = false;
    intent_count = 0;
    CHECK(kvp_ssd_open(&made, mine->segments, 3, mine->intents, mine->lock, &mine->ssd) == KVP_OK);
    for (uint32_t i = 0; i < SLOTS; i++) {
        mine->slots[i] = i;
        mine->lives[i] = 100 + i;
        mine->blocks[i] = SLOTS - 1 - i;
    }
    fill_random(mine->keys, sizeof mine->keys);
    fill_random(mine->parents, sizeof mine->parents);
    fill_random(mine->source, sizeof mine->source);
    fill_random(mine->tokens, sizeof mine->tokens);
    for (size_t i = 0; i < SLOTS; i++)
        mine->known[i] = i % 3 != 0;
    return mine;
}

static inline void closed(store *mine)
{
    kvp_ssd_close(mine->ssd, UINT64_C(60) * SECOND);
    for (size_t i = 0; i < 3; i++)
        close(mine->segments[i]);
    close(mine->intents);
    close(mine->lock);
    free(mine);
}

static inline kvp_status write_all(store *mine, uint64_t timeout_ns)
{
    const kvp_view view = flat(mine->source[0]);
    return kvp_ssd_write(mine->ssd, mine->slots, mine->lives, mine->keys[0], mine->parents[0],
                         SLOTS, 0, &view, mine->blocks, NULL, mine->tokens[0], mine->known,
                         timeout_ns, mine->results, &mine->error);
}

static inline kvp_status read_all(store *mine, uint64_t timeout_ns)
{
    const kvp_view view = flat(mine->dest[0]);
    return kvp_ssd_read(mine->ssd, mine->slots, mine->lives, mine->keys[0], SLOTS, &view,
                        mine->blocks, timeout_ns, mine->crcs[0], mine->found[0], mine->told,
                        mine->results, &mine->error);
}

static inline size_t count_results(const store *mine, kvp_slot_result result)
{
    size_t count = 0;
    for (size_t i = 0; i < SLOTS; i++)
        count += mine->results[i] == result;
    return count;
}

#endif
