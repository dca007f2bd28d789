/* A disk that fails on command, below everything in a process: preloaded, and told by `disk_fault`.
 *
 * A fault is of one operation on files whose path holds a text. It may be an errno, a short transfer, an
 * interruption now and then, or a hang until it is taken back. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PATH_BYTES = 1024 };
enum { READS, WRITES, SYNCS, OPERATIONS };
enum { HANGS = -1, IS_SHORT = -2, IS_INTERRUPTED = -3 };

static struct {
    int fault; /* 0: none; an errno, or one of the above */
    int after; /* calls that go well first */
    char text[64];
} told[OPERATIONS];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int hanging;
static unsigned turn;

__attribute__((visibility("default"))) void disk_fault(int operation, int fault, int after,
                                                       const char *text)
{
    pthread_mutex_lock(&mutex);
    told[operation].fault = fault;
    told[operation].after = after;
    snprintf(told[operation].text, sizeof told[operation].text, "%s", text);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
}

__attribute__((visibility("default"))) int disk_hanging(void)
{
    pthread_mutex_lock(&mutex);
    int count = hanging;
    pthread_mutex_unlock(&mutex);
    return count;
}

/* What happens to a call: 0, an errno, or that it is short. */
static int fault_of(int operation, int fd)
{
    char link[64], path[PATH_BYTES] = {0};
    if (told[operation].fault == 0)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (readlink(link, path, sizeof path - 1) <= 0 || strstr(path, told[operation].text) == NULL)
        return 0;
    pthread_mutex_lock(&mutex);
    int fault = told[operation].fault;
    if (told[operation].after > 0) {
        told[operation].after--;
        fault = 0;
    }
    if (fault == HANGS) {
        hanging++;
        while (told[operation].fault == HANGS)
            pthread_cond_wait(&changed, &mutex);
        hanging--;
        fault = 0;
    }
    turn = turn * 1103515245 + 12345;
    if (fault == IS_INTERRUPTED)
        fault = turn % 65536 < 30000 ? EINTR : 0;
    if (fault == IS_SHORT && turn % 65536 < 30000)
        fault = 0;
    pthread_mutex_unlock(&mutex);
    return fault;
}

#define MOVES(name, bytes_type, offset_type, operation)                                       \
    ssize_t name(int fd, bytes_type bytes, size_t size, offset_type offset)                   \
    {                                                                                         \
        static ssize_t (*next)(int, bytes_type, size_t, offset_type);                         \
        if (next == NULL)                                                                     \
            next = dlsym(RTLD_NEXT, #name);                                                   \
        int fault = fault_of(operation, fd);                                                  \
        if (fault > 0) {                                                                      \
            errno = fault;                                                                    \
            return -1;                                                                        \
        }                                                                                     \
        if (fault == IS_SHORT && size > 512)                                                  \
            size = 512 * (1 + turn % (size / 512));                                           \
        return next(fd, bytes, size, offset);                                                 \
    }
MOVES(pread, void *, off_t, READS)
MOVES(pread64, void *, off64_t, READS)
MOVES(pwrite, const void *, off_t, WRITES)
MOVES(pwrite64, const void *, off64_t, WRITES)

int fdatasync(int fd)
{
    static int (*next)(int);
    if (next == NULL)
        next = dlsym(RTLD_NEXT, "fdatasync");
    int fault = fault_of(SYNCS, fd);
    if (fault > 0) {
        errno = fault;
        return -1;
    }
    return next(fd);
}
