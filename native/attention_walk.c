/* The walk over a sequence's blocks, common to all instruction sets.
 *
 * Few queries (decode): block by block, all KV heads of a block, so that memory is read in long
 * runs. Many queries (prefill): KV head by KV head, a group of rows at a time over all blocks,
 * so that a group's sums stay in the first-level cache and a head's tiles in the second.
 * Either way a row meets the same tiles in the same order with the same arithmetic. */
#include "attention_kernels.h"
#include "attention_math.h"
#include "kv_layout.h"

#include <assert.h>
#include <math.h>

enum {
    MAX_ROWS = 256,      /* of one pass */
    QUERY_FLOATS = 8192, /* converted queries of one pass: 32 KB */
    GROUP_ROWS = 32,     /* rows of one KV head in a prefill pass */
    PAGE_BYTES = 4096
};

typedef struct {
    const ml_attention_shape *shape;
    const ml_attend_task *task;
    const ml_kernel *kernel;
    uint32_t first_head, end_head; /* KV heads of this pass */
    uint32_t first_row, end_row;   /* of each of them: row = query * ratio + head in its group */
    ml_row rows[MAX_ROWS];         /* head by head */
    float queries[QUERY_FLOATS];
} pass;

static uint32_t heads_ratio(const ml_attention_shape *shape) {
    return shape->n_q_heads / shape->n_kv_heads;
}

static const void *widen_query(const uint16_t *q, uint32_t head_dim, float *converted) {
    for (uint32_t d = 0; d < head_dim; d++) converted[d] = ml_float_from_bf16(q[d]);
    return converted;
}

static const void *quantise_query(const uint16_t *q, uint32_t head_dim, ml_row *row,
                                  int8_t *converted) {
    row->q_scale = ml_quantise(q, head_dim, converted);
    row->q_bias = 0;
    for (uint32_t d = 0; d < head_dim; d++) row->q_bias += 128 * converted[d];
    return converted;
}

/* The query as the kernel wants it: where it lies, or converted. */
static const void *prepare_query(pass *p, uint32_t index, const char *q) {
    const uint32_t head_dim = p->shape->head_dim;
    const uint32_t dtype = p->shape->kv_dtype == ML_FP32 ? ML_FP32 : ML_BF16;
    float *converted = p->queries + index * head_dim;
    const uint16_t *source = (const uint16_t *)(const void *)q;
    if (p->kernel->q_dtype == dtype) return q;
    if (p->kernel->q_dtype == ML_FP32) return widen_query(source, head_dim, converted);
    return quantise_query(source, head_dim, p->rows + index, (int8_t *)converted);
}

static void start_row(pass *p, uint32_t index, uint32_t head, uint32_t row) {
    const ml_attend_task *task = p->task;
    const uint32_t ratio = heads_ratio(p->shape), head_dim = p->shape->head_dim;
    const uint32_t query = row / ratio, q_head = head * ratio + row % ratio;
    const char *q = (const char *)task->q + query * task->q_row_stride_bytes +
                    q_head * ml_head_bytes(p->shape);
    ml_row *state = p->rows + index;
    state->q = prepare_query(p, index, q);
    state->acc = task->out + ((size_t)query * p->shape->n_q_heads + q_head) * head_dim;
    state->last_visible = task->query_position + query;
    state->reference = -INFINITY;
    for (int i = 0; i < 16; i++) state->sum[i] = 0.0f;
    for (uint32_t d = 0; d < head_dim; d++) state->acc[d] = 0.0f;
}

/* Normalises the row's output in place; returns its log-sum-exp. */
static float finish_row(const ml_row *row, uint32_t head_dim) {
    float sum = 0.0f;
    for (int i = 0; i < 16; i++) sum += row->sum[i];
    if (row->reference == -INFINITY) return -INFINITY;
    const float inverse = 1.0f / sum;
    for (uint32_t d = 0; d < head_dim; d++) row->acc[d] *= inverse;
    return (row->reference + log2f(sum)) * ML_LN2;
}

static char *block_at(const pass *p, uint32_t position) {
    const int32_t number = p->task->block_table[position / ML_BLOCK_TOKENS];
    return (char *)p->task->arena_layer + (size_t)number * ml_kv_block_bytes(p->shape);
}

/* All rows of one KV head over one tile; later calls find the tile in the cache. */
static void walk_tile(pass *p, ml_row *rows, ml_kv_tile *tile) {
    const uint32_t n_rows = p->end_row - p->first_row, step = p->kernel->rows_per_call;
    for (uint32_t row = 0; row < n_rows; row += step) {
        const uint32_t left = n_rows - row, n = left < step ? left : step;
        /* Rows are in order of position: the last one sees most. */
        if (rows[row + n - 1].last_visible < tile->position) continue;
        p->kernel->tile(rows + row, n, tile);
        tile->next = tile->kv;
    }
}

