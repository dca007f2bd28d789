/* How calls and threads of the SSD tier end: at a deadline, with the tier, in a fork. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ssd_store.h"

/* How many threads of any kvp_ssd the system still has. */
static size_t count_workers(void)
{
    size_t count = 0;
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks != NULL);
    for (struct dirent *task; (task = readdir(tasks)) != NULL;) {
        char path[300], name[32] = {0};
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
        FILE *file = fopen(path, "r");
        if (file == NULL)
            continue; /* ended meanwhile */
        count += fgets(name, sizeof name, file) != NULL && strcmp(name, "kvpool-ssd\n") == 0;
        fclose(file);
    }
    closedir(tasks);
    return count;
}

static void test_closing_leaves_a_hung_thread_to_the_kernel(void)
{
    while (count_workers() > 0) /* of the tests before */
        usleep(1000);
    store *mine = opened();
    CHECK(write_all(mine, UINT64_C(60) * SECOND) == KVP_OK);
    set_hung(true);
    while (kvp_ssd_late(mine->ssd) < THREADS)
        CHECK(read_all(mine, SECOND / 20) == KVP_TIMEOUT);
    wait_hanging(THREADS);
    kvp_ssd_close(mine->ssd, SECOND / 20);
    CHECK(count_workers() == THREADS);
    set_hung(false);
    while (count_workers() > 0) /* the last one frees what is left: a sanitizer looks */
        usleep(1000);
    mine->ssd = NULL;
    closed(mine);
}

/* A caller that gives up: in its own memory, which is gone when it has returned. */
typedef struct {
    kvp_ssd *ssd;
    batch *mine;
    bool returned;
    pthread_mutex_t mutex;
} quitter;

static void *give_up_at_once(void *argument)
{
    quitter *self = argument;
    const struct timespec past = {0};
    CHECK(kvp_ssd_finish(self->ssd, self->mine, &past) == KVP_TIMEOUT);
    free((void *)self->mine->view->base);
    pthread_mutex_lock(&self->mutex);
    self->returned = true;
    pthread_mutex_unlock(&self->mutex);
    return NULL;
}

static bool has_returned(quitter *one)
{
    pthread_mutex_lock(&one->mutex);
    const bool returned = one->returned;
    pthread_mutex_unlock(&one->mutex);
    return returned;
}

static bool waits_for_touch(kvp_ssd *ssd)
{
    pthread_mutex_lock(&ssd->mutex);
    const bool waits = ssd->waiting_for_touch > 0;
    pthread_mutex_unlock(&ssd->mutex);
    return waits;
}

/* No call returns while a thread still copies from or to its caller's memory, deadline or not. */
static void test_a_call_that_gives_up_waits_for_who_touches_its_memory(job_kind kind)
{
    store *mine = opened();
    CHECK(write_all(mine, UINT64_C(60) * SECOND) == KVP_OK);
    const kvp_view view = flat(calloc(SLOTS, PAYLOAD));
    CHECK(view.base != 0);
    hold_copies(true);
    batch job = {.kind = kind,
                 .slots = mine->slots,
                 .generations = mine->lives,
                 .keys = mine->keys[0],
                 .parents = mine->parents[0],
                 .view = &view,
                 .blocks = mine->blocks,
                 .crcs = mine->crcs[0],
                 .results = mine->results,
                 .count = SLOTS};
    quitter one = {.ssd = mine->ssd, .mine = &job};
    pthread_t thread;
    pthread_mutex_init(&one.mutex, NULL);
    kvp_ssd_begin(mine->ssd, &job);
    wait_copying(1);
    CHECK(pthread_create(&thread, NULL, give_up_at_once, &one) == 0);
    while (!waits_for_touch(mine->ssd) && !has_returned(&one))
        usleep(1000);
    CHECK(!has_returned(&one)); /* a thread copies: it cannot have */
    hold_copies(false);
    CHECK(pthread_join(thread, NULL) == 0);
    while (kvp_ssd_late(mine->ssd) > 0)
        usleep(1000);
    hold_copies(false);
    pthread_mutex_destroy(&one.mutex);
    closed(mine);
}

