/* The progress thread: it makes every ucp call of its engine, and sleeps when there is nothing to do.
 *
 * One round takes orders from other threads, lets libucp progress and steps every live endpoint.
 * After `spin_ns` without anything having moved it arms the worker and waits for the library's
 * descriptor, for an order, or for the next deadline or heartbeat.
 */
#define _GNU_SOURCE /* pthread_setname_np */
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "ucx_engine.h"

/* How long close() waits for endpoints to drain before the worker is torn down under them. */
static const uint64_t SHUTDOWN_NS = 2000000000;

/* How far past its time a wake-up is no longer explained by a busy machine. */
static const uint64_t STALL_NS = 100000000;

static void take_batches(kvp_ucx *engine)
{
    kvp_batch *batch = engine->submitted;
    engine->submitted = engine->submitted_last = NULL;
    while (batch != NULL) {
        kvp_batch *next = batch->next;
        /* Live: put() checked that it was open, and a slot finishes a round after it stopped being
         * so, when its last orders have been taken. */
        kvp_batch_queue(batch);
        batch = next;
    }
}

static void take_reads(kvp_ucx *engine)
{
    kvp_read *read = engine->submitted_reads;
    engine->submitted_reads = engine->submitted_reads_last = NULL;
    while (read != NULL) {
        kvp_read *next = read->next;
        kvp_read_queue(read); /* live, as with batches */
        read = next;
    }
}

static bool take_orders(kvp_ucx *engine)
{
    uint64_t orders = atomic_load_explicit(&engine->orders, memory_order_acquire);
    if (orders == engine->orders_seen) {
        return false;
    }
    engine->orders_seen = orders;
    pthread_mutex_lock(&engine->lock);
    for (kvp_endpoint *endpoint = engine->wanted; endpoint != NULL;
         endpoint = endpoint->next_wanted) {
        endpoint->wanted = false;
        if (endpoint->state == SLOT_CONNECTING) {
            endpoint->announced = true;
            engine->live[engine->live_count++] = endpoint;
        }
        endpoint->look = true;
        if (endpoint->leave) {
            kvp_endpoint_fail(endpoint, KVP_CLOSED, UCX_OK);
        }
    }
    engine->wanted = NULL;
    take_batches(engine);
    take_reads(engine);
    engine->leaving = engine->stopping;
    bool listen = engine->listen == LISTEN_WANTED;
    pthread_mutex_unlock(&engine->lock);
    if (listen) {
        ucx_status code = kvp_context_listen(engine);
        pthread_mutex_lock(&engine->lock);
        engine->listen = code == UCX_OK ? LISTEN_DONE : LISTEN_NONE;
        engine->listen_code = code;
        pthread_cond_broadcast(&engine->changed);
        pthread_mutex_unlock(&engine->lock);
    }
    return true;
}

static bool step_all(kvp_ucx *engine)
{
    bool moved = engine->pending_count != 0;
    while (engine->pending_count != 0) {
        kvp_endpoint_accept(engine, engine->pending[--engine->pending_count]);
    }
    engine->due_ns = UINT64_MAX;
    for (size_t i = 0; i < engine->live_count;) {
        kvp_endpoint *endpoint = engine->live[i];
        bool gone;
        moved = kvp_endpoint_step(endpoint, &gone) || moved;
        if (gone) {
            engine->live[i] = engine->live[--engine->live_count];
        } else {
            i++;
        }
    }
    kvp_strangers_look(engine);
    return moved;
}

/* A thread that wakes long after it meant to was stopped or starved, and finds every peer silent for
 * as long. That proves nothing about them. */
static void forgive_silence(kvp_ucx *engine)
{
    if (engine->now_ns > engine->due_ns && engine->now_ns - engine->due_ns >= STALL_NS) {
        for (size_t i = 0; i < engine->live_count; i++) {
            engine->live[i]->heard_ns = engine->now_ns;
        }
    }
}

