/* The reference of every row that copies: the same spans, bytes and threads, and nothing else.
 *
 * Two ways to copy a span: the C library's, and non-temporal AVX2 stores, which win for blocks that
 * are cold. The benchmark takes whichever is quicker on this machine.
 */
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

typedef void copy_span(uint8_t *dst, const uint8_t *src, size_t size);

static void copy_libc(uint8_t *dst, const uint8_t *src, size_t size)
{
    memcpy(dst, src, size);
}

__attribute__((target("avx2"))) static void copy_stream(uint8_t *dst, const uint8_t *src,
                                                        size_t size)
{
    size_t at = (uintptr_t)dst % 32 ? 32 - (uintptr_t)dst % 32 : 0;
    if (at > size)
        at = size;
    memcpy(dst, src, at);
    for (; at + 128 <= size; at += 128) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(src + at));
        __m256i b = _mm256_loadu_si256((const __m256i *)(src + at + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(src + at + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(src + at + 96));
        _mm256_stream_si256((__m256i *)(dst + at), a);
        _mm256_stream_si256((__m256i *)(dst + at + 32), b);
        _mm256_stream_si256((__m256i *)(dst + at + 64), c);
        _mm256_stream_si256((__m256i *)(dst + at + 96), d);
    }
    memcpy(dst + at, src + at, size - at);
    _mm_sfence();
}

struct job {
    copy_span *copy;
    const uintptr_t *dst, *src;
    const size_t *sizes;
    size_t begin, end;
};

static void *run(void *argument)
{
    const struct job *job = argument;
    for (size_t i = job->begin; i < job->end; i++)
        job->copy((uint8_t *)job->dst[i], (const uint8_t *)job->src[i], job->sizes[i]);
    return NULL;
}

/* Copy `count` spans with 1 to 16 threads, each a run of them; stream != 0 takes the AVX2 way. */
int reference_copy(const uintptr_t *dst, const uintptr_t *src, const size_t *sizes, size_t count,
                   size_t threads, int stream)
{
    pthread_t started[16];
    struct job jobs[16];
    if (threads < 1 || threads > 16)
        return -1;
    if (stream && !__builtin_cpu_supports("avx2"))
        return -1;
    for (size_t t = 0; t < threads; t++) {
        jobs[t] = (struct job){.copy = stream ? copy_stream : copy_libc,
                               .dst = dst,
                               .src = src,
                               .sizes = sizes,
                               .begin = count * t / threads,
                               .end = count * (t + 1) / threads};
        if (t + 1 < threads && pthread_create(&started[t], NULL, run, &jobs[t]) != 0)
            return -1;
    }
    run(&jobs[threads - 1]);
    for (size_t t = 0; t + 1 < threads; t++)
        pthread_join(started[t], NULL);
    return 0;
}
