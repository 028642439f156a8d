/* Cutting the items of a job into work: stores, query tiles, and tasks over the tiles' KV splits.
 *
 * Where a tile's KV is cut into splits is fixed (multiples of ML_SPLIT_TOKENS); load and number of
 * processes decide only how many rows go together in a tile, and how many splits in a task, neither
 * of which changes a result.
 */
#include <string.h>

#include "port.h"

enum { TASKS_PER_PROCESS = 8, TILES_PER_PROCESS = 4 };

typedef struct {
    ml_port *port;
    const ml_segment *segment;
    const ml_layout *layout;
    ml_item *items;
    ml_store *stores;
    ml_tile *tiles;
    uint32_t n_stores, n_tiles, n_tasks, n_partials;
    uint32_t tile_tokens; /* wanted */
    uint64_t task_work;   /* wanted: rows times splits */
} plan;

/* ---- checks ---- */

static int check_blocks(const ml_segment *segment, const ml_item *item) {
    _Atomic int32_t *row = ml_block_row(segment, item->row);
    uint64_t end = (uint64_t)item->start_position + item->n_tokens;
    uint64_t n_blocks = ml_div_ceil(end, ML_BLOCK_TOKENS);
    for (uint64_t i = 0; i < n_blocks; i++) {
        int32_t block = atomic_load_explicit(&row[i], memory_order_relaxed);
        if (block < 0 || (uint32_t)block >= segment->geometry.kv_blocks) return ML_BAD_BLOCK;
    }
    return ML_OK;
}

static int check_item(ml_port *port, const ml_item *item) {
    const ml_geometry *g = &port->segment->geometry;
    if (item->row >= g->max_sequences) return ML_BAD_ITEM_ROW;
    if (item->n_tokens == 0 || item->n_tokens > g->max_context_tokens ||
        item->start_position > g->max_context_tokens - item->n_tokens)
        return ML_BAD_ITEM_POSITION;
    if (item->n_tokens > g->max_slot_tokens ||
        item->slot_offset > g->max_slot_tokens - item->n_tokens)
        return ML_BAD_ITEM_SLOT;
    if (item->flags > ML_ATTEND_EARLIER_ONLY) return ML_BAD_ITEM_FLAGS;
    if (port->row_marks[item->row] == port->mark) return ML_DUPLICATE_ROW;
    port->row_marks[item->row] = port->mark;
    for (uint32_t i = 0; i < item->n_tokens; i++) {
        uint32_t *mark = &port->token_marks[item->slot_offset + i];
        if (*mark == port->mark) return ML_OVERLAPPING_SLOTS;
        *mark = port->mark;
    }
    return check_blocks(port->segment, item);
}

/* Marks of earlier calls must not look like this call's. */
static void new_mark(ml_port *port) {
    if (++port->mark != 0) return;
    memset(port->row_marks, 0, port->segment->geometry.max_sequences * sizeof(uint32_t));
    memset(port->token_marks, 0, port->segment->geometry.max_slot_tokens * sizeof(uint32_t));
    port->mark = 1;
}

static int check_items(ml_port *port, const ml_item *items, uint32_t n_items, uint32_t *bad_item) {
    *bad_item = 0;
    if (n_items == 0 || n_items > port->segment->layout.max_items) return ML_TOO_MANY_ITEMS;
    new_mark(port);
    for (uint32_t i = 0; i < n_items; i++) {
        *bad_item = i;
        int status = check_item(port, &items[i]);
        if (status != ML_OK) return status;
    }
    return ML_OK;
}

/* ---- sizes ---- */

/* A decoded token is stored by the task that attends to it; everything else by store tasks. */
static int stores_itself(const ml_item *item) { return item->n_tokens == 1 && item->flags == 0; }

/* End of the positions that the item's tokens before end_token see. */
static uint32_t kv_end(const ml_item *item, uint32_t end_token) {
    return item->start_position + (item->flags & ML_ATTEND_EARLIER_ONLY ? 0 : end_token);
}

static uint32_t splits_of(uint32_t n_positions) {
    return (uint32_t)ml_div_ceil(n_positions, ML_SPLIT_TOKENS);
}