static uint32_t end_of_walk(const pass *p) {
    const uint32_t n_rows = p->end_row - p->first_row;
    const uint32_t last_visible = p->rows[n_rows - 1].last_visible;
    return last_visible < p->task->kv_end ? last_visible + 1u : p->task->kv_end;
}

/* Store the task's new position where it lies in this tile. Here and not beforehand, since by now
 * the tile has been fetched, and is about to be read. */
static void store_new(const pass *p, uint32_t position, uint32_t head, char *tile) {
    const ml_attend_task *task = p->task;
    const size_t offset = head * ml_head_bytes(p->shape);
    const uint32_t token = task->kv_end - 1 - position;
    if (task->new_k && token < ML_BLOCK_TOKENS)
        ml_store_head(p->shape, tile, token, (const char *)task->new_k + offset,
                      (const char *)task->new_v + offset);
}

/* Address translations take long as well: ask for those of a tile, one a page. */
static void touch(const char *tile, size_t tile_bytes) {
    for (size_t offset = 0; offset < tile_bytes; offset += PAGE_BYTES)
        __builtin_prefetch(tile + offset, 0, 2);
}

/* All heads of the pass over one block; `next` and `far` are the two blocks after it, NULL where
 * unknown. */
static void walk_block(pass *p, ml_kv_tile *tile, char *block, const char *next, const char *far) {
    const uint32_t n_rows = p->end_row - p->first_row;
    const size_t tile_bytes = ml_tile_bytes(p->shape);
    for (uint32_t head = p->first_head; head < p->end_head; head++) {
        char *here = block + head * tile_bytes;
        tile->kv = tile->next = here;
        if (head + 1 < p->end_head)
            tile->next = here + tile_bytes;
        else if (next)
            tile->next = next + p->first_head * tile_bytes;
        if (far) touch(far + head * tile_bytes, tile_bytes);
        store_new(p, tile->position, head, here);
        walk_tile(p, p->rows + (head - p->first_head) * n_rows, tile);
    }
}

static void walk_blocks(pass *p) {
    const ml_attend_task *task = p->task;
    const uint32_t end = end_of_walk(p);
    ml_kv_tile tile = {.head_dim = p->shape->head_dim,
                       .kv_end = task->kv_end,
                       .scale_log2 = task->scale * ML_LOG2E};
    for (tile.position = task->kv_begin; tile.position < end; tile.position += ML_BLOCK_TOKENS) {
        const uint32_t second = tile.position + ML_BLOCK_TOKENS, third = second + ML_BLOCK_TOKENS;
        walk_block(p, &tile, block_at(p, tile.position),
                   second < end ? block_at(p, second) : task->next_block,
                   third < end ? block_at(p, third) : task->next_block);
    }
}

static void run_pass(pass *p) {
    const ml_attention_shape *shape = p->shape;
    const uint32_t ratio = heads_ratio(shape);
    uint32_t index = 0;
    for (uint32_t head = p->first_head; head < p->end_head; head++)
        for (uint32_t row = p->first_row; row < p->end_row; row++)
            start_row(p, index++, head, row);
    walk_blocks(p);
    index = 0;
    for (uint32_t head = p->first_head; head < p->end_head; head++) {
        for (uint32_t row = p->first_row; row < p->end_row; row++) {
            const size_t q_head = head * ratio + row % ratio;
            p->task->lse[row / ratio * shape->n_q_heads + q_head] =
                finish_row(p->rows + index++, shape->head_dim);
        }
    }
}

static uint32_t rows_that_fit(const ml_attention_shape *shape, uint32_t at_most) {
    const uint32_t fit = QUERY_FLOATS / shape->head_dim;
    return fit < at_most ? fit : at_most;
}

void ml_attend(const ml_attention_shape *shape, const ml_attend_task *task) {
    assert(ml_shape_error(shape) == NULL);
    assert(task->kv_begin % ML_BLOCK_TOKENS == 0);
    assert(!task->new_k || task->kv_end > task->kv_begin);
    assert(!task->new_k || task->query_position + task->n_queries >= task->kv_end);
    pass p;
    p.shape = shape;
    p.task = task;
    p.kernel = ml_kernel_for(shape->kv_dtype);
    const uint32_t rows_per_head = task->n_queries * heads_ratio(shape);
    if (rows_per_head * shape->n_kv_heads <= rows_that_fit(shape, MAX_ROWS)) {
        if (task->n_queries == 0) return;
        p.first_head = p.first_row = 0;
        p.end_head = shape->n_kv_heads;
        p.end_row = rows_per_head;
        run_pass(&p);
        return;
    }
    const uint32_t group = rows_that_fit(shape, GROUP_ROWS);
    for (p.first_head = 0; p.first_head < shape->n_kv_heads; p.first_head++) {
        p.end_head = p.first_head + 1;
        for (p.first_row = 0; p.first_row < rows_per_head; p.first_row = p.end_row) {
            const uint32_t left = rows_per_head - p.first_row;
            p.end_row = p.first_row + (left < group ? left : group);
            run_pass(&p);
        }
    }
}
