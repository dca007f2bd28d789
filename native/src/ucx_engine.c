/* The engine itself: made, taken apart, its slots, and its ring of events. Never calls libucp. */
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "ucx_engine.h"

enum { ENDPOINTS_MAX = 4096, BATCHES_MAX = 65536, READS_MAX = 65536, HELPERS_MAX = 64 };

/* Windows begin on a line of the cache. No ask names more than 32 bits can say. */
static const size_t WINDOW_ALIGNMENT = 64, WINDOW_BYTES_MAX = 1 << 30;

static const uint64_t HEARTBEAT_MAX_NS = 3600000000000;

uint64_t kvp_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* ---- with the lock held ----------------------------------------------------------------------- */

void kvp_order(kvp_ucx *engine)
{
    atomic_fetch_add_explicit(&engine->orders, 1, memory_order_release);
    if (engine->sleeping) {
        uint64_t one = 1;
        ssize_t put = write(engine->wake_fd, &one, sizeof(one));
        (void)put; /* it fails only when the counter is full, and then the thread wakes anyway */
        engine->sleeping = false;
    }
}

void kvp_order_slot(kvp_endpoint *endpoint)
{
    kvp_ucx *engine = endpoint->engine;
    if (!endpoint->wanted) {
        endpoint->wanted = true;
        endpoint->next_wanted = engine->wanted;
        engine->wanted = endpoint;
    }
    kvp_order(engine);
}

kvp_endpoint *kvp_slot_take(kvp_ucx *engine, kvp_slot_state state)
{
    for (size_t i = 0; i < engine->config.endpoint_max; i++) {
        kvp_endpoint *endpoint = &engine->endpoints[i];
        if (endpoint->state == SLOT_FREE) {
            /* What outlives a connection: the generation, and a place in the list of orders. */
            uint32_t generation = endpoint->generation;
            bool wanted = endpoint->wanted;
            kvp_endpoint *next_wanted = endpoint->next_wanted;
            memset(endpoint, 0, sizeof(*endpoint));
            endpoint->engine = engine;
            endpoint->index = i;
            endpoint->generation = generation;
            endpoint->wanted = wanted;
            endpoint->next_wanted = next_wanted;
            endpoint->state = state;
            endpoint->next_deadline_ns = UINT64_MAX;
            endpoint->read_deadline_ns = UINT64_MAX;
            endpoint->asks = &engine->asks[i * KVP_ASKS_MAX];
            endpoint->answers = &engine->answers[i * KVP_ASKS_MAX];
            endpoint->windows_free = KVP_ASKS_MAX;
            engine->slots_used++;
            return endpoint;
        }
    }
    return NULL;
}

void kvp_slot_give(kvp_endpoint *endpoint)
{
    endpoint->state = SLOT_FREE;
    endpoint->generation++;
    endpoint->engine->slots_used--;
}

void kvp_event_push(kvp_ucx *engine, const kvp_ucx_event *event)
{
    /* Always room: the ring holds an event a batch and a read, and OPENED, CLOSED and a window of notes an
     * endpoint slot. An empty one begins anew, so that few events touch few pages: going on round it
     * took 6 KiB of memory for each connection, until all 15 MiB had been touched. */
    if (engine->event_count == 0) {
        engine->event_head = 0;
    }
    size_t at = (engine->event_head + engine->event_count) % engine->event_capacity;
    engine->events[at] = *event;
    engine->event_count++;
    pthread_cond_broadcast(&engine->changed);
}

/* ---- open and close --------------------------------------------------------------------------- */

static bool sound(const kvp_ucx_config *config)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    bool inbox = config->inbox == 0 ? config->inbox_part == 0
                                    : config->inbox % page == 0 && config->inbox_part != 0 &&
                                          config->inbox_part % page == 0;
    /* Sent to the peer in milliseconds, 32 bits. */
    uint64_t interval = config->heartbeat_interval_ns;
    bool heart = interval == 0 || (interval >= 1000000 && interval <= HEARTBEAT_MAX_NS &&
                                   config->heartbeat_timeout_ns / 3 >= interval);
    bool counts = config->endpoint_max >= 1 && config->endpoint_max <= ENDPOINTS_MAX &&
                  config->batch_max >= 1 && config->batch_max <= BATCHES_MAX &&
                  config->read_max <= READS_MAX && config->copy_helpers <= HELPERS_MAX;
    bool tls = config->tls == NULL || strlen(config->tls) < KVP_TLS_TEXT_MAX;
    bool trial = config->trial_bytes == 0 || config->trial_bytes < config->inbox_part;
    return inbox && trial && heart && counts && tls && config->read_mode <= KVP_UCX_READ_GET &&
           config->look_ns >= 1000000;
}

static void free_engine(kvp_ucx *engine)
{
    if (engine->wake_fd >= 0) {
        close(engine->wake_fd);
    }
    if (engine->poll_fd >= 0) {
        close(engine->poll_fd);
    }
    pthread_cond_destroy(&engine->changed);
    pthread_mutex_destroy(&engine->lock);
    kvp_crew_close(engine->crew);
    free(engine->slot_crcs);
    free(engine->answers);
    free(engine->asks);
    free(engine->reads);
    free(engine->events);
    free(engine->batches);
    free(engine->live);
    free(engine->endpoints);
    free(engine->parts);
    free(engine);
}

