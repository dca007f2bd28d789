/* How a read is cut into asks that each fit a window of the inbox. Pure: no call of the library. */
#include "ucx_engine.h"

/* While a window is copied out nothing is received, and what comes through a socket comes unevenly if
 * it is long left to wait: reads of 64 KiB blocks were 1.2 times as fast in asks of a quarter of a
 * window of 2 MiB. What lies in one piece goes in one put of up to a slice: layers of a block, or blocks
 * in slots beside each other, as a pool's are that were stored together. Gets wait for nobody. */
enum { ASK_BYTES = 512 << 10, PIECE_BYTES = 1 << 20 };

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* How many layers of one block fit a window. */
static size_t layers_of(const kvp_ucx_job *job, size_t window)
{
    size_t bytes = window / kvp_layer_bytes(job->shape);
    return least(least(bytes, KVP_ASK_CRCS_MAX / job->shape->heads), job->layers);
}

bool kvp_read_fits(const kvp_ucx_job *job, size_t window)
{
    return job->shape == NULL || layers_of(job, window) != 0;
}

/* How many whole blocks fit, at least one: in one piece, if `piece`. */
static size_t blocks_of(const kvp_read *read, size_t block_bytes, size_t window, bool piece)
{
    size_t bytes = least(window, piece ? PIECE_BYTES : ASK_BYTES);
    size_t fit = (read->endpoint->gets ? window : bytes) / block_bytes;
    size_t crcs = KVP_ASK_CRCS_MAX / (read->job.layers * read->job.shape->heads);
    return least(least(fit > 1 ? fit : 1, crcs), KVP_ASK_ITEMS_MAX);
}

/* Blocks: whole ones as many as fit, or some layers of one. */
static void cut_blocks(kvp_read *read, kvp_ask *ask, size_t window)
{
    const kvp_ucx_job *job = &read->job;
    const bool gets = read->endpoint->gets;
    size_t layer_bytes = kvp_layer_bytes(job->shape), layers = layers_of(job, window);
    size_t most = 1, most_beside = 1;
    if (!gets && layers * layer_bytes > PIECE_BYTES) {
        layers = layer_bytes < PIECE_BYTES ? PIECE_BYTES / layer_bytes : 1;
    }
    if (layers == job->layers) {
        most = blocks_of(read, layers * layer_bytes, window, false);
        most_beside = blocks_of(read, layers * layer_bytes, window, true);
    } else if (layers > job->layers - read->next_part) {
        layers = job->layers - read->next_part;
    }
    ask->first = read->next_item;
    ask->layer = read->next_part;
    ask->layers = layers;
    ask->head.region = job->regions[ask->first];
    ask->head.first_crc = (uint32_t)(ask->layer * job->shape->heads);
    ask->head.crc_count = (uint32_t)(layers * job->shape->heads);
    size_t count = 0;
    bool beside = true;
    while (ask->first + count < job->count) {
        size_t at = ask->first + count;
        beside = beside && (count == 0 || job->slots[at] == job->slots[at - 1] + 1);
        if (count >= (beside ? most_beside : most) || job->regions[at] != ask->head.region) {
            break;
        }
        ask->items[count++] = (kvp_wire_item){
            .generation = job->generations[at],
            .offset = ask->layer * layer_bytes,
            .slot = job->slots[at],
            .size = (uint32_t)(layers * layer_bytes),
        };
    }
    ask->head.count = (uint32_t)count;
    read->next_part += layers;
    if (read->next_part == job->layers) {
        read->next_part = 0;
        read->next_item += count;
    }
}

/* Flat bytes: spans one after another while they fit, and a span that does not in pieces. */
static void cut_spans(kvp_read *read, kvp_ask *ask, size_t window)
{
    const kvp_ucx_job *job = &read->job;
    const bool gets = read->endpoint->gets;
    size_t left = gets ? window : least(window, ASK_BYTES), count = 0;
    const size_t most = gets ? window : least(window, PIECE_BYTES);
    ask->first = read->next_item;
    ask->head.region = job->regions[ask->first];
    ask->head.first_crc = ask->head.crc_count = 0;
    while (count < KVP_ASK_ITEMS_MAX && read->next_item < job->count &&
           job->regions[read->next_item] == ask->head.region) {
        size_t item = read->next_item;
        const kvp_ucx_span *span = &job->spans[item];
        size_t rest = span->size - read->next_part;
        if (rest > left && count != 0) {
            break;
        }
        size_t size = least(rest, most);
        ask->local[count] = span->local + read->next_part;
        ask->item_of[count] = item;
        ask->items[count++] = (kvp_wire_item){
            .generation = job->generations[item],
            .offset = span->remote_offset + read->next_part,
            .slot = job->slots[item],
            .size = (uint32_t)size,
        };
        left -= least(left, size);
        read->next_part += size;
        if (read->next_part == span->size) {
            read->next_part = 0;
            read->next_item++;
        }
    }
    ask->head.count = (uint32_t)count;
}

void kvp_read_cut(kvp_read *read, kvp_ask *ask, size_t window)
{
    if (read->job.shape != NULL) {
        cut_blocks(read, ask, window);
    } else {
        cut_spans(read, ask, window);
    }
}
