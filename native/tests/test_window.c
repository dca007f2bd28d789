/* window.c: an owner's slots as a peer sees them, lives that end, and memfds that lie. */
#include "../src/window.c"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include "check.h"

enum { SLOTS = 3, SLOT_BYTES = 4096, CRCS = 5, LIES = 6000, LIVES = 20000 };

static const uint8_t incarnation[KVP_INCARNATION_BYTES] = "0123456789abcde";
static const uint8_t other_run[KVP_INCARNATION_BYTES] = "another run....";
static const uint8_t hash[KVP_HASH_BYTES] = "a block's hash of 32 bytes......";

static void commit_one(kvp_arena *arena, uint32_t slot, uint64_t life, const uint32_t *crcs)
{
    size_t done;
    CHECK(kvp_arena_commit(arena, &slot, &life, 1, hash, crcs, &done) == KVP_OK);
}

static void release_one(kvp_arena *arena, uint32_t slot, uint64_t life)
{
    size_t done;
    CHECK(kvp_arena_change(arena, KVP_ARENA_RELEASE, &slot, &life, 1, &done) == KVP_OK);
}

static void test_lives(void)
{
    kvp_arena *arena;
    kvp_window *window;
    CHECK(kvp_arena_open(SLOTS, SLOT_BYTES, CRCS, incarnation, &arena) == KVP_OK);
    CHECK(kvp_window_map(kvp_arena_fd(arena), other_run, &window) == KVP_STALE);
    CHECK(kvp_window_map(kvp_arena_fd(arena), incarnation, &window) == KVP_OK);
    CHECK(kvp_window_slot_count(window) == SLOTS && kvp_window_slot_bytes(window) == SLOT_BYTES);
    CHECK(kvp_window_crc_count(window) == CRCS);
    CHECK(kvp_window_slot_stride(window) == kvp_arena_slot_stride(arena));
    uint32_t slots[2], crcs[CRCS] = {9, 8, 7, 6, 5}, read[2 * CRCS];
    uint64_t lives[2], none = 0;
    size_t bad;
    CHECK(kvp_arena_reserve(arena, 2, false, slots, lives) == 2);
    CHECK(kvp_window_check(window, slots, lives, 2, &bad) == KVP_STALE && bad == 0);
    CHECK(kvp_window_check(window, slots, &none, 1, &bad) == KVP_STALE); /* 0 is no life */
    commit_one(arena, slots[0], lives[0], crcs);
    CHECK(kvp_window_check(window, slots, lives, 2, &bad) == KVP_STALE && bad == 1);
    commit_one(arena, slots[1], lives[1], crcs);
    CHECK(kvp_window_check(window, slots, lives, 2, &bad) == KVP_OK && bad == 2);
    CHECK(kvp_window_crcs(window, slots, lives, 2, read, &bad) == KVP_OK && bad == 2);
    CHECK(!memcmp(read, crcs, sizeof crcs) && !memcmp(read + CRCS, crcs, sizeof crcs));
    release_one(arena, slots[0], lives[0]);
    CHECK(kvp_window_check(window, slots, lives, 2, &bad) == KVP_STALE && bad == 0);
    slots[0] = SLOTS;
    CHECK(kvp_window_check(window, slots, lives, 1, &bad) == KVP_INVALID && bad == 0);
    CHECK(kvp_window_crcs(window, slots, lives, 1, read, &bad) == KVP_INVALID);
    kvp_arena_close(arena);
    CHECK(kvp_window_check(window, slots + 1, lives + 1, 1, &bad) == KVP_OK); /* outlives it */
    kvp_window_close(window);
    kvp_window_close(NULL);
}

/* The owner overwrites one slot, life after life; the reader copies it. Whenever the life is the
 * same before and after, the copy and the CRCs are that life's. */
typedef struct {
    kvp_arena *arena;
    uint64_t life; /* atomic: of slot 0, as a descriptor would carry it; 0 at the end */
} shared;

static void *own(void *argument)
{
    shared *with = argument;
    for (size_t i = 0; i < LIVES; i++) {
        uint32_t slot, crcs[CRCS];
        uint64_t life;
        CHECK(kvp_arena_reserve(with->arena, 1, false, &slot, &life) == 1 && slot == 0);
        uint64_t *bytes = (uint64_t *)kvp_arena_base(with->arena);
        for (size_t j = 0; j < 64; j++)
            __atomic_store_n(&bytes[j], life, __ATOMIC_RELAXED);
        for (size_t j = 0; j < CRCS; j++)
            crcs[j] = (uint32_t)life;
        commit_one(with->arena, slot, life, crcs);
        __atomic_store_n(&with->life, life, __ATOMIC_RELEASE);
        release_one(with->arena, slot, life);
    }
    __atomic_store_n(&with->life, 0, __ATOMIC_RELEASE);
    return NULL;
}

