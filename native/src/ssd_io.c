/* Slots in files, moved by threads that block in the kernel so that nobody else does.
 *
 * Owns: the threads, a staging buffer for each, and the batches that they work at. A batch lies on
 * its caller's stack. A caller whose deadline has come takes the batch away from its workers: none
 * that is touching the caller's memory (it copies, for a moment) is left behind, and one that the
 * kernel holds goes on alone, with its own buffer, and tells nobody but `settled`. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "kvpool_ssd.h"

enum { THREADS_MAX = 256, HUGE_PAGE_BYTES = 2 << 20 };
/* Jobs of a shut batch that begin: more of them take the CPUs from the thread that will open it
 * (docs/decisions/0008-ssd-tier.md has the figures). */
enum { PREPARED_SLOTS = 1 };

size_t kvp_ssd_settled_max(const kvp_ssd *ssd)
{
    return 4 * ssd->geometry.threads;
}

/* Whether one more thread may work at a batch. Locked. */
static bool wants_one(const batch *mine)
{
    return mine->next < mine->limit && (mine->width == 0 || mine->taken < mine->width);
}

/* Put a batch behind the others. Locked. */
static void queue(kvp_ssd *ssd, batch *mine)
{
    mine->queued = true;
    mine->later = NULL;
    if (ssd->last == NULL)
        ssd->first = mine;
    else
        ssd->last->later = mine;
    ssd->last = mine;
}

/* Take the next job of the first batch, which then waits behind the others. Locked. */
static void take_job(kvp_ssd *ssd, worker *self)
{
    batch *mine = ssd->first;
    self->batch = mine;
    self->kind = mine->kind;
    self->index = mine->next++;
    self->begun = mine->kind != WRITE;
    self->name.slot = mine->slots[self->index];
    if (mine->generations != NULL)
        self->name.generation = mine->generations[self->index];
    if (mine->keys != NULL)
        memcpy(self->name.key, mine->keys + self->index * KVP_NAME_BYTES, KVP_NAME_BYTES);
    if (mine->parents != NULL)
        memcpy(self->name.parent, mine->parents + self->index * KVP_NAME_BYTES, KVP_NAME_BYTES);
    self->buffer = ssd->spare[--ssd->spare_count]; /* there are as many as threads */
    mine->taken++;
    mine->queued = false;
    ssd->first = mine->later;
    if (ssd->first == NULL)
        ssd->last = NULL;
    if (wants_one(mine))
        queue(ssd, mine);
}

/* Tell the caller, or those who ask for what has ended late. Locked. */
static void tell(kvp_ssd *ssd, worker *self, kvp_slot_result result, int error)
{
    batch *mine = self->batch;
    self->batch = NULL;
    ssd->spare[ssd->spare_count++] = self->buffer;
    if (mine != NULL) {
        mine->results[self->index] = (uint8_t)result;
        if (mine->error == 0)
            mine->error = error;
        mine->taken--;
        if (++mine->ended == mine->count)
            pthread_cond_broadcast(&ssd->ended);
        if (mine->queued || !wants_one(mine))
            return;
        if (ssd->first != NULL) /* which this thread takes next */
            pthread_cond_signal(&ssd->work);
        queue(ssd, mine);
        return;
    }
    if (!self->begun)
        return;
    ssd->late_count--;
    if (self->kind == INTENT || self->kind == ERASE)
        ssd->blocking--;
    if (self->kind == WRITE)
        ssd->settled[ssd->settled_count++] = (slot_life){self->name.slot, self->name.generation};
}

static size_t buffers_bytes(const kvp_ssd *ssd)
{
    return ssd->geometry.threads * ssd->geometry.slot_bytes + HUGE_PAGE_BYTES;
}

static void close_all(kvp_ssd *ssd)
{
    for (size_t i = 0; i < ssd->opened; i++)
        close(ssd->fds[i]);
    ssd->opened = 0;
}

static void release(kvp_ssd *ssd)
{
    /* Not by closing alone: a fork that never called kvp_ssd_forget has the same lock open. */
    if (ssd->opened == ssd->fd_count + 2)
        flock(ssd->fds[ssd->fd_count + 1], LOCK_UN);
    close_all(ssd);
    if (ssd->map != NULL)
        munmap(ssd->map, buffers_bytes(ssd));
    pthread_cond_destroy(&ssd->work);
    pthread_cond_destroy(&ssd->ended);
    pthread_cond_destroy(&ssd->opened_gate);
    pthread_mutex_destroy(&ssd->mutex);
    free(ssd->fds);
    free(ssd->spare);
    free(ssd->settled);
    free(ssd);
}

static void *work(void *argument)
{
    worker *self = argument;
    kvp_ssd *ssd = self->ssd;
    pthread_mutex_lock(&ssd->mutex);
    while (!ssd->closing) {
        if (ssd->first == NULL) {
            pthread_cond_wait(&ssd->work, &ssd->mutex);
            continue;
        }
        take_job(ssd, self);
        const bool whole = self->batch->whole;
        pthread_mutex_unlock(&ssd->mutex);
        int error = 0;
        kvp_slot_result result = kvp_ssd_job(self, whole, &error);
        pthread_mutex_lock(&ssd->mutex);
        tell(ssd, self, result, error);
    }
    const bool last = --ssd->alive == 0 && ssd->orphaned;
    pthread_cond_broadcast(&ssd->ended);
    pthread_mutex_unlock(&ssd->mutex);
    if (last)
        release(ssd);
    return NULL;
}

