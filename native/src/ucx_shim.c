/* What is asked of a running engine. Never calls libucp: these functions leave orders for the progress
 * thread under the engine's lock, and hand out its events. */
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ucx_engine.h"

static uint64_t deadline_after(uint64_t timeout_ns)
{
    uint64_t now = kvp_now_ns();
    return timeout_ns > UINT64_MAX - 1 - now ? UINT64_MAX - 1 : now + timeout_ns;
}

static struct timespec timespec_of(uint64_t at_ns)
{
    return (struct timespec){
        .tv_sec = (time_t)(at_ns / 1000000000),
        .tv_nsec = (long)(at_ns % 1000000000),
    };
}

static kvp_endpoint *lookup(kvp_ucx *engine, uint64_t id)
{
    size_t index = (size_t)(id & UINT32_MAX);
    if (index >= engine->config.endpoint_max) {
        return NULL;
    }
    kvp_endpoint *endpoint = &engine->endpoints[index];
    return kvp_endpoint_id(endpoint) == id && endpoint->state != SLOT_FREE ? endpoint : NULL;
}

/* ---- orders ----------------------------------------------------------------------------------- */

kvp_status kvp_ucx_listen(kvp_ucx *engine, uint16_t port, uint64_t timeout_ns, uint16_t *bound,
                          int *ucx_code)
{
    if (engine->pid != getpid()) {
        return KVP_CLOSED;
    }
    const struct timespec until = timespec_of(deadline_after(timeout_ns));
    pthread_mutex_lock(&engine->lock);
    kvp_status status = KVP_BUSY;
    if (engine->listen == LISTEN_NONE) {
        engine->listen = LISTEN_WANTED;
        engine->listen_port = port;
        kvp_order(engine);
        int code = 0;
        while (engine->listen == LISTEN_WANTED && code == 0) {
            code = pthread_cond_timedwait(&engine->changed, &engine->lock, &until);
        }
        if (engine->listen == LISTEN_WANTED) {
            status = KVP_TIMEOUT; /* and the port is the progress thread's to write */
        } else {
            status = engine->listen == LISTEN_DONE ? KVP_OK : KVP_SYSTEM;
            *bound = engine->listen_port;
            *ucx_code = engine->listen_code;
        }
    }
    pthread_mutex_unlock(&engine->lock);
    return status;
}

kvp_status kvp_ucx_connect(kvp_ucx *engine, const char *host, uint16_t port,
                           const uint8_t *expected, uint64_t timeout_ns, uint64_t *endpoint)
{
    struct sockaddr_storage address;
    socklen_t address_size;
    if (engine->pid != getpid()) {
        return KVP_CLOSED;
    }
    if (kvp_parse_address(host, port, &address, &address_size) != KVP_OK || port == 0 ||
        address.ss_family != engine->host.ss_family) {
        return KVP_INVALID;
    }
    pthread_mutex_lock(&engine->lock);
    kvp_endpoint *slot = kvp_slot_take(engine, SLOT_CONNECTING);
    if (slot != NULL) {
        slot->address = address;
        slot->address_size = address_size;
        slot->greeting_deadline_ns = deadline_after(timeout_ns);
        if (expected != NULL) {
            memcpy(slot->expected, expected, KVP_INCARNATION_BYTES);
        }
        *endpoint = kvp_endpoint_id(slot);
        kvp_order_slot(slot);
    }
    pthread_mutex_unlock(&engine->lock);
    return slot == NULL ? KVP_FULL : KVP_OK;
}

kvp_status kvp_ucx_disconnect(kvp_ucx *engine, uint64_t endpoint)
{
    if (engine->pid != getpid()) {
        return KVP_CLOSED;
    }
    pthread_mutex_lock(&engine->lock);
    kvp_endpoint *slot = lookup(engine, endpoint);
    if (slot != NULL && slot->state < SLOT_CLOSED) {
        slot->leave = true;
        kvp_order_slot(slot);
    }
    pthread_mutex_unlock(&engine->lock);
    return KVP_OK;
}

