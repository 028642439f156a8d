/* A mixture-of-experts block in one call: router, sort by expert, gate and up with SwiGLU, down,
 * weighted sum into the residual. Runs passes of at most ML_MOE_PASS_TOKENS tokens, so that its
 * workspace stays bounded; the result does not depend on the passes. */
#ifndef ML_MOE_H
#define ML_MOE_H

#include "layer_ops.h"

/* [cffi] */
enum { ML_MOE_PASS_TOKENS = 4096 };

typedef struct {
    size_t n_tokens;
    uint32_t hidden, inner; /* sizes of the model and of an expert */
    uint32_t n_experts, top_k;
    uint32_t renormalise; /* weights of the chosen experts sum to 1 */
    uint32_t dtype;       /* of weights and activations */
} ml_moe_shape;

typedef struct {
    ml_moe_shape shape;
    const void *x;        /* (n_tokens, hidden): the normed input */
    const void *residual; /* (n_tokens, hidden), NULL: zero; may be out itself */
    void *out;            /* (n_tokens, hidden) = residual + block(x) */
    size_t x_stride_bytes, residual_stride_bytes, out_stride_bytes;
    const void *router;         /* packed (n_experts, hidden) */
    const void *const *gate_up; /* (n_experts) packed pairs (inner, hidden) */
    const void *const *down;    /* (n_experts) packed (hidden, inner) */
    void *workspace;            /* ml_moe_workspace_bytes(), 64-byte aligned */
    int64_t *expert_tokens;     /* (n_experts) or NULL: incremented by the rows each one got */
    uint64_t route_ns, gate_up_ns, down_ns, combine_ns; /* written: time spent in each part */
} ml_moe_call;

size_t ml_moe_workspace_bytes(const ml_moe_shape *shape);
void ml_moe(ml_pool *pool, ml_moe_call *call);
/* [/cffi] */

#endif
