/* A pair of one-way rings of small records between two processes.
 *
 * Owns: one memfd with the outgoing ring, and a read-only mapping of the peer's. Each side writes
 * only its own memfd: records it pushes, and how many of the peer's it has popped. The peer may
 * write anything at any time, so each record is copied out first and checked afterwards.
 *
 *   page 0          mailbox_header
 *   from page 1     record_count records, record_stride bytes apart */
#define _GNU_SOURCE
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kvpool_memfd.h"

#define MAILBOX_MAGIC UINT64_C(0x584f424c49414d4b) /* "KMAILBOX" as it lies in memory */
enum { MAILBOX_VERSION = 1, RECORD_BYTES_MAX = 4096, LINE_BYTES = 64 };
#define RECORD_COUNT_MAX (UINT64_C(1) << 24)

typedef struct {
    uint64_t magic;
    uint32_t version;
    uint32_t reserved; /* 0 */
    uint8_t incarnation[KVP_INCARNATION_BYTES];
    uint64_t record_count;
    uint64_t record_bytes;
    uint8_t line_1[16];
    uint64_t pushed; /* records ever written to this ring; changes with every push */
    uint8_t line_2[56];
    uint64_t popped; /* records ever read from the peer's ring; changes with every pop */
} mailbox_header;

/* The two counters have different writers and a cache line each. */
_Static_assert(sizeof(mailbox_header) == 136, "the mailbox's header is fixed");
_Static_assert(offsetof(mailbox_header, pushed) == 64, "the mailbox's header is fixed");
_Static_assert(offsetof(mailbox_header, popped) == 128, "the mailbox's header is fixed");

typedef struct {
    uint64_t sequence; /* 1 for the first record ever pushed */
    uint32_t size;
    uint32_t crc; /* CRC32C of sequence, size, payload */
    uint8_t payload[];
} mailbox_record;

_Static_assert(sizeof(mailbox_record) == 16, "a record's header is fixed");
_Static_assert(offsetof(mailbox_record, payload) == 16, "a record's header is fixed");

struct kvp_mailbox {
    uint64_t record_count;
    size_t record_bytes;
    size_t record_stride;
    size_t total_bytes;
    int fd;
    uint8_t *map;
    const uint8_t *peer_map; /* null until attached; atomic, because attach may come late */
    uint64_t pushed;         /* by the pushing thread */
    uint64_t popped;         /* by the popping thread */
};

static uint32_t record_crc(const mailbox_record *record, const uint8_t *payload)
{
    uint32_t crc = kvp_crc32c(0, (const uint8_t *)&record->sequence, sizeof record->sequence);
    crc = kvp_crc32c(crc, (const uint8_t *)&record->size, sizeof record->size);
    return kvp_crc32c(crc, payload, record->size);
}

static size_t record_offset(const kvp_mailbox *mailbox, uint64_t position)
{
    return KVP_PAGE_BYTES + (position & (mailbox->record_count - 1)) * mailbox->record_stride;
}

kvp_status kvp_mailbox_open(size_t record_count, size_t record_bytes, const uint8_t *incarnation,
                            kvp_mailbox **out)
{
    if (record_count == 0 || record_count > RECORD_COUNT_MAX ||
        (record_count & (record_count - 1)) != 0 || record_bytes == 0 ||
        record_bytes > RECORD_BYTES_MAX)
        return KVP_INVALID;
    kvp_mailbox *mailbox = calloc(1, sizeof *mailbox);
    if (mailbox == NULL)
        return KVP_SYSTEM;
    /* The limits above keep both sums far below SIZE_MAX. */
    kvp_round_up(sizeof(mailbox_record) + record_bytes, LINE_BYTES, &mailbox->record_stride);
    kvp_round_up(KVP_PAGE_BYTES + record_count * mailbox->record_stride, KVP_PAGE_BYTES,
                 &mailbox->total_bytes);
    mailbox->record_count = record_count;
    mailbox->record_bytes = record_bytes;
    void *map;
    if (kvp_memfd_open("kvpool-mailbox", mailbox->total_bytes, &mailbox->fd, &map) != KVP_OK) {
        free(mailbox);
        return KVP_SYSTEM;
    }
    mailbox->map = map;
    mailbox_header header = {.magic = MAILBOX_MAGIC,
                             .version = MAILBOX_VERSION,
                             .record_count = record_count,
                             .record_bytes = record_bytes};
    memcpy(header.incarnation, incarnation, sizeof header.incarnation);
    memcpy(mailbox->map, &header, sizeof header);
    if (kvp_memfd_seal(mailbox->fd) != KVP_OK) {
        kvp_mailbox_close(mailbox);
        return KVP_SYSTEM;
    }
    *out = mailbox;
    return KVP_OK;
}

