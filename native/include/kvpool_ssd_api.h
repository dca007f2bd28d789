/* The SSD tier's C core, as cffi parses it: no preprocessor lines here. The conventions are those of
 * kvpool_api.h. */

/* ---- ledger.c: which block lies in which slot -------------------------------------------------
 *
 * Everything that a tier knows of its blocks, in arrays: about 120 bytes a slot. A slot's life is
 * the arena's (kvpool_api.h): FREE, RESERVED, READY, QUARANTINED, with pins and grants. A ready block
 * has a key and a parent (32 bytes each; a parent of zeros is none); it leaves the ledger by eviction
 * or when it is dropped, which waits for its last pin.
 *
 * Eviction is exact LRU among the blocks without a pin and without a child here. Safe from any
 * thread: a mutex is held for the length of each call. */
typedef struct kvp_ledger kvp_ledger;

typedef struct {
    size_t free;
    size_t reserved;
    size_t ready; /* dropped ones that are pinned included */
    size_t quarantined;
    size_t pins;
    size_t grants;
    size_t stale; /* slots whose header on the device names a block that has left */
} kvp_ledger_counts;

/* Lives are numbered from `first_generation` on. KVP_INVALID, KVP_SYSTEM (no memory). */
kvp_status kvp_ledger_open(size_t slot_count, uint64_t first_generation, kvp_ledger **out);
/* One more will close it; the last one frees it. */
void kvp_ledger_hold(kvp_ledger *ledger);
void kvp_ledger_close(kvp_ledger *ledger); /* null is allowed */
/* Keep the lives of an arena's slots from now on: kvp_arena_change and kvp_arena_count are the
 * ledger's, nothing can be reserved from the arena itself, and its readers see what
 * kvp_arena_publish shows. The arena holds the ledger. KVP_BUSY: the arena has lives of its own;
 * KVP_INVALID: they have not as many slots. */
kvp_status kvp_arena_keep(kvp_arena *arena, kvp_ledger *ledger);

/* Take up to `count` free slots, each with one grant out if `grant`; how many were taken. */
size_t kvp_ledger_reserve(kvp_ledger *ledger, size_t count, bool grant, uint32_t *slots,
                          uint64_t *generations);
/* Reserve as above, and evict up to as many blocks as free slots are wanting; *gone is how many went,
 * out of the slots in `evicted`, which has room for `count`. Call again if that is not enough. */
size_t kvp_ledger_take(kvp_ledger *ledger, size_t count, bool grant, uint32_t *slots,
                       uint64_t *generations, uint32_t *evicted, size_t *gone);
/* List up to `count` slots that kvp_ledger_take would take next if nothing changed, and change
 * nothing; how many. */
size_t kvp_ledger_ahead(kvp_ledger *ledger, size_t count, uint32_t *slots);
/* Evict up to `count` blocks; how many went, and out of which slots (null: do not say). One with
 * grants is quarantined, and frees no slot. */
size_t kvp_ledger_evict(kvp_ledger *ledger, size_t count, uint32_t *slots);
/* Evict every block in `count` slots from number `first` on, with the blocks that descend from them
 * wherever they lie, and reserve those slots: generations[i] is slot first + i's. *gone counts the
 * blocks that went. KVP_BUSY, and nothing changed, if one of the slots is reserved, granted or
 * quarantined, or one of the blocks is pinned; KVP_INVALID past the end. */
kvp_status kvp_ledger_vacate(kvp_ledger *ledger, size_t first, size_t count, uint64_t *generations,
                             size_t *gone);
/* Make reserved slots ready, in order, all or none: KVP_STALE or KVP_BUSY at *bad. added[i] says
 * whether the key was absent; if not, the block that is here counts as used and the slot is given
 * up. A parent that is its child, or descends from it (no hashing makes one), is taken for none. */
kvp_status kvp_ledger_commit(kvp_ledger *ledger, const uint32_t *slots,
                             const uint64_t *generations, const uint8_t *keys,
                             const uint8_t *parents, size_t count, bool *added, size_t *bad);
/* Commit a chain as above: each block is the parent of the next, `parent` (zeros: none) that of the
 * first. With `granted` one grant of each slot is given back first. *at counts the blocks that are new,
 * or is where it failed: KVP_INVALID also for a block that is its own parent and a slot without a
 * grant. */
kvp_status kvp_ledger_commit_run(kvp_ledger *ledger, const uint32_t *slots,
                                 const uint64_t *generations, const uint8_t *keys,
                                 const uint8_t *parent, size_t count, bool granted, bool *added,
                                 size_t *at);