static bool inside(const kvp_ucx_span *spans, size_t count, uint64_t inbox_bytes)
{
    for (size_t i = 0; i < count; i++) {
        if (spans[i].size == 0 || spans[i].size > inbox_bytes ||
            spans[i].remote_offset > inbox_bytes - spans[i].size) {
            return false;
        }
    }
    return true;
}

static kvp_status submit(kvp_ucx *engine, kvp_endpoint *slot, const kvp_batch *wanted,
                         const uint8_t *note)
{
    bool silent = wanted->note_size == 0;
    if (slot == NULL || slot->state != SLOT_OPEN || slot->leave) {
        return KVP_CLOSED;
    }
    if (!inside(wanted->spans, wanted->count, slot->peer_inbox_bytes)) {
        return KVP_INVALID;
    }
    if (engine->free_batches == NULL || engine->batches_used == engine->config.batch_max ||
        (!silent && slot->notes_submitted - slot->notes_credited >= slot->note_window)) {
        return KVP_FULL;
    }
    kvp_batch *batch = engine->free_batches;
    engine->free_batches = batch->next;
    engine->batches_used++;
    slot->notes_submitted += silent ? 0 : 1;
    *batch = *wanted;
    batch->submitted = true;
    batch->endpoint = slot;
    if (!silent) {
        memcpy(batch->note, note, wanted->note_size);
    }
    if (engine->submitted_last != NULL) {
        engine->submitted_last->next = batch;
    } else {
        engine->submitted = batch;
    }
    engine->submitted_last = batch;
    kvp_order(engine);
    return KVP_OK;
}

kvp_status kvp_ucx_put(kvp_ucx *engine, uint64_t endpoint, const kvp_ucx_span *spans, size_t count,
                       const uint8_t *note, size_t note_size, uint64_t timeout_ns, uint64_t cookie)
{
    if (engine->pid != getpid()) {
        return KVP_CLOSED;
    }
    if (note_size > KVP_NOTE_BYTES_MAX || (count == 0 && note_size == 0)) {
        return KVP_INVALID;
    }
    const kvp_batch wanted = {
        .spans = spans,
        .count = count,
        .deadline_ns = deadline_after(timeout_ns),
        .cookie = cookie,
        .stage = BATCH_QUEUED,
        .note_size = note_size,
    };
    pthread_mutex_lock(&engine->lock);
    kvp_status status = submit(engine, lookup(engine, endpoint), &wanted, note);
    pthread_mutex_unlock(&engine->lock);
    return status;
}

void kvp_ucx_cancel_put(kvp_ucx *engine, uint64_t endpoint, uint64_t cookie)
{
    if (engine->pid != getpid()) {
        return;
    }
    pthread_mutex_lock(&engine->lock);
    kvp_endpoint *slot = lookup(engine, endpoint);
    for (size_t i = 0; slot != NULL && i < engine->config.batch_max; i++) {
        kvp_batch *batch = &engine->batches[i];
        if (batch->submitted && batch->cookie == cookie) {
            atomic_store(&batch->cancelled, true);
            kvp_order_slot(slot);
        }
    }
    pthread_mutex_unlock(&engine->lock);
}

/* ---- reads ------------------------------------------------------------------------------------ */

static kvp_status submit_read(kvp_ucx *engine, kvp_endpoint *slot, const kvp_ucx_job *job,
                              uint64_t timeout_ns, uint64_t cookie, uint64_t *id)
{
    if (slot == NULL || slot->state != SLOT_OPEN || slot->leave ||
        atomic_load(&slot->reads_ended)) {
        return KVP_CLOSED;
    }
    if (engine->free_reads == NULL || engine->reads_used == engine->config.read_max) {
        return KVP_FULL;
    }
    kvp_read *read = engine->free_reads;
    engine->free_reads = read->next;
    engine->reads_used++;
    uint32_t generation = read->generation;
    *read = (kvp_read){
        .endpoint = slot,
        .generation = generation,
        .job = *job,
        .deadline_ns = deadline_after(timeout_ns),
        .cookie = cookie,
    };
    *id = (uint64_t)generation << 32 | (uint64_t)(read - engine->reads);
    if (engine->submitted_reads_last != NULL) {
        engine->submitted_reads_last->next = read;
    } else {
        engine->submitted_reads = read;
    }
    engine->submitted_reads_last = read;
    kvp_order(engine);
    return KVP_OK;
}

