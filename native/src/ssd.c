/* The calls of the SSD tier: batches of slots, and the order of a durable write.
 *
 * Owns: what is written before what. An intent names the slots that writes may be at from then on,
 * and is durable before the first of them changes (that they are made ready meanwhile changes nothing).
 * A write at slots that the last one names needs no other; nothing is written at slots that it does not
 * name. So after a power cut only slots of the last intents can be torn, and whoever opens the store
 * looks at just those. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "kvpool_ssd.h"

/* What is copied and not on the disk yet, of writes, at most: a part of a CPU's last cache, which the
 * bytes are then sent from; enough to keep a disk busy (decision 0008). */
enum { STAGED_BYTES = 9 << 20 };
/* A write of fewer bytes says nothing of the cache: they may lie in it already. */
enum { LEARNT_BYTES = 16 << 20 };
/* Writes that go past a cache that does not keep what is copied, before one tries it again. */
enum { PAST_WRITES = 15 };

size_t kvp_ssd_write_width(const kvp_ssd_geometry *geometry)
{
    const size_t width = STAGED_BYTES / geometry->slot_bytes;
    return width < 2 ? 0 : width;
}

bool kvp_ssd_way_next(copy_way *way)
{
    if (way->tried && way->past_ns == 0)
        return true;
    if (way->rest == 0)
        return false;
    way->rest--;
    return true;
}

void kvp_ssd_way_learn(copy_way *way, bool past, uint64_t slot_ns)
{
    if (!past) {
        way->tried = true;
        /* Half as much again is no noise; where the cache fails it is twice (decision 0008). */
        if (way->past_ns != 0 && slot_ns > way->past_ns + way->past_ns / 2)
            way->rest = PAST_WRITES;
    } else if (way->past_ns == 0 || slot_ns < way->past_ns) {
        way->past_ns = slot_ns;
    }
}

/* Whether every slot lies in the store. */
static bool fit(const kvp_ssd *ssd, const uint32_t *slots, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (slots[i] >= ssd->geometry.slot_count)
            return false;
    return true;
}

/* What a batch of one kind of job ended with: KVP_SYSTEM if one failed. */
static kvp_status outcome(const batch *mine, kvp_status status, int *error)
{
    if (mine->error != 0 && *error == 0)
        *error = mine->error;
    for (size_t i = 0; status == KVP_OK && i < mine->count; i++)
        if (mine->results[i] == KVP_SLOT_FAILED)
            status = KVP_SYSTEM;
    return status;
}

kvp_status kvp_ssd_read(kvp_ssd *ssd, const uint32_t *slots, const uint64_t *generations,
                        const uint8_t *keys, size_t count, const kvp_view *dst,
                        const uint64_t *dst_blocks, uint64_t timeout_ns, uint32_t *crcs,
                        uint32_t *tokens, bool *known, uint8_t *results, int *error)
{
    *error = 0;
    if (!fit(ssd, slots, count))
        return KVP_INVALID;
    const struct timespec deadline = kvp_ssd_deadline(timeout_ns);
    batch mine = {.kind = READ,
                  .slots = slots,
                  .generations = generations,
                  .keys = keys,
                  .view = dst,
                  .blocks = dst_blocks,
                  .crcs = crcs,
                  .found_tokens = tokens,
                  .found_known = known,
                  .results = results,
                  .count = count};
    return outcome(&mine, kvp_ssd_run(ssd, &mine, &deadline), error);
}

kvp_status kvp_ssd_scan(kvp_ssd *ssd, const uint32_t *slots, size_t count, bool whole,
                        uint64_t timeout_ns, uint8_t *keys, uint8_t *parents,
                        uint64_t *generations, uint32_t *tokens, bool *known, uint8_t *results,
                        int *error)
{
    *error = 0;
    if (!fit(ssd, slots, count))
        return KVP_INVALID;
    const struct timespec deadline = kvp_ssd_deadline(timeout_ns);
    batch mine = {.kind = SCAN,
                  .whole = whole,
                  .slots = slots,
                  .found_keys = keys,
                  .found_parents = parents,
                  .found_generations = generations,
                  .found_tokens = tokens,
                  .found_known = known,
                  .results = results,
                  .count = count};
    return outcome(&mine, kvp_ssd_run(ssd, &mine, &deadline), error);
}

static kvp_status sync_files(kvp_ssd *ssd, const uint32_t *files, size_t count,
                             const struct timespec *deadline, int *error)
{
    uint8_t results[KVP_SSD_SEGMENTS_MAX];
    batch mine = {.kind = SYNC, .slots = files, .results = results, .count = count};
    return outcome(&mine, kvp_ssd_run(ssd, &mine, deadline), error);
}

/* Sync the files of the slots that a batch has done. */
static kvp_status sync_slots(kvp_ssd *ssd, const batch *done, const struct timespec *deadline,
                             int *error)
{
    bool touched[KVP_SSD_SEGMENTS_MAX] = {false};
    uint32_t files[KVP_SSD_SEGMENTS_MAX];
    size_t count = 0;
    for (size_t i = 0; i < done->count; i++) {
        size_t file = done->slots[i] / ssd->geometry.segment_slots;
        if (done->results[i] != KVP_SLOT_DONE || touched[file])
            continue;
        touched[file] = true;
        files[count++] = (uint32_t)file;
    }
    return sync_files(ssd, files, count, deadline, error);
}

