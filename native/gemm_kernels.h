/* What each instruction set provides to gemm.c, gemm_pack.c and layer_ops.c. Internal. */
#ifndef ML_KERNELS_H
#define ML_KERNELS_H

#include <stddef.h>
#include <stdint.h>

enum { ML_TILE_ROWS = 6, ML_PREFETCH_WORDS = 4, ML_HALF_PANEL_COLUMNS = 32 };

/* acc (n_rows, 64) = or += rows x panel over n_words words of k; n_rows is fixed by the function.
 * rows[i] and panel point at the first word. With every ML_PREFETCH_WORDS words, `prefetch_lines`
 * cache lines from `prefetch` on are fetched into the second-level cache. */
typedef struct {
    const char *const *rows;
    const char *panel;
    size_t n_words;
    float *acc;
    int accumulate;
    const char *prefetch;
    size_t prefetch_lines;
} ml_tile;

typedef struct {
    uint32_t dtype;     /* of the weights: what the steps are rounded to */
    uint32_t out_dtype; /* of out and residual */
    uint32_t epilogue;  /* ml_epilogue */
} ml_finish;

/* One row of the operations between the products; see layer_ops.h. */
typedef struct {
    const void *delta;  /* NULL, or added to hidden first */
    const void *weight; /* (n) */
    void *hidden;       /* (n), changed where there is a delta */
    void *out;          /* (n) */
    size_t n;
    float eps;
    uint32_t dtype;
} ml_norm_row;

typedef struct {
    void (*tile_bf16[ML_TILE_ROWS])(const ml_tile *); /* index: n_rows - 1 */
    void (*tile_fp32[ML_TILE_ROWS])(const ml_tile *);
    /* A finished accumulator row (64 columns) into n outputs. */
    void (*finish_row)(const ml_finish *, const float *acc, size_t n, const void *residual,
                       void *out);
    /* out[word][column] = columns[column][word]: 32 columns of 32-bit words, rows of `out`
     * ML_PANEL_ROW_BYTES apart. */
    void (*transpose)(const char *const *columns, size_t n_words, char *out);
    void (*convert)(size_t n, const void *in, uint32_t in_dtype, void *out, uint32_t out_dtype);
    void (*norm_row)(const ml_norm_row *);
    /* x, out (head_dim); cos, sin (rotary_dim / 2). What lies beyond rotary_dim is copied. */
    void (*rotate_head)(uint32_t dtype, size_t head_dim, size_t rotary_dim, const float *cos,
                        const float *sin, const void *x, void *out);
    /* probabilities (n, padded with anything to a multiple of 16) from logits (n). */
    void (*softmax_row)(uint32_t dtype, size_t n, const void *logits, float *probabilities);
    /* out (n) = residual + sum over j of weights[j] * rows[j], in the order of j. */
    void (*combine_row)(uint32_t dtype, size_t n, size_t n_rows, const void *const *rows,
                        const float *weights, const void *residual, void *out);
    int64_t (*argmax_row)(uint32_t dtype, size_t n, const void *x);
} ml_kernels;

extern const ml_kernels ml_kernels_scalar, ml_kernels_avx2, ml_kernels_avx512,
    ml_kernels_avx512_bf16;

/* Those of ml_isa_selected(). */
const ml_kernels *ml_kernels_selected(void);

#endif
