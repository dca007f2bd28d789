/* The UCX engine as Python sees it: one-sided puts between processes, and reads made of them. No preprocessor lines here.
 *
 * Conventions of kvpool_api.h hold. One engine owns one UCX context, one worker and one progress
 * thread, and that thread makes every ucp call. An endpoint is one connection; endpoint slot i owns
 * part i of the inbox, into which its peer puts. All handles are numbers that carry a generation, so
 * a stale one is refused, never followed. After a fork the child's calls answer KVP_CLOSED.
 */

typedef struct kvp_ucx kvp_ucx;

/* How reads go: as puts of the slots' owner, or as gets of the reader. By default as gets over lanes
 * whose hardware or kernel reads another process's memory itself, else as puts. Gets over other lanes
 * are for tests, and both sides have to ask for them: where libucp emulates a get, a connection that
 * fails in the middle of one ends the owner's process. */
typedef enum {
    KVP_UCX_READ_AUTO = 0,
    KVP_UCX_READ_PUT = 1,
    KVP_UCX_READ_GET = 2
} kvp_ucx_read_mode;

/* A first put of so many bytes, which nobody reads, shows how libucp carries bulk. */
enum { KVP_UCX_TRIAL_BYTES = 65536 };

typedef struct {
    const char *library; /* path of libucp.so, or a bare name for the loader to find */
    const char *host;    /* numeric address to bind and to connect from; decides device and family */
    const char *tls; /* transports that libucp may use, as UCX_TLS has them; null: "tcp" */
    kvp_ucx_read_mode read_mode;
    const uint8_t *incarnation; /* 16 bytes */
    uintptr_t inbox;            /* page aligned, endpoint_max * inbox_part bytes; 0 for none */
    size_t inbox_part;          /* bytes of one connection's inbox, a multiple of the page size */
    size_t trial_bytes; /* of each part, at its end: room for the peer's trial; less than it */
    size_t endpoint_max;        /* 1 to 4096 */
    size_t batch_max;           /* batches in flight, all endpoints, 1 to 65536 */
    size_t read_max;            /* reads in flight, all endpoints, 0 to 65536 */
    size_t copy_helpers;        /* threads, 0 to 64, that help to copy out of the inbox */
    /* What we send: 0 for nothing, else 1 ms to 1 h. A peer that sends them and is then silent for
     * heartbeat_timeout_ns (at least three intervals of either side) is lost. */
    uint64_t heartbeat_interval_ns;
    uint64_t heartbeat_timeout_ns;
    uint64_t look_ns; /* how often to look for strangers at the listener, 1 ms or more; see below */
    uint64_t spin_ns; /* how long to poll after the last progress while work is in flight */
    uint64_t answer_timeout_ns; /* a peer that does not take what it asked for by then is lost */
} kvp_ucx_config;

/* One put: `size` bytes at `local` to `remote_offset` in the peer's inbox part. */
typedef struct {
    uint64_t local;
    uint64_t size;
    uint64_t remote_offset;
} kvp_ucx_span;

/* Slots of this process that peers may read: those of an arena. */
typedef struct {
    kvp_arena *arena;
    size_t slot_count;
    size_t slot_bytes;
    size_t crc_count;
} kvp_ucx_region;

/* What to read of a peer's slots, and where to put it. All that it points to, and the memory that it
 * describes, belongs to the engine until KVP_UCX_READ. */
typedef struct {
    size_t count;                /* slots, at least 1 */
    const uint32_t *regions;     /* of each slot, a number of the peer's */
    const uint32_t *slots;
    const uint64_t *generations; /* the life each must be in */
    /* Blocks in canonical order, each slot whole, checked against their CRCs: */
    const kvp_shape *shape; /* null for flat bytes */
    const kvp_view *dest;
    const uint64_t *dest_blocks;
    size_t layers;
    const uint32_t *crcs; /* nullable [count, layers, heads]: expected instead of the owner's */
    uint32_t *sums;       /* nullable, the same: filled in for the leading blocks that came */
    /* Flat bytes: `size` bytes at `remote_offset` of each slot to `local`. */
    const kvp_ucx_span *spans;
} kvp_ucx_job;

