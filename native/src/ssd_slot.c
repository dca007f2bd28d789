/* The bytes of the SSD tier: a slot's header, and the intent that goes before a write.
 *
 * Owns: what they mean and when they are whole. A header that is not whole, is of another version,
 * or names another slot or store says nothing. Never reads or writes a file. */
#include <string.h>

#include "kvpool_ssd.h"

size_t kvp_slot_crc_count(const kvp_ssd_geometry *geometry)
{
    return geometry->layers * geometry->shape.heads;
}

static size_t head_bytes(const kvp_ssd_geometry *geometry)
{
    const kvp_shape *shape = &geometry->shape;
    return shape->tokens * (shape->k_row_bytes + shape->v_row_bytes);
}

size_t kvp_slot_payload_bytes(const kvp_ssd_geometry *geometry)
{
    return kvp_slot_crc_count(geometry) * head_bytes(geometry);
}

bool kvp_slot_geometry_fits(const kvp_ssd_geometry *geometry)
{
    const kvp_shape *shape = &geometry->shape;
    size_t row, head, crcs, payload, crc_bytes, total;
    if (shape->heads == 0 || shape->tokens == 0 || shape->k_row_bytes == 0 ||
        geometry->layers == 0 || geometry->slot_count == 0 || geometry->segment_slots == 0 ||
        geometry->slot_count > UINT32_MAX)
        return false;
    if (__builtin_add_overflow(shape->k_row_bytes, shape->v_row_bytes, &row) ||
        __builtin_mul_overflow(shape->tokens, row, &head) ||
        __builtin_mul_overflow(geometry->layers, shape->heads, &crcs) ||
        __builtin_mul_overflow(crcs, head, &payload) ||
        __builtin_mul_overflow(crcs, sizeof(uint32_t), &crc_bytes) ||
        __builtin_add_overflow(payload, geometry->header_bytes, &total))
        return false;
    return geometry->header_bytes % KVP_BLOCK_BYTES == 0 &&
           geometry->slot_bytes % KVP_BLOCK_BYTES == 0 &&
           geometry->header_bytes >= sizeof(slot_header) &&
           geometry->header_bytes - sizeof(slot_header) >= crc_bytes &&
           geometry->slot_bytes >= total && crcs <= UINT32_MAX &&
           geometry->slot_bytes <= (size_t)INT64_MAX / geometry->segment_slots;
}

kvp_view kvp_slot_view(const kvp_ssd_geometry *geometry, const uint8_t *buffer)
{
    const kvp_shape *shape = &geometry->shape;
    return (kvp_view){
        .base = (uintptr_t)buffer + geometry->header_bytes,
        .layer_stride = shape->heads * head_bytes(geometry),
        .head_stride = head_bytes(geometry),
        .kv_stride = shape->tokens * shape->k_row_bytes,
        .k_token_stride = shape->k_row_bytes,
        .v_token_stride = shape->v_row_bytes,
    };
}

/* The CRC of `size` bytes whose field `crc` at byte 12 counts as zeros. */
static uint32_t sealed_crc(const uint8_t *bytes, size_t size)
{
    static const uint8_t zeros[4];
    uint32_t crc = kvp_crc32c(0, bytes, 12);
    crc = kvp_crc32c(crc, zeros, sizeof zeros);
    return kvp_crc32c(crc, bytes + 16, size - 16);
}

static size_t tokens_bytes(const kvp_ssd_geometry *geometry)
{
    return geometry->shape.tokens * sizeof(uint32_t);
}

void kvp_slot_seal(const kvp_ssd_geometry *geometry, const slot_name *name,
                   const uint32_t *tokens, uint8_t *buffer)
{
    const size_t crc_count = kvp_slot_crc_count(geometry);
    slot_header *header = (slot_header *)(void *)buffer;
    size_t used = sizeof *header + crc_count * sizeof(uint32_t);
    header->token_count = 0;
    if (tokens != NULL && geometry->header_bytes - used >= tokens_bytes(geometry)) {
        memcpy(buffer + used, tokens, tokens_bytes(geometry));
        header->token_count = (uint32_t)geometry->shape.tokens;
        used += tokens_bytes(geometry);
    }
    header->magic = KVP_SLOT_MAGIC;
    header->version = KVP_SLOT_VERSION_NUMBER;
    memcpy(header->store_id, geometry->store_id, sizeof header->store_id);
    memcpy(header->hash, name->key, sizeof header->hash);
    memcpy(header->parent, name->parent, sizeof header->parent);
    header->generation = name->generation;
    header->slot = name->slot;
    header->payload_bytes = kvp_slot_payload_bytes(geometry);
    header->crc_count = (uint32_t)crc_count;
    memset(buffer + used, 0, geometry->header_bytes - used);
    header->crc = sealed_crc(buffer, geometry->header_bytes);
}

