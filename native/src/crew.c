/* Threads that share one copy: the caller, and helpers that wait for work.
 *
 * Owns: the helpers and the one job that they look at. A job lies on its caller's stack; it is taken
 * away from the helpers before the call returns. Never looks into a block: copy.c does. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "kvpool_copy.h"

enum { HELPERS_MAX = 64 };

/* Bytes that one thread takes at a time, a run of blocks or of one block's layers: 50 us of copying, so
 * that no thread is left with much when the others have ended, and ten times what taking it costs. */
enum { RUN_BYTES = 512 << 10 };

/* Looks at whether the helpers have left before sleeping until they have: about the 60 us that a run
 * takes, which is the most that they have left to do. To sleep and be woken takes half as long. */
enum { LOOKS = 4000 };

typedef struct {
    const kvp_shape *shape;
    const kvp_view *dst, *src;
    const uint64_t *dst_blocks, *src_blocks;
    size_t block_count, layer_begin, layer_end;
    const uint32_t *crc_expected;
    uint32_t *crc_out;
    size_t crc_block_stride;
    size_t run_blocks; /* of a run; 1 where a block has several */
    size_t run_layers; /* of a run; all of them unless a block has several */
    size_t block_runs; /* of one block, or of `run_blocks` */
    size_t run_count;
    size_t next;       /* first run that nobody has taken; atomic */
    size_t good;       /* leading blocks that may still be whole; under the crew's mutex */
    size_t working;    /* helpers in this job; atomic, changed under the crew's mutex */
    kvp_status status; /* of the block at `good`; under the crew's mutex */
} copy_job;

struct kvp_crew {
    pthread_mutex_t mutex; /* guards job, closing, and parts of the job */
    pthread_cond_t work;   /* there is a job, or the end */
    pthread_cond_t left;   /* a helper left the job */
    copy_job *job;         /* null: none, or all of it is taken */
    bool closing;
    pid_t process;
    size_t helpers;
    pthread_t threads[];
};

/* Note that the job ends before `block`, unless it ends earlier already. */
static void end_before(kvp_crew *crew, copy_job *job, size_t block, kvp_status status)
{
    pthread_mutex_lock(&crew->mutex);
    if (block < job->good) {
        job->good = block;
        job->status = status;
    }
    pthread_mutex_unlock(&crew->mutex);
    __atomic_store_n(&job->next, job->run_count, __ATOMIC_RELAXED);
}

/* Take runs until there are none. Runs are taken in order, so all before a bad block are copied. */
static void take_runs(kvp_crew *crew, copy_job *job)
{
    for (;;) {
        size_t run = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (run >= job->run_count)
            return;
        const size_t block = run / job->block_runs * job->run_blocks;
        const size_t above = run % job->block_runs * job->run_layers; /* layers */
        size_t blocks = job->block_count - block, bad;
        if (blocks > job->run_blocks)
            blocks = job->run_blocks;
        size_t layer_end = job->layer_begin + above + job->run_layers;
        if (layer_end > job->layer_end)
            layer_end = job->layer_end;
        const size_t crc_at = block * job->crc_block_stride + above * job->shape->heads;
        kvp_status status = kvp_copy_blocks(
            job->shape, job->dst, job->dst_blocks + block, job->src, job->src_blocks + block,
            blocks, job->layer_begin + above, layer_end,
            job->crc_expected == NULL ? NULL : job->crc_expected + crc_at,
            job->crc_out == NULL ? NULL : job->crc_out + crc_at, job->crc_block_stride, &bad);
        if (status != KVP_OK) {
            end_before(crew, job, status == KVP_CORRUPT ? block + bad : block, status);
            return;
        }
    }
}

static void *help(void *argument)
{
    kvp_crew *crew = argument;
    pthread_mutex_lock(&crew->mutex);
    while (!crew->closing) {
        copy_job *job = crew->job;
        if (job == NULL) {
            pthread_cond_wait(&crew->work, &crew->mutex);
            continue;
        }
        __atomic_add_fetch(&job->working, 1, __ATOMIC_RELAXED);
        pthread_mutex_unlock(&crew->mutex);
        take_runs(crew, job);
        pthread_mutex_lock(&crew->mutex);
        if (crew->job == job)
            crew->job = NULL;
        __atomic_sub_fetch(&job->working, 1, __ATOMIC_RELEASE);
        pthread_cond_broadcast(&crew->left);
    }
    pthread_mutex_unlock(&crew->mutex);
    return NULL;
}