static void choose_sizes(plan *p, const ml_item *items, uint32_t n_items) {
    uint64_t chunk_rows = 0, work = 0;
    for (uint32_t i = 0; i < n_items; i++) {
        if (items[i].flags & ML_STORE_ONLY) continue;
        if (items[i].n_tokens > 1) chunk_rows += items[i].n_tokens;
        work += (uint64_t)items[i].n_tokens * splits_of(kv_end(&items[i], items[i].n_tokens));
    }
    uint32_t n_processes = p->segment->geometry.n_processes;
    p->task_work = ml_div_ceil(work, (uint64_t)n_processes * TASKS_PER_PROCESS);
    p->tile_tokens = ML_MAX_TILE_TOKENS;
    while (p->tile_tokens > ML_MIN_TILE_TOKENS &&
           chunk_rows < (uint64_t)p->tile_tokens * n_processes * TILES_PER_PROCESS)
        p->tile_tokens /= 2;
}

/* All splits of a tile must fit one process's scratch, since one process may get them all. */
static uint32_t tile_tokens_for(const plan *p, const ml_item *item) {
    uint64_t n_splits = splits_of(kv_end(item, item->n_tokens));
    uint32_t tokens = p->tile_tokens;
    while (tokens > ML_MIN_TILE_TOKENS && tokens * n_splits > p->layout->scratch_rows) tokens /= 2;
    return tokens;
}

/* ---- cutting ---- */

static int add_stores(plan *p, uint32_t item_index, const ml_item *item) {
    uint32_t token = 0;
    while (token < item->n_tokens) {
        uint32_t in_piece = (item->start_position + token) % ML_STORE_TOKENS;
        uint32_t n = (uint32_t)ml_min(ML_STORE_TOKENS - in_piece, item->n_tokens - token);
        if (p->n_stores == p->layout->max_stores) return ML_TOO_MANY_ITEMS;
        p->stores[p->n_stores++] =
            (ml_store){.item = item_index, .first_token = token, .n_tokens = n};
        token += n;
    }
    return ML_OK;
}

static uint8_t class_of(const plan *p, const ml_tile *tile, uint32_t first_split) {
    const ml_geometry *g = &p->segment->geometry;
    uint64_t node = 0;
    if (tile->n_splits > 0) {
        uint32_t first_block = first_split * (ML_SPLIT_TOKENS / ML_BLOCK_TOKENS);
        _Atomic int32_t *row = ml_block_row(p->segment, p->items[tile->item].row);
        int32_t block = atomic_load_explicit(&row[first_block], memory_order_relaxed);
        node = (uint64_t)(uint32_t)block * g->n_nodes / g->kv_blocks;
    }
    /* What waits for stores goes last: by then they are done. */
    return (uint8_t)(2 * node + tile->after_stores);
}

static int add_tasks(plan *p, const ml_tile *tile, uint32_t splits_per_task, int store_first) {
    uint32_t first = 0;
    for (uint32_t i = 0; i < tile->n_tasks; i++) {
        uint32_t end = (uint32_t)ml_min(first + splits_per_task, tile->n_splits);
        if (p->n_tasks == p->layout->max_tasks) return ML_TOO_MANY_ITEMS;
        p->port->classes[p->n_tasks] = class_of(p, tile, first);
        p->port->tasks[p->n_tasks++] =
            (ml_task){.tile = p->n_tiles - 1,
                      .first_split = first,
                      .end_split = end,
                      .store_first = store_first && end == tile->n_splits};
        first = end;
    }
    return ML_OK;
}

