/* Attention tiles in plain C, for processors without AVX2 and as the example for the other files.
 * The inner loops run over 16 tokens or 16 dimensions, so the compiler can use what it knows. */
#include "attention_kernels.h"
#include "attention_math.h"

#include <math.h>

enum { TOKENS = ML_BLOCK_TOKENS };

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

/* tile_sum[dim] = sum over tokens of weight v, v is [16][head_dim]. */
static void values_fp32(const float *restrict weight, const float *restrict v, uint32_t head_dim,
                        float *restrict tile_sum) {
    for (uint32_t t = 0; t < TOKENS; t++)
        for (uint32_t d = 0; d < head_dim; d++) tile_sum[d] += weight[t] * v[t * head_dim + d];
}

/* The same with v [8 token pairs][head_dim][2]. */
static void values_bf16(const float *restrict weight, const uint32_t *restrict v,
                        uint32_t head_dim, float *restrict tile_sum) {
    for (uint32_t t = 0; t < TOKENS; t += 2) {
        for (uint32_t d = 0; d < head_dim; d++) {
            const uint32_t pair = v[t / 2 * head_dim + d];
            tile_sum[d] += weight[t] * ml_float_from_bits(pair << 16);
            tile_sum[d] += weight[t + 1] * ml_float_from_bits(pair & 0xffff0000u);
        }
    }
}

/* Turns scores into weights 2^(score - reference), raising the reference where needed; returns what
 * the row's earlier sums are to be multiplied with. */
static float weigh(ml_row *row, const ml_kv_tile *tile, float *restrict score) {
    const uint32_t visible = ml_visible_tokens(row, tile);
    float maximum = -INFINITY, rescale = 1.0f;
    for (uint32_t t = 0; t < visible; t++) {
        score[t] *= tile->scale_log2;
        maximum = score[t] > maximum ? score[t] : maximum;
    }
    if (maximum > row->reference + ML_REFERENCE_SLACK) {
        rescale = row->reference == -INFINITY ? 0.0f : ml_exp2(row->reference - maximum);
        row->reference = maximum;
    }
    for (uint32_t t = 0; t < TOKENS; t++) {
        score[t] = t < visible ? ml_exp2(score[t] - row->reference) : 0.0f;
        row->sum[t] = row->sum[t] * rescale + score[t];
    }
    return rescale;
}

static void accumulate(const ml_row *row, uint32_t head_dim, float rescale,
                       const float *restrict tile_sum) {
    float *restrict acc = row->acc;
    for (uint32_t d = 0; d < head_dim; d++) acc[d] = acc[d] * rescale + tile_sum[d];
}

static void tile_fp32(ml_row *rows, uint32_t n_rows, const ml_kv_tile *tile) {
    const float *k = tile->kv, *v = k + tile->head_dim * TOKENS;
    for (ml_row *row = rows; row < rows + n_rows; row++) {
        float weight[TOKENS], tile_sum[ML_MAX_HEAD_DIM] = {0};
        scores_fp32(row->q, k, tile->head_dim, weight);
        const float rescale = weigh(row, tile, weight);
        values_fp32(weight, v, tile->head_dim, tile_sum);
        accumulate(row, tile->head_dim, rescale, tile_sum);
    }
}

static void tile_bf16(ml_row *rows, uint32_t n_rows, const ml_kv_tile *tile) {
    const uint32_t *k = tile->kv, *v = k + tile->head_dim / 2 * TOKENS;
    for (ml_row *row = rows; row < rows + n_rows; row++) {
        float weight[TOKENS], tile_sum[ML_MAX_HEAD_DIM] = {0};
        scores_bf16(row->q, k, tile->head_dim, weight);
        const float rescale = weigh(row, tile, weight);
        values_bf16(weight, v, tile->head_dim, tile_sum);
        accumulate(row, tile->head_dim, rescale, tile_sum);
    }
}

#define ML_MERGE_ROW ml_scalar_merge_row
#include "merge_row.h"

const ml_kernel ml_scalar_fp32 = {tile_fp32, 8, ML_FP32};
const ml_kernel ml_scalar_bf16 = {tile_bf16, 8, ML_FP32};
