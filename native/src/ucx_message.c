/* What two engines say to each other: hellos, notes, beats. Progress thread only.
 *
 * The connecting side says hello first. The accepting side judges it, opens, and answers; the answer
 * opens the connecting side, inside the callback, because a note may follow in the same breath.
 */
#include <string.h>

#include "ucx_engine.h"

static const uint8_t ANYBODY[KVP_INCARNATION_BYTES];

/* ---- messages out ----------------------------------------------------------------------------- */

kvp_wire_head kvp_message_head(kvp_endpoint *endpoint, uint16_t kind)
{
    endpoint->credit_sent = atomic_load(&endpoint->notes_taken);
    return (kvp_wire_head){
        .magic = KVP_WIRE_MAGIC,
        .version = KVP_WIRE_VERSION,
        .kind = kind,
        .to = endpoint->peer_id,
        .credit = endpoint->credit_sent,
    };
}

static void message_back(void *request, ucx_status code, void *user_data)
{
    kvp_endpoint *endpoint = user_data;
    endpoint->requests--;
    endpoint->beat_busy = false;
    if (code != UCX_OK) {
        kvp_endpoint_fail(endpoint, KVP_PEER, code);
    }
    endpoint->engine->ucp->request_free(request);
}

static void post(kvp_endpoint *endpoint, const void *head, size_t head_size, const void *data,
                 size_t size)
{
    const ucx_request_param param = {
        .op_attr_mask = UCX_OP_CALLBACK | UCX_OP_USER_DATA | UCX_OP_FLAGS,
        .flags = UCX_AM_SEND_EAGER | UCX_AM_SEND_REPLY,
        .cb = message_back,
        .user_data = endpoint,
    };
    const void *request = endpoint->engine->ucp->am_send_nbx(endpoint->ep, KVP_AM_ID, head,
                                                             head_size, data, size, &param);
    if (ucx_is_error(request)) {
        kvp_endpoint_fail(endpoint, KVP_PEER, ucx_error_of(request));
    } else if (request != NULL) {
        endpoint->requests++;
        endpoint->beat_busy = true;
    }
}

void kvp_message_hello(kvp_endpoint *endpoint, kvp_status refusal)
{
    kvp_ucx *engine = endpoint->engine;
    const kvp_registered *part = &engine->parts[endpoint->index];
    kvp_wire_hello *hello = &endpoint->hello_out;
    *hello = (kvp_wire_hello){
        .head = kvp_message_head(endpoint, KVP_WIRE_HELLO),
        .ucx_major = (uint16_t)engine->ucp->major,
        .ucx_minor = (uint16_t)engine->ucp->minor,
        .ucx_release = (uint16_t)engine->ucp->release,
        .refusal = (uint16_t)refusal,
        .from = (uint32_t)endpoint->index + 1,
        .note_window = KVP_NOTE_WINDOW,
        .beat_ms = (uint32_t)(engine->config.heartbeat_interval_ns / 1000000),
    };
    memcpy(hello->incarnation, engine->incarnation, KVP_INCARNATION_BYTES);
    memcpy(hello->expected, endpoint->expected, KVP_INCARNATION_BYTES);
    bool welcome = refusal == KVP_OK && part->rkey != NULL;
    if (welcome) {
        hello->inbox = engine->config.inbox + endpoint->index * engine->config.inbox_part;
        hello->inbox_bytes = engine->config.inbox_part - engine->config.trial_bytes;
        hello->trial_bytes = (uint32_t)engine->config.trial_bytes;
    }
    post(endpoint, hello, sizeof(*hello), part->rkey, welcome ? part->rkey_size : 0);
}

void kvp_message_region(kvp_endpoint *endpoint, uint32_t number, kvp_wire_region *out)
{
    const kvp_region *region = &endpoint->engine->regions[number];
    *out = (kvp_wire_region){
        .head = kvp_message_head(endpoint, KVP_WIRE_REGION),
        .number = number,
        .base = region->base,
        .stride = region->stride,
    };
    out->crc = kvp_region_crc(out, region->whole.rkey, region->whole.rkey_size);
    post(endpoint, out, sizeof(*out), region->whole.rkey, region->whole.rkey_size);
}

