/* One job of a thread of the SSD tier: a slot read, written, erased or looked at, a file synced.
 *
 * Owns: how bytes go through the kernel (short and interrupted transfers go on, an end of file is
 * corruption), and that the caller's memory is touched only while it waits. Never waits for anybody
 * but the kernel. */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "kvpool_copy.h"
#include "kvpool_ssd.h"

enum { INTERRUPTS_MAX = 1000, STALLS_MAX = 8, END_OF_FILE = -1 };

/* What it means that a transfer does not go on: END_OF_FILE if the file ends before `end`. */
static int stalled(int fd, off_t end)
{
    struct stat now;
    return fstat(fd, &now) == 0 && now.st_size < end ? END_OF_FILE : EIO;
}

/* Read or write all of `size` bytes: 0, an errno, or END_OF_FILE. Direct I/O goes on only at whole
 * blocks, so the rest of a short transfer is moved again from the last one. */
static int move(bool writes, int fd, uint8_t *bytes, size_t size, off_t offset)
{
    int interrupts = 0, stalls = 0;
    for (size_t done = 0; done < size;) {
        const off_t at = offset + (off_t)done;
        ssize_t moved = writes ? pwrite(fd, bytes + done, size - done, at)
                               : pread(fd, bytes + done, size - done, at);
        if (moved < 0 && errno == EINTR && ++interrupts < INTERRUPTS_MAX)
            continue;
        if (moved < 0)
            return errno;
        size_t step = (size_t)moved;
        if (step < size - done)
            step -= step % KVP_BLOCK_BYTES;
        if (step == 0 && ++stalls == STALLS_MAX)
            return writes ? EIO : stalled(fd, offset + (off_t)size);
        done += step;
    }
    return 0;
}

static int move_slot(worker *self, bool writes, size_t size)
{
    const kvp_ssd_geometry *geometry = &self->ssd->geometry;
    size_t at = self->name.slot % geometry->segment_slots;
    return move(writes, self->ssd->fds[self->name.slot / geometry->segment_slots], self->buffer,
                size, (off_t)(at * geometry->slot_bytes));
}

static int sync_file(int fd)
{
    int interrupts = 0;
    while (fdatasync(fd) != 0)
        if (errno != EINTR || ++interrupts == INTERRUPTS_MAX)
            return errno;
    return 0;
}

/* What this thread has had of the CPUs. */
static uint64_t cpu_ns(void)
{
    struct timespec at;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &at);
    return (uint64_t)at.tv_sec * 1000000000 + (uint64_t)at.tv_nsec;
}

/* Whether the caller still waits; from here to `stop_touching` it is not let go. */
static batch *touch(worker *self)
{
    pthread_mutex_lock(&self->ssd->mutex);
    batch *mine = self->batch;
    self->touching = mine != NULL;
    pthread_mutex_unlock(&self->ssd->mutex);
    return mine;
}

/* Touch nothing any more. Locked. */
static void let_go(worker *self)
{
    self->touching = false;
    if (self->ssd->waiting_for_touch > 0)
        pthread_cond_broadcast(&self->ssd->ended);
}

static void stop_touching(worker *self)
{
    pthread_mutex_lock(&self->ssd->mutex);
    let_go(self);
    pthread_mutex_unlock(&self->ssd->mutex);
}

/* Touch nothing any more, and wait until the slot may be written; whether it may. */
static bool pass(worker *self)
{
    pthread_mutex_lock(&self->ssd->mutex);
    self->batch->copy_ns += self->copy_ns; /* which is there as long as it is touched */
    let_go(self);
    while (self->batch != NULL && self->batch->shut)
        pthread_cond_wait(&self->ssd->opened_gate, &self->ssd->mutex);
    self->begun = self->batch != NULL;
    pthread_mutex_unlock(&self->ssd->mutex);
    return self->begun;
}

static kvp_slot_result failed(int error, int *first)
{
    if (error == END_OF_FILE)
        return KVP_SLOT_CORRUPT;
    *first = error;
    return KVP_SLOT_FAILED;
}

static uint32_t *crcs_of(const worker *self)
{
    return ((slot_header *)(void *)self->buffer)->crcs;
}

/* Hand the tokens of a checked header to the caller, who wants to know. Touching. */
static void tell_tokens(const worker *self, const batch *mine)
{
    if (mine->found_tokens == NULL)
        return;
    const size_t count = self->ssd->geometry.shape.tokens;
    const uint32_t *tokens = kvp_slot_tokens(self->buffer);
    mine->found_known[self->index] = tokens != NULL;
    if (tokens != NULL)
        memcpy(mine->found_tokens + self->index * count, tokens, count * sizeof *tokens);
}

