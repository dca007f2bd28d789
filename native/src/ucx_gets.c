/* Reads as gets: the reader fetches what the owner holds for it, and says when it has. Progress thread
 * only.
 *
 * The owner grants the slots before it answers and until it hears DONE, or this connection has ended on
 * its side. So what is got is what the answer named; what is got after the owner gave the reader up may
 * be a later owner's bytes, and fails its checksum as if it had changed on its way.
 */
#include <string.h>

#include "ucx_engine.h"

static void done_back(void *request, ucx_status code, void *user_data)
{
    kvp_ask *ask = user_data;
    kvp_endpoint *endpoint = ask->endpoint;
    endpoint->requests--;
    endpoint->stirred = true; /* the ask can be used again */
    ask->sending = false;
    if (code != UCX_OK) {
        kvp_endpoint_fail(endpoint, KVP_PEER, code);
    }
    endpoint->engine->ucp->request_free(request);
}

static void end(kvp_ask *ask)
{
    kvp_endpoint *endpoint = ask->endpoint;
    if (ask->good != 0) {
        ask->done = (kvp_wire_done){
            .head = kvp_message_head(endpoint, KVP_WIRE_DONE),
            .number = ask->head.number,
        };
        const ucx_request_param param = {
            .op_attr_mask = UCX_OP_CALLBACK | UCX_OP_USER_DATA | UCX_OP_FLAGS,
            .flags = UCX_AM_SEND_EAGER | UCX_AM_SEND_REPLY,
            .cb = done_back,
            .user_data = ask,
        };
        const void *request = endpoint->engine->ucp->am_send_nbx(
            endpoint->ep, KVP_AM_ID, &ask->done, sizeof(ask->done), NULL, 0, &param);
        if (ucx_is_error(request)) {
            kvp_endpoint_fail(endpoint, KVP_PEER, ucx_error_of(request));
        } else if (request != NULL) {
            endpoint->requests++;
            ask->sending = true;
        }
    }
    kvp_ask_ended(ask);
}

static void get_back(void *request, ucx_status code, void *user_data)
{
    kvp_ask *ask = user_data;
    kvp_endpoint *endpoint = ask->endpoint;
    endpoint->requests--;
    ask->getting--;
    if (code != UCX_OK) {
        kvp_endpoint_fail(endpoint, KVP_PEER, code);
    }
    endpoint->stirred = true; /* a callback sends nothing: the next step says DONE */
    endpoint->engine->ucp->request_free(request);
}

static void get(kvp_ask *ask)
{
    kvp_endpoint *endpoint = ask->endpoint;
    kvp_ucx *engine = endpoint->engine;
    const kvp_remote_region *region = &endpoint->remote[ask->head.region];
    uintptr_t window = engine->config.inbox + endpoint->index * engine->config.inbox_part +
                       ask->head.at;
    const ucx_request_param param = {
        .op_attr_mask = UCX_OP_CALLBACK | UCX_OP_USER_DATA,
        .cb = get_back,
        .user_data = ask,
    };
    for (size_t i = 0; i < ask->good; i++) {
        const kvp_wire_item *item = &ask->items[i];
        uint64_t from = region->base + item->slot * region->stride + item->offset;
        const void *request = engine->ucp->get_nbx(endpoint->ep, (void *)window, item->size, from,
                                                   region->rkey, &param);
        if (ucx_is_error(request)) {
            kvp_endpoint_fail(endpoint, KVP_PEER, ucx_error_of(request));
            return;
        }
        if (request != NULL) {
            endpoint->requests++;
            ask->getting++;
        }
        window += item->size;
        atomic_fetch_add_explicit(&engine->gets, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&engine->get_bytes, item->size, memory_order_relaxed);
    }
}

static void start(kvp_ask *ask)
{
    kvp_endpoint *endpoint = ask->endpoint;
    if (ask->good != 0 && endpoint->remote[ask->head.region].rkey == NULL) {
        kvp_endpoint_fail(endpoint, KVP_INVALID, UCX_OK); /* an answer before its region */
        return;
    }
    if (ask->read != NULL) {
        get(ask);
    }
}

void kvp_gets_step(kvp_endpoint *endpoint)
{
    for (size_t i = 0; i < KVP_ASKS_MAX && !endpoint->failed; i++) {
        kvp_ask *ask = &endpoint->asks[i];
        if (ask->stage == ASK_GETTING && !ask->begun) {
            ask->begun = true;
            start(ask);
        }
        if (ask->stage == ASK_GETTING && ask->getting == 0 && !ask->sending && !endpoint->failed) {
            end(ask);
        }
    }
}

void kvp_gets_region(kvp_endpoint *endpoint, const void *header, size_t header_size,
                     const void *rkey, size_t rkey_size)
{
    kvp_wire_region told;
    if (endpoint->state != SLOT_OPEN || header_size != sizeof(told) || rkey_size == 0 ||
        rkey_size > KVP_RKEY_BYTES_MAX) {
        kvp_endpoint_fail(endpoint, KVP_INVALID, UCX_OK);
        return;
    }
    memcpy(&told, header, sizeof(told));
    if (told.crc != kvp_region_crc(&told, rkey, rkey_size) || told.number >= KVP_REGIONS_MAX ||
        endpoint->remote[told.number].rkey != NULL) {
        kvp_endpoint_fail(endpoint, KVP_INVALID, UCX_OK);
        return;
    }
    kvp_remote_region *region = &endpoint->remote[told.number];
    ucx_status code = endpoint->engine->ucp->ep_rkey_unpack(endpoint->ep, rkey, &region->rkey);
    if (code != UCX_OK) {
        region->rkey = NULL;
        kvp_endpoint_fail(endpoint, KVP_INVALID, code);
        return;
    }
    region->base = told.base;
    region->stride = told.stride;
}

void kvp_gets_close(kvp_endpoint *endpoint)
{
    for (size_t i = 0; i < KVP_REGIONS_MAX; i++) {
        if (endpoint->remote[i].rkey != NULL) {
            endpoint->engine->ucp->rkey_destroy(endpoint->remote[i].rkey);
            endpoint->remote[i].rkey = NULL;
        }
    }
}
