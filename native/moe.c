#define _GNU_SOURCE
#include "moe.h"

#include <time.h>

/* Carved out of the workspace, for the tokens of one pass. */
typedef struct {
    void *logits;       /* (tokens, n_experts) */
    int32_t *experts;   /* (tokens, top_k) */
    float *weights;     /* (tokens, top_k) */
    int32_t *position;  /* (tokens, top_k) */
    int32_t *row_index; /* (tokens top_k) */
    int32_t *offsets;   /* (n_experts + 1) */
    void *inner;        /* (tokens top_k, inner) */
    void *expert_out;   /* (tokens top_k, hidden) */
    size_t size_bytes;
} workspace;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static size_t dtype_size(uint32_t dtype) { return dtype == ML_BF16 ? 2 : 4; }
static size_t pass_tokens(size_t n) { return n < ML_MOE_PASS_TOKENS ? n : ML_MOE_PASS_TOKENS; }

/* `base` may be NULL, to learn the size. */
static void *carve(workspace *w, char *base, size_t size_bytes) {
    const size_t at = w->size_bytes;
    w->size_bytes += (size_bytes + 63) / 64 * 64;
    return base ? base + at : NULL;
}

static workspace lay_out(const ml_moe_shape *s, void *base) {
    const size_t tokens = pass_tokens(s->n_tokens), pairs = tokens * s->top_k;
    const size_t size = dtype_size(s->dtype);
    workspace w = {0};
    w.logits = carve(&w, base, tokens * s->n_experts * size);
    w.experts = carve(&w, base, pairs * sizeof *w.experts);
    w.weights = carve(&w, base, pairs * sizeof *w.weights);
    w.position = carve(&w, base, pairs * sizeof *w.position);
    w.row_index = carve(&w, base, pairs * sizeof *w.row_index);
    w.offsets = carve(&w, base, (s->n_experts + 1) * sizeof *w.offsets);
    w.inner = carve(&w, base, pairs * s->inner * size);
    w.expert_out = carve(&w, base, pairs * s->hidden * size);
    return w;
}

size_t ml_moe_workspace_bytes(const ml_moe_shape *shape) { return lay_out(shape, NULL).size_bytes; }

static void route(ml_pool *pool, const ml_moe_call *call, const void *x, size_t n,
                  const workspace *w) {
    const ml_moe_shape *s = &call->shape;
    const int32_t all[2] = {0, (int32_t)n};
    const size_t logits_stride = s->n_experts * dtype_size(s->dtype);
    ml_gemm(pool, &(ml_gemm_call){.offsets = all,
                                  .weights = &call->router,
                                  .a = x,
                                  .a_stride_bytes = call->x_stride_bytes,
                                  .out = w->logits,
                                  .out_stride_bytes = logits_stride,
                                  .n_groups = 1,
                                  .n_out = s->n_experts,
                                  .k = s->hidden,
                                  .dtype = s->dtype,
                                  .out_dtype = s->dtype,
                                  .epilogue = ML_STORE});
    ml_route(pool, &(ml_route_call){.logits = w->logits,
                                    .experts = w->experts,
                                    .weights = w->weights,
                                    .logits_stride_bytes = logits_stride,
                                    .n_rows = n,
                                    .n_experts = s->n_experts,
                                    .top_k = s->top_k,
                                    .renormalise = s->renormalise,
                                    .dtype = s->dtype});
    ml_sort_by_expert(w->experts, n, s->top_k, s->n_experts, w->offsets, w->row_index, w->position);
    for (uint32_t e = 0; call->expert_tokens && e < s->n_experts; e++)
        call->expert_tokens[e] += w->offsets[e + 1] - w->offsets[e];
}

static void gate_up(ml_pool *pool, const ml_moe_call *call, const void *x, const workspace *w) {
    const ml_moe_shape *s = &call->shape;
    ml_gemm(pool, &(ml_gemm_call){.offsets = w->offsets,
                                  .weights = call->gate_up,
                                  .a = x,
                                  .row_index = w->row_index,
                                  .a_stride_bytes = call->x_stride_bytes,
                                  .out = w->inner,
                                  .out_stride_bytes = s->inner * dtype_size(s->dtype),
                                  .n_groups = s->n_experts,
                                  .n_out = s->inner,
                                  .k = s->hidden,
                                  .dtype = s->dtype,
                                  .out_dtype = s->dtype,
                                  .epilogue = ML_SWIGLU});
}

static void down(ml_pool *pool, const ml_moe_call *call, const workspace *w) {
    const ml_moe_shape *s = &call->shape;
    ml_gemm(pool, &(ml_gemm_call){.offsets = w->offsets,
                                  .weights = call->down,
                                  .a = w->inner,
                                  .a_stride_bytes = s->inner * dtype_size(s->dtype),
                                  .out = w->expert_out,
                                  .out_stride_bytes = s->hidden * dtype_size(s->dtype),
                                  .n_groups = s->n_experts,
                                  .n_out = s->hidden,
                                  .k = s->inner,
                                  .dtype = s->dtype,
                                  .out_dtype = s->dtype,
                                  .epilogue = ML_STORE});
}

static void combine(ml_pool *pool, const ml_moe_call *call, const void *residual, void *out,
                    size_t n, const workspace *w) {
    const ml_moe_shape *s = &call->shape;
    ml_combine(pool, &(ml_combine_call){.expert_out = w->expert_out,
                                        .position = w->position,
                                        .weights = w->weights,
                                        .residual = residual,
                                        .out = out,
                                        .expert_stride_bytes = s->hidden * dtype_size(s->dtype),
                                        .residual_stride_bytes = call->residual_stride_bytes,
                                        .out_stride_bytes = call->out_stride_bytes,
                                        .n_rows = n,
                                        .n = s->hidden,
                                        .top_k = s->top_k,
                                        .dtype = s->dtype});
}

static void run_pass(ml_pool *pool, ml_moe_call *call, size_t first, size_t n, const workspace *w) {
    const void *x = (const char *)call->x + first * call->x_stride_bytes;
    const void *residual = call->residual;
    if (residual) residual = (const char *)residual + first * call->residual_stride_bytes;
    void *out = (char *)call->out + first * call->out_stride_bytes;
    const uint64_t start = now_ns();
    route(pool, call, x, n, w);
    const uint64_t routed = now_ns();
    gate_up(pool, call, x, w);
    const uint64_t widened = now_ns();
    down(pool, call, w);
    const uint64_t narrowed = now_ns();
    combine(pool, call, residual, out, n, w);
    call->route_ns += routed - start;
    call->gate_up_ns += widened - routed;
    call->down_ns += narrowed - widened;
    call->combine_ns += now_ns() - narrowed;
}

void ml_moe(ml_pool *pool, ml_moe_call *call) {
    const workspace w = lay_out(&call->shape, call->workspace);
    call->route_ns = call->gate_up_ns = call->down_ns = call->combine_ns = 0;
    for (size_t first = 0; first < call->shape.n_tokens; first += ML_MOE_PASS_TOKENS)
        run_pass(pool, call, first, pass_tokens(call->shape.n_tokens - first), &w);
}