struct timespec kvp_ssd_deadline(uint64_t timeout_ns)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    const uint64_t ns = (uint64_t)at.tv_nsec + timeout_ns % 1000000000;
    at.tv_sec += (time_t)(timeout_ns / 1000000000 + ns / 1000000000);
    at.tv_nsec = (long)(ns % 1000000000);
    return at;
}

/* Leave the jobs that the kernel holds to it, and those that have not begun undone. Locked. */
static void give_up(kvp_ssd *ssd, batch *mine)
{
    batch *before = NULL;
    mine->limit = mine->next; /* who ends a job while this waits takes no other one */
    for (batch *at = ssd->first; at != NULL; before = at, at = at->later) {
        if (at != mine)
            continue;
        *(before == NULL ? &ssd->first : &before->later) = mine->later;
        if (ssd->last == mine)
            ssd->last = before;
        break;
    }
    ssd->waiting_for_touch++;
    for (size_t i = 0; i < ssd->geometry.threads; i++) {
        worker *other = &ssd->workers[i];
        while (other->batch == mine && other->touching)
            pthread_cond_wait(&ssd->ended, &ssd->mutex);
        if (other->batch != mine)
            continue;
        other->batch = NULL;
        if (!other->begun)
            continue;
        ssd->late_count++;
        ssd->blocking += other->kind == INTENT || other->kind == ERASE;
        mine->results[other->index] = KVP_SLOT_LATE;
    }
    ssd->waiting_for_touch--;
    pthread_cond_broadcast(&ssd->opened_gate);
}

/* Have the threads take jobs up to `limit`. Locked. */
static void allow(kvp_ssd *ssd, batch *mine, size_t limit)
{
    size_t more = limit - mine->limit;
    mine->limit = limit;
    if (!mine->queued && wants_one(mine))
        queue(ssd, mine);
    if (mine->width > 0 && more > mine->width)
        more = mine->width;
    if (more >= ssd->geometry.threads)
        pthread_cond_broadcast(&ssd->work);
    else
        for (size_t i = 0; i < more; i++)
            pthread_cond_signal(&ssd->work);
}

void kvp_ssd_begin(kvp_ssd *ssd, batch *mine)
{
    memset(mine->results, KVP_SLOT_SKIPPED, mine->count);
    pthread_mutex_lock(&ssd->mutex);
    allow(ssd, mine, mine->shut && mine->count > PREPARED_SLOTS ? PREPARED_SLOTS : mine->count);
    pthread_mutex_unlock(&ssd->mutex);
}

void kvp_ssd_unshut(kvp_ssd *ssd, batch *mine)
{
    pthread_mutex_lock(&ssd->mutex);
    mine->shut = false;
    allow(ssd, mine, mine->count);
    pthread_cond_broadcast(&ssd->opened_gate);
    pthread_mutex_unlock(&ssd->mutex);
}

kvp_status kvp_ssd_run(kvp_ssd *ssd, batch *mine, const struct timespec *deadline)
{
    kvp_ssd_begin(ssd, mine);
    return kvp_ssd_finish(ssd, mine, deadline);
}

kvp_status kvp_ssd_finish(kvp_ssd *ssd, batch *mine, const struct timespec *deadline)
{
    pthread_mutex_lock(&ssd->mutex);
    int waited = mine->shut ? ETIMEDOUT : 0;
    while (mine->ended < mine->count && waited == 0 && !ssd->stopped)
        waited = pthread_cond_timedwait(&ssd->ended, &ssd->mutex, deadline);
    if (mine->ended < mine->count)
        give_up(ssd, mine);
    const bool whole = mine->ended == mine->count;
    pthread_mutex_unlock(&ssd->mutex);
    return whole ? KVP_OK : KVP_TIMEOUT;
}

/* Staging buffers from a huge page's boundary on, in huge pages where the system has them: the
 * kernel pins memory for direct I/O page by page. False if there is no memory. */
static bool map_buffers(kvp_ssd *ssd)
{
    ssd->spare = malloc(ssd->geometry.threads * sizeof *ssd->spare);
    if (ssd->spare == NULL)
        return false;
    void *map = mmap(NULL, buffers_bytes(ssd), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                     -1, 0);
    if (map == MAP_FAILED)
        return false;
    ssd->map = map;
    madvise(map, buffers_bytes(ssd), MADV_HUGEPAGE);
    uint8_t *first = ssd->map + (HUGE_PAGE_BYTES - (uintptr_t)map % HUGE_PAGE_BYTES);
    memset(first, 0, ssd->geometry.threads * ssd->geometry.slot_bytes); /* touched now, not later */
    for (; ssd->spare_count < ssd->geometry.threads; ssd->spare_count++)
        ssd->spare[ssd->spare_count] = first + ssd->spare_count * ssd->geometry.slot_bytes;
    return true;
}

