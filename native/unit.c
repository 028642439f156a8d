/* Running one unit of work: a store, or a task over some splits of a query tile.
 *
 * Nothing in the segment is trusted: another process may have gone wild, or be of another opinion.
 * Words are copied first and the copies checked and used, so that what changes meanwhile does no
 * harm.
 */
#define _GNU_SOURCE
#include "checksum.h"
#include "worker.h"

#include <math.h>
#include <string.h>

enum { SPLIT_BLOCKS = ML_SPLIT_TOKENS / ML_BLOCK_TOKENS };

typedef struct {
    uint32_t first_token, n_tokens, n_splits, n_tasks, partials, kv_end;
    ml_tile *shared;
} tile_words;

/* ---- checked copies ---- */

static int copy_item(const ml_worker *worker, ml_unit *unit, uint32_t index) {
    const ml_geometry *g = &worker->segment->geometry;
    if (unit->layer >= g->n_layers) return ML_BAD_LAYER;
    if (index >= unit->n_items || index >= worker->segment->layout.max_items) return ML_BAD_TILE;
    memcpy(&unit->item, &ML_SLOT_PART(worker->segment, unit->slot, items, ml_item)[index],
           sizeof unit->item);
    unit->item_index = index;
    const ml_item *item = &unit->item;
    if (item->row >= g->max_sequences) return ML_BAD_ITEM_ROW;
    if (item->n_tokens == 0 || item->n_tokens > g->max_context_tokens ||
        item->start_position > g->max_context_tokens - item->n_tokens)
        return ML_BAD_ITEM_POSITION;
    if (item->n_tokens > g->max_slot_tokens ||
        item->slot_offset > g->max_slot_tokens - item->n_tokens)
        return ML_BAD_ITEM_SLOT;
    return item->flags > ML_ATTEND_EARLIER_ONLY ? ML_BAD_ITEM_FLAGS : ML_OK;
}

/* Entries of positions [begin, end) of the item's row; end is at most max_context_tokens. */
static int copy_blocks(ml_worker *worker, const ml_unit *unit, uint32_t begin, uint32_t end) {
    _Atomic int32_t *row = ml_block_row(worker->segment, unit->item.row);
    uint32_t end_block = (uint32_t)ml_div_ceil(end, ML_BLOCK_TOKENS);
    for (uint32_t i = begin / ML_BLOCK_TOKENS; i < end_block; i++) {
        int32_t block = atomic_load_explicit(&row[i], memory_order_relaxed);
        if (block < 0 || (uint32_t)block >= worker->segment->geometry.kv_blocks)
            return ML_BAD_BLOCK;
        worker->blocks[i] = block;
    }
    return ML_OK;
}

static int copy_tile(const ml_worker *worker, ml_unit *unit, uint32_t index, tile_words *tile) {
    const ml_layout *layout = &worker->segment->layout;
    if (index >= unit->n_tiles || index >= layout->max_tiles) return ML_BAD_TASK;
    tile->shared = &ML_SLOT_PART(worker->segment, unit->slot, tiles, ml_tile)[index];
    ml_tile copy;
    memcpy(&copy, tile->shared, offsetof(ml_tile, finished));
    int status = copy_item(worker, unit, copy.item);
    if (status != ML_OK) return status;
    const ml_item *item = &unit->item;
    if (copy.n_tokens == 0 || copy.n_tokens > ML_MAX_TILE_TOKENS ||
        copy.n_tokens > item->n_tokens || copy.first_token > item->n_tokens - copy.n_tokens)
        return ML_BAD_TILE;
    tile->first_token = copy.first_token;
    tile->n_tokens = copy.n_tokens;
    uint32_t end_token = copy.first_token + copy.n_tokens;
    tile->kv_end = item->start_position + (item->flags & ML_ATTEND_EARLIER_ONLY ? 0 : end_token);
    tile->n_splits = (uint32_t)ml_div_ceil(tile->kv_end, ML_SPLIT_TOKENS);
    tile->n_tasks = copy.n_tasks;
    tile->partials = copy.partials;
    if (copy.n_splits != tile->n_splits || copy.n_tasks == 0 ||
        copy.n_tasks > ml_max(1, tile->n_splits))
        return ML_BAD_TILE;
    uint32_t rows = copy.n_tokens * tile->n_splits; /* at most 64 * 2^13 */
    if (copy.partials == ML_NO_PARTIALS)
        return copy.n_tasks == 1 && rows <= layout->scratch_rows ? ML_OK : ML_BAD_TILE;
    if (rows > layout->partial_rows || copy.partials > layout->partial_rows - rows)
        return ML_BAD_TILE;
    return ML_OK;
}