void kvp_message_beat(kvp_endpoint *endpoint)
{
    endpoint->beat = kvp_message_head(endpoint, KVP_WIRE_BEAT);
    endpoint->beat_ns = endpoint->engine->now_ns;
    post(endpoint, &endpoint->beat, sizeof(endpoint->beat), NULL, 0);
}

/* ---- greeting --------------------------------------------------------------------------------- */

static kvp_status judge(const kvp_endpoint *endpoint)
{
    const kvp_ucp *ucp = endpoint->engine->ucp;
    const kvp_wire_hello *hello = &endpoint->hello_in;
    if (hello->refusal != 0) {
        return hello->refusal == KVP_STALE ? KVP_STALE : KVP_INVALID;
    }
    /* Two versions cannot read each other's remote keys, or fall back to copying puts in software:
     * found between 1.13, 1.18 and 1.22. */
    bool same = hello->ucx_major == ucp->major && hello->ucx_minor == ucp->minor;
    if (!same || hello->from == 0 || hello->note_window == 0 ||
        hello->inbox + hello->inbox_bytes < hello->inbox ||
        hello->trial_bytes > UINT64_MAX - hello->inbox - hello->inbox_bytes ||
        (hello->inbox_bytes != 0) != (endpoint->peer_rkey_size != 0)) {
        return KVP_INVALID;
    }
    const uint8_t *wanted = endpoint->accepted ? hello->expected : endpoint->expected;
    const uint8_t *found = endpoint->accepted ? endpoint->engine->incarnation : hello->incarnation;
    if (memcmp(wanted, ANYBODY, KVP_INCARNATION_BYTES) != 0 &&
        memcmp(wanted, found, KVP_INCARNATION_BYTES) != 0) {
        return KVP_STALE;
    }
    return KVP_OK;
}

static void find_lanes(kvp_endpoint *endpoint, char *text, size_t size)
{
    ucx_lane lanes[KVP_LANES_MAX];
    ucx_ep_attr attr = {
        .field_mask = UCX_EP_ATTR_TRANSPORTS,
        .lanes = {lanes, KVP_LANES_MAX, sizeof(lanes[0])},
    };
    text[0] = '\0';
    if (endpoint->engine->ucp->ep_query(endpoint->ep, &attr) != UCX_OK) {
        return;
    }
    size_t used = 0;
    for (unsigned i = 0; i < attr.lanes.count && i < KVP_LANES_MAX && used < size; i++) {
        if (lanes[i].device[0] == '\0') {
            continue; /* the lane that only makes the connection */
        }
        int more = snprintf(text + used, size - used, "%s%s/%s", used == 0 ? "" : " ",
                            lanes[i].transport, lanes[i].device);
        used += more > 0 ? (size_t)more : size;
    }
}

/* Lanes over which libucp reads another process's memory by itself: reliable RDMA, and what maps or
 * copies memory between processes of one host. Over others it has the peer send what a get names, and
 * ends the peer's process if the connection fails meanwhile (docs/decisions/0003-ucx.md, 15). */
static bool can_get(const char *lanes)
{
    static const char *const READERS[] = {"rc", "dc", "gga", "xpmem", "cma", "knem"};
    for (const char *lane = lanes; *lane != '\0'; lane += strcspn(lane, " ")) {
        lane += strspn(lane, " ");
        for (size_t i = 0; i < sizeof(READERS) / sizeof(READERS[0]); i++) {
            size_t size = strlen(READERS[i]);
            if (strncmp(lane, READERS[i], size) == 0 && strchr("_/", lane[size]) != NULL &&
                lane[size] != '\0') {
                return true;
            }
        }
    }
    return false;
}

