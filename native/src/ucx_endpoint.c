/* One connection: its beginning, heartbeat and end. Progress thread only.
 *
 * CONNECTING or accepted -> GREETING -> OPEN -> CLOSING -> CLOSED. Callbacks of libucp note what
 * happened (`failed`, `hello_came`), and the step acts on it.
 * A slot is CLOSED only when the force close has completed and the library holds no request of it:
 * then nothing reads its local buffers and nobody writes into its part of the inbox.
 */
#include <string.h>

#include "ucx_engine.h"

/* How long an accepted connection may stay silent before its hello. */
static const uint64_t GREETING_NS = 5000000000;

void kvp_endpoint_set_state(kvp_endpoint *endpoint, kvp_slot_state state)
{
    pthread_mutex_lock(&endpoint->engine->lock);
    endpoint->state = state;
    pthread_mutex_unlock(&endpoint->engine->lock);
}

void kvp_endpoint_fail(kvp_endpoint *endpoint, kvp_status reason, ucx_status code)
{
    if (!endpoint->failed) {
        endpoint->failed = true;
        endpoint->reason = reason;
        endpoint->code = code;
    }
}

static void take_error(void *arg, ucx_ep *ep, ucx_status code)
{
    (void)ep;
    kvp_endpoint_fail(arg, KVP_PEER, code);
}

/* ---- the beginning ----------------------------------------------------------------------------- */

static void create(kvp_endpoint *endpoint, ucx_conn_request *request)
{
    kvp_ucx *engine = endpoint->engine;
    ucx_ep_params params = {
        .field_mask = UCX_EP_ERR_MODE | UCX_EP_ERR_HANDLER,
        .err_mode = UCX_ERR_MODE_PEER,
        .err_handler = {take_error, endpoint},
    };
    if (request != NULL) {
        params.field_mask |= UCX_EP_CONN_REQUEST;
        params.conn_request = request;
    } else {
        params.field_mask |= UCX_EP_FLAGS | UCX_EP_SOCK_ADDR;
        params.flags = UCX_EP_CLIENT_SERVER;
        params.sockaddr = (ucx_sock_addr){(const struct sockaddr *)&endpoint->address,
                                          endpoint->address_size};
    }
    ucx_status code = engine->ucp->ep_create(engine->worker, &params, &endpoint->ep);
    if (code != UCX_OK) {
        endpoint->ep = NULL;
        kvp_endpoint_fail(endpoint, KVP_PEER, code);
    }
}

void kvp_endpoint_accept(kvp_ucx *engine, ucx_conn_request *request)
{
    pthread_mutex_lock(&engine->lock);
    kvp_endpoint *endpoint = kvp_slot_take(engine, SLOT_GREETING);
    pthread_mutex_unlock(&engine->lock);
    if (endpoint == NULL) {
        engine->ucp->listener_reject(engine->listener, request);
        return;
    }
    endpoint->accepted = true;
    endpoint->greeting_deadline_ns = engine->now_ns + GREETING_NS;
    engine->live[engine->live_count++] = endpoint;
    create(endpoint, request);
}

/* ---- the end ---------------------------------------------------------------------------------- */

static void take_close(void *request, ucx_status code, void *user_data)
{
    (void)code;
    kvp_endpoint *endpoint = user_data;
    endpoint->closed = true;
    endpoint->engine->ucp->request_free(request);
}

static void start_close(kvp_endpoint *endpoint)
{
    kvp_endpoint_set_state(endpoint, SLOT_CLOSING);
    if (endpoint->ep == NULL) {
        endpoint->closed = true;
        return;
    }
    const ucx_request_param param = {
        .op_attr_mask = UCX_OP_CALLBACK | UCX_OP_USER_DATA | UCX_OP_FLAGS,
        .flags = UCX_EP_CLOSE_FORCE,
        .cb = take_close,
        .user_data = endpoint,
    };
    const void *request = endpoint->engine->ucp->ep_close_nbx(endpoint->ep, &param);
    /* From here libucp may free it, and name another connection's so: who still asked it who its peer is
     * (ucx_strangers.c) ended the process, after hundreds of killed peers. */
    endpoint->ep = NULL;
    endpoint->closed = request == NULL || ucx_is_error(request);
}

