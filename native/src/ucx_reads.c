/* The reader's side: asks into windows of our inbox part, and the verified copy out of them. Progress
 * thread only.
 *
 * An inbox part has a window for each ask that may be unanswered. The owner puts what an ask names
 * into its window, flushes and answers, or it holds it and we get it into the window (ucx_gets.c);
 * then the bytes are copied to their place, checked on the way.
 * A window that was asked into is not used again before its answer has come, whatever became of the
 * read: the peer may still write there. A read itself ends as soon as nothing here touches its
 * destination, answer or not; copies run in this thread, so between two steps nothing does.
 */
#include <string.h>

#include "kvpool_crc32c.h"
#include "ucx_engine.h"

/* The items of a window, in order. */
#define EIGHT(first)                                                                               \
    first, (first) + 1, (first) + 2, (first) + 3, (first) + 4, (first) + 5, (first) + 6, (first) + 7
static const uint64_t IDS[] = {EIGHT(0),  EIGHT(8),  EIGHT(16), EIGHT(24),
                               EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56)};
_Static_assert(sizeof(IDS) == KVP_ASK_ITEMS_MAX * sizeof(IDS[0]), "an id for each item");

/* Is something left to ask for that the result could need? */
static bool wants(const kvp_read *read)
{
    return read->stop == KVP_OK && read->next_item < read->good;
}

/* ---- asks ------------------------------------------------------------------------------------- */

static void ask_back(void *request, ucx_status code, void *user_data)
{
    kvp_ask *ask = user_data;
    kvp_endpoint *endpoint = ask->endpoint;
    endpoint->requests--;
    endpoint->stirred = true;
    ask->sending = false;
    if (code != UCX_OK) {
        kvp_endpoint_fail(endpoint, KVP_PEER, code);
    }
    endpoint->engine->ucp->request_free(request);
}

static kvp_ask *free_ask(kvp_endpoint *endpoint)
{
    for (size_t i = 0; i < KVP_ASKS_MAX; i++) {
        if (endpoint->asks[i].stage == ASK_FREE && !endpoint->asks[i].sending) {
            return &endpoint->asks[i];
        }
    }
    return NULL;
}

static void send_ask(kvp_endpoint *endpoint, kvp_read *read, kvp_ask *ask)
{
    size_t window = endpoint->engine->window;
    ask->endpoint = endpoint;
    ask->read = read;
    ask->stage = ASK_SENT;
    kvp_read_cut(read, ask, window);
    read->asked++;
    ask->head.head = kvp_message_head(endpoint, endpoint->gets ? KVP_WIRE_HOLD : KVP_WIRE_ASK);
    ask->head.number = endpoint->next_ask++;
    ask->head.at = (size_t)(ask - endpoint->asks) * window;
    ask->head.crc = kvp_ask_crc(&ask->head, ask->items);
    atomic_fetch_sub_explicit(&endpoint->windows_free, 1, memory_order_relaxed);
    const ucx_request_param param = {
        .op_attr_mask = UCX_OP_CALLBACK | UCX_OP_USER_DATA | UCX_OP_FLAGS,
        .flags = UCX_AM_SEND_EAGER | UCX_AM_SEND_REPLY,
        .cb = ask_back,
        .user_data = ask,
    };
    const void *request = endpoint->engine->ucp->am_send_nbx(
        endpoint->ep, KVP_AM_ID, &ask->head, sizeof(ask->head), ask->items,
        ask->head.count * sizeof(ask->items[0]), &param);
    if (ucx_is_error(request)) {
        kvp_endpoint_fail(endpoint, KVP_PEER, ucx_error_of(request));
    } else if (request != NULL) {
        endpoint->requests++;
        ask->sending = true;
    }
}

static void free_window(kvp_ask *ask)
{
    ask->stage = ASK_FREE;
    ask->read = NULL;
    atomic_fetch_add_explicit(&ask->endpoint->windows_free, 1, memory_order_relaxed);
}

void kvp_read_answered(kvp_endpoint *endpoint, const kvp_wire_answer *answer, const void *crcs,
                       size_t size)
{
    kvp_ask *ask = NULL;
    for (size_t i = 0; i < KVP_ASKS_MAX; i++) {
        if (endpoint->asks[i].stage == ASK_SENT && endpoint->asks[i].head.number == answer->number) {
            ask = &endpoint->asks[i];
        }
    }
    size_t each = ask == NULL || ask->head.crc_count == 0 ? 1 : ask->head.crc_count;
    if (ask == NULL || answer->good > ask->head.count ||
        size != answer->good * each * sizeof(uint32_t) ||
        answer->crc != kvp_answer_crc(answer, crcs, size)) {
        kvp_endpoint_fail(endpoint, KVP_INVALID, UCX_OK);
        return;
    }
    if (size != 0) {
        memcpy(ask->crcs, crcs, size);
    }
    ask->good = answer->good;
    endpoint->stirred = true;
    if (endpoint->gets) {
        ask->stage = ASK_GETTING; /* from the next step on: this is a callback */
        ask->getting = 0;
        ask->begun = false;
    } else {
        kvp_ask_ended(ask);
    }
}