typedef enum {
    KVP_UCX_OPENED = 1,  /* handshake done: `inbox_offset`, `peer` and `accepted` are set */
    KVP_UCX_ARRIVED = 2, /* a note: everything put before it is visible */
    KVP_UCX_BATCH = 3,   /* the batch `cookie` ended with `status`: its local buffers are free */
    KVP_UCX_CLOSED = 4,  /* closed and drained for the reason `status`: nobody writes any more */
    KVP_UCX_READ = 5     /* the read `cookie` ended: nothing touches its memory any more */
} kvp_ucx_event_kind;

typedef struct {
    kvp_ucx_event_kind kind;
    kvp_status status;
    int ucx_code;      /* what libucp answered, 0 if it was not libucp that ended it */
    int accepted;      /* OPENED: 1 if the peer connected to us */
    uint64_t endpoint;
    uint64_t cookie;   /* BATCH, READ: as given to kvp_ucx_put, kvp_ucx_read */
    size_t good;       /* READ: how many leading slots arrived whole */
    uint64_t inbox_offset; /* OPENED: where our inbox part for this peer starts */
    uint64_t peer_inbox_bytes;
    uint8_t peer[16];  /* OPENED; CLOSED with KVP_STALE: the peer's incarnation */
    size_t note_size;
    uint8_t note[1088]; /* a notification of 1,024 bytes, and room for what frames it */
} kvp_ucx_event;

typedef struct {
    unsigned ucx_major, ucx_minor, ucx_release;
    size_t endpoints; /* slots in use, draining included */
    size_t batches;   /* submitted and not yet handed out as an event */
    size_t reads;     /* the same */
    uint64_t wakeups; /* times the progress thread left its sleep */
    uint64_t puts;
    uint64_t put_bytes;
    uint64_t coalesced; /* spans that went in one put with the span before them */
    uint64_t gets;
    uint64_t get_bytes;
    uint64_t registrations; /* pieces of memory that were registered with libucp since the start */
    /* Connections to the listener that were reset, because they had become no endpoint within look_ns,
     * or because libucp had left their bytes unread for as long: a thread of it would spin over those
     * for ever. What they said, if anything, was no UCX. */
    uint64_t strangers_reset;
} kvp_ucx_counts;

/* Load the library (once a process), create context and worker, start the progress thread.
 * KVP_INVALID: a setting is out of range, or the address is not of this host. KVP_SYSTEM: the library
 * cannot be loaded, is older than UCX 1.17, or refuses; `reason` (nullable, room for
 * reason_size bytes) says why. The inbox outlives the engine. */
kvp_status kvp_ucx_open(const kvp_ucx_config *config, char *reason, size_t reason_size,
                        kvp_ucx **out);
/* Force-close every endpoint, end every batch with KVP_CLOSED, stop the thread. Bounded to about
 * 3 s. No other call may be running or follow. Null is allowed. Events not taken are lost. */
void kvp_ucx_close(kvp_ucx *engine);

/* Listen on the engine's host. `port` 0 takes a free one; *bound is the port. KVP_BUSY: listens
 * already; KVP_SYSTEM: refused, the code is in *ucx_code. Blocks for the progress thread, at most
 * timeout_ns: after KVP_TIMEOUT it may listen yet. */
kvp_status kvp_ucx_listen(kvp_ucx *engine, uint16_t port, uint64_t timeout_ns, uint16_t *bound,
                          int *ucx_code);

/* Start to connect; OPENED or CLOSED follows within timeout_ns. `expected` (nullable): the
 * incarnation that must answer, else CLOSED with KVP_STALE. KVP_FULL: no endpoint slot is free. */
kvp_status kvp_ucx_connect(kvp_ucx *engine, const char *host, uint16_t port,
                           const uint8_t *expected, uint64_t timeout_ns, uint64_t *endpoint);
/* Force-close; CLOSED follows. Closing twice, or a stale handle, is harmless. Never blocks. */
kvp_status kvp_ucx_disconnect(kvp_ucx *engine, uint64_t endpoint);

/* Put `count` spans, flush, then deliver `note` (note_size 0: none) and BATCH follows within
 * timeout_ns. Batches of one endpoint are posted and notified in order. On a deadline the whole
 * endpoint is force-closed: a put cannot be called back otherwise. Never blocks, never posts.
 *
 * A note alone with cookie 0 has no BATCH: its bytes were copied, and if it does not arrive the endpoint
 * is CLOSED. An event would wake a thread for nothing each time.
 *
 * `spans` and the memory they name belong to the engine until BATCH. KVP_INVALID: a span is empty
 * or passes the end of the peer's inbox, nothing to do, or note_size > 1088; nothing was done.
 * KVP_FULL: batch_max are in flight, or the peer has not taken enough of the earlier notes.
 * KVP_CLOSED: the endpoint is not open (any more). */
