/* Attention tiles over an INT8 cache with AVX512_VNNI: products of unsigned by signed bytes, four at
 * a time (vpdpbusd), summed exactly. K lies as value + 128 and meets queries rounded to INT8; weights
 * times V's scales are rounded to 8 bits, relative to the largest of the tile, and meet signed V. */
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")

#include "attention_avx512.h"
#include "attention_kernels.h"
#include "kv_layout.h"

enum { ROWS = 8, QUADS = ML_BLOCK_TOKENS / 4 };

INLINE __m512i broadcast_quad(const void *quad) { return _mm512_set1_epi32(*(const int *)quad); }

INLINE __m512i load_quads(const char *line) { return _mm512_load_si512(line); }

/* score[r] = q . k by token. */
INLINE void products(const ml_row *rows, const ml_kv_tile *tile, const int n_rows,
                     __m512 *score) {
    const char *k = tile->kv, *far = tile->next, *near = k + ml_int8_half_bytes(tile->head_dim);
    const size_t scales = tile->head_dim * ML_BLOCK_TOKENS;
    const char *q[ROWS];
    __m512i sum[ROWS], odd[ROWS];
    UNROLL for (int r = 0; r < n_rows; r++) {
        q[r] = rows[r].q;
        sum[r] = odd[r] = _mm512_setzero_si512();
    }
    for (uint32_t i = 0; i < tile->head_dim / 4; i += 2) {
        const __m512i k0 = load_quads(k + i * LINE), k1 = load_quads(k + i * LINE + LINE);
        fetch(far, near, i * LINE);
        fetch(far, near, i * LINE + LINE);
        UNROLL for (int r = 0; r < n_rows; r++) {
            sum[r] = _mm512_dpbusd_epi32(sum[r], k0, broadcast_quad(q[r] + i * 4));
            odd[r] = _mm512_dpbusd_epi32(odd[r], k1, broadcast_quad(q[r] + i * 4 + 4));
        }
    }
    fetch(far, near, scales);
    const __m512 k_scale = _mm512_load_ps((const float *)(const void *)(k + scales));
    UNROLL for (int r = 0; r < n_rows; r++) {
        const __m512i biased = _mm512_add_epi32(sum[r], odd[r]);
        const __m512i exact = _mm512_sub_epi32(biased, _mm512_set1_epi32(rows[r].q_bias));
        const __m512 factor = _mm512_mul_ps(k_scale, _mm512_set1_ps(rows[r].q_scale));
        score[r] = _mm512_mul_ps(_mm512_cvtepi32_ps(exact), factor);
    }
}

/* Adds the weights to the row's sums, and rounds weight times scale of V to 0 ... 255; returns what
 * one step of that is worth. */
INLINE float round_weights(ml_row *row, __m512 weight, __m512 v_scale, void *rounded) {
    _mm512_store_ps(row->sum, _mm512_add_ps(_mm512_load_ps(row->sum), weight));
    const __m512 scaled = _mm512_mul_ps(weight, v_scale);
    const float largest = _mm512_reduce_max_ps(scaled);
    const float steps = largest > 0.0f ? 255.0f / largest : 0.0f;
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(scaled, _mm512_set1_ps(steps)));
    _mm_store_si128(rounded, _mm512_cvtusepi32_epi8(whole));
    return largest / 255.0f;
}

/* acc += weights v for `columns` vectors of 16 dimensions from `dim` on. */
INLINE void values(ml_row *rows, const ml_kv_tile *tile, const int n_rows, const int columns,
                   uint32_t dim, uint32_t (*weights)[QUADS], const float *step) {
    const size_t half_bytes = ml_int8_half_bytes(tile->head_dim);
    const char *near = tile->next, *far = near + half_bytes;
    const char *v = (const char *)tile->kv + half_bytes;
    size_t offset = dim / 16 * QUADS * LINE;
    __m512i sum[16];
    UNROLL for (int i = 0; i < n_rows * columns; i++) sum[i] = _mm512_setzero_si512();
    for (int quad = 0; quad < QUADS; quad++, offset += LINE) {
        UNROLL for (int c = 0; c < columns; c++) {
            const size_t line = offset + (size_t)c * QUADS * LINE;
            const __m512i quads = load_quads(v + line);
            fetch(far, near, line);
            UNROLL for (int r = 0; r < n_rows; r++) {
                __m512i *s = sum + r * columns + c;
                *s = _mm512_dpbusd_epi32(*s, broadcast_quad(&weights[r][quad]), quads);
            }
        }
    }
    UNROLL for (int i = 0; i < n_rows * columns; i++) {
        float *acc = rows[i / columns].acc + dim + 16 * (i % columns);
        const __m512 exact = _mm512_cvtepi32_ps(sum[i]);
        const __m512 worth = _mm512_set1_ps(step[i / columns]);
        _mm512_storeu_ps(acc, _mm512_fmadd_ps(exact, worth, _mm512_loadu_ps(acc)));
    }
}

INLINE void tile_rows(ml_row *rows, const ml_kv_tile *tile, const int n_rows) {
    _Alignas(64) uint32_t weights[ROWS][QUADS];
    const size_t half_bytes = ml_int8_half_bytes(tile->head_dim);
    const size_t v_scales = half_bytes + tile->head_dim * ML_BLOCK_TOKENS;
    const char *kv = tile->kv;
    __m512 score[ROWS];
    float step[ROWS];
    products(rows, tile, n_rows, score);
    weigh(rows, tile, n_rows, 0, score);
    const __m512 v_scale = _mm512_load_ps((const float *)(const void *)(kv + v_scales));
    fetch(tile->next, tile->next - half_bytes, v_scales);
    UNROLL for (int r = 0; r < n_rows; r++)
        step[r] = round_weights(rows + r, score[r], v_scale, weights[r]);
    const int columns = n_rows > 4 ? 2 : n_rows > 1 ? 4 : 8;
    uint32_t dim = 0;
    for (; dim + 16 * columns <= tile->head_dim; dim += 16 * columns)
        values(rows, tile, n_rows, columns, dim, weights, step);
    for (; dim < tile->head_dim; dim += 16) values(rows, tile, n_rows, 1, dim, weights, step);
}

DEFINE_TILE_FUNCTION(tile_int8, tile_rows, ROW_CASES_8)

const ml_kernel ml_avx512_vnni_int8 = {tile_int8, ROWS, ML_INT8};
