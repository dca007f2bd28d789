/* Between the sources of the SSD tier: the bytes of a slot's header and of an intent, as
 * docs/formats.md has them, and the threads that move slots. Not seen by Python. */
#ifndef KVPOOL_SSD_H
#define KVPOOL_SSD_H

#include <pthread.h>
#include <sys/types.h>
#include <time.h>

#include "kvpool.h"

#define KVP_SLOT_MAGIC UINT64_C(0x544f4c535350564b)   /* "KVPSSLOT" as bytes */
#define KVP_INTENT_MAGIC UINT64_C(0x544e45544e49564b) /* "KVINTENT" as bytes */

enum {
    KVP_BLOCK_BYTES = 4096, /* what direct I/O wants sizes, offsets and addresses to be multiples of */
    KVP_SLOT_VERSION_NUMBER = 2, /* 1 is read, too: it has no tokens */
    KVP_INTENT_VERSION_NUMBER = 1,
    KVP_STORE_ID_BYTES = 16,
    KVP_NAME_BYTES = 32
};

typedef struct {
    uint64_t magic;
    uint32_t version;
    uint32_t crc; /* of the whole header, with zeros here */
    uint8_t store_id[KVP_STORE_ID_BYTES];
    uint8_t hash[KVP_NAME_BYTES];
    uint8_t parent[KVP_NAME_BYTES];
    uint64_t generation;
    uint64_t slot;
    uint64_t payload_bytes;
    uint32_t crc_count;
    uint32_t token_count; /* that follow the crcs: the block's, or 0 if they are not known */
    uint32_t crcs[];
} slot_header;

_Static_assert(sizeof(slot_header) == 128, "docs/formats.md");
_Static_assert(offsetof(slot_header, crc) == 12, "docs/formats.md");
_Static_assert(offsetof(slot_header, hash) == 32, "docs/formats.md");
_Static_assert(offsetof(slot_header, generation) == 96, "docs/formats.md");
_Static_assert(offsetof(slot_header, crcs) == 128, "docs/formats.md");

typedef struct {
    uint64_t magic;
    uint32_t version;
    uint32_t crc; /* of the whole intent, with zeros here */
    uint8_t store_id[KVP_STORE_ID_BYTES];
    uint64_t sequence;
    uint32_t count;
    uint32_t reserved;
    uint32_t slots[KVP_SSD_INTENT_SLOTS];
    uint8_t zeros[KVP_SSD_INTENT_BYTES - 48 - 4 * KVP_SSD_INTENT_SLOTS];
} write_intent;

_Static_assert(sizeof(write_intent) == KVP_SSD_INTENT_BYTES, "docs/formats.md");
_Static_assert(offsetof(write_intent, slots) == 48, "docs/formats.md");

/* A block's name, and the slot's life that it is in. */
typedef struct {
    uint32_t slot;
    uint64_t generation;
    uint8_t key[KVP_NAME_BYTES];
    uint8_t parent[KVP_NAME_BYTES];
} slot_name;

size_t kvp_slot_crc_count(const kvp_ssd_geometry *geometry);
size_t kvp_slot_payload_bytes(const kvp_ssd_geometry *geometry);
/* Whether the geometry is one that the rest may trust. */
bool kvp_slot_geometry_fits(const kvp_ssd_geometry *geometry);
/* The canonical payload behind the header at `buffer`. */
kvp_view kvp_slot_view(const kvp_ssd_geometry *geometry, const uint8_t *buffer);
/* Complete the header at `buffer`, whose crcs are there already. `tokens` are the block's, or null;
 * a header that was laid out without room for them is left without. */
void kvp_slot_seal(const kvp_ssd_geometry *geometry, const slot_name *name,
                   const uint32_t *tokens, uint8_t *buffer);
/* The tokens of a checked header, as many as the shape has; null if it has none. */
const uint32_t *kvp_slot_tokens(const uint8_t *buffer);
/* Check the header at `buffer`, read from slot `slot`; DONE gives the name. */
kvp_slot_result kvp_slot_open(const kvp_ssd_geometry *geometry, uint32_t slot,
                              const uint8_t *buffer, slot_name *name);
/* Whether the payload behind a checked header sums to its crcs. */
bool kvp_slot_whole(const kvp_ssd_geometry *geometry, const uint8_t *buffer);
/* Write an intent of `count` slots (at most KVP_SSD_INTENT_SLOTS). */
void kvp_intent_seal(const kvp_ssd_geometry *geometry, uint64_t sequence, const uint32_t *slots,
                     size_t count, write_intent *intent);

/* ---- threads ---- */

typedef enum { READ, WRITE, ERASE, SCAN, SYNC, INTENT } job_kind;

/* Which way a write's bytes are copied, learnt from what its copies took: into the cache, from which
 * they are sent, or past it, where the cache keeps them not long enough. Of whoever writes. */
