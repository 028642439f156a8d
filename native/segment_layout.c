/* Where the parts of a segment lie, for a geometry; and texts for statuses. */
#include <math.h>

#include "segment.h"

enum { PAGE_BYTES = 4096, MAX_PARTIAL_BYTES = 64 << 20, SPARE_PARTIAL_ROWS = 1024 };
#define MAX_ARENA_BYTES (UINT64_C(1) << 47) /* what a process can map */

static const char *const STATUS_TEXTS[ML_STATUS_COUNT] = {
    [ML_OK] = "ok",
    [ML_TIMED_OUT] = "timed out",
    [ML_CANCELLED] = "cancelled",
    [ML_PEER_DIED] = "a peer died",
    [ML_PEER_HUNG] = "a peer hangs",
    [ML_EPOCH_RETIRED] = "the epoch is retired: configure the CPU worker again",
    [ML_SLOT_BUSY] = "busy: the slot's job has not ended, or the place is taken",
    [ML_NOT_PREPARED] = "the slot is not prepared (prepare comes before post)",
    [ML_BAD_SEGMENT] = "not a segment of this version, or damaged",
    [ML_BAD_LAYER] = "layer or slot is out of range",
    [ML_BAD_ITEM_ROW] = "row is not below max_sequences",
    [ML_BAD_ITEM_POSITION] = "n_tokens is 0, or positions reach beyond max_context_tokens",
    [ML_BAD_ITEM_SLOT] = "slot_offset + n_tokens is beyond max_slot_tokens",
    [ML_BAD_ITEM_FLAGS] = "flags are unknown or contradict each other",
    [ML_DUPLICATE_ROW] = "row is named twice in one slot",
    [ML_OVERLAPPING_SLOTS] = "slot rows overlap those of another item",
    [ML_BAD_BLOCK] = "a block id is not in [0, kv_blocks), or was never set",
    [ML_TOO_MANY_ITEMS] = "more items than the slot can hold, or none",
    [ML_BAD_TASK] = "a task's words do not fit its tile",
    [ML_BAD_TILE] = "a tile's words do not fit its item",
    [ML_BAD_STORE] = "a store's words do not fit its item",
    [ML_BAD_CURSOR] = "job words do not fit each other",
    [ML_STORE_STALLED] = "stores of the job did not finish in time",
    [ML_BAD_KV_CHECKSUM] = "a KV block is not what was stored in it",
    [ML_BAD_SLOT_CHECKSUM] = "activations are not what was written into the slot",
    [ML_SYSTEM_ERROR] = "system error",
};

const char *ml_status_text(int status) {
    if (status < 0 || status >= ML_STATUS_COUNT) return "unknown status";
    return STATUS_TEXTS[status];
}

static ml_attention_shape shape_of(const ml_geometry *g) {
    ml_attention_shape shape = {.n_q_heads = g->n_q_heads,
                                .n_kv_heads = g->n_kv_heads,
                                .head_dim = g->head_dim,
                                .kv_dtype = g->kv_dtype};
    return shape;
}

static int outside(uint32_t value, uint32_t most) { return value < 1 || value > most; }

const char *ml_geometry_error(const ml_geometry *g) {
    if (outside(g->n_layers, ML_MAX_LAYERS)) return "n_layers: must be 1 to 4096";
    if (outside(g->n_q_heads, ML_MAX_HEADS)) return "n_q_heads: must be 1 to 1024";
    if (outside(g->n_kv_heads, ML_MAX_HEADS)) return "n_kv_heads: must be 1 to 1024";
    ml_attention_shape shape = shape_of(g);
    const char *shape_error = ml_shape_error(&shape);
    if (shape_error) return shape_error;
    if (outside(g->kv_blocks, INT32_MAX)) return "kv_blocks: must be 1 to 2^31 - 1";
    if (outside(g->max_sequences, ML_MAX_SEQUENCES)) return "max_sequences: must be 1 to 2^20";
    if (outside(g->max_context_tokens, ML_MAX_CONTEXT_TOKENS))
        return "max_context_tokens: must be 1 to 2^22";
    if (outside(g->max_slot_tokens, ML_MAX_SLOT_TOKENS))
        return "max_slot_tokens: must be 1 to 2^20";
    if (outside(g->n_processes, ML_MAX_PROCESSES)) return "n_processes: must be 1 to 256";
    if (outside(g->n_nodes, ML_MAX_NODES)) return "n_nodes: must be 1 to 8";
    if (g->checksums > 1) return "checksums: must be 0 or 1";
    if (!isfinite(g->scale) || g->scale == 0) return "scale: must be finite and not 0";
    if (g->kv_blocks > MAX_ARENA_BYTES / ml_kv_block_bytes(&shape) / g->n_layers)
        return "kv_blocks: the KV arena would be larger than an address space";
    return NULL;
}

