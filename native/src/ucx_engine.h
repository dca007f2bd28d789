/* What the files of the UCX engine share: the engine, its endpoints and batches, and who owns which.
 *
 * `lock` guards every field marked [L]. All others belong to the progress thread alone. The lock is
 * never held across a ucp call.
 */
#ifndef KVP_UCX_ENGINE_H
#define KVP_UCX_ENGINE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "kvpool.h"
#include "ucx_load.h"
#include "ucx_wire.h"

enum {
    KVP_PENDING_CONNECTIONS_MAX = 64, /* accepted by UCX, not yet by the progress thread */
    KVP_PROTOCOL_TEXT_MAX = 256,
    KVP_LANES_TEXT_MAX = 128,
    KVP_LANES_MAX = 16,
    KVP_REGIONS_MAX = 64,
    KVP_REGION_CRCS = 1 << 16, /* checksums of one slot, at most */
    KVP_TLS_TEXT_MAX = 128,
    KVP_STRANGERS_MAX = 1024 /* that are looked at a second time; more at once are reset unseen */
};

typedef enum { BATCH_FREE, BATCH_QUEUED, BATCH_POSTED, BATCH_FLUSHED, BATCH_NOTIFYING } kvp_stage;

typedef struct kvp_batch kvp_batch;
typedef struct kvp_endpoint kvp_endpoint;
typedef struct kvp_answer kvp_answer;
typedef struct kvp_read kvp_read;

struct kvp_batch {
    kvp_endpoint *endpoint;
    kvp_batch *next; /* [L] in the free and submitted lists, then the endpoint's own list */
    const kvp_ucx_span *spans;
    size_t count;
    size_t posted;
    uint64_t part; /* bytes of the span behind those that are posted too */
    size_t pending; /* requests of this batch that libucp still holds */
    uint64_t deadline_ns;
    uint64_t cookie;
    bool submitted; /* [L] and its event is not pushed: `cookie` names it */
    atomic_bool cancelled;
    bool stopped; /* for that: nothing more is posted of it, nor its note */
    kvp_stage stage;
    kvp_answer *answer; /* whose it is; null: a caller's, which gets an event */
    size_t note_size;
    kvp_wire_head head; /* of the message that carries the note */
    uint8_t note[KVP_NOTE_BYTES_MAX];
};

/* A piece of memory that libucp knows of, and its packed remote key. */
typedef struct {
    ucx_memory *memory;
    void *rkey;
    size_t rkey_size;
} kvp_registered;

typedef struct {
    kvp_ucx_region told;
    uintptr_t base;
    size_t stride;
    kvp_registered whole; /* progress thread: registered when a peer first gets of it, once */
} kvp_region;

/* A region of the peer's that we get of. */
typedef struct {
    ucx_rkey *rkey; /* null: the peer has not told of it */
    uint64_t base, stride;
} kvp_remote_region;

/* An ask of a peer that is being answered. */
struct kvp_answer {
    bool used;
    const kvp_region *region;
    bool hold;    /* the peer gets the bytes itself, and says when it has */
    bool waiting; /* for that: the answer has been sent */
    size_t held; /* leading items whose slots are granted */
    size_t crc_bytes;
    kvp_batch batch;
    kvp_wire_answer head;
    kvp_wire_region region_out;
    kvp_ucx_span spans[KVP_ASK_ITEMS_MAX];
    uint64_t generations[KVP_ASK_ITEMS_MAX];
    uint32_t slots[KVP_ASK_ITEMS_MAX];
    uint32_t crcs[KVP_ASK_CRCS_MAX];
};

/* An ask of ours; its window is that of the same number. */
typedef struct {
    kvp_endpoint *endpoint;
    kvp_read *read; /* null: that has ended, and the peer still owes the window */
    enum { ASK_FREE, ASK_SENT, ASK_GETTING, ASK_ANSWERED } stage;
    bool sending; /* libucp still reads it */
    kvp_wire_ask head;
    kvp_wire_item items[KVP_ASK_ITEMS_MAX];
    size_t first, layer, layers; /* blocks: which; spans: `first` alone */
    size_t item_of[KVP_ASK_ITEMS_MAX]; /* spans: of which each is a piece, and where it goes */
    uint64_t local[KVP_ASK_ITEMS_MAX];
    bool begun;     /* of an answered HOLD: its gets are posted */
    size_t getting; /* gets that libucp has not completed */
    kvp_wire_done done;
    size_t good; /* of the answer, with `crcs` */
    uint32_t crcs[KVP_ASK_CRCS_MAX];
} kvp_ask;