kvp_status kvp_crew_open(size_t helpers, kvp_crew **out)
{
    if (helpers > HELPERS_MAX)
        return KVP_INVALID;
    kvp_crew *crew = calloc(1, sizeof *crew + helpers * sizeof *crew->threads);
    if (crew == NULL)
        return KVP_SYSTEM;
    pthread_mutex_init(&crew->mutex, NULL);
    pthread_cond_init(&crew->work, NULL);
    pthread_cond_init(&crew->left, NULL);
    crew->process = getpid();
    /* Signals are the application's: its own threads take them. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (crew->helpers < helpers &&
           pthread_create(&crew->threads[crew->helpers], NULL, help, crew) == 0) {
        pthread_setname_np(crew->threads[crew->helpers], "kvpool-crew");
        crew->helpers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (crew->helpers < helpers) {
        kvp_crew_close(crew);
        errno = EAGAIN;
        return KVP_SYSTEM;
    }
    *out = crew;
    return KVP_OK;
}

void kvp_crew_close(kvp_crew *crew)
{
    if (crew == NULL)
        return;
    if (crew->process == getpid()) {
        pthread_mutex_lock(&crew->mutex);
        crew->closing = true;
        pthread_cond_broadcast(&crew->work);
        pthread_mutex_unlock(&crew->mutex);
        for (size_t i = 0; i < crew->helpers; i++)
            pthread_join(crew->threads[i], NULL);
        pthread_cond_destroy(&crew->work);
        pthread_cond_destroy(&crew->left);
        pthread_mutex_destroy(&crew->mutex);
    }
    free(crew);
}

/* Bytes of one layer, never 0; the most there are if it is more, as where rows share their bytes. */
static size_t bytes_of_layer(const kvp_shape *shape)
{
    size_t bytes;
    return !__builtin_add_overflow(shape->k_row_bytes, shape->v_row_bytes, &bytes) &&
                   !__builtin_mul_overflow(bytes, shape->tokens, &bytes) &&
                   !__builtin_mul_overflow(bytes, shape->heads, &bytes)
               ? bytes
               : SIZE_MAX;
}

/* Cut a job into runs: of whole blocks, or of layers of a block that is more than one. */
static void cut(copy_job *job)
{
    const size_t layers = job->layer_end - job->layer_begin;
    const size_t layer_bytes = bytes_of_layer(job->shape);
    job->run_blocks = job->block_runs = 1;
    job->run_layers = layers;
    job->run_count = job->block_count;
    if (layers == 0)
        return;
    const size_t fitting = layer_bytes >= RUN_BYTES ? 1 : RUN_BYTES / layer_bytes; /* layers */
    if (fitting < layers) {
        job->block_runs = (layers + fitting - 1) / fitting;
        job->run_layers = (layers + job->block_runs - 1) / job->block_runs; /* about as many in each */
        job->block_runs = (layers + job->run_layers - 1) / job->run_layers;
        job->run_count *= job->block_runs;
    } else {
        job->run_blocks = fitting / layers;
        job->run_count = (job->block_count + job->run_blocks - 1) / job->run_blocks;
    }
}

static bool helped(const copy_job *job)
{
    return __atomic_load_n(&job->working, __ATOMIC_ACQUIRE) > 0;
}

/* For some ten nanoseconds. */
static void rest(void)
{
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
}

/* Offer the job to the helpers unless they have one already; do what is left; wait for them. */
static void share(kvp_crew *crew, copy_job *job)
{
    bool offered = false;
    if (crew->helpers > 0 && job->run_count > 1) {
        pthread_mutex_lock(&crew->mutex);
        offered = crew->job == NULL;
        if (offered) {
            crew->job = job;
            pthread_cond_broadcast(&crew->work);
        }
        pthread_mutex_unlock(&crew->mutex);
    }
    take_runs(crew, job);
    if (!offered)
        return;
    pthread_mutex_lock(&crew->mutex);
    if (crew->job == job)
        crew->job = NULL; /* from here on no helper begins */
    pthread_mutex_unlock(&crew->mutex);
    for (int looks = 0; looks < LOOKS && helped(job); looks++)
        rest();
    pthread_mutex_lock(&crew->mutex);
    while (helped(job))
        pthread_cond_wait(&crew->left, &crew->mutex);
    pthread_mutex_unlock(&crew->mutex);
}

kvp_status kvp_crew_copy_blocks(kvp_crew *crew, const kvp_shape *shape, const kvp_view *dst,
                                const uint64_t *dst_blocks, const kvp_view *src,
                                const uint64_t *src_blocks, size_t block_count, size_t layer_begin,
                                size_t layer_end, const uint32_t *crc_expected, uint32_t *crc_out,
                                size_t crc_block_stride, size_t *bad_block)
{
    /* Checks every view before the first byte moves, and copies nothing. */
    kvp_status status = kvp_copy_check(shape, dst, dst_blocks, src, src_blocks, block_count,
                                       layer_begin, layer_end, crc_expected, crc_out,
                                       crc_block_stride);
    if (status != KVP_OK)
        return status;
    copy_job job = {
        .shape = shape,
        .dst = dst,
        .src = src,
        .dst_blocks = dst_blocks,
        .src_blocks = src_blocks,
        .block_count = block_count,
        .layer_begin = layer_begin,
        .layer_end = layer_end,
        .crc_expected = crc_expected,
        .crc_out = crc_out,
        .crc_block_stride = crc_block_stride,
        .good = block_count,
        .status = KVP_OK,
    };
    cut(&job);
    share(crew, &job);
    *bad_block = job.good;
    return job.status;
}
