/* Every function and type that Python calls, as cffi parses it: no preprocessor lines here.
 *
 * Conventions: prefix kvp_; the result is a kvp_status; out-parameters come last; sizes are size_t;
 * fixed-width little-endian types wherever bytes leave the process. Unless a prototype says
 * otherwise: pointers are not null, the caller owns what it passes, and the call is safe from any
 * thread. C never calls Python, never logs, and allocates only in kvp_*_open and kvp_*_map.
 */

typedef enum {
    KVP_OK = 0,
    KVP_MISS = 1,     /* not there: a value, not a failure */
    KVP_FULL = 2,     /* no room now */
    KVP_BUSY = 3,     /* pinned, or in another state than the call needs */
    KVP_STALE = 4,    /* another generation or incarnation than the caller named */
    KVP_CORRUPT = 5,  /* a checksum, magic or sequence differed */
    KVP_INVALID = 6,  /* an argument is out of range; nothing was done */
    KVP_SYSTEM = 7,   /* the kernel refused; errno says why */
    KVP_CLOSED = 8,
    KVP_TIMEOUT = 9,
    KVP_PEER = 10,    /* the peer is gone or unreachable */
    KVP_CANCELLED = 11 /* the caller asked for an early end */
} kvp_status;

/* ---- hash.c: SHA-256 and chained block hashes ------------------------------------------------ */

/* Hash `size` bytes into 32 bytes at `digest`. SHA-NI where the CPU has it. */
void kvp_sha256(const uint8_t *data, size_t size, uint8_t *digest);

/* Chain the hashes of the full blocks of `tokens`: block i is SHA-256(parent || its tokens as
 * little-endian uint32 || its extra), parent of block 0 is `root` (32 bytes).
 * `extra_ends` is null (no extras) or has token_count / block_tokens ascending ends into `extras`.
 * `out` has room for 32 * (token_count / block_tokens) bytes; a trailing partial block is left out.
 * KVP_INVALID if block_tokens is 0. */
kvp_status kvp_hash_chain(const uint8_t *root, const uint32_t *tokens, size_t token_count,
                          size_t block_tokens, const uint8_t *extras, const size_t *extra_ends,
                          uint8_t *out);

/* ---- table.c: 32-byte hash -> uint64, open addressing ---------------------------------------- */

typedef struct kvp_table kvp_table;

/* Make a table that holds at least `capacity` entries; null if out of memory. */
kvp_table *kvp_table_open(size_t capacity);
void kvp_table_close(kvp_table *table); /* null is allowed */
size_t kvp_table_count(kvp_table *table);
/* Insert or overwrite. KVP_FULL at capacity. Not thread-safe against itself: the caller's lock. */
kvp_status kvp_table_put(kvp_table *table, const uint8_t *hash, uint64_t value);
/* Insert those of `count` hashes that are absent, each with its value; added[i] says whether it was.
 * KVP_FULL, and nothing was inserted, if there is not room for `count` more. */
kvp_status kvp_table_add(kvp_table *table, const uint8_t *hashes, const uint64_t *values,
                         size_t count, bool *added);
/* KVP_MISS if absent. */
kvp_status kvp_table_get(kvp_table *table, const uint8_t *hash, uint64_t *value);
/* Remove `count` hashes; `values` (nullable, room for `count`) takes their values. Ends at the first
 * that is absent; returns how many were removed. */
size_t kvp_table_remove(kvp_table *table, const uint8_t *hashes, size_t count, uint64_t *values);
/* Count the leading hashes (of `count`, 32 bytes each) that are present; `values` (nullable, room
 * for `count`) takes their values. */
size_t kvp_table_match(kvp_table *table, const uint8_t *hashes, size_t count, uint64_t *values);
/* Remove every hash whose value is below `numbers` and is `dead`. Returns how many. Linear in the
 * table's size. */
size_t kvp_table_sweep(kvp_table *table, const bool *dead, size_t numbers);
/* Copy up to `room` of the hashes that are present, 32 bytes each, in no order. Returns how many. */
size_t kvp_table_list(kvp_table *table, uint8_t *hashes, size_t room);

/* ---- block_index.c: block hash -> set of nodes ------------------------------------------------ */

/* Not thread-safe: one owner. */
typedef struct kvp_block_index kvp_block_index;