struct kvp_read {
    kvp_endpoint *endpoint; /* [L] null: free */
    kvp_read *next;         /* [L] in the free and submitted lists, then the endpoint's own list */
    uint32_t generation;    /* [L] */
    atomic_bool cancelled;
    kvp_ucx_job job;
    uint64_t deadline_ns;
    uint64_t cookie;
    size_t next_item, next_part; /* what is asked for next: of that item, which layer or byte */
    size_t good;                 /* items before this one may still be whole */
    size_t asked;                /* asks that are not answered */
    kvp_status stop;             /* why it ends early; KVP_OK: it does not */
};

typedef enum {
    SLOT_FREE,
    SLOT_CONNECTING, /* by us, not yet created */
    SLOT_GREETING,   /* created, waiting for the peer's hello */
    SLOT_REFUSED,    /* told the peer no, waiting for it to go */
    SLOT_OPEN,
    SLOT_CLOSING, /* force close under way */
    SLOT_CLOSED,  /* drained; its event is not yet taken */
    SLOT_TOLD     /* taken; not yet released */
} kvp_slot_state;

struct kvp_endpoint {
    kvp_ucx *engine;
    size_t index;
    /* [L]. While the slot is live only the progress thread writes `state`, so it may read it bare. */
    uint32_t generation;
    kvp_slot_state state;
    bool leave; /* somebody asked for the close */
    bool wanted; /* in the engine's list of slots that somebody wants something of */
    kvp_endpoint *next_wanted;
    uint64_t peer_inbox_bytes;
    uint64_t notes_submitted;
    uint64_t notes_credited; /* the peer has taken so many of them */
    uint64_t note_window;
    char lanes[KVP_LANES_TEXT_MAX]; /* transport/device of each lane */
    /* Between our reader and the progress thread. */
    atomic_uint_fast64_t notes_taken;
    atomic_size_t windows_free, windows_owed;
    atomic_bool reads_ended;
    /* progress thread */
    bool accepted;
    uint8_t expected[KVP_INCARNATION_BYTES]; /* 0: anybody */
    struct sockaddr_storage address;
    socklen_t address_size;
    ucx_ep *ep;
    ucx_rkey *rkey;
    uint64_t peer_inbox;
    kvp_remote_region remote[KVP_REGIONS_MAX];
    bool told[KVP_REGIONS_MAX]; /* the peer knows where these of ours lie */
    size_t waiting_answers;     /* that the peer has not said DONE to */
    bool gets, may_get;         /* our reads are gets; the peer's may be */
    struct sockaddr_storage remote_address; /* of an accepted one; AF_UNSPEC: not known yet */
    uint32_t peer_id; /* what the peer calls this connection */
    uint64_t greeting_deadline_ns;
    uint64_t next_deadline_ns; /* earliest of its batches; UINT64_MAX if none */
    kvp_batch *first, *last, *posting;
    kvp_ask *asks;       /* KVP_ASKS_MAX, as are the answers */
    kvp_answer *answers; /* to asks of the peer */
    uint32_t next_ask;
    kvp_read *first_read, *last_read;
    uint64_t read_deadline_ns; /* earliest of its reads; UINT64_MAX if none */
    bool stirred;              /* something happened that reads may go on from */
    bool look;                 /* a cancel, perhaps */
    size_t waiting_puts; /* that libucp has not completed */
    size_t requests;     /* of any kind that libucp still holds */
    bool announced;      /* our reader knows of it, and gets CLOSED */
    bool failed, closed;
    kvp_status reason; /* of the close; set before the slot is CLOSING */
    ucx_status code;
    uint64_t heard_ns, beat_ns;
    uint64_t silence_max_ns; /* UINT64_MAX: the peer has no heartbeat */
    uint64_t notes_arrived, credit_sent;
    bool beat_busy, hello_came;
    bool trial_posting, trial_back;
    kvp_wire_head beat;
    kvp_wire_hello hello_out, hello_in;
    uint8_t peer_rkey[KVP_RKEY_BYTES_MAX];
    size_t peer_rkey_size;
};

/* A connection to the listener that is no endpoint, or whose bytes nobody has read. */
typedef struct {
    uint64_t cookie; /* the kernel's name of the socket */
    int unread;
    bool waits; /* something, or its end, is to be read */
} kvp_stranger;