/* A slice of `bytes` at the next multiple of `alignment`; *end is moved behind it. */
static uint64_t place(uint64_t *end, uint64_t bytes, uint64_t alignment) {
    uint64_t start = ml_div_ceil(*end, alignment) * alignment;
    *end = start + bytes;
    return start;
}

static uint64_t place_lines(uint64_t *end, uint64_t bytes) {
    return place(end, bytes, ML_CACHE_LINE_BYTES);
}

static void count(const ml_geometry *g, ml_layout *layout) {
    uint64_t row_bytes = 4ull * g->n_q_heads * (g->head_dim + 1);
    uint64_t max_splits = ml_div_ceil(g->max_context_tokens, ML_SPLIT_TOKENS);
    uint64_t items = ml_min(g->max_sequences, g->max_slot_tokens);
    /* Splits of all sequences that the cache can hold, each with one query row, and some for
     * chunks; when they run out, tiles are not shared among processes, and nothing else changes. */
    uint64_t rows = g->kv_blocks / (ML_SPLIT_TOKENS / ML_BLOCK_TOKENS) + items + SPARE_PARTIAL_ROWS;
    layout->blocks_per_sequence = (uint32_t)ml_div_ceil(g->max_context_tokens, ML_BLOCK_TOKENS);
    layout->max_items = (uint32_t)items;
    /* Both ends of an item may lie inside an aligned piece. */
    layout->max_stores = (uint32_t)(g->max_slot_tokens / ML_STORE_TOKENS + 2 * items);
    layout->max_tiles = (uint32_t)(g->max_slot_tokens / ML_MIN_TILE_TOKENS + 2 * items);
    layout->partial_rows = (uint32_t)ml_min(rows, MAX_PARTIAL_BYTES / row_bytes);
    layout->max_tasks = layout->max_tiles + layout->partial_rows;
    layout->scratch_rows =
        (uint32_t)ml_max(16 * ML_MAX_TILE_TOKENS, ML_MIN_TILE_TOKENS * max_splits);
    layout->scratch_bytes = layout->scratch_rows * row_bytes + 4ull * layout->blocks_per_sequence;
}

static void place_slot(const ml_geometry *g, ml_layout *layout) {
    uint64_t end = sizeof(ml_slot);
    layout->times = place_lines(&end, g->n_processes * sizeof(ml_process_times));
    layout->items = place_lines(&end, layout->max_items * sizeof(ml_item));
    layout->stores = place_lines(&end, layout->max_stores * sizeof(ml_store));
    layout->tiles = place_lines(&end, layout->max_tiles * sizeof(ml_tile));
    layout->tasks = place_lines(&end, layout->max_tasks * sizeof(ml_task));
    layout->partial_out =
        place_lines(&end, 4ull * layout->partial_rows * g->n_q_heads * g->head_dim);
    layout->partial_lse = place_lines(&end, 4ull * layout->partial_rows * g->n_q_heads);
    layout->slot_bytes = place(&end, 0, PAGE_BYTES);
}

static void place_activations(const ml_geometry *g, ml_layout *layout) {
    uint64_t end = 0;
    uint64_t tokens = g->max_slot_tokens;
    uint64_t row_bytes = (uint64_t)g->head_dim * layout->element_bytes;
    layout->q = place_lines(&end, tokens * g->n_q_heads * row_bytes);
    layout->k = place_lines(&end, tokens * g->n_kv_heads * row_bytes);
    layout->v = place_lines(&end, tokens * g->n_kv_heads * row_bytes);
    layout->out = place_lines(&end, tokens * g->n_q_heads * row_bytes);
    layout->lse = place_lines(&end, tokens * g->n_q_heads * 4);
    layout->activation_bytes = place(&end, 0, PAGE_BYTES);
}

int ml_layout_of(const ml_geometry *g, ml_layout *layout) {
    if (ml_geometry_error(g)) return ML_BAD_SEGMENT;
    ml_attention_shape shape = shape_of(g);
    *layout = (ml_layout){.element_bytes = g->kv_dtype == ML_FP32 ? 4 : 2};
    layout->kv_layer_bytes = ml_kv_block_bytes(&shape) * g->kv_blocks;
    layout->kv_arena_bytes = layout->kv_layer_bytes * g->n_layers;
    count(g, layout);
    place_slot(g, layout);
    place_activations(g, layout);
    uint64_t end = sizeof(ml_header);
    layout->participants =
        place_lines(&end, (ML_FIRST_PROCESS + g->n_processes) * sizeof(ml_participant));
    layout->block_tables = place_lines(&end, 4ull * g->max_sequences * layout->blocks_per_sequence);
    uint64_t kv_checksums = g->checksums ? (uint64_t)g->n_layers * g->kv_blocks : 0;
    layout->kv_checksums = place_lines(&end, 8 * kv_checksums);
    layout->slots = place(&end, ML_SLOTS * layout->slot_bytes, PAGE_BYTES);
    layout->activations = place(&end, ML_SLOTS * layout->activation_bytes, PAGE_BYTES);
    layout->total_bytes = end;
    return ML_OK;
}
