/* ucx_endpoint.c: an endpoint that is being closed is libucp's to free, and nothing is asked of it. */
#include "../src/ucx_endpoint.c"

#include "check.h"

static kvp_ucx engine;
static kvp_endpoint endpoint, *live[1] = {&endpoint};
static size_t closes, questions;
static ucx_send_cb closed;
static void *closed_of;

/* Under way when this returns, as the close of an endpoint with work in flight is. */
static void *take_close_call(ucx_ep *ep, const ucx_request_param *param)
{
    CHECK(ep != NULL && (param->flags & UCX_EP_CLOSE_FORCE) != 0);
    closes++;
    closed = param->cb;
    closed_of = param->user_data;
    return &engine;
}

static ucx_status take_question(ucx_ep *ep, ucx_ep_attr *attr)
{
    CHECK(ep == (ucx_ep *)&endpoint);
    attr->remote.ss_family = AF_UNSPEC;
    questions++;
    return UCX_OK;
}

static void free_request(void *request)
{
    CHECK(request == &engine);
}

static void look_for_strangers(void)
{
    engine.now_ns += engine.config.look_ns;
    kvp_strangers_look(&engine);
}

int main(void)
{
    kvp_ucp ucp = {
        .ep_close_nbx = take_close_call,
        .ep_query = take_question,
        .request_free = free_request,
    };
    engine.ucp = &ucp;
    engine.config.look_ns = 1000000000;
    engine.listener = (ucx_listener *)&engine;
    engine.live = live;
    engine.live_count = 1;
    pthread_mutex_init(&engine.lock, NULL);
    endpoint.engine = &engine;
    endpoint.accepted = true;
    endpoint.state = SLOT_GREETING;
    endpoint.greeting_deadline_ns = UINT64_MAX;
    endpoint.ep = (ucx_ep *)&endpoint;
    look_for_strangers();
    CHECK(questions == 1);

    kvp_endpoint_fail(&endpoint, KVP_PEER, UCX_OK);
    bool gone = true;
    CHECK(kvp_endpoint_step(&endpoint, &gone) && !gone);
    CHECK(endpoint.state == SLOT_CLOSING && closes == 1);
    look_for_strangers();
    CHECK(questions == 1);
    /* A new connection may have its name in libucp: what comes to that is not for this one. */
    CHECK(endpoint.ep == NULL);
    CHECK(!kvp_endpoint_step(&endpoint, &gone) && !gone && closes == 1);
    closed(&engine, UCX_OK, closed_of);
    CHECK(endpoint.closed);
    return 0;
}