/* Make an index of at most `capacity` hashes of `hash_bytes` (8 to 32), of which at most
 * `set_capacity` are at several nodes at a time, and of nodes 0 to `nodes` - 1; each of the three
 * below 2^31. Null if out of memory or of range. */
kvp_block_index *kvp_block_index_open(size_t hash_bytes, size_t capacity, size_t set_capacity,
                                      size_t nodes);
void kvp_block_index_close(kvp_block_index *index); /* null is allowed */
size_t kvp_block_index_count(const kvp_block_index *index);
/* Below, `size` bytes are hashes, one after the other; a rest that is no whole hash is passed over.
 *
 * Note that `node` holds these. Ends at the first for which there is no room: of hashes, if their
 * count is the capacity, else of sets; returns the size of those noted. 0 for no such node. */
size_t kvp_block_index_add(kvp_block_index *index, size_t node, const uint8_t *hashes, size_t size);
/* Note that `node` holds these no more; those it did not hold are passed over. */
void kvp_block_index_remove(kvp_block_index *index, size_t node, const uint8_t *hashes,
                            size_t size);
/* Note that `node` holds nothing. Linear in the size of the index. */
void kvp_block_index_clear(kvp_block_index *index, size_t node);
/* Of one whole hash. */
bool kvp_block_index_holds(const kvp_block_index *index, size_t node, const uint8_t *hash);
/* For each node, count the leading hashes that it holds; `matched` has room for all nodes. */
void kvp_block_index_match(kvp_block_index *index, const uint8_t *hashes, size_t size,
                           int64_t *matched);
/* Copy all of `from` into `to`, which is empty and has hashes as long. KVP_FULL if it has too little
 * room, and KVP_INVALID if it has fewer nodes: `to` is good for closing only. */
kvp_status kvp_block_index_copy(const kvp_block_index *from, kvp_block_index *to);

/* ---- crc32c.c -------------------------------------------------------------------------------- */

/* Continue `crc` (0 to start) over `size` bytes: CRC-32C (Castagnoli), as in RFC 3720. */
uint32_t kvp_crc32c(uint32_t crc, const uint8_t *data, size_t size);
/* The CRC of A followed by B, from crc(A), crc(B) and B's size. */
uint32_t kvp_crc32c_combine(uint32_t crc_a, uint32_t crc_b, size_t size_b);

/* ---- copy.c: block copies between layouts, with CRC32C fused --------------------------------- */

/* What one layer of one block holds: `heads` heads, each K then V, each `tokens` rows. */
typedef struct {
    size_t heads;
    size_t tokens;
    size_t k_row_bytes; /* one token's K of one head */
    size_t v_row_bytes;
} kvp_shape;

/* Where blocks lie: row t of K (kv = 0) or V (kv = 1) of head h of layer l of block id b starts at
 * base + b * block_stride + l * layer_stride + h * head_stride + kv * kv_stride + t * token_stride,
 * where token_stride is k_token_stride or v_token_stride. Strides may be 0 (say, one layer only).
 */
typedef struct {
    uintptr_t base;
    size_t block_stride;
    size_t layer_stride;
    size_t head_stride;
    size_t kv_stride;
    size_t k_token_stride;
    size_t v_token_stride;
} kvp_view;

/* Copy layers [layer_begin, layer_end) of `block_count` blocks; dst_blocks and src_blocks are the
 * block ids in either view. CRC32C per (layer, head) covers K then V, rows in token order.
 *
 * crc_expected (nullable) and crc_out (nullable) are indexed
 *   [block * crc_block_stride + (layer - layer_begin) * heads + head].
 * With crc_expected a difference ends the copy: KVP_CORRUPT, *bad_block is the index of the block
 * (all blocks before it are whole and verified; it and those after are undefined). *bad_block is
 * block_count on success. The views must not overlap. The caller keeps both alive. KVP_INVALID if a
 * count other than v_row_bytes is 0, a base is null, an address would wrap, or crc_block_stride is
 * too small; nothing was copied then.
 *
 * A call that copies 256 KiB or more stores past the cache. */
