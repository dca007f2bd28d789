/* Batches: puts posted in slices, one flush, then the note. Progress thread only.
 *
 * The batches of an endpoint form a list in order of submission. `posting` is the first that is not
 * wholly posted; those before it wait for their flush, and only the first of all may send its note,
 * so notes arrive in order and each after every byte that was put before it.
 */
#include "ucx_engine.h"

/* A put sends while it is posted, until the socket is full. One slice bounds how long that keeps
 * other endpoints waiting (1 MiB: up to 0.3 ms over loopback). The library queues what the socket does
 * not take; more than a few waiting puts gain nothing and cost memory at a peer that does not read.
 * No put is larger than a slice, so at most 32 MiB of an endpoint are in flight. Small puts are copied
 * by every version: they say nothing of how bulk travels. */
enum { SLICE_BYTES = 1 << 20, WAITING_PUTS_MAX = 32, DESCRIBED_BYTES_MIN = KVP_UCX_TRIAL_BYTES };

void kvp_batch_queue(kvp_batch *batch)
{
    kvp_endpoint *endpoint = batch->endpoint;
    batch->next = NULL;
    if (endpoint->last != NULL) {
        endpoint->last->next = batch;
    } else {
        endpoint->first = batch;
    }
    endpoint->last = batch;
    if (endpoint->posting == NULL) {
        endpoint->posting = batch;
    }
    if (batch->deadline_ns < endpoint->next_deadline_ns) {
        endpoint->next_deadline_ns = batch->deadline_ns;
    }
}

static void find_deadline(kvp_endpoint *endpoint)
{
    endpoint->next_deadline_ns = UINT64_MAX;
    for (const kvp_batch *batch = endpoint->first; batch != NULL; batch = batch->next) {
        if (batch->deadline_ns < endpoint->next_deadline_ns) {
            endpoint->next_deadline_ns = batch->deadline_ns;
        }
    }
}

/* End a batch. Its requests must be back from the library. */
static void end_batch(kvp_batch *batch, kvp_status status, ucx_status code)
{
    kvp_endpoint *endpoint = batch->endpoint;
    kvp_ucx *engine = endpoint->engine;
    kvp_batch *before = NULL;
    for (kvp_batch *each = endpoint->first; each != batch; each = each->next) {
        before = each;
    }
    if (before == NULL) {
        endpoint->first = batch->next;
    } else {
        before->next = batch->next;
    }
    if (endpoint->last == batch) {
        endpoint->last = before;
    }
    if (endpoint->posting == batch) {
        endpoint->posting = batch->next;
    }
    if (batch->deadline_ns <= endpoint->next_deadline_ns) {
        find_deadline(endpoint);
    }
    if (batch->answer != NULL) {
        kvp_answer_sent(batch->answer, status == KVP_OK);
        return;
    }
    kvp_ucx_event event = {
        .kind = KVP_UCX_BATCH,
        .status = status,
        .ucx_code = code,
        .endpoint = kvp_endpoint_id(endpoint),
        .cookie = batch->cookie,
    };
    pthread_mutex_lock(&engine->lock);
    if (batch->stopped && batch->note_size != 0) {
        endpoint->notes_submitted--; /* it was never sent, so nobody will take it */
    }
    batch->submitted = false;
    batch->stage = BATCH_FREE;
    batch->next = engine->free_batches;
    engine->free_batches = batch;
    if (batch->count == 0 && batch->cookie == 0) {
        engine->batches_used--; /* a note that nobody wants to hear of: see kvp_ucx_put */
    } else {
        kvp_event_push(engine, &event);
    }
    pthread_mutex_unlock(&engine->lock);
}

void kvp_batch_end_all(kvp_endpoint *endpoint, kvp_status status, ucx_status code)
{
    uint64_t now = endpoint->engine->now_ns;
    while (endpoint->first != NULL) {
        /* Only what is itself overdue timed out; the others lost their way to the peer. */
        bool late = now >= endpoint->first->deadline_ns;
        kvp_status own = status == KVP_TIMEOUT && !late ? KVP_PEER : status;
        end_batch(endpoint->first, own, code);
    }
}

static void request_back(kvp_batch *batch, ucx_status code)
{
    batch->pending--;
    batch->endpoint->requests--;
    if (code != UCX_OK) {
        kvp_endpoint_fail(batch->endpoint, KVP_PEER, code);
    }
}

static void put_back(void *request, ucx_status code, void *user_data)
{
    kvp_batch *batch = user_data;
    batch->endpoint->waiting_puts--;
    request_back(batch, code);
    batch->endpoint->engine->ucp->request_free(request);
}