static int sleep_ms(const kvp_ucx *engine)
{
    if (engine->due_ns == UINT64_MAX) {
        return -1;
    }
    uint64_t left = engine->due_ns > engine->now_ns ? engine->due_ns - engine->now_ns : 0;
    uint64_t ms = left / 1000000 + 1;
    return ms > 60000 ? 60000 : (int)ms;
}

static void rest(kvp_ucx *engine)
{
    if (engine->ucp->worker_arm(engine->worker) != UCX_OK) {
        return; /* something came in: progress first */
    }
    pthread_mutex_lock(&engine->lock);
    engine->sleeping = atomic_load(&engine->orders) == engine->orders_seen;
    bool sleeping = engine->sleeping;
    pthread_mutex_unlock(&engine->lock);
    if (!sleeping) {
        return;
    }
    struct epoll_event ready[2];
    int count = epoll_wait(engine->poll_fd, ready, 2, sleep_ms(engine));
    pthread_mutex_lock(&engine->lock);
    engine->sleeping = false;
    pthread_mutex_unlock(&engine->lock);
    atomic_fetch_add_explicit(&engine->wakeups, 1, memory_order_relaxed);
    for (int i = 0; i < count; i++) {
        if (ready[i].data.fd == engine->wake_fd) {
            uint64_t orders;
            ssize_t got = read(engine->wake_fd, &orders, sizeof(orders));
            (void)got; /* it only wakes; what is wanted stands elsewhere */
        }
    }
}

static kvp_status watch(kvp_ucx *engine)
{
    int worker_fd;
    if (engine->ucp->worker_get_efd(engine->worker, &worker_fd) != UCX_OK) {
        return KVP_SYSTEM;
    }
    struct epoll_event worker_event = {.events = EPOLLIN, .data.fd = worker_fd};
    struct epoll_event wake_event = {.events = EPOLLIN, .data.fd = engine->wake_fd};
    if (epoll_ctl(engine->poll_fd, EPOLL_CTL_ADD, worker_fd, &worker_event) != 0 ||
        epoll_ctl(engine->poll_fd, EPOLL_CTL_ADD, engine->wake_fd, &wake_event) != 0) {
        return KVP_SYSTEM;
    }
    return KVP_OK;
}

static bool start(kvp_ucx *engine)
{
    kvp_status status = kvp_context_open(engine);
    if (status == KVP_OK) {
        status = watch(engine);
    }
    if (status != KVP_OK) {
        kvp_context_close(engine);
    }
    pthread_mutex_lock(&engine->lock);
    engine->start_status = status;
    engine->started = true;
    pthread_cond_broadcast(&engine->changed);
    pthread_mutex_unlock(&engine->lock);
    return status == KVP_OK;
}

static void loop(kvp_ucx *engine)
{
    uint64_t moved_ns = 0, stop_ns = UINT64_MAX;
    engine->due_ns = UINT64_MAX;
    for (;;) {
        engine->now_ns = kvp_now_ns();
        forgive_silence(engine);
        bool moved = take_orders(engine);
        moved = engine->ucp->worker_progress(engine->worker) != 0 || moved;
        moved = step_all(engine) || moved;
        if (engine->leaving) {
            if (stop_ns == UINT64_MAX) {
                stop_ns = engine->now_ns + SHUTDOWN_NS;
            }
            for (size_t i = 0; i < engine->live_count; i++) {
                kvp_endpoint_fail(engine->live[i], KVP_CLOSED, UCX_OK);
            }
            if (engine->live_count == 0 || engine->now_ns >= stop_ns) {
                return;
            }
            continue;
        }
        if (moved) {
            moved_ns = engine->now_ns;
        } else if (engine->now_ns - moved_ns >= engine->config.spin_ns) {
            rest(engine);
        }
    }
}

void *kvp_progress_run(void *arg)
{
    kvp_ucx *engine = arg;
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, NULL);
    pthread_setname_np(pthread_self(), "kvpool-ucx");
    if (start(engine)) {
        loop(engine);
        kvp_context_close(engine);
        kvp_answers_close(engine);
    }
    return NULL;
}