kvp_status kvp_copy_blocks(const kvp_shape *shape, const kvp_view *dst, const uint64_t *dst_blocks,
                           const kvp_view *src, const uint64_t *src_blocks, size_t block_count,
                           size_t layer_begin, size_t layer_end, const uint32_t *crc_expected,
                           uint32_t *crc_out, size_t crc_block_stride, size_t *bad_block);

/* ---- crew.c ----------------------------------------------------------------------------------
 *
 * Threads that share the work of one copy, so that one call uses the memory's whole bandwidth:
 * one thread of Python could start the others only through the interpreter's lock. */
typedef struct kvp_crew kvp_crew;

/* `helpers` (0 to 64) threads are started; the caller of a copy is one more. KVP_INVALID,
 * KVP_SYSTEM. */
kvp_status kvp_crew_open(size_t helpers, kvp_crew **out);
/* End the threads. No copy may be under way. After a fork, in the child, only memory is freed. */
void kvp_crew_close(kvp_crew *crew); /* null is allowed */
/* As kvp_copy_blocks, cut into runs of blocks that the caller and the idle helpers take one after
 * another. Helpers that are busy with another call's copy are not waited for. */
kvp_status kvp_crew_copy_blocks(kvp_crew *crew, const kvp_shape *shape, const kvp_view *dst,
                                const uint64_t *dst_blocks, const kvp_view *src,
                                const uint64_t *src_blocks, size_t block_count, size_t layer_begin,
                                size_t layer_end, const uint32_t *crc_expected, uint32_t *crc_out,
                                size_t crc_block_stride, size_t *bad_block);

/* Copy `count` flat spans; stops with KVP_CLOSED when *cancel (nullable) becomes non-zero, looked
 * at before every span. *done is how many spans were copied whole. */
kvp_status kvp_copy_spans(const uintptr_t *dst, const uintptr_t *src, const size_t *sizes,
                          size_t count, const volatile int32_t *cancel, size_t *done);

/* ---- arena.c, window.c: slots in a sealed memfd, which peers map read-only ------------------ */

/* A slot's life: FREE -> reserve -> RESERVED -> commit -> READY -> release -> FREE.
 *
 * A *grant* says that someone other than the calling thread (a peer process, the kernel, a NIC) may
 * still touch the slot's bytes. release() of a slot with grants makes it QUARANTINED instead of
 * FREE: nobody can reserve it until every grant was given back with settle(). A pin says that
 * somebody here reads it: a pinned slot cannot be released (KVP_BUSY).
 *
 * Every life of a slot has a generation, which travels in descriptors. In shared memory the slot's
 * header shows the generation only while the slot is READY, and 0 otherwise, so a reader that sees
 * the same non-zero generation before and after its copy has read that life's bytes.
 *
 * Calls that name a slot and a generation answer KVP_INVALID past the last slot, KVP_STALE if the
 * slot is FREE or in another life, KVP_BUSY if its state is not one that the call takes. */
typedef struct kvp_arena kvp_arena;

typedef struct {
    size_t free;
    size_t reserved;
    size_t ready;
    size_t quarantined;
    size_t pins;   /* sum over slots */
    size_t grants; /* sum over slots */
} kvp_arena_counts;

/* Create the memfd, map, prefault and seal it (SHRINK, GROW, FUTURE_WRITE, SEAL). crc_count is how
 * many CRC32C values a slot's header holds. `incarnation` is 16 bytes. KVP_INVALID, KVP_SYSTEM. */
kvp_status kvp_arena_open(size_t slot_count, size_t slot_bytes, size_t crc_count,
                          const uint8_t *incarnation, kvp_arena **out);
/* Unmap and close. The caller sees to it that nobody in this process still uses a slot. */
void kvp_arena_close(kvp_arena *arena); /* null is allowed */
/* Keep the arena's pages in memory: no swap. KVP_SYSTEM with errno: the process may not lock as
 * much. */
kvp_status kvp_arena_lock(kvp_arena *arena);
/* Have memory that this thread touches first from now on lie on a NUMA node, or anywhere (below 0).
 * KVP_INVALID: there is no such node; KVP_SYSTEM with errno: it may not be chosen here. */
kvp_status kvp_memory_node(int node);
int kvp_arena_fd(const kvp_arena *arena);
/* Address of slot 0; slot s is at + s * kvp_arena_slot_stride() (page aligned, >= slot_bytes). */
uintptr_t kvp_arena_base(const kvp_arena *arena);
size_t kvp_arena_slot_stride(const kvp_arena *arena);

