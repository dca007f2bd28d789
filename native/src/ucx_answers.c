/* The owner's side of reads: what a peer asks for is put into its inbox part, then told; or it is held,
 * and the peer gets it. Progress thread only, but for kvp_ucx_register.
 *
 * While its bytes are on their way, or until the peer says that it has them or is gone, a slot is
 * granted: a slot that is released meanwhile stays as it
 * is until the puts have ended. Each connection has as many answers as asks may be unanswered, so
 * nothing waits and nothing is allocated. Every field of an ask comes from the peer.
 */
#include <string.h>
#include <unistd.h>

#include "ucx_engine.h"

kvp_status kvp_ucx_register(kvp_ucx *engine, const kvp_ucx_region *region, uint32_t *number)
{
    if (engine->pid != getpid()) {
        return KVP_CLOSED;
    }
    if (region->slot_count == 0 || region->slot_bytes == 0 || region->crc_count > KVP_REGION_CRCS) {
        return KVP_INVALID;
    }
    pthread_mutex_lock(&engine->lock);
    size_t count = atomic_load_explicit(&engine->region_count, memory_order_relaxed);
    if (count < KVP_REGIONS_MAX) {
        engine->regions[count] = (kvp_region){
            .told = *region,
            .base = kvp_arena_base(region->arena),
            .stride = kvp_arena_slot_stride(region->arena),
        };
        *number = (uint32_t)count;
        atomic_store_explicit(&engine->region_count, count + 1, memory_order_release);
    }
    pthread_mutex_unlock(&engine->lock);
    return count < KVP_REGIONS_MAX ? KVP_OK : KVP_FULL;
}

bool kvp_ask_sound(const kvp_wire_ask *ask, const kvp_wire_item *items, const kvp_ucx_region *region,
                   uint64_t inbox_bytes)
{
    size_t each = ask->crc_count == 0 ? 1 : ask->crc_count;
    if ((uint64_t)ask->first_crc + ask->crc_count > region->crc_count ||
        each > KVP_ASK_CRCS_MAX / ask->count || ask->at > inbox_bytes) {
        return false;
    }
    uint64_t left = inbox_bytes - ask->at;
    for (size_t i = 0; i < ask->count; i++) {
        const kvp_wire_item *item = &items[i];
        if (item->slot >= region->slot_count || item->size == 0 || item->size > left ||
            item->size > region->slot_bytes || item->offset > region->slot_bytes - item->size) {
            return false;
        }
        left -= item->size;
    }
    return true;
}

/* Grant the leading items whose slots are ready in the lives asked for, and read their checksums. */
static void hold(kvp_answer *answer, const kvp_wire_ask *ask, const kvp_wire_item *items)
{
    kvp_ucx *engine = answer->batch.endpoint->engine;
    const kvp_region *region = answer->region;
    uint32_t *out = answer->crcs;
    for (answer->held = 0; answer->held < ask->count; answer->held++) {
        const kvp_wire_item *item = &items[answer->held];
        uint32_t *slot = &answer->slots[answer->held];
        uint64_t *life = &answer->generations[answer->held];
        size_t done;
        *slot = item->slot;
        *life = item->generation;
        if (kvp_arena_change(region->told.arena, KVP_ARENA_GRANT, slot, life, 1, &done) != KVP_OK) {
            return;
        }
        /* A slot that is not published yet has none. */
        if (kvp_arena_crcs(region->told.arena, slot, life, 1, engine->slot_crcs, &done) != KVP_OK) {
            kvp_arena_change(region->told.arena, KVP_ARENA_SETTLE, slot, life, 1, &done);
            return;
        }
        if (ask->crc_count == 0) {
            const uint8_t *bytes = (const uint8_t *)(region->base + item->slot * region->stride);
            *out++ = kvp_crc32c(0, bytes + item->offset, item->size);
        } else {
            memcpy(out, engine->slot_crcs + ask->first_crc, ask->crc_count * sizeof(*out));
            out += ask->crc_count;
        }
    }
}

static kvp_answer *free_answer(kvp_endpoint *endpoint)
{
    for (size_t i = 0; i < KVP_ASKS_MAX; i++) {
        if (!endpoint->answers[i].used) {
            return &endpoint->answers[i];
        }
    }
    return NULL;
}

/* Let the peer get of a region: register it, if nobody got of it before, and tell where it lies. */
static bool open_region(kvp_endpoint *endpoint, uint32_t number, kvp_wire_region *out)
{
    kvp_ucx *engine = endpoint->engine;
    kvp_region *region = &engine->regions[number];
    if (region->whole.rkey == NULL) {
        /* Read-only to peers, where the network can tell reads from writes. */
        ucx_status code = kvp_context_register(
            engine, region->base, region->told.slot_count * region->stride,
            UCX_PROT_LOCAL_READ | UCX_PROT_LOCAL_WRITE | UCX_PROT_REMOTE_READ, &region->whole);
        if (code != UCX_OK) {
            kvp_endpoint_fail(endpoint, KVP_SYSTEM, code);
            return false;
        }
    }
    if (!endpoint->told[number]) {
        endpoint->told[number] = true;
        kvp_message_region(endpoint, number, out);
    }
    return true;
}