struct kvp_ucx {
    const kvp_ucp *ucp;
    kvp_ucx_config config; /* library and host are not kept */
    uint8_t incarnation[KVP_INCARNATION_BYTES];
    struct sockaddr_storage host;
    socklen_t host_size;
    char device[64];
    char tls[KVP_TLS_TEXT_MAX];
    pid_t pid;
    pthread_t thread;
    int wake_fd, poll_fd;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* [L] */
    kvp_batch *free_batches, *submitted, *submitted_last;
    kvp_endpoint *wanted; /* to connect or to leave */
    size_t batches_used; /* counted until their event is taken, so that events never overflow */
    kvp_read *free_reads, *submitted_reads, *submitted_reads_last;
    size_t reads_used; /* the same */
    size_t slots_used;
    bool sleeping, stopping, events_stopped, events_woken;
    enum { LISTEN_NONE, LISTEN_WANTED, LISTEN_DONE } listen;
    uint16_t listen_port;
    ucx_status listen_code;
    bool started;
    kvp_status start_status;
    char start_reason[128];
    kvp_ucx_event *events;
    size_t event_capacity, event_head, event_count;
    char put_protocol[KVP_PROTOCOL_TEXT_MAX];
    /* Shared without the lock. */
    atomic_uint_fast64_t orders; /* counts what other threads asked for */
    atomic_uint_fast64_t wakeups, puts, put_bytes, coalesced, gets, get_bytes;
    atomic_uint_fast64_t registrations, strangers_reset;
    kvp_region regions[KVP_REGIONS_MAX]; /* written once each, before region_count says so */
    atomic_size_t region_count;
    size_t window; /* bytes of one; 0 without an inbox */
    /* progress thread */
    uint64_t orders_seen;
    bool leaving;
    ucx_context *context;
    ucx_worker *worker;
    ucx_listener *listener;
    ucx_conn_request *pending[KVP_PENDING_CONNECTIONS_MAX];
    size_t pending_count;
    kvp_registered *parts; /* of the inbox */
    kvp_endpoint *endpoints;
    kvp_endpoint **live; /* the slots that the progress thread looks after */
    size_t live_count;
    kvp_batch *batches;
    kvp_read *reads;
    kvp_ask *asks;
    kvp_answer *answers;
    uint32_t *slot_crcs; /* KVP_REGION_CRCS, of one slot while it is answered for */
    kvp_crew *crew;
    kvp_stranger strangers[KVP_STRANGERS_MAX];
    size_t stranger_count;
    uint64_t look_ns; /* when to look for them again */
    uint64_t now_ns, due_ns; /* of this round: its time, and when to wake without being woken */
};

/* ucx_context.c: progress thread only, but for the last two */
kvp_status kvp_context_open(kvp_ucx *engine);
void kvp_context_close(kvp_ucx *engine);
ucx_status kvp_context_listen(kvp_ucx *engine);
/* Register memory and pack its remote key. What is registered already stays as it is. */
ucx_status kvp_context_register(kvp_ucx *engine, uintptr_t address, size_t size, unsigned prot,
                                kvp_registered *out);
kvp_status kvp_parse_address(const char *host, uint16_t port, struct sockaddr_storage *out,
                             socklen_t *size);
kvp_status kvp_find_device(const struct sockaddr_storage *host, char *name, size_t size);

/* ucx_endpoint.c: progress thread only */
void kvp_endpoint_accept(kvp_ucx *engine, ucx_conn_request *request);
/* One round of work. *gone: the slot is no longer ours, it was drained and handed back. */
bool kvp_endpoint_step(kvp_endpoint *endpoint, bool *gone);
void kvp_endpoint_set_state(kvp_endpoint *endpoint, kvp_slot_state state);
/* Note that the connection is lost; the next step closes it. The first reason stays. */
void kvp_endpoint_fail(kvp_endpoint *endpoint, kvp_status reason, ucx_status code);

static inline uint32_t kvp_ask_crc(const kvp_wire_ask *ask, const void *items)
{
    const size_t from = offsetof(kvp_wire_ask, number), to = offsetof(kvp_wire_ask, crc);
    uint32_t crc = kvp_crc32c(0, (const uint8_t *)ask + from, to - from);
    return kvp_crc32c(crc, items, ask->count * sizeof(kvp_wire_item));
}

static inline uint32_t kvp_answer_crc(const kvp_wire_answer *answer, const void *crcs, size_t size)
{
    const size_t from = offsetof(kvp_wire_answer, number), to = offsetof(kvp_wire_answer, crc);
    uint32_t crc = kvp_crc32c(0, (const uint8_t *)answer + from, to - from);
    return kvp_crc32c(crc, crcs, size);
}

static inline uint32_t kvp_region_crc(const kvp_wire_region *region, const void *rkey, size_t size)
{
    const size_t from = offsetof(kvp_wire_region, base);
    uint32_t crc = kvp_crc32c(0, (const uint8_t *)&region->number, sizeof(region->number));
    crc = kvp_crc32c(crc, (const uint8_t *)region + from, sizeof(*region) - from);
    return kvp_crc32c(crc, rkey, size);
}

static inline uint64_t kvp_endpoint_id(const kvp_endpoint *endpoint)
{
    return (uint64_t)endpoint->generation << 32 | endpoint->index;
}