/* Take up to `count` free slots, each with one grant out if `grant`; how many were taken. */
size_t kvp_arena_reserve(kvp_arena *arena, size_t count, bool grant, uint32_t *slots,
                         uint64_t *generations);

/* Calls on `count` slots work through them in order and end at the first that they cannot take:
 * *done is how many they took, those after it are as they were. */
typedef enum {
    KVP_ARENA_PIN = 0,     /* READY only */
    KVP_ARENA_UNPIN = 1,   /* KVP_INVALID if it is not pinned */
    KVP_ARENA_GRANT = 2,   /* count one more party that may touch the slot (RESERVED or READY) */
    KVP_ARENA_SETTLE = 3,  /* give one grant back, KVP_INVALID if none is out; the last one of a
                            * QUARANTINED slot makes it FREE */
    KVP_ARENA_RELEASE = 4, /* RESERVED or READY -> FREE, or QUARANTINED while grants are out;
                            * KVP_BUSY while pinned */
    KVP_ARENA_REQUIRE_RESERVED = 5, /* change nothing: KVP_BUSY unless RESERVED */
    KVP_ARENA_REQUIRE_PINNED = 6    /* change nothing: KVP_BUSY unless pinned */
} kvp_arena_step;

kvp_status kvp_arena_change(kvp_arena *arena, kvp_arena_step step, const uint32_t *slots,
                            const uint64_t *generations, size_t count, size_t *done);
/* RESERVED -> READY, publishing 32 bytes of `hashes` and crc_count of `crcs` for each. */
kvp_status kvp_arena_commit(kvp_arena *arena, const uint32_t *slots, const uint64_t *generations,
                            size_t count, const uint8_t *hashes, const uint32_t *crcs,
                            size_t *done);
/* Read the CRCs of READY slots, crc_count values each. */
kvp_status kvp_arena_crcs(kvp_arena *arena, const uint32_t *slots, const uint64_t *generations,
                          size_t count, uint32_t *crcs, size_t *done);
void kvp_arena_count(kvp_arena *arena, kvp_arena_counts *out);

/* For an arena whose slots' lives a ledger keeps (kvp_arena_keep); KVP_INVALID for another one, and
 * past the last slot.
 *
 * Show peers slots that are written whole and READY in the ledger, or nothing if it fails. */
kvp_status kvp_arena_publish(kvp_arena *arena, const uint32_t *slots, const uint64_t *generations,
                             size_t count, const uint8_t *hashes, const uint32_t *crcs);
/* Let every reader that looks again learn that these lives are over. Before anybody writes there. */
kvp_status kvp_arena_hide(kvp_arena *arena, const uint32_t *slots, size_t count);

/* A peer's arena, mapped read-only. All fields read from it are checked against the geometry that
 * was validated at map time. */
typedef struct kvp_window kvp_window;

/* Map the arena behind `fd`, which the caller keeps and may close: the mapping outlives it. Checks
 * magic, version, seals, size against geometry, and the incarnation: KVP_CORRUPT, KVP_STALE,
 * KVP_SYSTEM. */
kvp_status kvp_window_map(int fd, const uint8_t *incarnation, kvp_window **out);
void kvp_window_close(kvp_window *window); /* null is allowed */
uintptr_t kvp_window_base(const kvp_window *window);
size_t kvp_window_slot_count(const kvp_window *window);
size_t kvp_window_slot_bytes(const kvp_window *window);
size_t kvp_window_slot_stride(const kvp_window *window);
size_t kvp_window_crc_count(const kvp_window *window);
/* KVP_OK if every slot is in that life and READY now; KVP_STALE if not (*bad is the first index),
 * KVP_INVALID past the end. Call before and after a copy. */
kvp_status kvp_window_check(kvp_window *window, const uint32_t *slots,
                            const uint64_t *generations, size_t count, size_t *bad);
/* Copy the CRCs of `count` slots, crc_count each, checked as above. */
kvp_status kvp_window_crcs(kvp_window *window, const uint32_t *slots,
                           const uint64_t *generations, size_t count, uint32_t *crcs, size_t *bad);

/* ---- pull.c: verified copies out of a window ------------------------------------------------- */