void kvp_ask_ended(kvp_ask *ask)
{
    ask->stage = ASK_ANSWERED;
    ask->endpoint->stirred = true;
    if (ask->read == NULL) {
        atomic_fetch_sub_explicit(&ask->endpoint->windows_owed, 1, memory_order_relaxed);
    }
}

/* ---- copies ----------------------------------------------------------------------------------- */

static void lower(size_t *good, size_t to)
{
    *good = to < *good ? to : *good;
}

/* Tell the caller what the leading `good` blocks of an ask were checked against, `stride` of each. */
static void tell_sums(const kvp_ucx_job *job, const kvp_ask *ask, const uint32_t *crcs,
                      size_t stride, size_t good)
{
    size_t heads = job->shape->heads;
    for (size_t i = 0; i < good; i++) {
        memcpy(job->sums + ((ask->first + i) * job->layers + ask->layer) * heads,
               crcs + i * stride, ask->layers * heads * sizeof(*crcs));
    }
}

static void copy_blocks(kvp_read *read, const kvp_ask *ask, uintptr_t window)
{
    const kvp_ucx_job *job = &read->job;
    const kvp_shape *shape = job->shape;
    size_t heads = shape->heads, kv_bytes = shape->tokens * shape->k_row_bytes;
    size_t layer_bytes = kvp_layer_bytes(shape);
    kvp_view source = {
        .base = window,
        .block_stride = ask->layers * layer_bytes,
        .layer_stride = layer_bytes,
        .head_stride = layer_bytes / heads,
        .kv_stride = kv_bytes,
        .k_token_stride = shape->k_row_bytes,
        .v_token_stride = shape->v_row_bytes,
    };
    kvp_view dest = *job->dest;
    dest.base += ask->layer * dest.layer_stride;
    const uint32_t *crcs = ask->crcs;
    size_t crc_stride = ask->layers * heads, bad = ask->good;
    if (job->crcs != NULL) {
        crcs = job->crcs + (ask->first * job->layers + ask->layer) * heads;
        crc_stride = job->layers * heads;
    }
    kvp_status status = kvp_crew_copy_blocks(
        read->endpoint->engine->crew, shape, &dest, job->dest_blocks + ask->first, &source, IDS,
        ask->good, 0, ask->layers, crcs, NULL, crc_stride, &bad);
    if (status == KVP_CORRUPT) {
        lower(&read->good, ask->first + bad);
    } else if (status != KVP_OK) {
        /* KVP_INVALID ends connections, and a wrong destination is not the peer's doing. */
        read->stop = KVP_SYSTEM;
    }
    if (job->sums != NULL && read->stop == KVP_OK) {
        tell_sums(job, ask, crcs, crc_stride, bad);
    }
}

static void copy_spans(kvp_read *read, const kvp_ask *ask, uintptr_t window)
{
    for (size_t i = 0; i < ask->good; i++) {
        size_t size = ask->items[i].size;
        uint32_t crc = kvp_crc32c_copy(0, (void *)(uintptr_t)ask->local[i],
                                       (const void *)window, size);
        if (crc != ask->crcs[i]) {
            read->stop = KVP_CORRUPT; /* it was whole at its owner: changed on its way */
            return;
        }
        window += size;
    }
}

static void take_window(kvp_endpoint *endpoint, kvp_ask *ask)
{
    kvp_read *read = ask->read;
    if (read != NULL) {
        const kvp_ucx *engine = endpoint->engine;
        uintptr_t window = engine->config.inbox + endpoint->index * engine->config.inbox_part +
                           ask->head.at;
        bool blocks = read->job.shape != NULL;
        read->asked--;
        if (ask->good < ask->head.count) {
            lower(&read->good, blocks ? ask->first + ask->good : ask->item_of[ask->good]);
        }
        if (read->stop == KVP_OK && ask->first < read->good && ask->good != 0) {
            (blocks ? copy_blocks : copy_spans)(read, ask, window);
        }
    }
    free_window(ask);
}

/* In the order of asking, so that nothing is copied behind a block that is not whole. */
static kvp_ask *first_answered(kvp_endpoint *endpoint)
{
    kvp_ask *first = NULL;
    for (size_t i = 0; i < KVP_ASKS_MAX; i++) {
        kvp_ask *ask = &endpoint->asks[i];
        if (ask->stage == ASK_ANSWERED &&
            (first == NULL || (int32_t)(ask->head.number - first->head.number) < 0)) {
            first = ask;
        }
    }
    return first;
}

/* ---- reads ------------------------------------------------------------------------------------ */

