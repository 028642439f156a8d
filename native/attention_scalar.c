/* Attention tiles in plain C, for processors without AVX2 and as the example for the other files.
 * The inner loops run over 16 tokens or 16 dimensions, so the compiler can use what it knows. */
#include "attention_kernels.h"
#include "attention_math.h"

#include <math.h>

enum { TOKENS = ML_BLOCK_TOKENS, DIMS = 16 };

/* score[token] = scale q . k, k is [head_dim][16]. */
static void scores_fp32(const float *restrict q, const float *restrict k, uint32_t head_dim,
                        float *restrict score) {
    for (int t = 0; t < TOKENS; t++) score[t] = 0.0f;
    for (uint32_t d = 0; d < head_dim; d++)
        for (int t = 0; t < TOKENS; t++) score[t] += q[d] * k[d * TOKENS + (uint32_t)t];
}

/* The same with k [head_dim / 2][16][2]; a dword holds dimensions 2 i (low half) and 2 i + 1. */
static void scores_bf16(const float *restrict q, const uint32_t *restrict k, uint32_t head_dim,
                        float *restrict score) {
    for (int t = 0; t < TOKENS; t++) score[t] = 0.0f;
    for (uint32_t i = 0; i < head_dim / 2; i++) {
        for (int t = 0; t < TOKENS; t++) {
            const uint32_t pair = k[i * TOKENS + (uint32_t)t];
            score[t] += q[2 * i] * ml_float_from_bits(pair << 16);
            score[t] += q[2 * i + 1] * ml_float_from_bits(pair & 0xffff0000u);
        }
    }
}

/* sum[j] = sum over tokens of weight v, for 16 dimensions; v is [16 tokens][16]. */
static void values_fp32(const float *restrict weights, const float *restrict v,
                        float *restrict sum) {
    for (int t = 0; t < TOKENS; t++)
        for (int j = 0; j < DIMS; j++) sum[j] += weights[t] * v[t * DIMS + j];
}

/* The same with v [8 token pairs][16][2]. */
static void values_bf16(const float *restrict weights, const uint32_t *restrict v,
                        float *restrict sum) {
    for (int t = 0; t < TOKENS; t += 2) {
        for (int j = 0; j < DIMS; j++) {
            const uint32_t pair = v[t / 2 * DIMS + j];
            sum[j] += weights[t] * ml_float_from_bits(pair << 16);
            sum[j] += weights[t + 1] * ml_float_from_bits(pair & 0xffff0000u);
        }
    }
}

/* Raises the row's reference and rescales its sums. */
static void raise_reference(ml_row *row, uint32_t head_dim, float maximum) {
    const float factor =
        row->reference == -INFINITY ? 0.0f : ml_exp2(row->reference - maximum);
    row->reference = maximum;
    for (int t = 0; t < TOKENS; t++) row->sum[t] *= factor;
    for (uint32_t d = 0; d < head_dim; d++) row->acc[d] *= factor;
}

/* Turns scores into weights 2^(score - reference), raising the reference where needed. */
static void weigh(ml_row *row, const ml_kv_tile *tile, float *restrict score) {
    const uint32_t visible = ml_visible_tokens(row, tile);
    float maximum = -INFINITY;
    for (uint32_t t = 0; t < visible; t++) {
        score[t] *= tile->scale_log2;
        maximum = score[t] > maximum ? score[t] : maximum;
    }
    if (maximum > row->reference + ML_REFERENCE_SLACK)
        raise_reference(row, tile->head_dim, maximum);
    for (uint32_t t = 0; t < TOKENS; t++) {
        score[t] = t < visible ? ml_exp2(score[t] - row->reference) : 0.0f;
        row->sum[t] += score[t];
    }
}

static void add_tile(ml_row *row, const ml_kv_tile *tile, int is_bf16) {
    const size_t half_bytes = tile->head_dim * TOKENS * (is_bf16 ? 2u : 4u);
    const char *k = tile->kv, *v = k + half_bytes;
    const size_t column_bytes = half_bytes / (tile->head_dim / DIMS);
    float weights[TOKENS];
    if (is_bf16)
        scores_bf16(row->q, (const uint32_t *)(const void *)k, tile->head_dim, weights);
    else
        scores_fp32(row->q, (const float *)(const void *)k, tile->head_dim, weights);
    weigh(row, tile, weights);
    for (float *acc = row->acc; acc < row->acc + tile->head_dim; acc += DIMS, v += column_bytes) {
        float sum[DIMS] = {0};
        if (is_bf16)
            values_bf16(weights, (const uint32_t *)(const void *)v, sum);
        else
            values_fp32(weights, (const float *)(const void *)v, sum);
        for (int j = 0; j < DIMS; j++) acc[j] += sum[j];
    }
}

static void tile_fp32(ml_row *rows, uint32_t n_rows, const ml_kv_tile *tile) {
    for (uint32_t r = 0; r < n_rows; r++) add_tile(rows + r, tile, 0);
}

static void tile_bf16(ml_row *rows, uint32_t n_rows, const ml_kv_tile *tile) {
    for (uint32_t r = 0; r < n_rows; r++) add_tile(rows + r, tile, 1);
}

#include "vector_math.h"

#define ML_INT8_TILE tile_int8
#define ML_FP32_TILE tile_fp32
#include "int8_tile.h"

#define ML_MERGE_ROW ml_scalar_merge_row
#include "merge_row.h"

const ml_kernel ml_scalar_fp32 = {tile_fp32, 8, ML_FP32};
const ml_kernel ml_scalar_bf16 = {tile_bf16, 8, ML_FP32};
const ml_kernel ml_scalar_int8 = {tile_int8, 8, ML_FP32};