/* Copy `count` slots, canonical blocks of `layers` layers, into the blocks `dst_blocks` of a view:
 * lives are looked at before and after, checksums compared. `expected` (nullable: the window's own,
 * read into `room`, which has room for count * crc_count) is expected_stride apart for each block.
 * `crew` (nullable) shares the work. *good is how many leading blocks are whole, verified and in
 * their lives; what lies behind them is undefined. KVP_OK also if a life is over, KVP_CORRUPT if a
 * checksum differed. KVP_INVALID: slots hold other blocks, one is past the end, or an argument is
 * wrong as for kvp_copy_blocks; nothing was copied then. */
kvp_status kvp_window_pull(kvp_window *window, kvp_crew *crew, const kvp_shape *shape,
                           size_t layers, const kvp_view *dst, const uint64_t *dst_blocks,
                           const uint64_t *slots, const uint64_t *generations, size_t count,
                           const uint32_t *expected, size_t expected_stride, uint32_t *room,
                           size_t *good);

/* ---- mailbox.c: a pair of one-way rings of small records between two processes --------------- */

/* Each side owns one memfd (written by itself only, sealed as above) that holds its outgoing ring
 * and how far it has read the peer's. Records carry a sequence number and a CRC32C. One thread
 * pushes and one thread pops at a time per side. Waking the peer (an eventfd) is the caller's. */
typedef struct kvp_mailbox kvp_mailbox;

/* record_count is a power of two; record_bytes is the largest payload (<= 4096). */
kvp_status kvp_mailbox_open(size_t record_count, size_t record_bytes, const uint8_t *incarnation,
                            kvp_mailbox **out);
void kvp_mailbox_close(kvp_mailbox *mailbox); /* null is allowed */
int kvp_mailbox_fd(const kvp_mailbox *mailbox);
/* Map the peer's memfd read-only; the caller keeps `peer_fd`, and may close it. KVP_CORRUPT unless
 * it is sealed and its geometry equals ours, KVP_STALE for another incarnation, KVP_BUSY the
 * second time. */
kvp_status kvp_mailbox_attach(kvp_mailbox *mailbox, int peer_fd, const uint8_t *peer_incarnation);
/* KVP_FULL until the peer has read enough; KVP_INVALID if size is 0 or > record_bytes; KVP_CORRUPT
 * if the peer says that it has read what was never pushed. */
kvp_status kvp_mailbox_push(kvp_mailbox *mailbox, const uint8_t *payload, size_t size);
/* KVP_MISS if nothing is there or nobody is attached; KVP_CORRUPT, from then on, if the peer's ring
 * is damaged. `payload` has room for record_bytes. */
kvp_status kvp_mailbox_pop(kvp_mailbox *mailbox, uint8_t *payload, size_t *size);

/* ---- bell.c: to have somebody look after what nobody else does soon --------------------------- */

typedef struct kvp_bell kvp_bell;

kvp_status kvp_bell_open(kvp_bell **out);
void kvp_bell_close(kvp_bell *bell); /* null is allowed; nobody waits any more */
/* Have the thread in `kvp_bell_wait` hear it in 1 to 2 ms. Wakes it only if no ring has come for 32 ms:
 * otherwise it is awake already. */
void kvp_bell_ring(kvp_bell *bell);
/* Take back the rings that nobody has heard. */
void kvp_bell_hush(kvp_bell *bell);
/* Wait until a ring is heard: true. False from `kvp_bell_end` on. For one thread. */
bool kvp_bell_wait(kvp_bell *bell);
void kvp_bell_end(kvp_bell *bell);

/* ---- process.c ------------------------------------------------------------------------------- */

/* Ask the kernel to send `signal_number` to this process when its parent dies (Linux): to be exact,
 * when the parent's thread that started it ends. KVP_INVALID if there is no such signal. A parent
 * that died before the call is not noticed: compare getppid() afterwards. */
kvp_status kvp_die_with_parent(int signal_number);

/* ---- probe.c: for `kvpool doctor` -------------------------------------------------------------- */

/* Make the smallest io_uring there is and close it. KVP_SYSTEM: refused, and errno says why: ENOSYS
 * by a kernel before 5.1, EPERM by its settings or a container's filter. */
kvp_status kvp_probe_io_uring(void);