static void open_endpoint(kvp_endpoint *endpoint)
{
    kvp_ucx *engine = endpoint->engine;
    const kvp_wire_hello *hello = &endpoint->hello_in;
    if (hello->inbox_bytes != 0) {
        ucx_status code =
            engine->ucp->ep_rkey_unpack(endpoint->ep, endpoint->peer_rkey, &endpoint->rkey);
        if (code != UCX_OK) {
            endpoint->rkey = NULL;
            kvp_endpoint_fail(endpoint, KVP_INVALID, code);
            return;
        }
    }
    endpoint->peer_inbox = hello->inbox;
    kvp_batch_trial(endpoint);
    endpoint->announced = true;
    endpoint->silence_max_ns = UINT64_MAX;
    if (hello->beat_ms != 0) {
        uint64_t three_beats = (uint64_t)hello->beat_ms * 3000000;
        uint64_t own = engine->config.heartbeat_timeout_ns;
        endpoint->silence_max_ns = own > three_beats ? own : three_beats;
    }
    endpoint->heard_ns = endpoint->beat_ns = engine->now_ns;
    kvp_ucx_event event = {
        .kind = KVP_UCX_OPENED,
        .accepted = endpoint->accepted,
        .endpoint = kvp_endpoint_id(endpoint),
        .inbox_offset = endpoint->index * engine->config.inbox_part,
        .peer_inbox_bytes = hello->inbox_bytes,
    };
    memcpy(event.peer, hello->incarnation, KVP_INCARNATION_BYTES);
    kvp_sockets_unpace(engine->ucp, engine->worker);
    char lanes[KVP_LANES_TEXT_MAX];
    find_lanes(endpoint, lanes, sizeof(lanes));
    endpoint->may_get = engine->config.read_mode == KVP_UCX_READ_GET || can_get(lanes);
    endpoint->gets = engine->config.read_mode != KVP_UCX_READ_PUT && endpoint->may_get;
    pthread_mutex_lock(&engine->lock);
    memcpy(endpoint->lanes, lanes, sizeof(lanes));
    endpoint->state = SLOT_OPEN;
    endpoint->peer_inbox_bytes = hello->inbox_bytes;
    endpoint->note_window = hello->note_window;
    kvp_event_push(engine, &event);
    pthread_mutex_unlock(&engine->lock);
}

void kvp_message_greet(kvp_endpoint *endpoint)
{
    endpoint->peer_id = endpoint->hello_in.from;
    kvp_status verdict = judge(endpoint);
    if (verdict != KVP_OK) {
        if (endpoint->accepted) {
            /* The peer reads why and goes; the greeting's deadline bounds the wait for that. */
            kvp_endpoint_set_state(endpoint, SLOT_REFUSED);
            kvp_message_hello(endpoint, verdict);
        } else {
            kvp_endpoint_fail(endpoint, verdict, UCX_OK);
        }
        return;
    }
    /* Our reader hears of the connection before the peer learns where to put. */
    open_endpoint(endpoint);
    if (endpoint->accepted && !endpoint->failed) {
        kvp_message_hello(endpoint, KVP_OK);
    }
}

/* ---- messages in ------------------------------------------------------------------------------ */

static kvp_endpoint *find(kvp_ucx *engine, uint32_t to, const ucx_am_recv_param *param)
{
    if ((param->recv_attr & UCX_AM_RECV_REPLY_EP) == 0) {
        return NULL;
    }
    for (size_t i = 0; i < engine->live_count; i++) {
        kvp_endpoint *endpoint = engine->live[i];
        if (endpoint->ep == param->reply_ep && (to == 0 || endpoint->index + 1 == to)) {
            return endpoint;
        }
    }
    return NULL;
}

static void take_hello(kvp_endpoint *endpoint, const void *header, size_t header_size,
                       const void *data, size_t size)
{
    if (endpoint->hello_came || endpoint->state != SLOT_GREETING ||
        header_size != sizeof(kvp_wire_hello) || size > KVP_RKEY_BYTES_MAX) {
        kvp_endpoint_fail(endpoint, KVP_INVALID, UCX_OK);
        return;
    }
    memcpy(&endpoint->hello_in, header, header_size);
    if (size != 0) {
        memcpy(endpoint->peer_rkey, data, size);
    }
    endpoint->peer_rkey_size = size;
    endpoint->hello_came = true;
    if (!endpoint->accepted) {
        kvp_message_greet(endpoint);
    }
}

