#include "layer_ops.h"

#include <string.h>

#include "gemm_kernels.h"

/* A chunk of rows that is worth a thread's while: about 10 microseconds. */
enum { CHUNK_BYTES = 64 * 1024 };

static size_t dtype_size(uint32_t dtype) { return dtype == ML_BF16 ? 2 : 4; }

static const void *row_in(const void *base, size_t row, size_t stride) {
    return (const char *)base + row * stride;
}

static void *row_out(void *base, size_t row, size_t stride) { return (char *)base + row * stride; }

typedef struct {
    const void *call;
    void (*one_row)(const void *call, const ml_kernels *kernels, size_t row);
    const ml_kernels *kernels;
} rows;

static void run_rows(ml_loop *loop, uint32_t thread, void *context) {
    (void)thread;
    const rows *r = context;
    for (size_t begin, end; ml_claim(loop, &begin, &end);)
        for (; begin < end; begin++) r->one_row(r->call, r->kernels, begin);
}

static void for_rows(ml_pool *pool, size_t n_rows, size_t row_bytes, const void *call,
                     void (*one_row)(const void *, const ml_kernels *, size_t)) {
    rows r = {call, one_row, ml_kernels_selected()};
    ml_pool_run(pool, n_rows, 1 + CHUNK_BYTES / (row_bytes + 1), run_rows, &r);
}

static void norm_one(const void *context, const ml_kernels *kernels, size_t row) {
    const ml_rms_norm_call *call = context;
    const ml_norm_row r = {
        .hidden = row_out(call->hidden, row, call->hidden_stride_bytes),
        .delta = call->delta ? row_in(call->delta, row, call->delta_stride_bytes) : NULL,
        .weight = call->weight,
        .out = row_out(call->out, row, call->out_stride_bytes),
        .n = call->n,
        .eps = call->eps,
        .dtype = call->dtype,
    };
    kernels->norm_row(&r);
}

void ml_rms_norm(ml_pool *pool, const ml_rms_norm_call *call) {
    for_rows(pool, call->n_rows, call->n * 2 * dtype_size(call->dtype), call, norm_one);
}

static void rotate_heads(const ml_rotary_call *call, const ml_kernels *kernels, size_t position,
                         uint32_t n_heads, const char *from, char *to) {
    const size_t head_bytes = call->head_dim * dtype_size(call->dtype);
    const size_t angles = position * (call->rotary_dim / 2);
    for (uint32_t head = 0; head < n_heads; head++)
        kernels->rotate_head(call->dtype, call->head_dim, call->rotary_dim, call->cos + angles,
                             call->sin + angles, from + head * head_bytes, to + head * head_bytes);
}

static void rotary_one(const void *context, const ml_kernels *kernels, size_t row) {
    const ml_rotary_call *call = context;
    const size_t head_bytes = call->head_dim * dtype_size(call->dtype);
    const size_t kv_bytes = call->n_kv_heads * head_bytes, position = (size_t)call->positions[row];
    const size_t to = call->out_index ? (size_t)call->out_index[row] : row;
    const char *q = row_in(call->qkv, row, call->qkv_stride_bytes);
    const char *k = q + call->n_q_heads * head_bytes;
    rotate_heads(call, kernels, position, call->n_q_heads, q,
                 row_out(call->q, to, call->q_stride_bytes));
    rotate_heads(call, kernels, position, call->n_kv_heads, k,
                 row_out(call->k, to, call->k_stride_bytes));
    memcpy(row_out(call->v, to, call->v_stride_bytes), k + kv_bytes, kv_bytes);
}

void ml_rotary(ml_pool *pool, const ml_rotary_call *call) {
    const size_t heads = call->n_q_heads + 2 * call->n_kv_heads;
    for_rows(pool, call->n_rows, heads * call->head_dim * 2 * dtype_size(call->dtype), call,
             rotary_one);
}

/* The largest that is not taken (negative); a NaN is smaller than any number. */
static uint32_t take_largest(float *probabilities, uint32_t n) {
    uint32_t best = n;
    for (uint32_t i = 0; i < n; i++) {
        if (probabilities[i] < 0) continue;
        if (best == n || probabilities[i] > probabilities[best] ||
            probabilities[best] != probabilities[best])
            best = i;
    }
    return best;
}

static void route_one(const void *context, const ml_kernels *kernels, size_t row) {
    const ml_route_call *call = context;
    float probabilities[ML_MAX_EXPERTS + 16];
    int32_t *experts = call->experts + row * call->top_k;
    float *weights = call->weights + row * call->top_k, sum = 0;
    kernels->softmax_row(call->dtype, call->n_experts,
                         row_in(call->logits, row, call->logits_stride_bytes), probabilities);
    for (uint32_t j = 0; j < call->top_k; j++) {
        const uint32_t best = take_largest(probabilities, call->n_experts);
        experts[j] = (int32_t)best;
        weights[j] = probabilities[best];
        sum += weights[j];
        probabilities[best] = -1;
    }
    for (uint32_t j = 0; call->renormalise && j < call->top_k; j++) weights[j] /= sum;
}

void ml_route(ml_pool *pool, const ml_route_call *call) {
    for_rows(pool, call->n_rows, call->n_experts * (size_t)(8 + 4 * call->top_k), call, route_one);
}