kvp_status kvp_ucx_put(kvp_ucx *engine, uint64_t endpoint, const kvp_ucx_span *spans, size_t count,
                       const uint8_t *note, size_t note_size, uint64_t timeout_ns, uint64_t cookie);

/* End a batch soon. What has not been posted of it never is: if that is all, it ends at once, else when
 * what was posted has been flushed; in either case its note is not sent, and BATCH says KVP_CANCELLED.
 * One that is all posted goes on. Harmless if it has ended. Never blocks. */
void kvp_ucx_cancel_put(kvp_ucx *engine, uint64_t endpoint, uint64_t cookie);

/* Let peers read the READY slots of an arena from now on; regions count from 0. The arena outlives the
 * engine. KVP_FULL: 64 are registered. KVP_INVALID: a count is 0. */
kvp_status kvp_ucx_register(kvp_ucx *engine, const kvp_ucx_region *region, uint32_t *number);
/* Start a read; KVP_UCX_READ follows within timeout_ns. Its status: KVP_OK, `good` says how many
 * leading slots arrived whole (the next one is stale or corrupt at its owner; flat bytes are all or
 * KVP_STALE, KVP_CORRUPT); KVP_TIMEOUT, KVP_CANCELLED, KVP_CLOSED (by us), KVP_PEER. *read names it to
 * kvp_ucx_cancel. Never blocks. KVP_INVALID: no slots, or no connection with an inbox.
 * KVP_FULL: read_max are in flight; KVP_SYSTEM: one layer of a block is larger than a window of the
 * inbox, kvp_ucx_window_bytes(). KVP_CLOSED: not open. */
kvp_status kvp_ucx_read(kvp_ucx *engine, uint64_t endpoint, const kvp_ucx_job *job,
                        uint64_t timeout_ns, uint64_t cookie, uint64_t *read);
/* End a read soon, if it has not ended. Never blocks. */
void kvp_ucx_cancel(kvp_ucx *engine, uint64_t read);
/* End the reads of an endpoint with KVP_CLOSED soon, and refuse new ones. The endpoint stays. */
void kvp_ucx_end_reads(kvp_ucx *engine, uint64_t endpoint);
/* An eighth of an inbox part: what one ask may bring. */
size_t kvp_ucx_window_bytes(const kvp_ucx *engine);
/* Windows of an endpoint that are free, and those that the peer still owes to reads that ended. */
void kvp_ucx_windows(kvp_ucx *engine, uint64_t endpoint, size_t *free, size_t *owed);

/* Take the next event; KVP_MISS after timeout_ns. CLOSED is the last event of its endpoint. One
 * thread at a time. */
kvp_status kvp_ucx_next_event(kvp_ucx *engine, uint64_t timeout_ns, kvp_ucx_event *event);
/* Give the slot of a CLOSED endpoint and its inbox part to the next connection. Only now may another
 * peer write there. KVP_BUSY before CLOSED was taken; harmless twice. */
kvp_status kvp_ucx_release(kvp_ucx *engine, uint64_t endpoint);
/* Make a waiting kvp_ucx_next_event answer KVP_CLOSED, now and from now on. */
void kvp_ucx_stop_events(kvp_ucx *engine);
/* Make the kvp_ucx_next_event that waits now, or else the next one that finds none, answer KVP_MISS. */
void kvp_ucx_wake_events(kvp_ucx *engine);

/* How libucp says that it carries bulk ("zero-copy ..."), as a string: known when OPENED is taken, if
 * the peer has KVP_UCX_TRIAL_BYTES of room for a trial, else once a put had to wait. KVP_MISS: not
 * known yet. */
kvp_status kvp_ucx_put_protocol(kvp_ucx *engine, char *text, size_t text_size);
/* The lanes that libucp chose for an endpoint, "tcp/eth0 tcp/eth1"; KVP_CLOSED: it is not open. */
kvp_status kvp_ucx_lanes(kvp_ucx *engine, uint64_t endpoint, char *text, size_t text_size);
void kvp_ucx_count(kvp_ucx *engine, kvp_ucx_counts *out);
/* The latest warning of the library in this process, and how many there were. */
uint64_t kvp_ucx_last_warning(char *text, size_t text_size);
