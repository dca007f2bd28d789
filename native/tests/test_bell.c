/* bell.c: a ring is heard once unless it was hushed, and none is lost on the way to sleep. */
#include "../src/bell.c"

#include <pthread.h>

#include "check.h"

static atomic_int heard;

static void *listen(void *argument)
{
    while (kvp_bell_wait(argument))
        atomic_fetch_add(&heard, 1);
    return NULL;
}

static void until_heard(int count)
{
    for (int ms = 0; ms < 20000 && atomic_load(&heard) < count; ms++)
        rest();
    CHECK(atomic_load(&heard) == count);
}

static void until_asleep(kvp_bell *bell)
{
    for (int ms = 0; ms < 20000 && !atomic_load(&bell->asleep); ms++)
        rest();
    CHECK(atomic_load(&bell->asleep));
}

/* What came before it was seen to be asleep woke nobody: then it must not sleep. */
static void test_none_is_lost_on_the_way_to_sleep(void)
{
    kvp_bell *bell;
    CHECK(kvp_bell_open(&bell) == KVP_OK);
    kvp_bell_ring(bell);
    sleep_long(bell);
    CHECK(!atomic_load(&bell->asleep));
    kvp_bell_hush(bell);
    kvp_bell_end(bell);
    sleep_long(bell);
    CHECK(!atomic_load(&bell->asleep));
    kvp_bell_close(bell);
}

int main(void)
{
    test_none_is_lost_on_the_way_to_sleep();
    kvp_bell *bell;
    pthread_t listener;
    CHECK(kvp_bell_open(&bell) == KVP_OK);
    kvp_bell_ring(bell);
    kvp_bell_hush(bell);
    CHECK(pthread_create(&listener, NULL, listen, bell) == 0);
    until_asleep(bell); /* having heard nothing */
    CHECK(atomic_load(&heard) == 0);
    for (int i = 1; i <= 20; i++) {
        if (i % 8 == 0)
            until_asleep(bell);
        kvp_bell_ring(bell);
        until_heard(i);
    }
    until_asleep(bell); /* having heard each once */
    CHECK(atomic_load(&heard) == 20);
    kvp_bell_end(bell);
    CHECK(pthread_join(listener, NULL) == 0);
    CHECK(!kvp_bell_wait(bell));
    kvp_bell_close(bell);
    kvp_bell_close(NULL);
    return 0;
}