void kvp_read_queue(kvp_read *read)
{
    kvp_endpoint *endpoint = read->endpoint;
    read->next = NULL;
    read->good = read->job.count;
    if (endpoint->last_read != NULL) {
        endpoint->last_read->next = read;
    } else {
        endpoint->first_read = read;
    }
    endpoint->last_read = read;
    endpoint->stirred = true;
    if (read->deadline_ns < endpoint->read_deadline_ns) {
        endpoint->read_deadline_ns = read->deadline_ns;
    }
}

/* Does nothing that is still asked for matter to the result? */
static bool over(const kvp_read *read)
{
    if (read->stop != KVP_OK) {
        return true;
    }
    if (wants(read)) {
        return false;
    }
    for (size_t i = 0; read->asked != 0 && i < KVP_ASKS_MAX; i++) {
        const kvp_ask *ask = &read->endpoint->asks[i];
        if (ask->stage != ASK_FREE && ask->read == read && ask->first < read->good) {
            return false;
        }
    }
    return true;
}

static void end_read(kvp_read *read, kvp_status status, ucx_status code)
{
    kvp_endpoint *endpoint = read->endpoint;
    kvp_ucx *engine = endpoint->engine;
    for (size_t i = 0; i < KVP_ASKS_MAX; i++) {
        kvp_ask *ask = &endpoint->asks[i];
        if (ask->read == read) {
            ask->read = NULL;
            if (ask->stage == ASK_SENT || ask->stage == ASK_GETTING) {
                atomic_fetch_add_explicit(&endpoint->windows_owed, 1, memory_order_relaxed);
            }
        }
    }
    if (status == KVP_OK && read->job.shape == NULL && read->good < read->job.count) {
        status = KVP_STALE;
    }
    kvp_ucx_event event = {
        .kind = KVP_UCX_READ,
        .status = status,
        .ucx_code = code,
        .endpoint = kvp_endpoint_id(endpoint),
        .cookie = read->cookie,
        .good = read->good,
    };
    pthread_mutex_lock(&engine->lock);
    read->generation++;
    read->endpoint = NULL;
    read->next = engine->free_reads;
    engine->free_reads = read;
    kvp_event_push(engine, &event);
    pthread_mutex_unlock(&engine->lock);
}

/* Note cancels and passed deadlines. */
static void look(kvp_endpoint *endpoint)
{
    kvp_ucx *engine = endpoint->engine;
    endpoint->look = false;
    endpoint->read_deadline_ns = UINT64_MAX;
    for (kvp_read *read = endpoint->first_read; read != NULL; read = read->next) {
        if (read->stop != KVP_OK) {
            continue;
        }
        if (atomic_load(&read->cancelled)) {
            read->stop = KVP_CANCELLED;
        } else if (atomic_load(&endpoint->reads_ended)) {
            read->stop = KVP_CLOSED;
        } else if (engine->now_ns >= read->deadline_ns) {
            read->stop = KVP_TIMEOUT;
        } else if (read->deadline_ns < endpoint->read_deadline_ns) {
            endpoint->read_deadline_ns = read->deadline_ns;
        }
    }
}

/* Remove and end the reads that are over. */
static void sweep(kvp_endpoint *endpoint)
{
    kvp_read **link = &endpoint->first_read;
    kvp_read *last = NULL;
    while (*link != NULL) {
        kvp_read *read = *link;
        if (over(read)) {
            *link = read->next;
            end_read(read, read->stop, UCX_OK);
        } else {
            last = read;
            link = &read->next;
        }
    }
    endpoint->last_read = last;
}

bool kvp_reads_step(kvp_endpoint *endpoint)
{
    bool late = endpoint->engine->now_ns >= endpoint->read_deadline_ns;
    if (!endpoint->stirred && !endpoint->look && !late) {
        return false;
    }
    endpoint->stirred = false;
    if (endpoint->look || late) {
        look(endpoint);
    }
    kvp_gets_step(endpoint);
    kvp_ask *ask;
    while ((ask = first_answered(endpoint)) != NULL) {
        take_window(endpoint, ask);
    }
    ask = free_ask(endpoint);
    for (kvp_read *read = endpoint->first_read; read != NULL && ask != NULL; read = read->next) {
        while (ask != NULL && !endpoint->failed && wants(read)) {
            send_ask(endpoint, read, ask);
            ask = free_ask(endpoint);
        }
    }
    sweep(endpoint);
    return true;
}

void kvp_reads_end_all(kvp_endpoint *endpoint, kvp_status status, ucx_status code)
{
    uint64_t now = endpoint->engine->now_ns;
    while (endpoint->first_read != NULL) {
        kvp_read *read = endpoint->first_read;
        endpoint->first_read = read->next;
        bool late = now >= read->deadline_ns;
        end_read(read, status == KVP_TIMEOUT && !late ? KVP_PEER : status, code);
    }
    endpoint->last_read = NULL;
    for (size_t i = 0; i < KVP_ASKS_MAX; i++) {
        endpoint->asks[i].stage = ASK_FREE; /* nobody writes into its window any more */
    }
}