static void finish(kvp_endpoint *endpoint)
{
    kvp_ucx *engine = endpoint->engine;
    kvp_batch_end_all(endpoint, endpoint->reason, endpoint->code);
    kvp_reads_end_all(endpoint, endpoint->reason, endpoint->code);
    kvp_answers_end_all(endpoint);
    kvp_gets_close(endpoint);
    if (endpoint->rkey != NULL) {
        engine->ucp->rkey_destroy(endpoint->rkey);
    }
    kvp_ucx_event event = {
        .kind = KVP_UCX_CLOSED,
        .status = endpoint->reason,
        .ucx_code = endpoint->code,
        .endpoint = kvp_endpoint_id(endpoint),
    };
    if (endpoint->hello_came) {
        memcpy(event.peer, endpoint->hello_in.incarnation, KVP_INCARNATION_BYTES);
    }
    pthread_mutex_lock(&engine->lock);
    /* From here the slot may be given to another connection. */
    endpoint->state = SLOT_CLOSED;
    if (endpoint->announced) {
        kvp_event_push(engine, &event);
    } else {
        kvp_slot_give(endpoint);
    }
    pthread_mutex_unlock(&engine->lock);
}

/* ---- the step --------------------------------------------------------------------------------- */

static void wake_at(kvp_ucx *engine, uint64_t at_ns)
{
    if (at_ns < engine->due_ns) {
        engine->due_ns = at_ns;
    }
}

static bool beat(kvp_endpoint *endpoint)
{
    const kvp_ucx *engine = endpoint->engine;
    uint64_t interval = engine->config.heartbeat_interval_ns;
    uint64_t owed = atomic_load(&endpoint->notes_taken) - endpoint->credit_sent;
    bool late = interval != 0 && engine->now_ns - endpoint->beat_ns >= interval;
    if (!endpoint->beat_busy && (late || owed >= KVP_NOTE_WINDOW / 2)) {
        kvp_message_beat(endpoint);
        return true;
    }
    return false;
}

static bool step_open(kvp_endpoint *endpoint)
{
    kvp_ucx *engine = endpoint->engine;
    if (engine->now_ns >= endpoint->next_deadline_ns) {
        kvp_endpoint_fail(endpoint, KVP_TIMEOUT, UCX_OK);
        return true;
    }
    uint64_t done_due_ns = kvp_answers_due(endpoint);
    if (engine->now_ns >= done_due_ns) {
        kvp_endpoint_fail(endpoint, KVP_TIMEOUT, UCX_OK); /* its slots cannot wait for ever */
        return true;
    }
    wake_at(engine, done_due_ns);
    wake_at(engine, endpoint->next_deadline_ns);
    wake_at(engine, endpoint->read_deadline_ns);
    if (engine->now_ns - endpoint->heard_ns >= endpoint->silence_max_ns) {
        kvp_endpoint_fail(endpoint, KVP_TIMEOUT, UCX_OK);
        return true;
    }
    if (endpoint->silence_max_ns != UINT64_MAX) {
        wake_at(engine, endpoint->heard_ns + endpoint->silence_max_ns);
    }
    if (engine->config.heartbeat_interval_ns != 0) {
        wake_at(engine, endpoint->beat_ns + engine->config.heartbeat_interval_ns);
    }
    if (endpoint->look) {
        kvp_batch_look(endpoint);
    }
    bool moved = beat(endpoint);
    moved = kvp_reads_step(endpoint) || moved;
    return kvp_batch_step(endpoint) || moved;
}

bool kvp_endpoint_step(kvp_endpoint *endpoint, bool *gone)
{
    kvp_ucx *engine = endpoint->engine;
    *gone = false;
    if (endpoint->state == SLOT_CLOSING) {
        if (endpoint->closed && endpoint->requests == 0) {
            *gone = true;
            finish(endpoint);
            return true;
        }
        return false;
    }
    if (endpoint->state == SLOT_CONNECTING && !endpoint->failed) {
        kvp_endpoint_set_state(endpoint, SLOT_GREETING);
        create(endpoint, NULL);
        if (!endpoint->failed) {
            kvp_message_hello(endpoint, KVP_OK);
        }
        return true;
    }
    bool moved = false;
    if (endpoint->state == SLOT_OPEN && !endpoint->failed) {
        moved = step_open(endpoint);
    } else if (endpoint->state == SLOT_GREETING && endpoint->hello_came && !endpoint->failed) {
        kvp_message_greet(endpoint);
        moved = true;
    }
    if (endpoint->state != SLOT_OPEN) {
        if (engine->now_ns >= endpoint->greeting_deadline_ns) {
            kvp_endpoint_fail(endpoint, KVP_TIMEOUT, UCX_OK);
        }
        wake_at(engine, endpoint->greeting_deadline_ns);
    }
    if (endpoint->failed) {
        start_close(endpoint);
        return true;
    }
    return moved;
}