kvp_status kvp_ucx_read(kvp_ucx *engine, uint64_t endpoint, const kvp_ucx_job *job,
                        uint64_t timeout_ns, uint64_t cookie, uint64_t *read)
{
    if (engine->pid != getpid()) {
        return KVP_CLOSED;
    }
    if (job->count == 0 || engine->window == 0) {
        return KVP_INVALID;
    }
    if (!kvp_read_fits(job, engine->window)) {
        return KVP_SYSTEM;
    }
    pthread_mutex_lock(&engine->lock);
    kvp_endpoint *slot = lookup(engine, endpoint);
    kvp_status status = submit_read(engine, slot, job, timeout_ns, cookie, read);
    pthread_mutex_unlock(&engine->lock);
    return status;
}

void kvp_ucx_cancel(kvp_ucx *engine, uint64_t read)
{
    size_t index = (size_t)(read & UINT32_MAX);
    if (engine->pid != getpid() || index >= engine->config.read_max) {
        return;
    }
    pthread_mutex_lock(&engine->lock);
    kvp_read *it = &engine->reads[index];
    if (it->endpoint != NULL && it->generation == (uint32_t)(read >> 32)) {
        atomic_store(&it->cancelled, true);
        kvp_order_slot(it->endpoint);
    }
    pthread_mutex_unlock(&engine->lock);
}

void kvp_ucx_end_reads(kvp_ucx *engine, uint64_t endpoint)
{
    if (engine->pid != getpid()) {
        return;
    }
    pthread_mutex_lock(&engine->lock);
    kvp_endpoint *slot = lookup(engine, endpoint);
    if (slot != NULL) {
        atomic_store(&slot->reads_ended, true);
        kvp_order_slot(slot);
    }
    pthread_mutex_unlock(&engine->lock);
}

size_t kvp_ucx_window_bytes(const kvp_ucx *engine)
{
    return engine->window;
}

void kvp_ucx_windows(kvp_ucx *engine, uint64_t endpoint, size_t *free, size_t *owed)
{
    *free = *owed = 0;
    if (engine->pid != getpid()) {
        return;
    }
    pthread_mutex_lock(&engine->lock);
    kvp_endpoint *slot = lookup(engine, endpoint);
    if (slot != NULL) {
        *free = atomic_load(&slot->windows_free);
        *owed = atomic_load(&slot->windows_owed);
    }
    pthread_mutex_unlock(&engine->lock);
}

/* ---- events ----------------------------------------------------------------------------------- */

static void taken(kvp_ucx *engine, const kvp_ucx_event *event)
{
    kvp_endpoint *slot = &engine->endpoints[event->endpoint & UINT32_MAX];
    if (event->kind == KVP_UCX_BATCH) {
        engine->batches_used--;
    } else if (event->kind == KVP_UCX_READ) {
        engine->reads_used--;
    } else if (event->kind == KVP_UCX_CLOSED) {
        slot->state = SLOT_TOLD;
    } else if (event->kind == KVP_UCX_ARRIVED) {
        uint64_t count = atomic_fetch_add(&slot->notes_taken, 1) + 1;
        if (count % (KVP_NOTE_WINDOW / 2) == 0) {
            kvp_order(engine); /* the peer is owed credit */
        }
    }
}

