/* Attention tiles with AVX2 and FMA, for FP32 and BF16 caches. A vector holds half a tile's tokens
 * or 8 dimensions; with 16 registers, 4 rows at a time. */
#pragma GCC target("avx2,fma")

#include "attention_kernels.h"
#include "attention_math.h"
#include "attention_x86.h"

enum { ROWS = 4, PAIRS = ML_BLOCK_TOKENS / 2, HALF = 32 /* bytes */ };

INLINE __m256 low_halves(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}

INLINE __m256 high_halves(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000u)));
}

INLINE __m256 load_floats(const char *at) {
    return _mm256_load_ps((const float *)(const void *)at);
}

INLINE __m256i load_pairs(const char *at) {
    return _mm256_load_si256((const __m256i *)(const void *)at);
}

/* 2^x for x < 128; below -126 it is 2^-126; NaN (the second operand of max) passes. */
INLINE __m256 exp2_avx2(__m256 x) {
    static const float coefficients[] = ML_EXP2_D6;
    x = _mm256_max_ps(_mm256_set1_ps(-126.0f), x);
    const __m256 whole = _mm256_floor_ps(x), f = _mm256_sub_ps(x, whole);
    __m256 p = _mm256_set1_ps(coefficients[0]);
    UNROLL for (int i = 1; i < 7; i++)
        p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(coefficients[i]));
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
}

/* Dimensions 2 i and 2 i + 1 of 8 tokens; k is [head_dim / 2][16][2] or [head_dim][16]. */
INLINE void load_k(const char *k, uint32_t i, int half, const int is_bf16, __m256 *even,
                   __m256 *odd) {
    if (is_bf16) {
        const __m256i pairs = load_pairs(k + i * LINE + half * HALF);
        *even = low_halves(pairs);
        *odd = high_halves(pairs);
    } else {
        *even = load_floats(k + i * 2 * LINE + half * HALF);
        *odd = load_floats(k + i * 2 * LINE + LINE + half * HALF);
    }
}

/* score[r][half] = q . k by token. */
INLINE void scores(const ml_row *rows, const ml_kv_tile *tile, const int n_rows, const int is_bf16,
                   __m256 (*score)[2]) {
    const int lines = is_bf16 ? 1 : 2;
    const char *k = tile->kv, *far = tile->next, *near = k + half_tile(tile, is_bf16);
    const float *q[ROWS];
    UNROLL for (int r = 0; r < n_rows; r++) {
        q[r] = rows[r].q;
        score[r][0] = score[r][1] = _mm256_setzero_ps();
    }
    for (uint32_t i = 0; i < tile->head_dim / 2; i++) {
        UNROLL for (int l = 0; l < lines; l++) fetch(far, near, (i * lines + l) * LINE);
        __m256 even[2], odd[2];
        load_k(k, i, 0, is_bf16, &even[0], &odd[0]);
        load_k(k, i, 1, is_bf16, &even[1], &odd[1]);
        UNROLL for (int r = 0; r < n_rows; r++) {
            const __m256 q0 = _mm256_broadcast_ss(q[r] + 2 * i);
            const __m256 q1 = _mm256_broadcast_ss(q[r] + 2 * i + 1);
            score[r][0] = _mm256_fmadd_ps(even[0], q0, score[r][0]);
            score[r][1] = _mm256_fmadd_ps(even[1], q0, score[r][1]);
            score[r][0] = _mm256_fmadd_ps(odd[0], q1, score[r][0]);
            score[r][1] = _mm256_fmadd_ps(odd[1], q1, score[r][1]);
        }
    }
}

INLINE float reduce_max(__m256 x) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

/* Raises the row's reference to the maximum of the visible scores (the others are -infinity) and
 * rescales its sums. Seldom called. */
static __attribute__((noinline)) void raise_reference(ml_row *row, uint32_t head_dim,
                                                      __m256 score0, __m256 score1) {
    const float maximum = reduce_max(_mm256_max_ps(score0, score1));
    const float step = row->reference - maximum; /* -infinity for the first tile */
    const __m256 factor = _mm256_set1_ps(step < -126.0f ? 0.0f : ml_exp2(step));
    row->reference = maximum;
    for (int i = 0; i < 16; i += 8)
        _mm256_store_ps(row->sum + i, _mm256_mul_ps(factor, _mm256_load_ps(row->sum + i)));
    for (float *acc = row->acc; acc < row->acc + head_dim; acc += 8)
        _mm256_storeu_ps(acc, _mm256_mul_ps(factor, _mm256_loadu_ps(acc)));
}

/* All ones for the visible tokens of a half. */
INLINE __m256 visible_lanes(uint32_t visible, int half) {
    const __m256i token = _mm256_add_epi32(_mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0),
                                           _mm256_set1_epi32(8 * half));
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32((int)visible), token));
}

/* Turns a row's scores into weights 2^(scale score - reference), 0 where it may not see, and adds
 * them to its sums. */