/* Take one more descriptor for `release` to close; false if there is none. */
static bool duplicate(kvp_ssd *ssd, int fd)
{
    const int made = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (made >= 0)
        ssd->fds[ssd->opened++] = made;
    return made >= 0;
}

/* Start the threads; false if one cannot be had. */
static bool start(kvp_ssd *ssd)
{
    sigset_t all, before;
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    /* Signals are the application's: its own threads take them. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    size_t started = 0;
    pthread_mutex_lock(&ssd->mutex);
    for (; started < ssd->geometry.threads; started++) {
        pthread_t thread;
        worker *self = &ssd->workers[started];
        self->ssd = ssd;
        if (pthread_create(&thread, &detached, work, self) != 0)
            break;
        pthread_setname_np(thread, "kvpool-ssd");
        ssd->alive++;
    }
    pthread_mutex_unlock(&ssd->mutex);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&detached);
    return started == ssd->geometry.threads;
}

kvp_status kvp_ssd_open(const kvp_ssd_geometry *geometry, const int *fds, size_t fd_count,
                        int intent_fd, int lock_fd, kvp_ssd **out)
{
    const size_t threads = geometry->threads;
    if (!kvp_slot_geometry_fits(geometry) || threads < 1 || threads > THREADS_MAX ||
        geometry->slot_bytes > ((size_t)INT64_MAX - HUGE_PAGE_BYTES) / threads ||
        fd_count > KVP_SSD_SEGMENTS_MAX ||
        fd_count != (geometry->slot_count - 1) / geometry->segment_slots + 1)
        return KVP_INVALID;
    kvp_ssd *ssd = calloc(1, sizeof *ssd + threads * sizeof *ssd->workers);
    if (ssd == NULL)
        return KVP_SYSTEM;
    ssd->geometry = *geometry;
    ssd->process = getpid();
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&ssd->mutex, NULL);
    pthread_cond_init(&ssd->work, NULL);
    pthread_cond_init(&ssd->ended, &monotonic);
    pthread_cond_init(&ssd->opened_gate, NULL);
    pthread_condattr_destroy(&monotonic);
    ssd->settled = calloc(kvp_ssd_settled_max(ssd), sizeof *ssd->settled);
    ssd->fds = calloc(fd_count + 2, sizeof *ssd->fds);
    ssd->fd_count = fd_count;
    bool whole = ssd->settled != NULL && ssd->fds != NULL && map_buffers(ssd);
    for (size_t i = 0; whole && i < fd_count; i++)
        whole = duplicate(ssd, fds[i]);
    whole = whole && duplicate(ssd, intent_fd) && duplicate(ssd, lock_fd);
    if (!whole) {
        const int reason = errno;
        release(ssd);
        errno = reason;
        return KVP_SYSTEM;
    }
    if (!start(ssd)) {
        kvp_ssd_close(ssd, UINT64_MAX / 2);
        errno = EAGAIN;
        return KVP_SYSTEM;
    }
    *out = ssd;
    return KVP_OK;
}

void kvp_ssd_stop(kvp_ssd *ssd)
{
    pthread_mutex_lock(&ssd->mutex);
    ssd->stopped = true;
    pthread_cond_broadcast(&ssd->ended);
    pthread_mutex_unlock(&ssd->mutex);
}

void kvp_ssd_close(kvp_ssd *ssd, uint64_t timeout_ns)
{
    if (ssd == NULL || ssd->process != getpid())
        return; /* a fork has no threads to end, and what they hold is the parent's */
    const struct timespec deadline = kvp_ssd_deadline(timeout_ns);
    pthread_mutex_lock(&ssd->mutex);
    ssd->closing = true;
    pthread_cond_broadcast(&ssd->work);
    int waited = 0;
    while (ssd->alive > 0 && waited == 0)
        waited = pthread_cond_timedwait(&ssd->ended, &ssd->mutex, &deadline);
    const bool last = ssd->alive == 0;
    ssd->orphaned = !last;
    pthread_mutex_unlock(&ssd->mutex);
    if (last)
        release(ssd);
}

void kvp_ssd_forget(kvp_ssd *ssd)
{
    if (ssd->process != getpid())
        close_all(ssd);
}

size_t kvp_ssd_settled(kvp_ssd *ssd, size_t count, uint32_t *slots, uint64_t *generations)
{
    pthread_mutex_lock(&ssd->mutex);
    if (count > ssd->settled_count)
        count = ssd->settled_count;
    for (size_t i = 0; i < count; i++) {
        const slot_life *life = &ssd->settled[ssd->settled_count - 1 - i];
        slots[i] = life->slot;
        generations[i] = life->generation;
    }
    ssd->settled_count -= count;
    pthread_mutex_unlock(&ssd->mutex);
    return count;
}

size_t kvp_ssd_late(kvp_ssd *ssd)
{
    pthread_mutex_lock(&ssd->mutex);
    const size_t late = ssd->late_count;
    pthread_mutex_unlock(&ssd->mutex);
    return late;
}
