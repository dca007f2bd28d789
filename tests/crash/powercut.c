/* A libc below everything that writes files: what a power cut leaves can be told from its log.
 *
 * Preloaded into a process, it appends to POWERCUT_LOG what is done to files below POWERCUT_FOLDER: the
 * beginning of each write, with its bytes, and its end; the beginning and the end of each sync; sizes.
 * A write that ended before a sync of its file began, which then ended, is durable; of any other each
 * sector may or may not be on the disk. With POWERCUT_DEAF no sync is noted: a disk that lies.
 * tests/crash/powercut.py reads the log. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { PATH_BYTES = 1024, PIECES = 4 };

typedef struct {
    uint32_t kind; /* a letter, see `note` */
    uint32_t path_bytes;
    uint64_t id;
    uint64_t offset;
    uint64_t size;
} record;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static uint64_t next_id;
static int log_fd = -2;
static const char *folder;

static void *real(const char *name)
{
    void *found = dlsym(RTLD_NEXT, name);
    if (found == NULL)
        abort();
    return found;
}

/* The path of a descriptor if it is of a file that is watched, else 0 bytes. */
static size_t path_of(int fd, char *path)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, PATH_BYTES);
    if (size <= 0 || folder == NULL || strncmp(path, folder, strlen(folder)) != 0)
        return 0;
    return (size_t)size;
}

/* W: a write begins. E: it has ended. S: a sync begins. F: it has ended. T: the file has this size. */
static uint64_t note(char kind, int fd, uint64_t id, uint64_t offset, const struct iovec *bytes,
                     int count)
{
    char path[PATH_BYTES];
    pthread_mutex_lock(&mutex);
    if (log_fd == -2) {
        const char *name = getenv("POWERCUT_LOG");
        folder = getenv("POWERCUT_FOLDER");
        log_fd = name == NULL ? -1
                              : (int)syscall(SYS_openat, AT_FDCWD, name,
                                             O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    }
    size_t size = 0, length = log_fd < 0 ? 0 : path_of(fd, path);
    for (int i = 0; i < count; i++)
        size += bytes[i].iov_len;
    if (id == 0)
        id = ++next_id;
    if (length > 0 && !(getenv("POWERCUT_DEAF") != NULL && (kind == 'S' || kind == 'F'))) {
        record head = {(uint32_t)kind, (uint32_t)length, id, offset, kind == 'T' ? offset : size};
        struct iovec pieces[2 + PIECES] = {{&head, sizeof head}, {path, length}};
        for (int i = 0; i < count && i < PIECES; i++)
            pieces[2 + i] = bytes[i];
        if (count > PIECES) { /* more than fit one record: as many records */
            for (int i = 0; i < count; i++) {
                head.size = bytes[i].iov_len;
                pieces[2] = bytes[i];
                syscall(SYS_writev, log_fd, pieces, 3);
                head.offset += bytes[i].iov_len;
            }
        } else {
            syscall(SYS_writev, log_fd, pieces, 2 + count);
        }
    }
    pthread_mutex_unlock(&mutex);
    return id;
}

#define WRITES(name, offset_type)                                                             \
    ssize_t name(int fd, const void *bytes, size_t size, offset_type offset)                  \
    {                                                                                         \
        static ssize_t (*next)(int, const void *, size_t, offset_type);                       \
        if (next == NULL)                                                                     \
            next = real(#name);                                                               \
        const struct iovec all = {(void *)(uintptr_t)bytes, size};                            \
        uint64_t id = note('W', fd, 0, (uint64_t)offset, &all, 1);                            \
        ssize_t moved = next(fd, bytes, size, offset);                                        \
        note('E', fd, id, (uint64_t)moved, NULL, 0);                                          \
        return moved;                                                                         \
    }
WRITES(pwrite, off_t)
WRITES(pwrite64, off64_t)

#define WRITES_VECTOR(name, offset_type)                                                      \
    ssize_t name(int fd, const struct iovec *bytes, int count, offset_type offset)            \
    {                                                                                         \
        static ssize_t (*next)(int, const struct iovec *, int, offset_type);                  \
        if (next == NULL)                                                                     \
            next = real(#name);                                                               \
        uint64_t id = note('W', fd, 0, (uint64_t)offset, bytes, count);                       \
        ssize_t moved = next(fd, bytes, count, offset);                                       \
        note('E', fd, id, (uint64_t)moved, NULL, 0);                                          \
        return moved;                                                                         \
    }
WRITES_VECTOR(pwritev, off_t)
WRITES_VECTOR(pwritev64, off64_t)

ssize_t write(int fd, const void *bytes, size_t size)
{
    static ssize_t (*next)(int, const void *, size_t);
    if (next == NULL)
        next = real("write");
    const off_t at = lseek(fd, 0, SEEK_CUR);
    if (at < 0)
        return next(fd, bytes, size);
    const struct iovec all = {(void *)(uintptr_t)bytes, size};
    uint64_t id = note('W', fd, 0, (uint64_t)at, &all, 1);
    ssize_t moved = next(fd, bytes, size);
    note('E', fd, id, (uint64_t)moved, NULL, 0);
    return moved;
}

#define SYNCS(name)                                                                           \
    int name(int fd)                                                                          \
    {                                                                                         \
        static int (*next)(int);                                                              \
        if (next == NULL)                                                                     \
            next = real(#name);                                                               \
        uint64_t id = note('S', fd, 0, 0, NULL, 0);                                           \
        int status = next(fd);                                                                \
        if (status == 0)                                                                      \
            note('F', fd, id, 0, NULL, 0);                                                    \
        return status;                                                                        \
    }
SYNCS(fsync)
SYNCS(fdatasync)

#define SIZES(name, offset_type)                                                              \
    int name(int fd, offset_type size)                                                        \
    {                                                                                         \
        static int (*next)(int, offset_type);                                                 \
        if (next == NULL)                                                                     \
            next = real(#name);                                                               \
        int status = next(fd, size);                                                          \
        if (status == 0)                                                                      \
            note('T', fd, 0, (uint64_t)size, NULL, 0);                                        \
        return status;                                                                        \
    }
SIZES(ftruncate, off_t)
SIZES(ftruncate64, off64_t)

#define ALLOCATES(name, offset_type)                                                          \
    int name(int fd, offset_type offset, offset_type size)                                    \
    {                                                                                         \
        static int (*next)(int, offset_type, offset_type);                                    \
        if (next == NULL)                                                                     \
            next = real(#name);                                                               \
        int status = next(fd, offset, size);                                                  \
        if (status == 0)                                                                      \
            note('T', fd, 0, (uint64_t)(offset + size), NULL, 0);                             \
        return status;                                                                        \
    }
ALLOCATES(posix_fallocate, off_t)
ALLOCATES(posix_fallocate64, off64_t)