void kvp_answer_start(kvp_endpoint *endpoint, const void *header, size_t header_size,
                      const void *data, size_t size)
{
    kvp_ucx *engine = endpoint->engine;
    kvp_answer *answer = free_answer(endpoint);
    kvp_wire_ask ask;
    kvp_wire_item items[KVP_ASK_ITEMS_MAX];
    if (answer == NULL || endpoint->state != SLOT_OPEN || header_size != sizeof(ask)) {
        kvp_endpoint_fail(endpoint, KVP_INVALID, UCX_OK);
        return;
    }
    memcpy(&ask, header, sizeof(ask));
    size_t regions = atomic_load_explicit(&engine->region_count, memory_order_acquire);
    if (ask.region >= regions || ask.count == 0 || ask.count > KVP_ASK_ITEMS_MAX ||
        size != ask.count * sizeof(items[0]) || ask.crc != kvp_ask_crc(&ask, data)) {
        kvp_endpoint_fail(endpoint, KVP_INVALID, UCX_OK);
        return;
    }
    memcpy(items, data, size);
    const kvp_region *region = &engine->regions[ask.region];
    bool holds = ask.head.kind == KVP_WIRE_HOLD;
    uint64_t room = holds ? UINT64_MAX : endpoint->peer_inbox_bytes;
    if ((holds && !endpoint->may_get) || !kvp_ask_sound(&ask, items, &region->told, room)) {
        kvp_endpoint_fail(endpoint, KVP_INVALID, UCX_OK);
        return;
    }
    if (holds && !open_region(endpoint, ask.region, &answer->region_out)) {
        return;
    }
    answer->used = true;
    answer->hold = holds;
    answer->waiting = false;
    answer->region = region;
    answer->batch = (kvp_batch){
        .endpoint = endpoint,
        .answer = answer,
        .spans = answer->spans,
        .deadline_ns = engine->now_ns + engine->config.answer_timeout_ns,
        .stage = BATCH_QUEUED,
    };
    hold(answer, &ask, items);
    uint64_t at = ask.at;
    for (size_t i = 0; !holds && i < answer->held; i++) {
        uint64_t from = region->base + items[i].slot * region->stride + items[i].offset;
        answer->spans[i] = (kvp_ucx_span){from, items[i].size, at};
        at += items[i].size;
    }
    size_t each = ask.crc_count == 0 ? 1 : ask.crc_count;
    answer->crc_bytes = answer->held * each * sizeof(answer->crcs[0]);
    answer->head = (kvp_wire_answer){.number = ask.number};
    answer->head.good = (uint32_t)answer->held;
    answer->head.crc = kvp_answer_crc(&answer->head, answer->crcs, answer->crc_bytes);
    answer->batch.count = holds ? 0 : answer->held;
    kvp_batch_queue(&answer->batch);
}

static void end_answer(kvp_answer *answer)
{
    size_t done;
    kvp_arena_change(answer->region->told.arena, KVP_ARENA_SETTLE, answer->slots,
                     answer->generations, answer->held, &done);
    answer->used = false;
}

void kvp_answer_sent(kvp_answer *answer, bool well)
{
    if (well && answer->hold && answer->held != 0) {
        answer->waiting = true;
        answer->batch.endpoint->waiting_answers++;
    } else {
        end_answer(answer);
    }
}

void kvp_answer_done(kvp_endpoint *endpoint, uint32_t number)
{
    for (size_t i = 0; i < KVP_ASKS_MAX; i++) {
        kvp_answer *answer = &endpoint->answers[i];
        if (answer->used && answer->waiting && answer->head.number == number) {
            endpoint->waiting_answers--;
            end_answer(answer);
            return;
        }
    }
    kvp_endpoint_fail(endpoint, KVP_INVALID, UCX_OK);
}

uint64_t kvp_answers_due(const kvp_endpoint *endpoint)
{
    uint64_t due = UINT64_MAX;
    for (size_t i = 0; endpoint->waiting_answers != 0 && i < KVP_ASKS_MAX; i++) {
        const kvp_answer *answer = &endpoint->answers[i];
        if (answer->used && answer->waiting && answer->batch.deadline_ns < due) {
            due = answer->batch.deadline_ns;
        }
    }
    return due;
}

void kvp_answers_end_all(kvp_endpoint *endpoint)
{
    for (size_t i = 0; i < KVP_ASKS_MAX; i++) {
        if (endpoint->answers[i].used) {
            end_answer(&endpoint->answers[i]);
        }
    }
    endpoint->waiting_answers = 0;
}

void kvp_answers_close(kvp_ucx *engine)
{
    for (size_t i = 0; i < engine->config.endpoint_max * KVP_ASKS_MAX; i++) {
        if (engine->answers[i].used) {
            end_answer(&engine->answers[i]);
        }
    }
}