static void look_at(kvp_ssd *ssd, const batch *mine, size_t *next, size_t *ended)
{
    pthread_mutex_lock(&ssd->mutex);
    *next = mine->next;
    *ended = mine->ended;
    pthread_mutex_unlock(&ssd->mutex);
}

/* Nobody begins another job of a call that gives up, which waits for a copy; not even a batch of
 * which no more may be under way at once, where each job that ends lets one more begin. */
static void test_no_job_begins_for_a_call_that_gives_up(void)
{
    enum { AT_ONCE = 2 };
    store *mine = opened();
    CHECK(write_all(mine, UINT64_C(60) * SECOND) == KVP_OK);
    const kvp_view view = flat(calloc(SLOTS, PAYLOAD));
    CHECK(view.base != 0);
    hold_copies(true);
    batch job = {.kind = READ,
                 .width = AT_ONCE,
                 .slots = mine->slots,
                 .generations = mine->lives,
                 .keys = mine->keys[0],
                 .view = &view,
                 .blocks = mine->blocks,
                 .crcs = mine->crcs[0],
                 .results = mine->results,
                 .count = SLOTS};
    quitter one = {.ssd = mine->ssd, .mine = &job};
    pthread_t thread;
    size_t next, ended;
    pthread_mutex_init(&one.mutex, NULL);
    kvp_ssd_begin(mine->ssd, &job);
    wait_copying(AT_ONCE);
    CHECK(pthread_create(&thread, NULL, give_up_at_once, &one) == 0);
    while (!waits_for_touch(mine->ssd))
        usleep(1000);
    free_one_copy(); /* either the one that is waited for or the other one */
    do {
        usleep(1000);
        look_at(mine->ssd, &job, &next, &ended);
        CHECK(next == AT_ONCE && ended < AT_ONCE);
    } while (count_copying() == AT_ONCE);
    hold_copies(false);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(job.next == AT_ONCE);
    pthread_mutex_lock(&mine->ssd->mutex);
    CHECK(mine->ssd->first == NULL && mine->ssd->last == NULL); /* where this batch lay is gone */
    pthread_mutex_unlock(&mine->ssd->mutex);
    while (kvp_ssd_late(mine->ssd) > 0)
        usleep(1000);
    pthread_mutex_destroy(&one.mutex);
    closed(mine);
}

/* A lock that a fork has inherited goes with the tier that was closed, not with the fork. */
static void test_a_fork_does_not_keep_the_lock(bool forgets)
{
    store *mine = opened();
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", mine->lock);
    const int other = open(path, O_RDWR);
    CHECK(other >= 0 && flock(mine->lock, LOCK_EX | LOCK_NB) == 0);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        if (forgets) {
            kvp_ssd_forget(mine->ssd);
            close(mine->lock);
        }
        for (;;)
            pause();
    }
    CHECK(flock(other, LOCK_EX | LOCK_NB) != 0); /* its opener has it, whatever the child does */
    kvp_ssd_forget(mine->ssd);                   /* which is not the child: nothing happens */
    CHECK(write_all(mine, UINT64_C(60) * SECOND) == KVP_OK);
    closed(mine);
    CHECK(flock(other, LOCK_EX | LOCK_NB) == 0);
    close(other);
    CHECK(kill(child, SIGKILL) == 0 && waitpid(child, NULL, 0) == child);
}

int main(void)
{
    test_closing_leaves_a_hung_thread_to_the_kernel();
    test_a_call_that_gives_up_waits_for_who_touches_its_memory(READ);
    test_a_call_that_gives_up_waits_for_who_touches_its_memory(WRITE);
    for (int turn = 0; turn < 10; turn++) /* which copy is freed is chance */
        test_no_job_begins_for_a_call_that_gives_up();
    test_a_fork_does_not_keep_the_lock(false);
    test_a_fork_does_not_keep_the_lock(true);
    return 0;
}