static void flush_back(void *request, ucx_status code, void *user_data)
{
    kvp_batch *batch = user_data;
    request_back(batch, code);
    batch->stage = BATCH_FLUSHED;
    batch->endpoint->engine->ucp->request_free(request);
}

static void note_back(void *request, ucx_status code, void *user_data)
{
    request_back(user_data, code);
    ((kvp_batch *)user_data)->endpoint->engine->ucp->request_free(request);
}

/* Take libucp's answer to a call on behalf of a batch. Returns false if the endpoint failed. */
static bool accepted(kvp_batch *batch, const void *request)
{
    if (ucx_is_error(request)) {
        kvp_endpoint_fail(batch->endpoint, KVP_PEER, ucx_error_of(request));
        return false;
    }
    if (request != NULL) {
        batch->pending++;
        batch->endpoint->requests++;
    }
    return true;
}

static void describe_put(kvp_ucx *engine, void *request)
{
    char text[KVP_PROTOCOL_TEXT_MAX] = "";
    ucx_request_attr attr = {
        .field_mask = UCX_REQUEST_INFO | UCX_REQUEST_INFO_SIZE,
        .debug_string = text,
        .debug_string_size = sizeof(text),
    };
    if (engine->ucp->request_query(request, &attr) == UCX_OK) {
        pthread_mutex_lock(&engine->lock);
        snprintf(engine->put_protocol, sizeof(engine->put_protocol), "%s", text);
        pthread_mutex_unlock(&engine->lock);
    }
}

static void trial_back(void *request, ucx_status code, void *user_data)
{
    kvp_endpoint *endpoint = user_data;
    endpoint->requests--;
    if (code != UCX_OK) {
        kvp_endpoint_fail(endpoint, KVP_PEER, code);
    }
    if (endpoint->trial_posting) {
        endpoint->trial_back = true;
    } else {
        endpoint->engine->ucp->request_free(request);
    }
}

void kvp_batch_trial(kvp_endpoint *endpoint)
{
    static uint8_t nothing[KVP_UCX_TRIAL_BYTES];
    kvp_ucx *engine = endpoint->engine;
    const kvp_wire_hello *hello = &endpoint->hello_in;
    if (engine->put_protocol[0] != '\0' || endpoint->rkey == NULL ||
        hello->trial_bytes < sizeof(nothing)) {
        return;
    }
    /* Never done at once, or there would be no request to ask; its callback may yet come first. */
    const ucx_request_param param = {
        .op_attr_mask = UCX_OP_CALLBACK | UCX_OP_USER_DATA | UCX_OP_NO_IMM_CMPL,
        .cb = trial_back,
        .user_data = endpoint,
    };
    endpoint->trial_posting = true;
    endpoint->requests++;
    void *request = engine->ucp->put_nbx(endpoint->ep, nothing, sizeof(nothing),
                                         endpoint->peer_inbox + hello->inbox_bytes, endpoint->rkey,
                                         &param);
    endpoint->trial_posting = false;
    if (request == NULL || ucx_is_error(request)) {
        endpoint->requests--;
        if (request != NULL) {
            kvp_endpoint_fail(endpoint, KVP_PEER, ucx_error_of(request));
        }
        return;
    }
    describe_put(engine, request);
    if (endpoint->trial_back) {
        engine->ucp->request_free(request);
    }
}

/* The next put: what is left of a span, with those behind it that go on where it ends on both sides,
 * and none larger than a slice. Returns how many spans it ends. */
static size_t next_put(const kvp_batch *batch, kvp_ucx_span *put)
{
    const kvp_ucx_span *span = &batch->spans[batch->posted];
    *put = (kvp_ucx_span){span->local + batch->part, span->size - batch->part,
                          span->remote_offset + batch->part};
    size_t ended = 1;
    while (put->size < SLICE_BYTES && batch->posted + ended < batch->count) {
        const kvp_ucx_span *next = &batch->spans[batch->posted + ended];
        if (next->local != put->local + put->size || next->size > SLICE_BYTES - put->size ||
            next->remote_offset != put->remote_offset + put->size) {
            break;
        }
        put->size += next->size;
        ended++;
    }
    if (put->size > SLICE_BYTES) {
        put->size = SLICE_BYTES;
        ended = 0;
    }
    return ended;
}

