/* Attention over a paged KV cache, and the cache's layout.
 *
 * A sequence's KV lies in blocks of ML_BLOCK_TOKENS positions. A layer of the arena is an array of
 * blocks; block_table[i] is the number of the block with positions [16 i, 16 i + 16). All KV heads
 * of a block lie together, since a core walks them in this order and long runs are what memory
 * is fast at:
 *
 *   arena_layer: block 0 | block 1 | ...
 *   block:       head 0 | head 1 | ...
 *   head:        K tile | V tile
 *
 *   kv_dtype   K tile                              V tile
 *   ML_FP32    [head_dim][16 tokens]               [head_dim / 16][16 tokens][16 dims]
 *   ML_BF16    [head_dim / 2][16 tokens][2 dims]   [head_dim / 16][8 pairs][16 dims][2 tokens]
 *   ML_INT8    [head_dim / 4][16 tokens][4 dims]   [head_dim / 16][4 quads][16 dims][4 tokens]
 *              + 128, then 16 factors              then 16 factors
 *
 * so that one cache line holds 16 tokens of K, or 16 dimensions of V, in the pairs or quads that a
 * dot-product instruction takes, and lines are used in the order in which they lie. INT8 values
 * have an FP32 factor per token and head, the largest magnitude over 127. Queries, keys and values
 * are FP32 with an FP32 cache, BF16 with any other; outputs and log-sum-exp are FP32.
 */
#ifndef ML_ATTENTION_H
#define ML_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

#include "dtype.h"

/* [cffi] */
enum { ML_BLOCK_TOKENS = 16, ML_MAX_HEAD_DIM = 256 };

typedef struct {
    uint32_t n_q_heads;  /* a multiple of n_kv_heads */
    uint32_t n_kv_heads; /* at least 1 */
    uint32_t head_dim;   /* a multiple of 16, at most ML_MAX_HEAD_DIM */
    uint32_t kv_dtype;   /* ml_dtype */
} ml_attention_shape;

/* NULL where the kernels can run `shape`, else what is wrong with it (static text). */
const char *ml_shape_error(const ml_attention_shape *shape);

/* Bytes of one block (16 tokens, all KV heads) in one layer: a multiple of 64. */
size_t ml_kv_block_bytes(const ml_attention_shape *shape);

/* Store k and v, each (n_tokens, n_kv_heads, head_dim) with `row_stride_bytes` from token to token,
 * at positions [position, position + n_tokens) of a sequence. Storing the first position of a
 * block clears the whole block first: the kernels rely on it, since what a block's
 * former owner left (NaN, say) must not meet the weight 0 of a position not yet written. */
void ml_kv_store(const ml_attention_shape *shape, void *arena_layer, const int32_t *block_table,
                 uint32_t position, uint32_t n_tokens, const void *k, const void *v,
                 size_t row_stride_bytes);

/* n_queries rows at positions query_position, query_position + 1, ... attend causally to positions
 * [kv_begin, kv_end) of one sequence, in all heads of one layer. */
typedef struct {
    void *arena_layer;          /* 64-byte aligned */
    const int32_t *block_table; /* entries kv_begin / 16 to (kv_end - 1) / 16 are read */
    const void *q;              /* (n_queries, n_q_heads, head_dim) */
    size_t q_row_stride_bytes;  /* from query to query */
    float *out;                 /* (n_queries, n_q_heads, head_dim), normalised over this range */
    float *lse;                 /* (n_queries, n_q_heads): ln of the sum of exp(scale q.k) */
    /* NULL, or K and V, each (n_kv_heads, head_dim), of position kv_end - 1, which the last query
     * must see: stored on the way, which costs less than beforehand. */
    const void *new_k;
    const void *new_v;
    const void *next_block;     /* NULL, or the block that the caller will read next */
    uint32_t kv_begin;          /* a multiple of ML_BLOCK_TOKENS */
    uint32_t kv_end;
    uint32_t n_queries;
    uint32_t query_position;
    float scale;
} ml_attend_task;

/* A row that sees no position gives out = 0 and lse = -infinity. A row's result depends on its
 * query, position and range alone, to the bit: not on n_queries, nor on positions
 * that it may not see. Uses about 64 KB of stack. */
void ml_attend(const ml_attention_shape *shape, const ml_attend_task *task);

/* Merge the results of n_splits ranges, each of n_rows rows: out = sum_i w_i out_i with
 * w_i = exp(lse_i - max lse) / sum. Part i's outputs (n_rows, head_dim) start at
 * out_parts + i * out_split_stride, its lse (n_rows) at lse_parts + i * lse_split_stride (both in
 * floats). out (n_rows, head_dim) is out_dtype, ML_FP32 or ML_BF16 (nearest even); lse (n_rows) may
 * be NULL. Empty parts (lse = -infinity) leave the result as it is, to the bit. */
typedef struct {
    const float *out_parts;
    const float *lse_parts;
    size_t out_split_stride;
    size_t lse_split_stride;
    void *out;
    float *lse;
    uint32_t n_splits;
    uint32_t n_rows;
    uint32_t head_dim;
    uint32_t out_dtype;
} ml_merge_task;

void ml_merge(const ml_merge_task *task);
/* [/cffi] */

#endif