static ml_task copy_task(const ml_worker *worker, const ml_unit *unit, uint32_t index) {
    ml_task task;
    memcpy(&task, &ML_SLOT_PART(worker->segment, unit->slot, tasks, ml_task)[index], sizeof task);
    return task;
}

/* ---- addresses ---- */

static uint8_t *arena_layer(const ml_worker *worker, const ml_unit *unit) {
    return worker->arena + unit->layer * worker->segment->layout.kv_layer_bytes;
}

static size_t row_bytes(const ml_worker *worker, uint32_t n_heads) {
    const ml_segment *segment = worker->segment;
    return (size_t)n_heads * segment->geometry.head_dim * segment->layout.element_bytes;
}

/* Row `token` of the item in the slot's array at `offset`. */
static uint8_t *activation(const ml_worker *worker, const ml_unit *unit, uint64_t offset,
                           size_t row_bytes, uint32_t token) {
    return ml_activations_of(worker->segment, unit->slot) + offset +
           (uint64_t)(unit->item.slot_offset + token) * row_bytes;
}

/* ---- checksums ---- */

static uint64_t block_checksum(const ml_worker *worker, const ml_unit *unit, uint32_t block) {
    const ml_segment *segment = worker->segment;
    size_t block_bytes = segment->layout.kv_layer_bytes / segment->geometry.kv_blocks;
    return ml_checksum(ML_CHECKSUM_START, arena_layer(worker, unit) + block * block_bytes,
                       block_bytes);
}

/* The blocks of positions [begin, end), copied before, hold what was stored in them. */
static int verify_blocks(const ml_worker *worker, const ml_unit *unit, uint32_t begin,
                         uint32_t end) {
    if (!worker->segment->geometry.checksums) return ML_OK;
    for (uint32_t i = begin / ML_BLOCK_TOKENS; i < ml_div_ceil(end, ML_BLOCK_TOKENS); i++) {
        uint32_t block = (uint32_t)worker->blocks[i];
        ml_word64 *expected = ml_kv_checksum_of(worker->segment, unit->layer, block);
        if (atomic_load_explicit(expected, memory_order_relaxed) !=
            block_checksum(worker, unit, block))
            return ML_BAD_KV_CHECKSUM;
    }
    return ML_OK;
}

/* After positions [begin, end) were stored. */
static void note_blocks(const ml_worker *worker, const ml_unit *unit, uint32_t begin,
                        uint32_t end) {
    if (!worker->segment->geometry.checksums) return;
    for (uint32_t i = begin / ML_BLOCK_TOKENS; i < ml_div_ceil(end, ML_BLOCK_TOKENS); i++) {
        uint32_t block = (uint32_t)worker->blocks[i];
        atomic_store_explicit(ml_kv_checksum_of(worker->segment, unit->layer, block),
                              block_checksum(worker, unit, block), memory_order_relaxed);
    }
}

/* ---- running ---- */

static int store_tokens(ml_worker *worker, const ml_unit *unit, uint32_t token, uint32_t n_tokens) {
    const ml_segment *segment = worker->segment;
    uint32_t position = unit->item.start_position + token;
    int status = copy_blocks(worker, unit, position, position + n_tokens);
    /* A block that is continued must not get a new checksum for old damage. */
    if (status == ML_OK && position % ML_BLOCK_TOKENS != 0)
        status = verify_blocks(worker, unit, position, position + 1);
    if (status != ML_OK) return status;
    size_t stride = row_bytes(worker, segment->geometry.n_kv_heads);
    ml_kv_store(&segment->shape, arena_layer(worker, unit), worker->blocks, position, n_tokens,
                activation(worker, unit, segment->layout.k, stride, token),
                activation(worker, unit, segment->layout.v, stride, token), stride);
    note_blocks(worker, unit, position, position + n_tokens);
    return ML_OK;
}