static void take_note(kvp_endpoint *endpoint, const void *data, size_t size)
{
    kvp_ucx *engine = endpoint->engine;
    uint64_t waiting = endpoint->notes_arrived - atomic_load(&endpoint->notes_taken);
    if (endpoint->state != SLOT_OPEN || size == 0 || size > KVP_NOTE_BYTES_MAX ||
        waiting >= KVP_NOTE_WINDOW) {
        kvp_endpoint_fail(endpoint, KVP_INVALID, UCX_OK);
        return;
    }
    kvp_ucx_event event = {
        .kind = KVP_UCX_ARRIVED,
        .endpoint = kvp_endpoint_id(endpoint),
        .note_size = size,
    };
    memcpy(event.note, data, size);
    endpoint->notes_arrived++;
    pthread_mutex_lock(&engine->lock);
    kvp_event_push(engine, &event);
    pthread_mutex_unlock(&engine->lock);
}

static void take_credit(kvp_endpoint *endpoint, uint64_t credit)
{
    kvp_ucx *engine = endpoint->engine;
    pthread_mutex_lock(&engine->lock);
    bool sound = credit >= endpoint->notes_credited && credit <= endpoint->notes_submitted;
    if (sound) {
        endpoint->notes_credited = credit;
    }
    pthread_mutex_unlock(&engine->lock);
    if (!sound) {
        kvp_endpoint_fail(endpoint, KVP_INVALID, UCX_OK);
    }
}

static void take_answer(kvp_endpoint *endpoint, const void *header, size_t header_size,
                        const void *data, size_t size)
{
    kvp_wire_answer answer;
    if (endpoint->state != SLOT_OPEN || header_size != sizeof(answer)) {
        kvp_endpoint_fail(endpoint, KVP_INVALID, UCX_OK);
        return;
    }
    memcpy(&answer, header, sizeof(answer));
    kvp_read_answered(endpoint, &answer, data, size);
}

static void take_done(kvp_endpoint *endpoint, const void *header, size_t header_size)
{
    kvp_wire_done done;
    if (header_size != sizeof(done)) {
        kvp_endpoint_fail(endpoint, KVP_INVALID, UCX_OK);
        return;
    }
    memcpy(&done, header, sizeof(done));
    kvp_answer_done(endpoint, done.number);
}

ucx_status kvp_message_take(void *arg, const void *header, size_t header_size, void *data,
                              size_t size, const ucx_am_recv_param *param)
{
    kvp_wire_head head = {0};
    if (header_size >= sizeof(head)) {
        memcpy(&head, header, sizeof(head));
    }
    kvp_endpoint *endpoint = find(arg, head.to, param);
    if (endpoint == NULL || endpoint->state == SLOT_CLOSING) {
        return UCX_OK;
    }
    endpoint->heard_ns = endpoint->engine->now_ns;
    if (head.magic != KVP_WIRE_MAGIC || head.version != KVP_WIRE_VERSION ||
        (param->recv_attr & UCX_AM_RECV_RNDV) != 0) {
        kvp_endpoint_fail(endpoint, KVP_INVALID, UCX_OK);
        return UCX_OK;
    }
    take_credit(endpoint, head.credit);
    if (head.kind == KVP_WIRE_HELLO) {
        take_hello(endpoint, header, header_size, data, size);
    } else if (head.kind == KVP_WIRE_NOTE) {
        take_note(endpoint, data, size);
    } else if (head.kind == KVP_WIRE_ASK || head.kind == KVP_WIRE_HOLD) {
        kvp_answer_start(endpoint, header, header_size, data, size);
    } else if (head.kind == KVP_WIRE_ANSWER) {
        take_answer(endpoint, header, header_size, data, size);
    } else if (head.kind == KVP_WIRE_REGION) {
        kvp_gets_region(endpoint, header, header_size, data, size);
    } else if (head.kind == KVP_WIRE_DONE) {
        take_done(endpoint, header, header_size);
    } else if (head.kind != KVP_WIRE_BEAT) {
        kvp_endpoint_fail(endpoint, KVP_INVALID, UCX_OK);
    }
    return UCX_OK;
}