/* ucx_message.c: progress thread only */
kvp_wire_head kvp_message_head(kvp_endpoint *endpoint, uint16_t kind);
void kvp_message_hello(kvp_endpoint *endpoint, kvp_status refusal);
void kvp_message_beat(kvp_endpoint *endpoint);
void kvp_message_greet(kvp_endpoint *endpoint); /* act on the peer's hello */
/* Tell where a region lies; `out` is the message's until it has gone. */
void kvp_message_region(kvp_endpoint *endpoint, uint32_t number, kvp_wire_region *out);
ucx_status kvp_message_take(void *arg, const void *header, size_t header_size, void *data, size_t size,
                          const ucx_am_recv_param *param);

/* ucx_batch.c: progress thread only */
void kvp_batch_queue(kvp_batch *batch);
bool kvp_batch_step(kvp_endpoint *endpoint);
void kvp_batch_look(kvp_endpoint *endpoint); /* act on cancels */
/* The engine's first put, of bytes that nobody reads: libucp says of it how it carries bulk. */
void kvp_batch_trial(kvp_endpoint *endpoint);
void kvp_batch_end_all(kvp_endpoint *endpoint, kvp_status status, ucx_status code);

/* ucx_cuts.c: pure. Does one layer of a block fit a window? Cut the next ask of a read that wants one. */
bool kvp_read_fits(const kvp_ucx_job *job, size_t window);
void kvp_read_cut(kvp_read *read, kvp_ask *ask, size_t window);

static inline size_t kvp_layer_bytes(const kvp_shape *shape)
{
    return shape->heads * shape->tokens * (shape->k_row_bytes + shape->v_row_bytes);
}

/* ucx_reads.c: progress thread only */
void kvp_read_queue(kvp_read *read);
void kvp_read_answered(kvp_endpoint *endpoint, const kvp_wire_answer *answer, const void *crcs,
                       size_t size);
bool kvp_reads_step(kvp_endpoint *endpoint);
void kvp_reads_end_all(kvp_endpoint *endpoint, kvp_status status, ucx_status code);

/* A window's bytes are here, or will never be wanted: copy it out, and free it. */
void kvp_ask_ended(kvp_ask *ask);

/* ucx_gets.c: progress thread only. Get what answers say is held, and end asks whose bytes have come. */
void kvp_gets_step(kvp_endpoint *endpoint);
void kvp_gets_region(kvp_endpoint *endpoint, const void *header, size_t header_size,
                     const void *rkey, size_t rkey_size);
void kvp_gets_close(kvp_endpoint *endpoint);

/* ucx_answers.c: progress thread only */
bool kvp_ask_sound(const kvp_wire_ask *ask, const kvp_wire_item *items, const kvp_ucx_region *region,
                   uint64_t inbox_bytes); /* of an ask whose count is */
void kvp_answer_start(kvp_endpoint *endpoint, const void *header, size_t header_size,
                      const void *data, size_t size);
/* Its message has gone, or never will: settle its slots, unless the peer still gets of them. */
void kvp_answer_sent(kvp_answer *answer, bool well);
void kvp_answer_done(kvp_endpoint *endpoint, uint32_t number);
/* When the first DONE is due that has not come; UINT64_MAX: none is. */
uint64_t kvp_answers_due(const kvp_endpoint *endpoint);
void kvp_answers_end_all(kvp_endpoint *endpoint);
void kvp_answers_close(kvp_ucx *engine); /* after the worker is gone: nothing reads slots any more */

/* ucx_sockets.c: progress thread only. Call it when a connection has opened. */
void kvp_sockets_unpace(const kvp_ucp *ucp, ucx_worker *worker);

/* ucx_strangers.c: progress thread only. Call it once a round, after the steps. */
void kvp_strangers_look(kvp_ucx *engine);

/* ucx_engine.c; with the lock held, but for the last */
kvp_endpoint *kvp_slot_take(kvp_ucx *engine, kvp_slot_state state); /* null: none is free */
void kvp_slot_give(kvp_endpoint *endpoint);
void kvp_event_push(kvp_ucx *engine, const kvp_ucx_event *event);
void kvp_order(kvp_ucx *engine); /* tell the progress thread that something is wanted */
void kvp_order_slot(kvp_endpoint *endpoint); /* the same, of this slot */
uint64_t kvp_now_ns(void);

/* ucx_progress.c: the thread's main function; `arg` is the engine */
void *kvp_progress_run(void *arg);

/* ucx_load.c: null if the library cannot be used, and `reason` says why */
const kvp_ucp *kvp_ucp_load(const char *library, char *reason, size_t reason_size);

#endif