/* Make free slots ready with blocks of earlier runs, oldest use first. kept[i] is false for a slot
 * that is past the end or not free, and for a key that is here. Once, before anything else. */
void kvp_ledger_restore(kvp_ledger *ledger, const uint32_t *slots, const uint64_t *generations,
                        const uint8_t *keys, const uint8_t *parents, size_t count, bool *kept);

/* Count the leading keys that are here. */
size_t kvp_ledger_match(kvp_ledger *ledger, const uint8_t *keys, size_t count);
/* Count the leading keys that are here, from a block whose every ancestor is here on. */
size_t kvp_ledger_rooted(kvp_ledger *ledger, const uint8_t *keys, size_t count);
/* Count as used those of the keys that are here; here[i] says which. */
void kvp_ledger_touch(kvp_ledger *ledger, const uint8_t *keys, size_t count, bool *here);
/* Pin the leading keys that are here, and count them as used if `use`; how many. */
size_t kvp_ledger_pin(kvp_ledger *ledger, const uint8_t *keys, size_t count, bool use,
                      uint32_t *slots, uint64_t *generations);
/* Forget a block, which lay in *slot: now, or at its last unpin; from now on it is a miss. KVP_MISS
 * if it is not here. */
kvp_status kvp_ledger_drop(kvp_ledger *ledger, const uint8_t *key, uint32_t *slot);

/* As kvp_arena_change; also KVP_ARENA_RELEASE, of RESERVED only, and KVP_ARENA_UNPIN, at whose last
 * one a dropped block goes. */
kvp_status kvp_ledger_change(kvp_ledger *ledger, kvp_arena_step step, const uint32_t *slots,
                             const uint64_t *generations, size_t count, size_t *done);

/* Copy key and parent of ready slots, 32 bytes each, and whether they are (`ready`, which is false
 * for a slot in another life or dropped). */
void kvp_ledger_names(kvp_ledger *ledger, const uint32_t *slots, const uint64_t *generations,
                      size_t count, uint8_t *keys, uint8_t *parents, bool *ready);
/* List up to `count` ready slots from number *next on, with their blocks, and move *next behind
 * them; how many. For a consistent list nothing may change meanwhile. */
size_t kvp_ledger_list(kvp_ledger *ledger, size_t *next, size_t count, uint32_t *slots,
                       uint64_t *generations, uint8_t *keys, uint8_t *parents);
/* List up to `count` stale slots that no block lies in and nobody may write (FREE, RESERVED). */
size_t kvp_ledger_stale(kvp_ledger *ledger, size_t count, uint32_t *slots);
/* Say that headers of slots on the device are stale (another block's), or are no more. */
void kvp_ledger_mark(kvp_ledger *ledger, const uint32_t *slots, size_t count, bool stale);
void kvp_ledger_count(kvp_ledger *ledger, kvp_ledger_counts *out);

/* ---- ssd_io.c, ssd_slot.c: slots in files, moved by threads ------------------------------------
 *
 * A slot is a header, which says all there is to know of it, and a payload in canonical order
 * (docs/formats.md). Each thread has one staging buffer that a slot fits into: a call that gives up
 * at its deadline leaves the thread, and with it the buffer, to the kernel until the kernel is done.
 * Nobody else's memory is ever in the kernel's hands. */
typedef struct kvp_ssd kvp_ssd;

typedef struct {
    kvp_shape shape;
    size_t layers;
    size_t header_bytes;  /* a multiple of 4096 */
    size_t slot_bytes;    /* header and payload, a multiple of 4096 */
    size_t slot_count;
    size_t segment_slots; /* slots of one file */
    uint8_t store_id[16];
    size_t threads;       /* 1 to 256 */
} kvp_ssd_geometry;

/* What came of one slot. */
typedef enum {
    KVP_SLOT_DONE = 0,
    KVP_SLOT_EMPTY = 1,   /* the header's magic is zeros */
    KVP_SLOT_CORRUPT = 2, /* no header, or its checksum, a payload's, or the file's end is wrong */
    KVP_SLOT_OTHER = 3,   /* a valid header: of another block, life, slot or store */
    KVP_SLOT_VERSION = 4, /* a header of another version of the format */
    KVP_SLOT_FAILED = 5,  /* the kernel said no; *error is the first errno */
    KVP_SLOT_LATE = 6,    /* the deadline came first; the kernel may still be at it */
    KVP_SLOT_SKIPPED = 7, /* the deadline, or a failure before it, came first; it was not begun */
    KVP_SLOT_SOURCE = 8   /* the source's bytes had another checksum: nothing was written */
} kvp_slot_result;