static void test_never_torn(void)
{
    shared with = {NULL, 1};
    kvp_window *window;
    CHECK(kvp_arena_open(1, SLOT_BYTES, CRCS, incarnation, &with.arena) == KVP_OK);
    CHECK(kvp_window_map(kvp_arena_fd(with.arena), incarnation, &window) == KVP_OK);
    pthread_t owner;
    CHECK(pthread_create(&owner, NULL, own, &with) == 0);
    const uint64_t *bytes = (const uint64_t *)kvp_window_base(window);
    uint64_t life;
    while ((life = __atomic_load_n(&with.life, __ATOMIC_ACQUIRE)) != 0) {
        uint32_t slot = 0, crcs[CRCS];
        uint64_t copy[64];
        size_t bad;
        if (kvp_window_crcs(window, &slot, &life, 1, crcs, &bad) != KVP_OK)
            continue;
        for (size_t j = 0; j < 64; j++)
            copy[j] = __atomic_load_n(&bytes[j], __ATOMIC_RELAXED);
        if (kvp_window_check(window, &slot, &life, 1, &bad) != KVP_OK)
            continue;
        for (size_t j = 0; j < 64; j++)
            CHECK(copy[j] == life);
        for (size_t j = 0; j < CRCS; j++)
            CHECK(crcs[j] == (uint32_t)life);
    }
    CHECK(pthread_join(owner, NULL) == 0);
    kvp_window_close(window);
    kvp_arena_close(with.arena);
}

/* Use everything that a window offers: whatever maps must be safe to read. */
static void read_all(kvp_window *window)
{
    uint64_t sum = 0;
    size_t bad, slots = kvp_window_slot_count(window), crc_count = kvp_window_crc_count(window);
    uint32_t *crcs = calloc(crc_count + 1, sizeof *crcs);
    CHECK(crcs != NULL);
    for (uint32_t slot = 0; slot < slots; slot += 1 + (uint32_t)(slots / 16)) {
        uint64_t life = __atomic_load_n(&header_of(window, slot)->generation, __ATOMIC_ACQUIRE);
        (void)kvp_window_crcs(window, &slot, &life, 1, crcs, &bad);
        const volatile uint8_t *bytes =
            (const uint8_t *)(kvp_window_base(window) + slot * kvp_window_slot_stride(window));
        sum += bytes[0] + bytes[kvp_window_slot_bytes(window) - 1];
    }
    CHECK(sum < UINT64_MAX);
    free(crcs);
}

static void damage(arena_header *header)
{
    static const uint64_t edges[] = {0, 1, 2, 4095, 4096, 4097, UINT32_MAX, UINT64_MAX, 1ull << 63,
                                     (1ull << 52) + 1, UINT64_MAX - 4095};
    uint64_t *fields = (uint64_t *)&header->geometry;
    size_t field = random_below(sizeof header->geometry / sizeof *fields);
    switch (random_below(4)) {
    case 0: /* a bit anywhere */
        ((uint8_t *)header)[random_below(sizeof *header)] ^= (uint8_t)(1 << random_below(8));
        break;
    case 1:
        fields[field] = edges[random_below(sizeof edges / sizeof *edges)];
        break;
    case 2:
        fill_random(header, sizeof *header);
        break;
    default: /* counts that agree with each other, not with the file */
        header->geometry.slot_count = 1 + random_below(6);
        (void)kvp_arena_lay_out(header->geometry.slot_count, 1 + random_below(9000),
                                random_below(40), &header->geometry);
    }
}

static void test_lies(void)
{
    arena_geometry geometry;
    CHECK(kvp_arena_lay_out(SLOTS, SLOT_BYTES, CRCS, &geometry));
    size_t mapped = 0;
    for (size_t step = 0; step < LIES; step++) {
        arena_header header = {
            .magic = KVP_ARENA_MAGIC, .version = KVP_ARENA_VERSION, .geometry = geometry};
        memcpy(header.incarnation, incarnation, sizeof incarnation);
        size_t size = geometry.total_bytes;
        if (step % 8 != 0)
            damage(&header);
        if (step % 4 == 3)
            size = random_below(2 * size);
        int seals = F_SEAL_SHRINK | F_SEAL_GROW | 0x0010 /* FUTURE_WRITE */;
        if (step % 16 == 5)
            seals &= ~(1 << (1 + random_below(4)));
        int fd = memfd_create("lie", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        CHECK(fd >= 0);
        size_t written = size < sizeof header ? size : sizeof header;
        CHECK(pwrite(fd, &header, written, 0) == (ssize_t)written);
        CHECK(ftruncate(fd, (off_t)size) == 0 && fcntl(fd, F_ADD_SEALS, seals) == 0);
        kvp_window *window;
        if (kvp_window_map(fd, incarnation, &window) == KVP_OK) {
            mapped++;
            read_all(window);
            kvp_window_close(window);
        }
        close(fd);
    }
    CHECK(mapped >= LIES / 8 && mapped < LIES / 4); /* the true ones, and few of the others */
}

int main(void)
{
    test_lives();
    test_never_torn();
    test_lies();
    return 0;
}