static kvp_ucx *make_engine(const kvp_ucx_config *config)
{
    kvp_ucx *engine = calloc(1, sizeof(*engine));
    if (engine == NULL) {
        return NULL;
    }
    engine->config = *config;
    engine->config.library = engine->config.host = NULL;
    engine->config.incarnation = NULL;
    engine->config.tls = NULL;
    memcpy(engine->incarnation, config->incarnation, KVP_INCARNATION_BYTES);
    engine->pid = getpid();
    pthread_mutex_init(&engine->lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&engine->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    engine->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    engine->poll_fd = epoll_create1(EPOLL_CLOEXEC);
    engine->event_capacity = config->batch_max + config->read_max +
                             config->endpoint_max * (KVP_NOTE_WINDOW + 2);
    engine->events = calloc(engine->event_capacity, sizeof(*engine->events));
    engine->batches = calloc(config->batch_max, sizeof(*engine->batches));
    engine->endpoints = calloc(config->endpoint_max, sizeof(*engine->endpoints));
    engine->live = calloc(config->endpoint_max, sizeof(*engine->live));
    engine->parts = calloc(config->endpoint_max, sizeof(*engine->parts));
    /* Touched page by page as connections use them. */
    engine->asks = calloc(config->endpoint_max * KVP_ASKS_MAX, sizeof(*engine->asks));
    engine->answers = calloc(config->endpoint_max * KVP_ASKS_MAX, sizeof(*engine->answers));
    engine->slot_crcs = calloc(KVP_REGION_CRCS, sizeof(*engine->slot_crcs));
    engine->reads = calloc(config->read_max + 1, sizeof(*engine->reads));
    if (engine->wake_fd < 0 || engine->poll_fd < 0 || engine->events == NULL ||
        engine->batches == NULL || engine->endpoints == NULL || engine->live == NULL ||
        engine->parts == NULL || engine->asks == NULL || engine->answers == NULL ||
        engine->slot_crcs == NULL || engine->reads == NULL ||
        kvp_crew_open(config->copy_helpers, &engine->crew) != KVP_OK) {
        free_engine(engine);
        return NULL;
    }
    size_t window = (config->inbox_part - config->trial_bytes) / KVP_ASKS_MAX;
    window = window < WINDOW_BYTES_MAX ? window : WINDOW_BYTES_MAX;
    engine->window = window - window % WINDOW_ALIGNMENT;
    for (size_t i = 0; i < config->read_max; i++) {
        engine->reads[i].next = engine->free_reads;
        engine->free_reads = &engine->reads[i];
    }
    for (size_t i = 0; i < config->batch_max; i++) {
        engine->batches[i].next = engine->free_batches;
        engine->free_batches = &engine->batches[i];
    }
    return engine;
}

static kvp_status start_thread(kvp_ucx *engine)
{
    if (pthread_create(&engine->thread, NULL, kvp_progress_run, engine) != 0) {
        snprintf(engine->start_reason, sizeof(engine->start_reason), "no thread");
        return KVP_SYSTEM;
    }
    pthread_mutex_lock(&engine->lock);
    while (!engine->started) {
        pthread_cond_wait(&engine->changed, &engine->lock);
    }
    kvp_status status = engine->start_status;
    pthread_mutex_unlock(&engine->lock);
    if (status != KVP_OK) {
        pthread_join(engine->thread, NULL);
    }
    return status;
}

kvp_status kvp_ucx_open(const kvp_ucx_config *config, char *reason, size_t reason_size,
                        kvp_ucx **out)
{
    char unused[1];
    if (reason == NULL || reason_size == 0) {
        reason = unused;
        reason_size = sizeof(unused);
    }
    struct sockaddr_storage host;
    socklen_t host_size;
    char device[sizeof(((kvp_ucx *)0)->device)];
    if (!sound(config)) {
        snprintf(reason, reason_size, "a size or a count is out of range");
        return KVP_INVALID;
    }
    if (kvp_parse_address(config->host, 0, &host, &host_size) != KVP_OK ||
        kvp_find_device(&host, device, sizeof(device)) != KVP_OK) {
        snprintf(reason, reason_size, "%s is no address of this host", config->host);
        return KVP_INVALID;
    }
    const kvp_ucp *ucp = kvp_ucp_load(config->library, reason, reason_size);
    if (ucp == NULL) {
        return KVP_SYSTEM;
    }
    kvp_ucx *engine = make_engine(config);
    if (engine == NULL) {
        snprintf(reason, reason_size, "out of memory or descriptors");
        return KVP_SYSTEM;
    }
    engine->ucp = ucp;
    engine->host = host;
    engine->host_size = host_size;
    memcpy(engine->device, device, sizeof(device));
    snprintf(engine->tls, sizeof(engine->tls), "%s", config->tls == NULL ? "tcp" : config->tls);
    kvp_status status = start_thread(engine);
    if (status != KVP_OK) {
        snprintf(reason, reason_size, "%s", engine->start_reason);
        free_engine(engine);
        return status;
    }
    *out = engine;
    return KVP_OK;
}

void kvp_ucx_close(kvp_ucx *engine)
{
    if (engine == NULL || engine->pid != getpid()) {
        return; /* in a forked child the thread does not exist, and the sockets are the parent's */
    }
    pthread_mutex_lock(&engine->lock);
    engine->stopping = true;
    kvp_order(engine);
    pthread_mutex_unlock(&engine->lock);
    pthread_join(engine->thread, NULL);
    free_engine(engine);
}
