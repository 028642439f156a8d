/* Attention tiles with AVX-512 (F, BW, DQ, VL) in FP32 arithmetic, for FP32 and BF16 caches. */
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")

#include "attention_kernels.h"
#include "attention_avx512.h"

enum { ROWS = 8, PAIRS = ML_BLOCK_TOKENS / 2 };

/* The two BF16 of each dword as FP32. */
INLINE __m512 low_halves(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
}

INLINE __m512 high_halves(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000u)));
}

/* Dimensions 2 i and 2 i + 1 of 16 tokens; k is [head_dim / 2][16][2] or [head_dim][16]. */
INLINE void load_k(const char *k, uint32_t i, const int is_bf16, __m512 *even, __m512 *odd) {
    if (is_bf16) {
        const __m512i pairs = _mm512_load_si512(k + i * LINE);
        *even = low_halves(pairs);
        *odd = high_halves(pairs);
    } else {
        *even = _mm512_load_ps(k + i * 2 * LINE);
        *odd = _mm512_load_ps(k + i * 2 * LINE + LINE);
    }
}

/* score[r] = q . k by token; even and odd dimensions apart, two chains hide the latency. */
INLINE void scores(const ml_row *rows, const ml_kv_tile *tile, const int n_rows, const int is_bf16,
                   __m512 *score) {
    const int lines = is_bf16 ? 1 : 2;
    const char *k = tile->kv, *far = tile->next, *near = k + half_tile(tile, is_bf16);
    const float *q[ROWS];
    __m512 odd_sum[ROWS];
    UNROLL for (int r = 0; r < n_rows; r++) {
        q[r] = rows[r].q;
        score[r] = odd_sum[r] = _mm512_setzero_ps();
    }
    for (uint32_t i = 0; i < tile->head_dim / 2; i++) {
        __m512 even, odd;
        load_k(k, i, is_bf16, &even, &odd);
        UNROLL for (int l = 0; l < lines; l++) fetch(far, near, (i * lines + l) * LINE);
        UNROLL for (int r = 0; r < n_rows; r++) {
            score[r] = _mm512_fmadd_ps(even, _mm512_set1_ps(q[r][2 * i]), score[r]);
            odd_sum[r] = _mm512_fmadd_ps(odd, _mm512_set1_ps(q[r][2 * i + 1]), odd_sum[r]);
        }
    }
    UNROLL for (int r = 0; r < n_rows; r++) score[r] = _mm512_add_ps(score[r], odd_sum[r]);
}

/* 16 dimensions of two tokens, [16][2] or [2][16]. */
INLINE void load_v(const char *v, const int is_bf16, __m512 *first, __m512 *second) {
    if (is_bf16) {
        const __m512i pairs = _mm512_load_si512(v);
        *first = low_halves(pairs);
        *second = high_halves(pairs);
    } else {
        *first = _mm512_load_ps(v);
        *second = _mm512_load_ps(v + LINE);
    }
}

/* acc += weights v for `columns` vectors of 16 dimensions from `dim` on. The tile is summed on its
 * own first: fewer roundings against the large sum of a long context. */
INLINE void values(ml_row *rows, const ml_kv_tile *tile, const int n_rows, const int columns,
                   const int is_bf16, uint32_t dim, float (*weights)[ML_BLOCK_TOKENS]) {
    const char *near = tile->next, *far = near + half_tile(tile, is_bf16);
    const char *v = (const char *)tile->kv + half_tile(tile, is_bf16);
    const size_t pair_bytes = is_bf16 ? LINE : 2 * LINE, column_bytes = PAIRS * pair_bytes;
    size_t offset = dim / 16 * column_bytes;
    __m512 sum[16];
    UNROLL for (int i = 0; i < n_rows * columns; i++) sum[i] = _mm512_setzero_ps();
    for (int pair = 0; pair < PAIRS; pair++, offset += pair_bytes) {
        UNROLL for (int c = 0; c < columns; c++) {
            const size_t line = offset + c * column_bytes;
            __m512 first, second;
            load_v(v + line, is_bf16, &first, &second);
            fetch(far, near, line);
            if (!is_bf16) fetch(far, near, line + LINE);
            UNROLL for (int r = 0; r < n_rows; r++) {
                __m512 *s = sum + r * columns + c;
                *s = _mm512_fmadd_ps(first, _mm512_set1_ps(weights[r][2 * pair]), *s);
                *s = _mm512_fmadd_ps(second, _mm512_set1_ps(weights[r][2 * pair + 1]), *s);
            }
        }
    }
    UNROLL for (int i = 0; i < n_rows * columns; i++) {
        float *acc = rows[i / columns].acc + dim + 16 * (i % columns);
        _mm512_storeu_ps(acc, _mm512_add_ps(_mm512_loadu_ps(acc), sum[i]));
    }
}

INLINE void tile_rows(ml_row *rows, const ml_kv_tile *tile, const int n_rows, const int is_bf16) {
    _Alignas(64) float weights[ROWS][ML_BLOCK_TOKENS];
    __m512 score[ROWS];
    scores(rows, tile, n_rows, is_bf16, score);
    weigh(rows, tile, n_rows, 1, score);
    UNROLL for (int r = 0; r < n_rows; r++) {
        _mm512_store_ps(weights[r], score[r]);
        _mm512_store_ps(rows[r].sum, _mm512_add_ps(_mm512_load_ps(rows[r].sum), score[r]));
    }
    const int columns = n_rows > 4 ? 2 : n_rows > 1 ? 4 : 8;
    uint32_t dim = 0;
    for (; dim + 16 * columns <= tile->head_dim; dim += 16 * columns)
        values(rows, tile, n_rows, columns, is_bf16, dim, weights);
    for (; dim < tile->head_dim; dim += 16) values(rows, tile, n_rows, 1, is_bf16, dim, weights);
}

INLINE void rows_fp32(ml_row *rows, const ml_kv_tile *tile, const int n_rows) {
    tile_rows(rows, tile, n_rows, 0);
}

INLINE void rows_bf16(ml_row *rows, const ml_kv_tile *tile, const int n_rows) {
    tile_rows(rows, tile, n_rows, 1);
}

DEFINE_TILE_FUNCTION(tile_fp32, rows_fp32, ROW_CASES_8)
DEFINE_TILE_FUNCTION(tile_bf16, rows_bf16, ROW_CASES_8)

#include "vector_math.h"

#define ML_INT8_TILE tile_int8
#define ML_FP32_TILE tile_fp32
#include "int8_tile.h"

#define ML_MERGE_ROW ml_avx512_merge_row
#include "merge_row.h"

const ml_kernel ml_avx512_fp32 = {tile_fp32, ROWS, ML_FP32};
const ml_kernel ml_avx512_bf16 = {tile_bf16, ROWS, ML_FP32};
const ml_kernel ml_avx512_int8 = {tile_int8, ROWS, ML_FP32};