typedef struct {
    uint64_t past_ns; /* the least that a slot took past the cache; 0: not known */
    size_t rest;      /* writes that still go past it, before the cache is tried again */
    bool tried;       /* the cache, once */
} copy_way;

/* What a call hands to the threads: one job for each of `count` slots (SYNC: files; INTENT: one). */
typedef struct batch {
    job_kind kind;
    bool whole; /* SCAN: check the payload */
    const uint32_t *slots;
    const uint64_t *generations;
    const uint8_t *keys, *parents;
    const kvp_view *view;
    const uint64_t *blocks;
    const uint32_t *crc_expected;
    uint32_t *crcs;
    const uint32_t *tokens; /* WRITE: nullable; of those that `known` marks */
    const bool *known;
    uint32_t *found_tokens; /* READ, SCAN: nullable */
    bool *found_known;
    uint8_t *found_keys, *found_parents;
    uint64_t *found_generations;
    uint64_t sequence;   /* INTENT */
    size_t intent_slots; /* INTENT */
    uint8_t *results;
    size_t count;
    bool shut;    /* WRITE: prepare slots, and put none on the disk yet */
    size_t next;  /* first job that nobody has taken */
    size_t limit; /* first job that nobody may take yet: the threads are there for others, too */
    size_t width; /* jobs under way at once, at most; 0: as many as there are threads */
    size_t taken; /* jobs under way */
    uint64_t copy_ns; /* WRITE: of CPUs, for all slots that were copied */
    bool queued;
    size_t ended; /* jobs */
    int error;    /* the first errno */
    struct batch *later;
} batch;

typedef struct {
    kvp_ssd *ssd;
    uint8_t *buffer; /* slot_bytes; of a job, until it has ended */
    batch *batch;    /* null: idle, or the caller has given up */
    size_t index;
    job_kind kind;
    slot_name name;
    bool touching; /* the caller's memory */
    bool begun;    /* what the kernel has, or is about to be given */
    uint64_t copy_ns;
} worker;

typedef struct {
    uint32_t slot;
    uint64_t generation;
} slot_life;

struct kvp_ssd {
    pthread_mutex_t mutex;  /* guards all that changes below, and batches */
    pthread_cond_t work;    /* there is a batch, or the end */
    pthread_cond_t ended;   /* a batch has ended, a worker touches nothing any more, or has left */
    pthread_cond_t opened_gate; /* a batch is shut no more, or its caller has given up */
    kvp_ssd_geometry geometry;
    batch *first, *last;
    uint64_t sequence; /* of the next intent; of whoever writes, as the next two */
    uint32_t named[KVP_SSD_INTENT_SLOTS]; /* by the last intent, which is durable: in order */
    size_t named_count;
    copy_way way;
    bool closing, orphaned;
    bool stopped; /* nobody waits any more */
    size_t alive, settled_count;
    size_t late_count; /* workers that the kernel holds for callers that have given up */
    size_t blocking;   /* of them: with an intent or an erasure, which no write may overtake */
    pid_t process;
    size_t fd_count; /* of the segments */
    size_t opened;   /* all: behind them the intent file, and the lock */
    int *fds;
    uint8_t *map;
    uint8_t **spare; /* buffers that no worker has: the last one is the one that was used last */
    size_t spare_count;
    size_t waiting_for_touch; /* callers that give up, and wait until nobody touches their memory */
    slot_life *settled; /* room for 4 a thread */
    worker workers[];
};

/* ssd_job.c: do what a worker has taken; *error is the errno of a FAILED one. */
kvp_slot_result kvp_ssd_job(worker *self, bool whole, int *error);

/* ssd_io.c. */
/* How many late writes may wait to be taken by kvp_ssd_settled. */
size_t kvp_ssd_settled_max(const kvp_ssd *ssd);
/* How many slots are written at once, so that what was copied is in the cache when it is sent; 0 if a
 * slot is too large for that. */
size_t kvp_ssd_write_width(const kvp_ssd_geometry *geometry);
/* Whether the next large write goes past the cache. */
bool kvp_ssd_way_next(copy_way *way);
/* Learn what a slot of a large write took to copy. */
void kvp_ssd_way_learn(copy_way *way, bool past, uint64_t slot_ns);
struct timespec kvp_ssd_deadline(uint64_t timeout_ns);
/* Hand a batch to the threads. Its first job is taken after those of batches begun before it. */
void kvp_ssd_begin(kvp_ssd *ssd, batch *mine);
/* Let a batch that was begun shut be written. */
void kvp_ssd_unshut(kvp_ssd *ssd, batch *mine);
/* Wait until a batch is done, or give up at the deadline, or at once if it is shut: KVP_OK if every
 * job has ended. */
kvp_status kvp_ssd_finish(kvp_ssd *ssd, batch *mine, const struct timespec *deadline);
/* Begin and finish. */
kvp_status kvp_ssd_run(kvp_ssd *ssd, batch *mine, const struct timespec *deadline);

#endif
