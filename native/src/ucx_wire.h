/* What two engines say to each other: fixed-width little-endian fields, one active message id.
 *
 * A connecting process sends a hello at once; the accepting one answers with its own hello. Nothing
 * is put before both have been read. A message's receiver finds its endpoint by `to`.
 */
#ifndef KVP_UCX_WIRE_H
#define KVP_UCX_WIRE_H

#include <stddef.h>
#include <stdint.h>

enum {
    KVP_WIRE_MAGIC = 0x5855564b, /* "KVUX" */
    KVP_WIRE_VERSION = 5,
    KVP_AM_ID = 11,
    KVP_INCARNATION_BYTES = 16,
    KVP_NOTE_BYTES_MAX = 1088,
    KVP_NOTE_WINDOW = 64, /* notes that may wait at a receiver, per connection */
    KVP_RKEY_BYTES_MAX = 1024,
    KVP_ASKS_MAX = 8,       /* that may be unanswered, per connection: a peer with more is cut off */
    KVP_ASK_ITEMS_MAX = 64, /* 1,536 bytes: an ask fits one packet of the library's */
    KVP_ASK_CRCS_MAX = 1024 /* 4,096 bytes: so does an answer */
};

enum {
    KVP_WIRE_HELLO = 1,
    KVP_WIRE_NOTE = 2,
    KVP_WIRE_BEAT = 3,
    KVP_WIRE_ASK = 4,
    KVP_WIRE_ANSWER = 5,
    KVP_WIRE_HOLD = 6,
    KVP_WIRE_REGION = 7,
    KVP_WIRE_DONE = 8
};

typedef struct {
    uint32_t magic;
    uint16_t version;
    uint16_t kind;
    uint32_t to;       /* the receiver's slot index + 1; 0 in the first hello */
    uint32_t reserved; /* 0 */
    uint64_t credit;   /* notes of the receiver's that the sender has taken so far */
} kvp_wire_head;

/* Followed, as the message's data, by the packed remote key of the sender's inbox part. */
typedef struct {
    kvp_wire_head head;
    uint16_t ucx_major;
    uint16_t ucx_minor;
    uint16_t ucx_release;
    uint16_t refusal; /* a kvp_status; 0: welcome */
    uint32_t from;    /* the sender's slot index + 1, for the receiver's `to` */
    uint32_t note_window;
    uint32_t beat_ms; /* the sender's heartbeat interval; 0: it has none, and silence is no sign */
    uint32_t trial_bytes; /* behind the inbox part, of nobody's: for a put that shows how bulk goes */
    uint8_t incarnation[KVP_INCARNATION_BYTES];
    uint8_t expected[KVP_INCARNATION_BYTES]; /* whom the sender means to reach; 0: anybody */
    uint64_t inbox;
    uint64_t inbox_bytes;
} kvp_wire_hello;

/* ASK: put bytes of slots of a region of the receiver's into the sender's inbox part, one item behind
 * the other from `at` on, and answer when they are there. HOLD: answer now, and hold the slots, of
 * which the sender gets the bytes, until it says DONE. Followed, as data, by `count` items. */
typedef struct {
    kvp_wire_head head;
    uint32_t number; /* the sender's name of this ask */
    uint32_t region;
    uint64_t at;
    uint32_t first_crc; /* which checksums of each slot the answer carries */
    uint32_t crc_count; /* 0: one, of just the item's bytes */
    uint32_t count;     /* 1 to KVP_ASK_ITEMS_MAX */
    uint32_t crc;       /* CRC32C of what lies between `head` and here, and of the items */
} kvp_wire_ask;

typedef struct {
    uint64_t generation; /* the life the slot must be in */
    uint64_t offset;     /* in the slot */
    uint32_t slot;
    uint32_t size;
} kvp_wire_item;

/* Sent after the items' bytes were flushed. Followed, as data, by the CRC32C values of the `good`
 * leading items, uint32 each; the item after those is in another life. */
typedef struct {
    kvp_wire_head head;
    uint32_t number;
    uint32_t good;
    uint32_t reserved; /* 0 */
    uint32_t crc;      /* CRC32C of what lies between `head` and here, and of the values */
} kvp_wire_answer;

/* Where a region of the sender's lies, once, before the first answer to a HOLD of it. Followed, as data,
 * by its packed remote key. */
typedef struct {
    kvp_wire_head head;
    uint32_t number;
    uint32_t crc; /* CRC32C of number, base and stride, and of the key */
    uint64_t base;
    uint64_t stride; /* from one slot to the next */
} kvp_wire_region;

/* Of the HOLD of this number nothing is read any more. Only after an answer with a `good` item. */
typedef struct {
    kvp_wire_head head;
    uint32_t number;
    uint32_t reserved; /* 0 */
} kvp_wire_done;

_Static_assert(sizeof(kvp_wire_region) == 48, "wire format");
_Static_assert(offsetof(kvp_wire_region, base) == 32, "wire format");
_Static_assert(sizeof(kvp_wire_done) == 32, "wire format");
_Static_assert(sizeof(kvp_wire_head) == 24, "wire format");
_Static_assert(sizeof(kvp_wire_ask) == 56, "wire format");
_Static_assert(sizeof(kvp_wire_item) == 24, "wire format");
_Static_assert(sizeof(kvp_wire_answer) == 40, "wire format");
_Static_assert(offsetof(kvp_wire_ask, crc) == 52, "wire format");
_Static_assert(offsetof(kvp_wire_answer, crc) == 36, "wire format");
_Static_assert(offsetof(kvp_wire_head, credit) == 16, "wire format");
_Static_assert(sizeof(kvp_wire_hello) == 96, "wire format");
_Static_assert(offsetof(kvp_wire_hello, incarnation) == 48, "wire format");
_Static_assert(offsetof(kvp_wire_hello, inbox) == 80, "wire format");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "wire format");

#endif