static kvp_slot_result read_slot(worker *self, int *error)
{
    const kvp_ssd_geometry *geometry = &self->ssd->geometry;
    const size_t crc_count = kvp_slot_crc_count(geometry);
    const uint64_t zero = 0;
    int status = move_slot(self, false, geometry->slot_bytes);
    if (status != 0)
        return failed(status, error);
    slot_name found;
    kvp_slot_result result = kvp_slot_open(geometry, self->name.slot, self->buffer, &found);
    if (result != KVP_SLOT_DONE)
        return result;
    if (found.generation != self->name.generation ||
        memcmp(found.key, self->name.key, sizeof found.key) != 0)
        return KVP_SLOT_OTHER;
    batch *mine = touch(self);
    if (mine == NULL)
        return KVP_SLOT_LATE;
    const kvp_view view = kvp_slot_view(geometry, self->buffer);
    size_t bad;
    kvp_status copied = kvp_copy_blocks(&geometry->shape, mine->view, mine->blocks + self->index,
                                        &view, &zero, 1, 0, geometry->layers, crcs_of(self), NULL,
                                        crc_count, &bad);
    memcpy(mine->crcs + self->index * crc_count, crcs_of(self), crc_count * sizeof(uint32_t));
    tell_tokens(self, mine);
    stop_touching(self);
    return copied == KVP_OK ? KVP_SLOT_DONE : KVP_SLOT_CORRUPT;
}

static kvp_slot_result write_slot(worker *self, int *error)
{
    const kvp_ssd_geometry *geometry = &self->ssd->geometry;
    const size_t crc_count = kvp_slot_crc_count(geometry);
    const size_t end = geometry->header_bytes + kvp_slot_payload_bytes(geometry);
    const uint64_t zero = 0;
    batch *mine = touch(self);
    if (mine == NULL)
        return KVP_SLOT_LATE;
    const kvp_view view = kvp_slot_view(geometry, self->buffer);
    const uint32_t *expected =
        mine->crc_expected == NULL ? NULL : mine->crc_expected + self->index * crc_count;
    size_t bad;
    const uint64_t began = cpu_ns();
    /* The disk, or who plays it, finds the bytes in the cache: less for the memory to do. */
    kvp_status copied =
        (mine->width > 0 ? kvp_copy_blocks_near : kvp_copy_blocks)(
            &geometry->shape, &view, &zero, mine->view, mine->blocks + self->index, 1, 0,
            geometry->layers, expected, crcs_of(self), crc_count, &bad);
    self->copy_ns = cpu_ns() - began;
    if (copied != KVP_OK) {
        stop_touching(self);
        return KVP_SLOT_SOURCE;
    }
    const uint32_t *tokens = mine->tokens == NULL || !mine->known[self->index]
                                 ? NULL
                                 : mine->tokens + self->index * geometry->shape.tokens;
    kvp_slot_seal(geometry, &self->name, tokens, self->buffer);
    memset(self->buffer + end, 0, geometry->slot_bytes - end);
    if (!pass(self))
        return KVP_SLOT_SKIPPED;
    int status = move_slot(self, true, geometry->slot_bytes);
    return status == 0 ? KVP_SLOT_DONE : failed(status, error);
}

static kvp_slot_result scan_slot(worker *self, bool whole, int *error)
{
    const kvp_ssd_geometry *geometry = &self->ssd->geometry;
    int status = move_slot(self, false, whole ? geometry->slot_bytes : geometry->header_bytes);
    if (status != 0)
        return failed(status, error);
    slot_name found;
    kvp_slot_result result = kvp_slot_open(geometry, self->name.slot, self->buffer, &found);
    if (result == KVP_SLOT_DONE && whole && !kvp_slot_whole(geometry, self->buffer))
        result = KVP_SLOT_CORRUPT;
    if (result != KVP_SLOT_DONE)
        return result;
    batch *mine = touch(self);
    if (mine == NULL)
        return KVP_SLOT_LATE;
    mine->found_generations[self->index] = found.generation;
    memcpy(mine->found_keys + self->index * KVP_NAME_BYTES, found.key, sizeof found.key);
    memcpy(mine->found_parents + self->index * KVP_NAME_BYTES, found.parent, sizeof found.parent);
    tell_tokens(self, mine);
    stop_touching(self);
    return KVP_SLOT_DONE;
}

/* Durably: nobody may write on the strength of one that a power cut takes back. */
static kvp_slot_result write_intent_page(worker *self, int *error)
{
    kvp_ssd *ssd = self->ssd;
    batch *mine = touch(self);
    if (mine == NULL)
        return KVP_SLOT_LATE;
    const uint64_t sequence = mine->sequence;
    kvp_intent_seal(&ssd->geometry, sequence, mine->slots, mine->intent_slots,
                    (write_intent *)(void *)self->buffer);
    stop_touching(self);
    const int fd = ssd->fds[ssd->fd_count];
    int status = move(true, fd, self->buffer, KVP_SSD_INTENT_BYTES,
                      (off_t)(sequence % 2 * KVP_SSD_INTENT_BYTES));
    if (status == 0)
        status = sync_file(fd);
    return status == 0 ? KVP_SLOT_DONE : failed(status, error);
}

kvp_slot_result kvp_ssd_job(worker *self, bool whole, int *error)
{
    int status;
    switch (self->kind) {
    case READ:
        return read_slot(self, error);
    case WRITE:
        return write_slot(self, error);
    case ERASE:
        memset(self->buffer, 0, self->ssd->geometry.header_bytes);
        status = move_slot(self, true, self->ssd->geometry.header_bytes);
        break;
    case SCAN:
        return scan_slot(self, whole, error);
    case SYNC:
        status = sync_file(self->ssd->fds[self->name.slot]);
        break;
    default:
        return write_intent_page(self, error);
    }
    return status == 0 ? KVP_SLOT_DONE : failed(status, error);
}