int ml_run_store(ml_worker *worker, ml_unit *unit, uint32_t index) {
    ml_store store;
    memcpy(&store, &ML_SLOT_PART(worker->segment, unit->slot, stores, ml_store)[index],
           sizeof store);
    int status = copy_item(worker, unit, store.item);
    if (status != ML_OK) return status;
    if (store.n_tokens == 0 || store.n_tokens > unit->item.n_tokens ||
        store.first_token > unit->item.n_tokens - store.n_tokens)
        return ML_BAD_STORE;
    return store_tokens(worker, unit, store.first_token, store.n_tokens);
}

/* Where the parts of a tile lie: [n_splits][n_tokens] rows, shared or private. */
static void find_parts(const ml_worker *worker, const ml_unit *unit, const tile_words *tile,
                       float **out, float **lse) {
    const ml_geometry *g = &worker->segment->geometry;
    *out = worker->scratch_out;
    *lse = worker->scratch_lse;
    if (tile->partials == ML_NO_PARTIALS) return;
    uint64_t row = tile->partials;
    *out = ML_SLOT_PART(worker->segment, unit->slot, partial_out, float) +
           row * g->n_q_heads * g->head_dim;
    *lse = ML_SLOT_PART(worker->segment, unit->slot, partial_lse, float) + row * g->n_q_heads;
}

static void attend_split(ml_worker *worker, ml_unit *unit, const tile_words *tile, uint32_t split,
                         const ml_task *task) {
    const ml_segment *segment = worker->segment;
    const ml_geometry *g = &segment->geometry;
    size_t q_stride = row_bytes(worker, g->n_q_heads);
    size_t block_bytes = segment->layout.kv_layer_bytes / g->kv_blocks;
    uint64_t first_row = (uint64_t)split * tile->n_tokens * g->n_q_heads;
    uint32_t begin = split * ML_SPLIT_TOKENS;
    uint32_t end = (uint32_t)ml_min(begin + ML_SPLIT_TOKENS, tile->kv_end);
    float *out, *lse;
    find_parts(worker, unit, tile, &out, &lse);
    ml_attend_task attend = {
        .arena_layer = arena_layer(worker, unit),
        .block_table = worker->blocks,
        .q = activation(worker, unit, segment->layout.q, q_stride, tile->first_token),
        .q_row_stride_bytes = q_stride,
        .out = out + first_row * g->head_dim,
        .lse = lse + first_row,
        .kv_begin = begin,
        .kv_end = end,
        .n_queries = tile->n_tokens,
        .query_position = unit->item.start_position + tile->first_token,
        .scale = g->scale,
    };
    if (task->store_first && split + 1 == tile->n_splits) {
        size_t kv_stride = row_bytes(worker, g->n_kv_heads);
        attend.new_k = activation(worker, unit, segment->layout.k, kv_stride, 0);
        attend.new_v = activation(worker, unit, segment->layout.v, kv_stride, 0);
    }
    if (split + 1 < task->end_split)
        attend.next_block = arena_layer(worker, unit) +
                            (uint64_t)worker->blocks[(split + 1) * SPLIT_BLOCKS] * block_bytes;
    ml_attend(&segment->shape, &attend);
    unit->kv_read_bytes += ml_div_ceil(end - begin, ML_BLOCK_TOKENS) * block_bytes;
}

static void clear_rows(const ml_worker *worker, const tile_words *tile, uint8_t *out, float *lse) {
    const ml_geometry *g = &worker->segment->geometry;
    memset(out, 0, tile->n_tokens * row_bytes(worker, g->n_q_heads));
    for (uint32_t i = 0; i < tile->n_tokens * g->n_q_heads; i++) lse[i] = -INFINITY;
}