INLINE void weigh(ml_row *row, const ml_kv_tile *tile, __m256 *score, float *weights) {
    const __m256 none = _mm256_set1_ps(-__builtin_inff());
    const __m256 limit = _mm256_set1_ps(row->reference + ML_REFERENCE_SLACK);
    const uint32_t visible = ml_visible_tokens(row, tile);
    __m256 lanes[2], over = _mm256_setzero_ps();
    UNROLL for (int half = 0; half < 2; half++) {
        lanes[half] = visible_lanes(visible, half);
        const __m256 scaled = _mm256_mul_ps(score[half], _mm256_set1_ps(tile->scale_log2));
        score[half] = _mm256_blendv_ps(none, scaled, lanes[half]);
        over = _mm256_or_ps(over, _mm256_cmp_ps(score[half], limit, _CMP_GT_OQ));
    }
    if (__builtin_expect(_mm256_movemask_ps(over), 0))
        raise_reference(row, tile->head_dim, score[0], score[1]);
    UNROLL for (int half = 0; half < 2; half++) {
        const __m256 x = _mm256_sub_ps(score[half], _mm256_set1_ps(row->reference));
        const __m256 weight = _mm256_and_ps(exp2_avx2(x), lanes[half]);
        const __m256 sum = _mm256_load_ps(row->sum + 8 * half);
        _mm256_store_ps(weights + 8 * half, weight);
        _mm256_store_ps(row->sum + 8 * half, _mm256_add_ps(sum, weight));
    }
}

/* 8 dimensions, in `half` of 16, of two tokens: [16][2] or [2][16]. */
INLINE void load_v(const char *v, int half, const int is_bf16, __m256 *first, __m256 *second) {
    if (is_bf16) {
        const __m256i pairs = load_pairs(v + half * HALF);
        *first = low_halves(pairs);
        *second = high_halves(pairs);
    } else {
        *first = load_floats(v + half * HALF);
        *second = load_floats(v + LINE + half * HALF);
    }
}

/* acc += weights v for 16 dimensions from `dim` on. The tile is summed on its own first: fewer
 * roundings against the large sum of a long context. */
INLINE void values(ml_row *rows, const ml_kv_tile *tile, const int n_rows, const int is_bf16,
                   uint32_t dim, float (*weights)[ML_BLOCK_TOKENS]) {
    const char *near = tile->next, *far = near + half_tile(tile, is_bf16);
    const char *v = (const char *)tile->kv + half_tile(tile, is_bf16);
    const size_t pair_bytes = is_bf16 ? LINE : 2 * LINE;
    size_t line = dim / 16 * PAIRS * pair_bytes;
    __m256 sum[2 * ROWS];
    UNROLL for (int i = 0; i < 2 * n_rows; i++) sum[i] = _mm256_setzero_ps();
    for (int pair = 0; pair < PAIRS; pair++, line += pair_bytes) {
        __m256 first[2], second[2];
        fetch(far, near, line);
        if (!is_bf16) fetch(far, near, line + LINE);
        load_v(v + line, 0, is_bf16, &first[0], &second[0]);
        load_v(v + line, 1, is_bf16, &first[1], &second[1]);
        UNROLL for (int r = 0; r < n_rows; r++) {
            const __m256 w0 = _mm256_broadcast_ss(&weights[r][2 * pair]);
            const __m256 w1 = _mm256_broadcast_ss(&weights[r][2 * pair + 1]);
            sum[2 * r] = _mm256_fmadd_ps(first[0], w0, sum[2 * r]);
            sum[2 * r + 1] = _mm256_fmadd_ps(first[1], w0, sum[2 * r + 1]);
            sum[2 * r] = _mm256_fmadd_ps(second[0], w1, sum[2 * r]);
            sum[2 * r + 1] = _mm256_fmadd_ps(second[1], w1, sum[2 * r + 1]);
        }
    }
    UNROLL for (int i = 0; i < 2 * n_rows; i++) {
        float *acc = rows[i / 2].acc + dim + 8 * (i % 2);
        _mm256_storeu_ps(acc, _mm256_add_ps(_mm256_loadu_ps(acc), sum[i]));
    }
}

INLINE void tile_rows(ml_row *rows, const ml_kv_tile *tile, const int n_rows, const int is_bf16) {
    _Alignas(32) float weights[ROWS][ML_BLOCK_TOKENS];
    __m256 score[ROWS][2];
    scores(rows, tile, n_rows, is_bf16, score);
    UNROLL for (int r = 0; r < n_rows; r++) weigh(rows + r, tile, score[r], weights[r]);
    for (uint32_t dim = 0; dim < tile->head_dim; dim += 16)
        values(rows, tile, n_rows, is_bf16, dim, weights);
}

INLINE void rows_fp32(ml_row *rows, const ml_kv_tile *tile, const int n_rows) {
    tile_rows(rows, tile, n_rows, 0);
}

INLINE void rows_bf16(ml_row *rows, const ml_kv_tile *tile, const int n_rows) {
    tile_rows(rows, tile, n_rows, 1);
}

DEFINE_TILE_FUNCTION(tile_fp32, rows_fp32, ROW_CASES_4)
DEFINE_TILE_FUNCTION(tile_bf16, rows_bf16, ROW_CASES_4)

#include "vector_math.h"

#define ML_INT8_TILE tile_int8
#define ML_FP32_TILE tile_fp32
#include "int8_tile.h"

#define ML_MERGE_ROW ml_avx2_merge_row
#include "merge_row.h"

const ml_kernel ml_avx2_fp32 = {tile_fp32, ROWS, ML_FP32};
const ml_kernel ml_avx2_bf16 = {tile_bf16, ROWS, ML_FP32};
const ml_kernel ml_avx2_int8 = {tile_int8, ROWS, ML_FP32};
