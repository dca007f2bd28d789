/* A kernel that fails on command, below the threads of the SSD tier: short and interrupted transfers,
 * errors, calls that hang. It holds every write of a slot against the intents that are durable. */
#ifndef KVPOOL_TEST_SSD_KERNEL_H
#define KVPOOL_TEST_SSD_KERNEL_H

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "kvpool_ssd.h"

enum { SLOT_BYTES = 8192, SECOND = 1000000000 };

typedef enum { WELL, INTERRUPTED, SHORT, BROKEN, ENDED } mood;

static pthread_mutex_t kernel = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static mood reading, writing;
static int sync_error;
static bool hung;
static size_t hanging, syncs;
static ino_t intent_file, segment_files[3];
static size_t intent_count; /* intents that were made durable */
static uint8_t intents[2][KVP_SSD_INTENT_BYTES];
static bool intent_durable[2]; /* and nobody has begun to write another there */

static mood enter_kernel(mood which)
{
    pthread_mutex_lock(&kernel);
    hanging++;
    pthread_cond_broadcast(&changed);
    while (hung)
        pthread_cond_wait(&changed, &kernel);
    hanging--;
    const bool fails = which > SHORT || random_below(3) == 0;
    pthread_mutex_unlock(&kernel);
    return fails ? which : WELL;
}

static void set_hung(bool value)
{
    pthread_mutex_lock(&kernel);
    hung = value;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&kernel);
}

static inline void wait_hanging(size_t count)
{
    pthread_mutex_lock(&kernel);
    while (hanging < count)
        pthread_cond_wait(&changed, &kernel);
    pthread_mutex_unlock(&kernel);
}

static ino_t inode(int fd)
{
    struct stat file;
    CHECK(fstat(fd, &file) == 0);
    return file.st_ino;
}

/* Whether a power cut at this moment would have whoever opens the store look at that slot. */
static bool is_named(int fd, off_t offset)
{
    static const uint8_t store_id[16] = {7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7};
    uint32_t named[KVP_SSD_INTENT_SLOTS], slot = (uint32_t)(offset / SLOT_BYTES);
    bool found = false;
    for (uint32_t i = 0; i < 3; i++)
        slot += segment_files[i] == inode(fd) ? 3 * i : 0;
    pthread_mutex_lock(&kernel);
    for (size_t page = 0; page < 2; page++) {
        const size_t count = kvp_ssd_intent_slots(intents[page], KVP_SSD_INTENT_BYTES, store_id,
                                                  KVP_SSD_INTENT_SLOTS, named);
        for (size_t i = 0; intent_durable[page] && i < count; i++)
            found = found || named[i] == slot;
    }
    pthread_mutex_unlock(&kernel);
    return found;
}

static void begin_intent(off_t offset)
{
    pthread_mutex_lock(&kernel);
    intent_durable[offset / KVP_SSD_INTENT_BYTES] = false;
    pthread_mutex_unlock(&kernel);
}

static void keep_intents(int fd)
{
    pthread_mutex_lock(&kernel);
    CHECK(pread(fd, intents, sizeof intents, 0) == sizeof intents);
    intent_durable[0] = intent_durable[1] = true;
    intent_count++;
    pthread_mutex_unlock(&kernel);
}

static size_t shorter(mood now, size_t size)
{
    return now == SHORT && size > 1 ? 1 + size / 2 + size / 3 : size;
}

static ssize_t fake_pread(int fd, void *bytes, size_t size, off_t offset)
{
    const mood now = enter_kernel(reading);
    if (now == ENDED)
        return 0;
    if (now == INTERRUPTED || now == BROKEN) {
        errno = now == BROKEN ? EIO : EINTR;
        return -1;
    }
    return pread(fd, bytes, shorter(now, size), offset);
}

static ssize_t fake_pwrite(int fd, const void *bytes, size_t size, off_t offset)
{
    if (inode(fd) == intent_file)
        begin_intent(offset);
    else
        CHECK(is_named(fd, offset));
    const mood now = enter_kernel(writing);
    if (now == ENDED)
        return 0;
    if (now == INTERRUPTED || now == BROKEN) {
        errno = now == BROKEN ? ENOSPC : EINTR;
        return -1;
    }
    return pwrite(fd, bytes, shorter(now, size), offset);
}

static int fake_fdatasync(int fd)
{
    enter_kernel(WELL);
    __atomic_fetch_add(&syncs, 1, __ATOMIC_RELAXED);
    if (inode(fd) == intent_file && sync_error == 0)
        keep_intents(fd);
    errno = sync_error;
    return sync_error == 0 ? 0 : -1;
}

#endif