static void merge_parts(const ml_worker *worker, const ml_unit *unit, const tile_words *tile) {
    const ml_segment *segment = worker->segment;
    const ml_geometry *g = &segment->geometry;
    size_t out_stride = row_bytes(worker, g->n_q_heads);
    uint32_t n_rows = tile->n_tokens * g->n_q_heads;
    uint8_t *out = activation(worker, unit, segment->layout.out, out_stride, tile->first_token);
    float *lse = (float *)(void *)activation(worker, unit, segment->layout.lse,
                                             g->n_q_heads * sizeof(float), tile->first_token);
    if (tile->n_splits == 0) {
        clear_rows(worker, tile, out, lse);
        return;
    }
    float *out_parts, *lse_parts;
    find_parts(worker, unit, tile, &out_parts, &lse_parts);
    ml_merge_task merge = {.out_parts = out_parts,
                           .lse_parts = lse_parts,
                           .out_split_stride = (size_t)n_rows * g->head_dim,
                           .lse_split_stride = n_rows,
                           .out = out,
                           .lse = lse,
                           .n_splits = tile->n_splits,
                           .n_rows = n_rows,
                           .head_dim = g->head_dim,
                           .out_dtype = g->kv_dtype == ML_FP32 ? ML_FP32 : ML_BF16};
    ml_merge(&merge);
}

static int check_task(const ml_unit *unit, const tile_words *tile, const ml_task *task) {
    if (task->first_split > task->end_split || task->end_split > tile->n_splits) return ML_BAD_TASK;
    if (tile->n_tasks == 1 && (task->first_split != 0 || task->end_split != tile->n_splits))
        return ML_BAD_TASK;
    if (task->store_first && (unit->item.n_tokens != 1 || unit->item.flags != 0 ||
                              task->end_split != tile->n_splits))
        return ML_BAD_TASK;
    return ML_OK;
}

int ml_task_waits(const ml_worker *worker, const ml_unit *unit, uint32_t index) {
    ml_task task = copy_task(worker, unit, index);
    if (task.tile >= worker->segment->layout.max_tiles) return 0; /* refused when it runs */
    return ML_SLOT_PART(worker->segment, unit->slot, tiles, ml_tile)[task.tile].after_stores != 0;
}

int ml_run_task(ml_worker *worker, ml_unit *unit, uint32_t index) {
    ml_task task = copy_task(worker, unit, index);
    tile_words tile;
    int status = copy_tile(worker, unit, task.tile, &tile);
    if (status == ML_OK) status = check_task(unit, &tile, &task);
    uint32_t begin = task.first_split * ML_SPLIT_TOKENS;
    if (status == ML_OK && task.first_split < task.end_split) {
        uint64_t end = ml_min((uint64_t)task.end_split * ML_SPLIT_TOKENS, tile.kv_end);
        status = copy_blocks(worker, unit, begin, (uint32_t)end);
        /* A decode stores its token on the way: a block that it begins holds nothing yet. */
        uint32_t stored = (uint32_t)end - (task.store_first && end % ML_BLOCK_TOKENS == 1);
        if (status == ML_OK) status = verify_blocks(worker, unit, begin, stored);
    }
    if (status != ML_OK) return status;
    for (uint32_t split = task.first_split; split < task.end_split; split++) {
        /* A task may take seconds on a slow instruction set; a split does not. */
        ml_worker_beat(worker, ml_now_ns());
        attend_split(worker, unit, &tile, split, &task);
    }
    if (task.store_first) note_blocks(worker, unit, tile.kv_end - 1, tile.kv_end);
    if (tile.n_tasks > 1) {
        /* acq_rel: the last to count sees the parts of all others. */
        uint32_t before =
            atomic_fetch_add_explicit(&tile.shared->finished, 1, memory_order_acq_rel);
        if ((before + 1) % tile.n_tasks != 0) return ML_OK;
    }
    merge_parts(worker, unit, &tile);
    return ML_OK;
}