static bool post_slice(kvp_endpoint *endpoint)
{
    kvp_ucx *engine = endpoint->engine;
    kvp_batch *batch = endpoint->posting;
    const ucx_request_param param = {
        .op_attr_mask = UCX_OP_CALLBACK | UCX_OP_USER_DATA,
        .cb = put_back,
        .user_data = batch,
    };
    uint64_t bytes = 0, puts = 0, coalesced = 0;
    while (batch->posted < batch->count && bytes < SLICE_BYTES &&
           endpoint->waiting_puts < WAITING_PUTS_MAX) {
        kvp_ucx_span put;
        size_t ended = next_put(batch, &put);
        void *request = engine->ucp->put_nbx(endpoint->ep, (const void *)(uintptr_t)put.local,
                                             put.size, endpoint->peer_inbox + put.remote_offset,
                                             endpoint->rkey, &param);
        if (!accepted(batch, request)) {
            return true;
        }
        if (request != NULL) {
            endpoint->waiting_puts++;
            if (engine->put_protocol[0] == '\0' && put.size >= DESCRIBED_BYTES_MIN) {
                describe_put(engine, request);
            }
        }
        batch->posted += ended;
        batch->part = ended == 0 ? batch->part + put.size : 0;
        coalesced += ended > 1 ? ended - 1 : 0;
        bytes += put.size;
        puts++;
    }
    atomic_fetch_add_explicit(&engine->put_bytes, bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&engine->puts, puts, memory_order_relaxed);
    atomic_fetch_add_explicit(&engine->coalesced, coalesced, memory_order_relaxed);
    return bytes != 0;
}

static void flush(kvp_endpoint *endpoint)
{
    kvp_batch *batch = endpoint->posting;
    const ucx_request_param param = {
        .op_attr_mask = UCX_OP_CALLBACK | UCX_OP_USER_DATA,
        .cb = flush_back,
        .user_data = batch,
    };
    batch->stage = BATCH_POSTED;
    endpoint->posting = batch->next;
    if (batch->posted == 0 && batch->part == 0) {
        batch->stage = BATCH_FLUSHED; /* a note alone: those before it in the list were flushed */
        return;
    }
    const void *request = endpoint->engine->ucp->ep_flush_nbx(endpoint->ep, &param);
    if (accepted(batch, request) && request == NULL) {
        batch->stage = BATCH_FLUSHED;
    }
}

static void notify(kvp_batch *batch)
{
    kvp_endpoint *endpoint = batch->endpoint;
    const ucx_request_param param = {
        .op_attr_mask = UCX_OP_CALLBACK | UCX_OP_USER_DATA | UCX_OP_FLAGS,
        .flags = UCX_AM_SEND_EAGER | UCX_AM_SEND_REPLY,
        .cb = note_back,
        .user_data = batch,
    };
    kvp_answer *answer = batch->answer;
    kvp_wire_head *head = answer != NULL ? &answer->head.head : &batch->head;
    *head = kvp_message_head(endpoint, answer != NULL ? KVP_WIRE_ANSWER : KVP_WIRE_NOTE);
    batch->stage = BATCH_NOTIFYING;
    const void *data = answer != NULL ? (const void *)answer->crcs : batch->note;
    size_t head_size = answer != NULL ? sizeof(answer->head) : sizeof(batch->head);
    size_t size = answer != NULL ? answer->crc_bytes : batch->note_size;
    accepted(batch, endpoint->engine->ucp->am_send_nbx(endpoint->ep, KVP_AM_ID, head, head_size,
                                                       data, size, &param));
}

void kvp_batch_look(kvp_endpoint *endpoint)
{
    kvp_batch *next;
    for (kvp_batch *batch = endpoint->posting; batch != NULL; batch = next) {
        next = batch->next;
        if (!atomic_load(&batch->cancelled) || batch->stage != BATCH_QUEUED) {
            continue;
        }
        batch->stopped = true;
        if (batch->posted == 0 && batch->part == 0) {
            end_batch(batch, KVP_CANCELLED, UCX_OK);
        }
    }
}

bool kvp_batch_step(kvp_endpoint *endpoint)
{
    bool moved = false;
    if (endpoint->posting != NULL) {
        const kvp_batch *batch = endpoint->posting;
        moved = !batch->stopped && post_slice(endpoint);
        if (!endpoint->failed && (batch->stopped || batch->posted == batch->count)) {
            flush(endpoint);
            moved = true;
        }
    }
    while (!endpoint->failed && endpoint->first != NULL && endpoint->first->pending == 0) {
        kvp_batch *batch = endpoint->first;
        bool tells = !batch->stopped && (batch->note_size != 0 || batch->answer != NULL);
        if (batch->stage == BATCH_FLUSHED && tells) {
            notify(batch);
        } else if (batch->stage == BATCH_FLUSHED || batch->stage == BATCH_NOTIFYING) {
            end_batch(batch, batch->stopped ? KVP_CANCELLED : KVP_OK, UCX_OK);
        } else {
            break;
        }
        moved = true;
    }
    return moved;
}