static int add_tile(plan *p, uint32_t item_index, uint32_t token, uint32_t n_tokens) {
    const ml_item *item = &p->items[item_index];
    if (p->n_tiles == p->layout->max_tiles) return ML_TOO_MANY_ITEMS;
    ml_tile *tile = &p->tiles[p->n_tiles++];
    tile->item = item_index;
    tile->first_token = token;
    tile->n_tokens = n_tokens;
    tile->n_splits = splits_of(kv_end(item, token + n_tokens));
    /* With checksums even what is older than the stores has to wait: its last block may be one that
     * they write into. */
    tile->after_stores = !stores_itself(item) && (!(item->flags & ML_ATTEND_EARLIER_ONLY) ||
                                                  p->segment->geometry.checksums);
    uint32_t splits_per_task = (uint32_t)ml_max(1, ml_div_ceil(p->task_work, n_tokens));
    tile->n_tasks = (uint32_t)ml_max(1, ml_div_ceil(tile->n_splits, splits_per_task));
    uint64_t n_partials = (uint64_t)n_tokens * tile->n_splits;
    if (tile->n_tasks > 1 && n_partials > p->layout->partial_rows - p->n_partials) {
        tile->n_tasks = 1;
        splits_per_task = tile->n_splits;
    }
    tile->partials = tile->n_tasks > 1 ? p->n_partials : ML_NO_PARTIALS;
    if (tile->n_tasks > 1) p->n_partials += (uint32_t)n_partials;
    atomic_store_explicit(&tile->finished, 0, memory_order_relaxed);
    return add_tasks(p, tile, splits_per_task, stores_itself(item));
}

static int add_tiles(plan *p, uint32_t item_index, const ml_item *item) {
    uint32_t tile_tokens = tile_tokens_for(p, item);
    uint32_t token = 0;
    int status = ML_OK;
    while (token < item->n_tokens && status == ML_OK) {
        uint32_t in_tile = (item->start_position + token) % tile_tokens;
        uint32_t n = (uint32_t)ml_min(tile_tokens - in_tile, item->n_tokens - token);
        status = add_tile(p, item_index, token, n);
        token += n;
    }
    return status;
}

static int add_item(plan *p, uint32_t index, const ml_item *item) {
    int status = ML_OK;
    p->items[index] = *item;
    if (!stores_itself(item)) status = add_stores(p, index, item);
    if (status == ML_OK && !(item->flags & ML_STORE_ONLY)) status = add_tiles(p, index, item);
    return status;
}

/* Counting sort of the tasks into the segment; node_begin becomes where each node's start. */
static void sort_tasks(const plan *p, ml_task *sorted, uint32_t *node_begin) {
    uint32_t next[2 * ML_MAX_NODES + 1] = {0};
    for (uint32_t i = 0; i < p->n_tasks; i++) next[p->port->classes[i] + 1]++;
    for (uint32_t c = 1; c <= 2 * ML_MAX_NODES; c++) next[c] += next[c - 1];
    for (uint32_t node = 0; node <= ML_MAX_NODES; node++) node_begin[node] = next[2 * node];
    /* From the end: a chunk's last tiles see most KV, and what takes longest should start first. */
    for (uint32_t i = p->n_tasks; i-- > 0;)
        sorted[next[p->port->classes[i]]++] = p->port->tasks[i];
}

int ml_plan(ml_port *port, uint32_t slot, const ml_item *items, uint32_t n_items,
            uint32_t *bad_item) {
    const ml_segment *segment = port->segment;
    plan p = {.port = port,
              .segment = segment,
              .layout = &segment->layout,
              .items = ML_SLOT_PART(segment, slot, items, ml_item),
              .stores = ML_SLOT_PART(segment, slot, stores, ml_store),
              .tiles = ML_SLOT_PART(segment, slot, tiles, ml_tile)};
    int status = check_items(port, items, n_items, bad_item);
    if (status != ML_OK) return status;
    choose_sizes(&p, items, n_items);
    for (uint32_t i = 0; i < n_items && status == ML_OK; i++) {
        *bad_item = i;
        status = add_item(&p, i, &items[i]);
    }
    if (status != ML_OK) return status;
    ml_port_slot *own = &port->slots[slot];
    sort_tasks(&p, ML_SLOT_PART(segment, slot, tasks, ml_task), own->node_begin);
    own->n_items = n_items;
    own->n_rows = 0;
    for (uint32_t i = 0; i < n_items; i++)
        own->n_rows = (uint32_t)ml_max(own->n_rows, items[i].slot_offset + items[i].n_tokens);
    own->n_stores = p.n_stores;
    own->n_tiles = p.n_tiles;
    own->n_tasks = p.n_tasks;
    return ML_OK;
}
