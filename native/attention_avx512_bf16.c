/* Attention tiles with AVX512_BF16: both products are pairs of BF16 (vdpbf16ps). The weights are
 * rounded to BF16 for it and summed as rounded, so that they still add up to one. */
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")

#include "attention_kernels.h"
#include "attention_avx512.h"

enum { ROWS = 8, PAIRS = ML_BLOCK_TOKENS / 2 };

/* A 4-byte pair of BF16, in every lane. */
INLINE __m512bh broadcast_pair(const void *pair) {
    return (__m512bh)_mm512_set1_epi32(*(const int *)pair);
}

INLINE __m512bh load_pairs(const char *line) { return (__m512bh)_mm512_load_si512(line); }

/* score[r] = q . k by token. Even and odd pairs apart: two chains hide the latency. */
INLINE void scores(const ml_row *rows, const ml_kv_tile *tile, const int n_rows, __m512 *score) {
    const char *k = tile->kv, *far = tile->next, *near = k + half_tile(tile, 1);
    const char *q[ROWS];
    __m512 odd[ROWS];
    UNROLL for (int r = 0; r < n_rows; r++) {
        q[r] = rows[r].q;
        score[r] = odd[r] = _mm512_setzero_ps();
    }
    for (uint32_t i = 0; i < tile->head_dim / 2; i += 2) {
        const __m512bh k0 = load_pairs(k + i * LINE), k1 = load_pairs(k + i * LINE + LINE);
        fetch(far, near, i * LINE);
        fetch(far, near, i * LINE + LINE);
        UNROLL for (int r = 0; r < n_rows; r++) {
            score[r] = _mm512_dpbf16_ps(score[r], k0, broadcast_pair(q[r] + i * 4));
            odd[r] = _mm512_dpbf16_ps(odd[r], k1, broadcast_pair(q[r] + i * 4 + 4));
        }
    }
    UNROLL for (int r = 0; r < n_rows; r++) score[r] = _mm512_add_ps(score[r], odd[r]);
}

/* Rounds weights to BF16 (the pairs that `values` multiplies) and adds them, as rounded, to the
 * row's sums: by token pair, in the first 8 lanes. */
INLINE void round_weights(ml_row *row, __m512 weight, void *rounded) {
    const __m256bh pairs = _mm512_cvtneps_pbh(weight);
    const __m256bh ones = (__m256bh)_mm256_set1_epi32(0x3f803f80);
    _mm256_store_si256(rounded, (__m256i)pairs);
    _mm256_store_ps(row->sum, _mm256_dpbf16_ps(_mm256_load_ps(row->sum), pairs, ones));
}

/* acc += weights v for `columns` vectors of 16 dimensions from `dim` on. */
INLINE void values(ml_row *rows, const ml_kv_tile *tile, const int n_rows, const int columns,
                   uint32_t dim, uint32_t (*weights)[PAIRS]) {
    const char *near = tile->next, *far = near + half_tile(tile, 1);
    const char *v = (const char *)tile->kv + half_tile(tile, 1);
    size_t offset = dim / 16 * PAIRS * LINE;
    __m512 sum[16];
    UNROLL for (int i = 0; i < n_rows * columns; i++)
        sum[i] = _mm512_loadu_ps(rows[i / columns].acc + dim + 16 * (i % columns));
    for (int pair = 0; pair < PAIRS; pair++, offset += LINE) {
        UNROLL for (int c = 0; c < columns; c++) {
            const size_t line = offset + (size_t)c * PAIRS * LINE;
            const __m512bh pairs = load_pairs(v + line);
            fetch(far, near, line);
            UNROLL for (int r = 0; r < n_rows; r++) {
                __m512 *s = sum + r * columns + c;
                *s = _mm512_dpbf16_ps(*s, pairs, broadcast_pair(&weights[r][pair]));
            }
        }
    }
    UNROLL for (int i = 0; i < n_rows * columns; i++)
        _mm512_storeu_ps(rows[i / columns].acc + dim + 16 * (i % columns), sum[i]);
}

INLINE void tile_rows(ml_row *rows, const ml_kv_tile *tile, const int n_rows) {
    _Alignas(32) uint32_t weights[ROWS][PAIRS];
    __m512 score[ROWS];
    scores(rows, tile, n_rows, score);
    weigh(rows, tile, n_rows, 0, score);
    UNROLL for (int r = 0; r < n_rows; r++) round_weights(rows + r, score[r], weights[r]);
    const int columns = n_rows > 4 ? 2 : n_rows > 1 ? 4 : 8;
    uint32_t dim = 0;
    for (; dim + 16 * columns <= tile->head_dim; dim += 16 * columns)
        values(rows, tile, n_rows, columns, dim, weights);
    for (; dim < tile->head_dim; dim += 16) values(rows, tile, n_rows, 1, dim, weights);
}

DEFINE_TILE_FUNCTION(tile_bf16, tile_rows, ROW_CASES_8)

const ml_kernel ml_avx512_bf16_bf16 = {tile_bf16, ROWS, ML_BF16};