/* Start the threads. File descriptors are duplicated: `fds` of the segments, `intent_fd` of the
 * intent file, and `lock_fd`, whose flock holds until the kernel has let go of the last thread.
 * KVP_INVALID, KVP_SYSTEM. */
kvp_status kvp_ssd_open(const kvp_ssd_geometry *geometry, const int *fds, size_t fd_count,
                        int intent_fd, int lock_fd, kvp_ssd **out);
/* Have calls that wait give up, as at their deadline, and those that follow at once. */
void kvp_ssd_stop(kvp_ssd *ssd);
/* End the threads. Those that the kernel holds for longer than `timeout_ns` are left to it, and the
 * last one frees what is left. No other call may be under way or follow. Null is allowed. */
void kvp_ssd_close(kvp_ssd *ssd, uint64_t timeout_ns);
/* In a forked child: close the descriptors, so that the lock is its parent's alone; nothing but
 * kvp_ssd_close may follow. In the process that opened it, it does nothing. */
void kvp_ssd_forget(kvp_ssd *ssd);

/* Read blocks into `dst`, verified: keys 32 bytes each, results, crcs (crc_count each) and tokens
 * (shape.tokens each, where `known`; both nullable) by block. Of a result other than DONE, all but
 * the result is undefined. */
kvp_status kvp_ssd_read(kvp_ssd *ssd, const uint32_t *slots, const uint64_t *generations,
                        const uint8_t *keys, size_t count, const kvp_view *dst,
                        const uint64_t *dst_blocks, uint64_t timeout_ns, uint32_t *crcs,
                        uint32_t *tokens, bool *known, uint8_t *results, int *error);
/* Write blocks, and make them and all that was written before durable: first an intent that names
 * `count` slots of `slots` and the `also` ones behind them, unless the last one does (kvp_ssd_named),
 * then header and payload of each. Only if
 * KVP_OK is returned is every block with result DONE durable; otherwise slots with a result other
 * than SKIPPED or SOURCE hold anything. Those with result LATE are to be reserved until
 * kvp_ssd_settled names them. crc_expected is nullable; so are tokens (shape.tokens each), of which
 * those that `known` marks go into the headers. At most KVP_SSD_INTENT_SLOTS slots.
 * KVP_TIMEOUT, KVP_SYSTEM (errno in *error), KVP_FULL (call kvp_ssd_settled first), KVP_BUSY (the
 * kernel still has an erasure or an intent of a call that gave up), KVP_INVALID.
 * One call of kvp_ssd_write or kvp_ssd_erase at a time. */
kvp_status kvp_ssd_write(kvp_ssd *ssd, const uint32_t *slots, const uint64_t *generations,
                         const uint8_t *keys, const uint8_t *parents, size_t count, size_t also,
                         const kvp_view *src, const uint64_t *src_blocks,
                         const uint32_t *crc_expected, const uint32_t *tokens, const bool *known,
                         uint64_t timeout_ns, uint8_t *results, int *error);
/* Whether the last intent is durable and names all of these: a write of them needs no other. Only
 * for whoever may call kvp_ssd_write. */
bool kvp_ssd_named(const kvp_ssd *ssd, const uint32_t *slots, size_t count);
/* Erase headers, durably. Returns and results as kvp_ssd_write. */
kvp_status kvp_ssd_erase(kvp_ssd *ssd, const uint32_t *slots, size_t count, uint64_t timeout_ns,
                         uint8_t *results, int *error);
/* Read headers, and if `whole` check the payloads: what lies in slots, whatever it is. Result DONE
 * gives key, parent, generation, and tokens where `known` (both nullable). */
kvp_status kvp_ssd_scan(kvp_ssd *ssd, const uint32_t *slots, size_t count, bool whole,
                        uint64_t timeout_ns, uint8_t *keys, uint8_t *parents,
                        uint64_t *generations, uint32_t *tokens, bool *known, uint8_t *results,
                        int *error);
/* Take the slots whose late writes have ended since: up to `count`; how many. */
size_t kvp_ssd_settled(kvp_ssd *ssd, size_t count, uint32_t *slots, uint64_t *generations);
/* How many threads the kernel holds for calls that have given up. */
size_t kvp_ssd_late(kvp_ssd *ssd);

/* The slots that an intent names, `page` of `size` bytes: up to `count`; how many. None if it is no
 * whole intent of that store. */
size_t kvp_ssd_intent_slots(const uint8_t *page, size_t size, const uint8_t *store_id,
                            size_t count, uint32_t *slots);

enum { KVP_SSD_INTENT_BYTES = 4096, KVP_SSD_INTENT_SLOTS = 1000, KVP_SSD_SEGMENTS_MAX = 1024 };
