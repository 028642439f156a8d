/* What an instruction set provides to the common walk over blocks (attention_walk.c). Private. */
#ifndef ML_ATTENTION_KERNELS_H
#define ML_ATTENTION_KERNELS_H

#include "attention.h"

/* A query row: one head of one query. Softmax in base 2 over the positions seen so far, relative to
 * `reference`: sum over lanes of `sum` = sum of 2^(score - reference), acc = sum of 2^(...) v.
 * The reference is the running maximum, but raised only when a score exceeds it by more than
 * ML_REFERENCE_SLACK, so that most tiles need no reduction across lanes and no rescaling. */
typedef struct {
    const void *q;         /* (head_dim), of the kernel's q_dtype */
    float *acc;            /* (head_dim) */
    uint32_t last_visible; /* position */
    float reference;       /* -infinity until a position has been seen */
    float q_scale;         /* an INT8 query's factor */
    int32_t q_bias;        /* 128 times the sum of an INT8 query */
    _Alignas(64) float sum[16]; /* by position modulo 16 */
} ml_row;
_Static_assert(sizeof(ml_row) == 128, "a row is two cache lines");

#define ML_REFERENCE_SLACK 8.0f

/* One KV head of one block. */
typedef struct {
    const void *kv;        /* K tile, then V tile */
    const char *next;     /* the tile after it, to be fetched meanwhile; always readable */
    uint32_t head_dim;
    uint32_t position;     /* of the tile's first token */
    uint32_t kv_end;       /* tokens from here on are not looked at */
    float scale_log2;      /* score scale times log2(e) */
} ml_kv_tile;

/* Adds the tile to n_rows <= rows_per_call rows. */
typedef void ml_tile_fn(ml_row *rows, uint32_t n_rows, const ml_kv_tile *tile);

typedef struct {
    ml_tile_fn *tile;
    uint32_t rows_per_call;
    uint32_t q_dtype; /* where the task's queries are of another, the walk converts them */
} ml_kernel;

extern const ml_kernel ml_scalar_fp32, ml_scalar_bf16, ml_scalar_int8;
extern const ml_kernel ml_avx2_fp32, ml_avx2_bf16, ml_avx2_int8;
extern const ml_kernel ml_avx512_fp32, ml_avx512_bf16, ml_avx512_int8;
extern const ml_kernel ml_avx512_bf16_bf16, ml_avx512_vnni_int8;

/* The kernel of the selected instruction set for a KV dtype. */
const ml_kernel *ml_kernel_for(uint32_t kv_dtype);

/* Writes the output of one row of a merge, given the weights of its parts. */
typedef void ml_merge_row_fn(const ml_merge_task *task, uint32_t row, const float *weights);

extern ml_merge_row_fn ml_scalar_merge_row, ml_avx2_merge_row, ml_avx512_merge_row;

ml_merge_row_fn *ml_merge_row(void);

/* Tokens of the tile that the row may see: the first 0..16. */
static inline uint32_t ml_visible_tokens(const ml_row *row, const ml_kv_tile *tile) {
    const uint32_t end =
        row->last_visible < tile->kv_end ? row->last_visible + 1u : tile->kv_end;
    if (end <= tile->position) return 0;
    const uint32_t tokens = end - tile->position;
    return tokens < ML_BLOCK_TOKENS ? tokens : ML_BLOCK_TOKENS;
}

#endif