const uint32_t *kvp_slot_tokens(const uint8_t *buffer)
{
    const slot_header *header = (const slot_header *)(const void *)buffer;
    return header->token_count == 0 ? NULL : header->crcs + header->crc_count;
}

static bool is_known(uint32_t version)
{
    return version == KVP_SLOT_VERSION_NUMBER || version == 1;
}

static bool is_zero(const uint8_t *bytes, size_t size)
{
    return bytes[0] == 0 && memcmp(bytes, bytes + 1, size - 1) == 0;
}

kvp_slot_result kvp_slot_open(const kvp_ssd_geometry *geometry, uint32_t slot,
                              const uint8_t *buffer, slot_name *name)
{
    const slot_header *header = (const slot_header *)(const void *)buffer;
    if (header->magic != KVP_SLOT_MAGIC)
        return is_zero(buffer, geometry->header_bytes) ? KVP_SLOT_EMPTY : KVP_SLOT_CORRUPT;
    if (header->crc != sealed_crc(buffer, geometry->header_bytes))
        return is_known(header->version) ? KVP_SLOT_CORRUPT : KVP_SLOT_VERSION;
    if (!is_known(header->version))
        return KVP_SLOT_VERSION;
    if (header->slot != slot || header->payload_bytes != kvp_slot_payload_bytes(geometry) ||
        header->crc_count != kvp_slot_crc_count(geometry) ||
        memcmp(header->store_id, geometry->store_id, sizeof header->store_id) != 0)
        return KVP_SLOT_OTHER;
    const size_t crcs_end = sizeof *header + header->crc_count * sizeof(uint32_t);
    if (header->token_count != 0 &&
        (header->token_count != geometry->shape.tokens ||
         geometry->header_bytes - crcs_end < tokens_bytes(geometry)))
        return KVP_SLOT_OTHER;
    name->slot = slot;
    name->generation = header->generation;
    memcpy(name->key, header->hash, sizeof name->key);
    memcpy(name->parent, header->parent, sizeof name->parent);
    return KVP_SLOT_DONE;
}

bool kvp_slot_whole(const kvp_ssd_geometry *geometry, const uint8_t *buffer)
{
    const slot_header *header = (const slot_header *)(const void *)buffer;
    const size_t size = head_bytes(geometry);
    const uint8_t *head = buffer + geometry->header_bytes;
    for (size_t i = 0; i < header->crc_count; i++, head += size)
        if (kvp_crc32c(0, head, size) != header->crcs[i])
            return false;
    return true;
}

void kvp_intent_seal(const kvp_ssd_geometry *geometry, uint64_t sequence, const uint32_t *slots,
                     size_t count, write_intent *intent)
{
    memset(intent, 0, sizeof *intent);
    intent->magic = KVP_INTENT_MAGIC;
    intent->version = KVP_INTENT_VERSION_NUMBER;
    memcpy(intent->store_id, geometry->store_id, sizeof intent->store_id);
    intent->sequence = sequence;
    intent->count = (uint32_t)count;
    memcpy(intent->slots, slots, count * sizeof *slots);
    intent->crc = sealed_crc((const uint8_t *)intent, sizeof *intent);
}

size_t kvp_ssd_intent_slots(const uint8_t *page, size_t size, const uint8_t *store_id,
                            size_t count, uint32_t *slots)
{
    write_intent intent;
    if (size != sizeof intent)
        return 0;
    memcpy(&intent, page, sizeof intent);
    if (intent.magic != KVP_INTENT_MAGIC || intent.version != KVP_INTENT_VERSION_NUMBER ||
        intent.crc != sealed_crc(page, sizeof intent) || intent.count > KVP_SSD_INTENT_SLOTS ||
        memcmp(intent.store_id, store_id, sizeof intent.store_id) != 0)
        return 0;
    if (count > intent.count)
        count = intent.count;
    memcpy(slots, intent.slots, count * sizeof *slots);
    return count;
}