kvp_status kvp_ucx_next_event(kvp_ucx *engine, uint64_t timeout_ns, kvp_ucx_event *event)
{
    if (engine->pid != getpid()) {
        return KVP_CLOSED;
    }
    const struct timespec until = timespec_of(deadline_after(timeout_ns));
    kvp_status status = KVP_OK;
    pthread_mutex_lock(&engine->lock);
    while (engine->event_count == 0 && !engine->events_stopped && status == KVP_OK) {
        int code = 0;
        if (!engine->events_woken) {
            code = pthread_cond_timedwait(&engine->changed, &engine->lock, &until);
        }
        status = code != 0 || engine->events_woken ? KVP_MISS : KVP_OK;
        engine->events_woken = false;
    }
    if (engine->events_stopped) {
        status = KVP_CLOSED;
    } else if (engine->event_count != 0) {
        status = KVP_OK;
        *event = engine->events[engine->event_head];
        engine->event_head = (engine->event_head + 1) % engine->event_capacity;
        engine->event_count--;
        taken(engine, event);
    }
    pthread_mutex_unlock(&engine->lock);
    return status;
}

kvp_status kvp_ucx_release(kvp_ucx *engine, uint64_t endpoint)
{
    if (engine->pid != getpid()) {
        return KVP_CLOSED;
    }
    pthread_mutex_lock(&engine->lock);
    kvp_endpoint *slot = lookup(engine, endpoint);
    bool busy = slot != NULL && slot->state != SLOT_TOLD;
    if (slot != NULL && !busy) {
        kvp_slot_give(slot);
    }
    pthread_mutex_unlock(&engine->lock);
    return busy ? KVP_BUSY : KVP_OK;
}

void kvp_ucx_stop_events(kvp_ucx *engine)
{
    if (engine->pid != getpid()) {
        return;
    }
    pthread_mutex_lock(&engine->lock);
    engine->events_stopped = true;
    pthread_cond_broadcast(&engine->changed);
    pthread_mutex_unlock(&engine->lock);
}

void kvp_ucx_wake_events(kvp_ucx *engine)
{
    if (engine->pid != getpid()) {
        return;
    }
    pthread_mutex_lock(&engine->lock);
    engine->events_woken = true;
    pthread_cond_broadcast(&engine->changed);
    pthread_mutex_unlock(&engine->lock);
}

kvp_status kvp_ucx_put_protocol(kvp_ucx *engine, char *text, size_t text_size)
{
    if (engine->pid != getpid()) {
        return KVP_CLOSED;
    }
    pthread_mutex_lock(&engine->lock);
    snprintf(text, text_size, "%s", engine->put_protocol);
    bool known = engine->put_protocol[0] != '\0';
    pthread_mutex_unlock(&engine->lock);
    return known ? KVP_OK : KVP_MISS;
}

kvp_status kvp_ucx_lanes(kvp_ucx *engine, uint64_t endpoint, char *text, size_t text_size)
{
    if (engine->pid != getpid()) {
        return KVP_CLOSED;
    }
    pthread_mutex_lock(&engine->lock);
    const kvp_endpoint *slot = lookup(engine, endpoint);
    bool open = slot != NULL && slot->state == SLOT_OPEN;
    snprintf(text, text_size, "%s", open ? slot->lanes : "");
    pthread_mutex_unlock(&engine->lock);
    return open ? KVP_OK : KVP_CLOSED;
}

void kvp_ucx_count(kvp_ucx *engine, kvp_ucx_counts *out)
{
    if (engine->pid != getpid()) {
        *out = (kvp_ucx_counts){0};
        return;
    }
    pthread_mutex_lock(&engine->lock);
    *out = (kvp_ucx_counts){
        .ucx_major = engine->ucp->major,
        .ucx_minor = engine->ucp->minor,
        .ucx_release = engine->ucp->release,
        .endpoints = engine->slots_used,
        .batches = engine->batches_used,
        .reads = engine->reads_used,
        .wakeups = atomic_load(&engine->wakeups),
        .puts = atomic_load(&engine->puts),
        .put_bytes = atomic_load(&engine->put_bytes),
        .coalesced = atomic_load(&engine->coalesced),
        .gets = atomic_load(&engine->gets),
        .get_bytes = atomic_load(&engine->get_bytes),
        .registrations = atomic_load(&engine->registrations),
        .strangers_reset = atomic_load(&engine->strangers_reset),
    };
    pthread_mutex_unlock(&engine->lock);
}