void ml_sort_by_expert(const int32_t *experts, size_t n_rows, uint32_t top_k, uint32_t n_experts,
                       int32_t *offsets, int32_t *row_index, int32_t *position) {
    const size_t n_pairs = n_rows * top_k;
    memset(offsets, 0, (n_experts + 1) * sizeof *offsets);
    for (size_t i = 0; i < n_pairs; i++) offsets[experts[i] + 1]++;
    for (uint32_t e = 0; e < n_experts; e++) offsets[e + 1] += offsets[e];
    /* offsets[e] runs ahead as expert e's places are given out, and ends at offsets[e + 1]. */
    for (size_t i = 0; i < n_pairs; i++) {
        position[i] = offsets[experts[i]]++;
        row_index[position[i]] = (int32_t)(i / top_k);
    }
    memmove(offsets + 1, offsets, n_experts * sizeof *offsets);
    offsets[0] = 0;
}

/* Insertion sort of a token's choices by place; top_k is small. */
static void order_choices(const int32_t *position, uint32_t top_k, uint32_t *order) {
    for (uint32_t j = 0; j < top_k; j++) {
        uint32_t i = j;
        for (; i && position[order[i - 1]] > position[j]; i--) order[i] = order[i - 1];
        order[i] = j;
    }
}

static void combine_one(const void *context, const ml_kernels *kernels, size_t row) {
    const ml_combine_call *call = context;
    const int32_t *position = call->position + row * call->top_k;
    const void *parts[ML_MAX_TOP_K];
    float weights[ML_MAX_TOP_K];
    uint32_t order[ML_MAX_TOP_K];
    order_choices(position, call->top_k, order);
    for (uint32_t j = 0; j < call->top_k; j++) {
        parts[j] = row_in(call->expert_out, (size_t)position[order[j]], call->expert_stride_bytes);
        weights[j] = call->weights[row * call->top_k + order[j]];
    }
    const void *residual =
        call->residual ? row_in(call->residual, row, call->residual_stride_bytes) : NULL;
    kernels->combine_row(call->dtype, call->n, call->top_k, parts, weights, residual,
                         row_out(call->out, row, call->out_stride_bytes));
}

void ml_combine(ml_pool *pool, const ml_combine_call *call) {
    const size_t row_bytes = call->n * (call->top_k + 2) * dtype_size(call->dtype);
    for_rows(pool, call->n_rows, row_bytes, call, combine_one);
}

typedef struct {
    const void *in;
    void *out;
    const int32_t *ids;
    size_t in_stride, out_stride, n;
    uint32_t in_dtype, out_dtype;
} row_copy;

static void gather_one(const void *context, const ml_kernels *kernels, size_t row) {
    (void)kernels;
    const row_copy *c = context;
    memcpy(row_out(c->out, row, c->out_stride), row_in(c->in, (size_t)c->ids[row], c->in_stride),
           c->n);
}

void ml_gather_rows(ml_pool *pool, const void *table, size_t table_stride_bytes, const int32_t *ids,
                    size_t n_rows, size_t row_bytes, void *out, size_t out_stride_bytes) {
    const row_copy c = {.in = table,
                        .out = out,
                        .ids = ids,
                        .in_stride = table_stride_bytes,
                        .out_stride = out_stride_bytes,
                        .n = row_bytes};
    for_rows(pool, n_rows, 2 * row_bytes, &c, gather_one);
}

static void argmax_one(const void *context, const ml_kernels *kernels, size_t row) {
    const row_copy *c = context;
    ((int64_t *)c->out)[row] =
        kernels->argmax_row(c->in_dtype, c->n, row_in(c->in, row, c->in_stride));
}

void ml_argmax(ml_pool *pool, const void *x, size_t x_stride_bytes, size_t n_rows, size_t n,
               uint32_t dtype, int64_t *out) {
    const row_copy c = {
        .in = x, .out = out, .in_stride = x_stride_bytes, .n = n, .in_dtype = dtype};
    for_rows(pool, n_rows, n * dtype_size(dtype), &c, argmax_one);
}

static void convert_one(const void *context, const ml_kernels *kernels, size_t row) {
    const row_copy *c = context;
    kernels->convert(c->n, row_in(c->in, row, c->in_stride), c->in_dtype,
                     row_out(c->out, row, c->out_stride), c->out_dtype);
}

void ml_convert(ml_pool *pool, const void *in, size_t in_stride_bytes, uint32_t in_dtype, void *out,
                size_t out_stride_bytes, uint32_t out_dtype, size_t n_rows, size_t n) {
    const row_copy c = {.in = in,
                        .out = out,
                        .in_stride = in_stride_bytes,
                        .out_stride = out_stride_bytes,
                        .n = n,
                        .in_dtype = in_dtype,
                        .out_dtype = out_dtype};
    for_rows(pool, n_rows, n * 6, &c, convert_one);
}

int64_t ml_find_out_of_range(const int32_t *values, size_t n, int64_t limit) {
    for (size_t i = 0; i < n; i++)
        if (values[i] < 0 || values[i] >= limit) return (int64_t)i;
    return -1;
}
