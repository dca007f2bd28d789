/* The reference of the rows of the SSD tier: the same transfers at the same depth, and nothing else.
 *
 * `depth` threads take one transfer after another, with direct I/O, between the caller's memory and
 * files; a write ends with one fdatasync of each file. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <unistd.h>

struct job {
    int writes;
    const int *fds;
    const int64_t *offsets;
    const uintptr_t *memory;
    size_t count, size;
    size_t next; /* atomic */
    int failed;  /* atomic */
};

static void *run(void *argument)
{
    struct job *job = argument;
    for (;;) {
        size_t i = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (i >= job->count)
            return NULL;
        for (size_t done = 0; done < job->size;) {
            uint8_t *at = (uint8_t *)job->memory[i] + done;
            off_t offset = (off_t)job->offsets[i] + (off_t)done;
            ssize_t moved = job->writes ? pwrite(job->fds[i], at, job->size - done, offset)
                                        : pread(job->fds[i], at, job->size - done, offset);
            if (moved <= 0) {
                __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
                return NULL;
            }
            done += (size_t)moved;
        }
    }
}

/* Move `count` times `size` bytes; transfer i is between memory[i] and fds[i] at offsets[i]. */
int reference_ssd(int writes, const int *fds, const int64_t *offsets, const uintptr_t *memory,
                  size_t count, size_t size, size_t depth, const int *files, size_t file_count)
{
    pthread_t started[256];
    struct job job = {writes, fds, offsets, memory, count, size, 0, 0};
    if (depth < 1 || depth > 256)
        return -1;
    size_t threads = 0;
    while (threads + 1 < depth && pthread_create(&started[threads], NULL, run, &job) == 0)
        threads++;
    run(&job);
    for (size_t i = 0; i < threads; i++)
        pthread_join(started[i], NULL);
    for (size_t i = 0; writes && i < file_count; i++)
        if (fdatasync(files[i]) != 0)
            return -1;
    return job.failed || threads + 1 < depth ? -1 : 0;
}