void kvp_mailbox_close(kvp_mailbox *mailbox)
{
    if (mailbox == NULL)
        return;
    if (mailbox->peer_map != NULL)
        munmap((void *)(uintptr_t)mailbox->peer_map, mailbox->total_bytes);
    munmap(mailbox->map, mailbox->total_bytes);
    close(mailbox->fd);
    free(mailbox);
}

int kvp_mailbox_fd(const kvp_mailbox *mailbox)
{
    return mailbox->fd;
}

kvp_status kvp_mailbox_attach(kvp_mailbox *mailbox, int peer_fd, const uint8_t *peer_incarnation)
{
    if (__atomic_load_n(&mailbox->peer_map, __ATOMIC_ACQUIRE) != NULL)
        return KVP_BUSY;
    const void *map;
    size_t size;
    kvp_status status = kvp_memfd_map(peer_fd, &map, &size);
    if (status != KVP_OK)
        return status;
    mailbox_header header; /* one copy: what is checked is what is used */
    memcpy(&header, map, sizeof(mailbox_header));
    if (header.magic != MAILBOX_MAGIC || header.version != MAILBOX_VERSION ||
        header.record_count != mailbox->record_count ||
        header.record_bytes != mailbox->record_bytes || size != mailbox->total_bytes)
        status = KVP_CORRUPT;
    else if (memcmp(header.incarnation, peer_incarnation, KVP_INCARNATION_BYTES) != 0)
        status = KVP_STALE;
    if (status != KVP_OK) {
        munmap((void *)(uintptr_t)map, size);
        return status;
    }
    const uint8_t *nobody = NULL;
    if (!__atomic_compare_exchange_n(&mailbox->peer_map, &nobody, (const uint8_t *)map, false,
                                     __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        munmap((void *)(uintptr_t)map, size); /* another thread attached meanwhile */
        return KVP_BUSY;
    }
    return KVP_OK;
}

kvp_status kvp_mailbox_push(kvp_mailbox *mailbox, const uint8_t *payload, size_t size)
{
    if (size == 0 || size > mailbox->record_bytes)
        return KVP_INVALID;
    const uint8_t *peer_map = __atomic_load_n(&mailbox->peer_map, __ATOMIC_ACQUIRE);
    uint64_t popped = 0;
    if (peer_map != NULL)
        popped = __atomic_load_n(&((const mailbox_header *)(const void *)peer_map)->popped,
                                 __ATOMIC_ACQUIRE);
    uint64_t unread = mailbox->pushed - popped;
    if (unread > mailbox->record_count)
        return KVP_CORRUPT; /* the peer says it has read what was never written */
    if (unread == mailbox->record_count)
        return KVP_FULL;
    mailbox_record *record =
        (mailbox_record *)(void *)(mailbox->map + record_offset(mailbox, mailbox->pushed));
    mailbox->pushed++;
    record->sequence = mailbox->pushed;
    record->size = (uint32_t)size;
    record->crc = record_crc(record, payload);
    memcpy(record->payload, payload, size);
    __atomic_store_n(&((mailbox_header *)(void *)mailbox->map)->pushed, mailbox->pushed,
                     __ATOMIC_RELEASE);
    return KVP_OK;
}

kvp_status kvp_mailbox_pop(kvp_mailbox *mailbox, uint8_t *payload, size_t *size)
{
    const uint8_t *peer_map = __atomic_load_n(&mailbox->peer_map, __ATOMIC_ACQUIRE);
    if (peer_map == NULL)
        return KVP_MISS;
    uint64_t pushed = __atomic_load_n(&((const mailbox_header *)(const void *)peer_map)->pushed,
                                      __ATOMIC_ACQUIRE);
    uint64_t unread = pushed - mailbox->popped;
    if (unread == 0)
        return KVP_MISS;
    if (unread > mailbox->record_count)
        return KVP_CORRUPT;
    const uint8_t *from = peer_map + record_offset(mailbox, mailbox->popped);
    mailbox_record record;
    memcpy(&record, from, sizeof record);
    if (record.sequence != mailbox->popped + 1 || record.size == 0 ||
        record.size > mailbox->record_bytes)
        return KVP_CORRUPT;
    memcpy(payload, from + sizeof record, record.size);
    if (record_crc(&record, payload) != record.crc)
        return KVP_CORRUPT;
    *size = record.size;
    mailbox->popped++;
    __atomic_store_n(&((mailbox_header *)(void *)mailbox->map)->popped, mailbox->popped,
                     __ATOMIC_RELEASE);
    return KVP_OK;
}
