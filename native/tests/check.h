/* What the C tests share: a check that says where it failed, and random numbers from a seed. */
#ifndef KVPOOL_CHECK_H
#define KVPOOL_CHECK_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* Not assert(): work may be done inside, and it is never compiled out. */
#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);       \
            abort();                                                                      \
        }                                                                                 \
    } while (0)

static uint64_t random_state = 0x9e3779b97f4a7c15;

static inline uint64_t next_random(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state * UINT64_C(0x2545f4914f6cdd1d);
}

static inline size_t random_below(size_t limit)
{
    return (size_t)(next_random() % limit);
}

static inline void fill_random(void *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++)
        ((uint8_t *)bytes)[i] = (uint8_t)next_random();
}

#endif
