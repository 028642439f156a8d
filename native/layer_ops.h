/* What lies between the matrix products of a transformer layer, row by row over a thread pool.
 *
 * dtype (ML_FP32 or ML_BF16) is that of activations and norm weights. Sums are FP32; with BF16 the
 * steps are rounded where transformers' Mixtral rounds them. Every row's result depends on that row
 * alone, to the bit, and is the same on every instruction set. Strides are in bytes. */
#ifndef ML_LAYER_OPS_H
#define ML_LAYER_OPS_H

#include <stddef.h>
#include <stdint.h>

#include "dtype.h"
#include "gemm.h"
#include "thread_pool.h"

/* [cffi] */
/* hidden += delta where there is a delta; out = hidden / rms(hidden) * weight. */
typedef struct {
    void *hidden;       /* (n_rows, n) */
    const void *delta;  /* (n_rows, n) or NULL */
    const void *weight; /* (n) */
    void *out;          /* (n_rows, n) */
    size_t hidden_stride_bytes, delta_stride_bytes, out_stride_bytes;
    size_t n_rows, n;
    float eps; /* added to the mean square */
    uint32_t dtype;
} ml_rms_norm_call;

void ml_rms_norm(ml_pool *pool, const ml_rms_norm_call *call);

/* Splits rows of (q heads | k heads | v heads), rotates q and k by their positions' angles
 * (dimension i with i + rotary_dim / 2, the "NeoX" pairing) and copies v. Row r's q, k and v go to
 * row out_index[r] of q, k and v where there is an out_index. */
typedef struct {
    const void *qkv;          /* (n_rows, (n_q_heads + 2 n_kv_heads) head_dim) */
    const int32_t *positions; /* (n_rows), each < n_positions */
    const float *cos, *sin;   /* (n_positions, rotary_dim / 2) */
    const int32_t *out_index; /* (n_rows) or NULL */
    void *q;                  /* (any, n_q_heads head_dim) */
    void *k, *v;              /* (any, n_kv_heads head_dim) */
    size_t qkv_stride_bytes, q_stride_bytes, k_stride_bytes, v_stride_bytes;
    size_t n_rows;
    uint32_t n_q_heads, n_kv_heads, head_dim, rotary_dim;
    uint32_t dtype;
} ml_rotary_call;

void ml_rotary(ml_pool *pool, const ml_rotary_call *call);

/* Softmax over the experts in FP32, the top_k largest probabilities (ties: lower expert first) in
 * descending order, divided by their sum where `renormalise`. NaN logits still give valid experts.
 */
typedef struct {
    const void *logits; /* (n_rows, n_experts) of dtype */
    int32_t *experts;   /* (n_rows, top_k) */
    float *weights;     /* (n_rows, top_k) */
    size_t logits_stride_bytes;
    size_t n_rows;
    uint32_t n_experts; /* at most ML_MAX_EXPERTS */
    uint32_t top_k;     /* at most ML_MAX_TOP_K and n_experts */
    uint32_t renormalise;
    uint32_t dtype;
} ml_route_call;

enum { ML_MAX_EXPERTS = 1024, ML_MAX_TOP_K = 32 };

void ml_route(ml_pool *pool, const ml_route_call *call);

/* Counting sort of the (row, choice) pairs by expert, rows ascending within an expert. Pair
 * (r, j) gets place position[r * top_k + j]; row_index[place] = r; expert e has the places
 * offsets[e] ... offsets[e + 1] - 1. experts (n_rows, top_k), offsets (n_experts + 1). */
void ml_sort_by_expert(const int32_t *experts, size_t n_rows, uint32_t top_k, uint32_t n_experts,
                       int32_t *offsets, int32_t *row_index, int32_t *position);

/* out[r] = residual[r] + sum over j of weights[r, j] * expert_out[position[r, j]], summed in
 * ascending order of the place, which is that of the expert. */
typedef struct {
    const void *expert_out;  /* (n_rows top_k, n) */
    const int32_t *position; /* (n_rows, top_k) */
    const float *weights;    /* (n_rows, top_k) */
    const void *residual;    /* (n_rows, n), NULL: zero; may be out itself */
    void *out;               /* (n_rows, n) */
    size_t expert_stride_bytes, residual_stride_bytes, out_stride_bytes;
    size_t n_rows, n;
    uint32_t top_k;
    uint32_t dtype;
} ml_combine_call;

void ml_combine(ml_pool *pool, const ml_combine_call *call);

/* out[r] = table[ids[r]], rows of row_bytes. */
void ml_gather_rows(ml_pool *pool, const void *table, size_t table_stride_bytes, const int32_t *ids,
                    size_t n_rows, size_t row_bytes, void *out, size_t out_stride_bytes);

/* out[r] = first index of the largest of x[r] (n_rows, n); -1 where the row holds a NaN. */
void ml_argmax(ml_pool *pool, const void *x, size_t x_stride_bytes, size_t n_rows, size_t n,
               uint32_t dtype, int64_t *out);

/* Index of the first of values (n) that is negative or not below `limit`; -1: there is none. */
int64_t ml_find_out_of_range(const int32_t *values, size_t n, int64_t limit);

/* out (n_rows, n) = in, FP32 <-> BF16 to nearest even. */
void ml_convert(ml_pool *pool, const void *in, size_t in_stride_bytes, uint32_t in_dtype, void *out,
                size_t out_stride_bytes, uint32_t out_dtype, size_t n_rows, size_t n);
/* [/cffi] */

#endif
