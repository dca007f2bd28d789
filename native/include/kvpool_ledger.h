/* Between the sources of the ledger: its arrays, and what ledger_order.c keeps of them. Not seen by
 * Python. Everything here is called with the ledger's mutex held. */
#ifndef KVPOOL_LEDGER_H
#define KVPOOL_LEDGER_H

#include <pthread.h>

#include "kvpool.h"

#define NONE UINT32_MAX
enum { HASH_BYTES = 32 };

typedef enum { FREE, RESERVED, READY, DROPPED, QUARANTINED } slot_state;
typedef uint8_t hash[HASH_BYTES];

/* Open addressing, linear probing, no tombstones: a place holds slot + 1, and 0 is empty. */
typedef struct {
    uint32_t *places;
    const hash *hashes; /* by slot */
} slot_table;

struct kvp_ledger {
    pthread_mutex_t mutex; /* guards everything */
    size_t holders; /* who may still call: its opener, and an arena; atomic */
    size_t slot_count;
    size_t place_count;  /* of each table: 1.5 a slot */
    uint64_t seed;       /* so that nobody can choose hashes that collide here */
    uint64_t generation; /* of the next life */
    uint64_t uses;       /* orders them */
    kvp_ledger_counts counts;
    size_t heap_count;
    uint32_t free_head;
    slot_table by_key, by_parent;
    /* By slot. */
    hash *keys, *parents;
    uint64_t *generations, *used;
    uint32_t *pins, *grants;
    uint32_t *next, *previous; /* siblings; `next` of a free slot: the next free one */
    uint32_t *heap;            /* slots; a block's place in it is heap_at, NONE if it is not */
    uint32_t *heap_at;
    uint8_t *states;
    bool *stale;
};

/* The place of `name`, or the empty place where it would go. */
size_t kvp_ledger_find(const kvp_ledger *ledger, const slot_table *table, const uint8_t *name);
/* Empty a place, and shift back those behind it that would not be found past a hole. */
void kvp_ledger_empty(const kvp_ledger *ledger, slot_table *table, size_t hole);
/* The slot of a block that is here, or NONE. */
uint32_t kvp_ledger_slot(const kvp_ledger *ledger, const uint8_t *key);
bool kvp_ledger_has_child(const kvp_ledger *ledger, const uint8_t *key);
bool kvp_ledger_no_parent(const uint8_t *parent);
/* Enter and leave the list of a parent's children. */
void kvp_ledger_join(kvp_ledger *ledger, uint32_t slot);
void kvp_ledger_part(kvp_ledger *ledger, uint32_t slot);
/* Look again at whether a block may be evicted, and when: something about it has changed. */
void kvp_ledger_reconsider(kvp_ledger *ledger, uint32_t slot);
void kvp_ledger_use(kvp_ledger *ledger, uint32_t slot);

void kvp_ledger_set_free(kvp_ledger *ledger, uint32_t slot);
/* A RESERVED slot, or one that a block has left, is free, or quarantined while grants are out. */
void kvp_ledger_give_up(kvp_ledger *ledger, uint32_t slot);
/* A block leaves the tables, and its slot unless somebody reads it. */
void kvp_ledger_leave(kvp_ledger *ledger, uint32_t slot);
/* Whether that life of the slot is going on: KVP_INVALID past the end, KVP_STALE if not. */
kvp_status kvp_ledger_look(const kvp_ledger *ledger, uint32_t slot, uint64_t generation);
void kvp_ledger_set_stale(kvp_ledger *ledger, uint32_t slot, bool stale);

#endif
