/* A bell that is heard a little later, and not at all if it was hushed meanwhile.
 *
 * Owns: when a thread that helps out must be woken. To wake it for each piece of work costs the one
 * who gives the work 20 us, and more where the two then want one lock; so for a while after a ring the
 * thread looks by itself, and sleeps only when none has come for long. No lock: a fork cannot catch
 * one. */
#include <errno.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>

#include "kvpool.h"

/* How often a thread that is awake looks: a fortieth of a CPU where a look costs 25 us. */
enum { LOOK_NS = 1000000 };
/* Looks without a ring before it sleeps. */
enum { LOOKS_MAX = 32 };

struct kvp_bell {
    sem_t wake;
    atomic_bool asleep;  /* whoever makes this false posts `wake` */
    atomic_bool closing;
    atomic_ullong rung;  /* how often */
    atomic_ullong waits; /* the ring that nobody has heard or hushed, else 0 */
};

kvp_status kvp_bell_open(kvp_bell **out)
{
    kvp_bell *bell = calloc(1, sizeof *bell);
    if (bell == NULL)
        return KVP_SYSTEM;
    if (sem_init(&bell->wake, 0, 0) != 0) {
        free(bell);
        return KVP_SYSTEM;
    }
    *out = bell;
    return KVP_OK;
}

void kvp_bell_close(kvp_bell *bell)
{
    free(bell); /* a semaphore holds nothing else */
}

static void wake(kvp_bell *bell)
{
    if (atomic_exchange(&bell->asleep, false))
        sem_post(&bell->wake);
}

void kvp_bell_ring(kvp_bell *bell)
{
    atomic_store(&bell->waits, atomic_fetch_add(&bell->rung, 1) + 1);
    wake(bell);
}

void kvp_bell_hush(kvp_bell *bell)
{
    atomic_store(&bell->waits, 0);
}

void kvp_bell_end(kvp_bell *bell)
{
    atomic_store(&bell->closing, true);
    wake(bell);
}

static void rest(void)
{
    const struct timespec look = {.tv_nsec = LOOK_NS};
    nanosleep(&look, NULL); /* a signal makes it a little shorter, that is all */
}

static void sleep_long(kvp_bell *bell)
{
    atomic_store(&bell->asleep, true);
    /* What came before this was seen to be asleep woke nobody. */
    if ((atomic_load(&bell->waits) != 0 || atomic_load(&bell->closing)) &&
        atomic_exchange(&bell->asleep, false))
        return;
    while (sem_wait(&bell->wake) != 0 && errno == EINTR)
        ;
}

bool kvp_bell_wait(kvp_bell *bell)
{
    unsigned long long before = atomic_load(&bell->rung);
    for (int looks = 0; !atomic_load(&bell->closing);) {
        unsigned long long waits = atomic_load(&bell->waits);
        if (waits == 0 && looks == LOOKS_MAX) {
            sleep_long(bell);
            looks = 0;
            continue;
        }
        rest();
        if (waits != 0 && atomic_compare_exchange_strong(&bell->waits, &waits, 0))
            return true;
        unsigned long long rung = atomic_load(&bell->rung);
        looks = rung == before ? looks + 1 : 0;
        before = rung;
    }
    return false;
}