/* Whether a write may begin: nothing that the kernel still does for an earlier one could undo it. */
static kvp_status admit(kvp_ssd *ssd)
{
    pthread_mutex_lock(&ssd->mutex);
    const bool room =
        ssd->settled_count + ssd->late_count + ssd->geometry.threads <= kvp_ssd_settled_max(ssd);
    const bool blocked = ssd->blocking > 0;
    pthread_mutex_unlock(&ssd->mutex);
    return blocked ? KVP_BUSY : room ? KVP_OK : KVP_FULL;
}

static int by_number(const void *a, const void *b)
{
    const uint32_t first = *(const uint32_t *)a, second = *(const uint32_t *)b;
    return (first > second) - (first < second);
}

bool kvp_ssd_named(const kvp_ssd *ssd, const uint32_t *slots, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (bsearch(slots + i, ssd->named, ssd->named_count, sizeof *slots, by_number) == NULL)
            return false;
    return true;
}

/* Write an intent durably, and let `mine` be written then; its first slots are copied and summed
 * while the intent is on its way to the disk. One that failed is written anew where it was: the last
 * durable one, which may name slots that the kernel still writes, lies in the other place. */
static kvp_status declare(kvp_ssd *ssd, const uint32_t *slots, size_t count, batch *mine,
                          const struct timespec *deadline, int *error)
{
    uint8_t declared;
    batch intent = {.kind = INTENT,
                    .slots = slots,
                    .intent_slots = count,
                    .sequence = ssd->sequence,
                    .results = &declared,
                    .count = 1};
    kvp_ssd_begin(ssd, &intent);
    kvp_ssd_begin(ssd, mine);
    ssd->named_count = 0;
    memcpy(ssd->named, slots, count * sizeof *slots);
    qsort(ssd->named, count, sizeof *slots, by_number);
    const kvp_status status = outcome(&intent, kvp_ssd_finish(ssd, &intent, deadline), error);
    if (status != KVP_OK)
        return status;
    ssd->named_count = count;
    ssd->sequence++;
    kvp_ssd_unshut(ssd, mine);
    return KVP_OK;
}

kvp_status kvp_ssd_write(kvp_ssd *ssd, const uint32_t *slots, const uint64_t *generations,
                         const uint8_t *keys, const uint8_t *parents, size_t count, size_t also,
                         const kvp_view *src, const uint64_t *src_blocks,
                         const uint32_t *crc_expected, const uint32_t *tokens, const bool *known,
                         uint64_t timeout_ns, uint8_t *results, int *error)
{
    *error = 0;
    memset(results, KVP_SLOT_SKIPPED, count);
    if (count > KVP_SSD_INTENT_SLOTS || also > KVP_SSD_INTENT_SLOTS - count ||
        !fit(ssd, slots, count + also))
        return KVP_INVALID;
    if (count == 0)
        return KVP_OK;
    kvp_status status = admit(ssd);
    if (status != KVP_OK)
        return status;
    const struct timespec deadline = kvp_ssd_deadline(timeout_ns);
    const size_t width = kvp_ssd_write_width(&ssd->geometry);
    const bool learns = width > 0 && count >= LEARNT_BYTES / ssd->geometry.slot_bytes;
    const bool past = width == 0 || (learns && kvp_ssd_way_next(&ssd->way));
    batch mine = {.kind = WRITE,
                  .width = past ? 0 : width,
                  .shut = !kvp_ssd_named(ssd, slots, count + also),
                  .slots = slots,
                  .generations = generations,
                  .keys = keys,
                  .parents = parents,
                  .view = src,
                  .blocks = src_blocks,
                  .crc_expected = crc_expected,
                  .tokens = tokens,
                  .known = known,
                  .results = results,
                  .count = count};
    if (mine.shut)
        status = declare(ssd, slots, count + also, &mine, &deadline, error);
    else
        kvp_ssd_begin(ssd, &mine);
    const kvp_status written = kvp_ssd_finish(ssd, &mine, &deadline);
    if (status != KVP_OK)
        return status;
    status = written;
    if (learns && status == KVP_OK && mine.error == 0)
        kvp_ssd_way_learn(&ssd->way, past, mine.copy_ns / count);
    if (mine.error != 0)
        *error = mine.error;
    /* What was written is durable even if some could not be. */
    return status == KVP_OK ? sync_slots(ssd, &mine, &deadline, error) : status;
}

kvp_status kvp_ssd_erase(kvp_ssd *ssd, const uint32_t *slots, size_t count, uint64_t timeout_ns,
                         uint8_t *results, int *error)
{
    *error = 0;
    memset(results, KVP_SLOT_SKIPPED, count);
    if (!fit(ssd, slots, count))
        return KVP_INVALID;
    kvp_status status = admit(ssd);
    if (status != KVP_OK)
        return status;
    const struct timespec deadline = kvp_ssd_deadline(timeout_ns);
    batch mine = {.kind = ERASE, .slots = slots, .results = results, .count = count};
    status = outcome(&mine, kvp_ssd_run(ssd, &mine, &deadline), error);
    return status == KVP_OK ? sync_slots(ssd, &mine, &deadline, error) : status;
}
