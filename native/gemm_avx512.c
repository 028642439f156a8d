/* AVX-512 without BF16 arithmetic: words are widened to FP32, even k first. */
#include <immintrin.h>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#include "vector_math.h"

#define V                  __m512
#define V_LANES            16
#define BF16_VECTORS(rows) 4
#define FP32_VECTORS(rows) 4

ML_INLINE V v_zero(void) { return _mm512_setzero_ps(); }
ML_INLINE V v_load(const float *p) { return _mm512_loadu_ps(p); }
ML_INLINE void v_store(float *p, V x) { _mm512_storeu_ps(p, x); }

ML_INLINE __m512i broadcast_word(const char *row, size_t word) {
    int32_t bits;
    memcpy(&bits, row + word * 4, sizeof bits);
    return _mm512_set1_epi32(bits);
}

/* The word's two BF16 numbers as FP32: the one at even k, then the one at odd k. */
ML_INLINE V even_k(__m512i words) { return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16)); }
ML_INLINE V odd_k(__m512i words) {
    return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000)));
}

ML_INLINE void step_bf16(const int rows, const int vectors, V acc[][8], const char *const *row,
                         const char *panel, size_t word) {
    _Pragma("GCC unroll 2") for (int odd = 0; odd < 2; odd++) {
        V b[4];
        _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) {
            const __m512i words = _mm512_load_si512(panel + word * 256 + v * 64);
            b[v] = odd ? odd_k(words) : even_k(words);
        }
        _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++) {
            const __m512i words = broadcast_word(row[r], word);
            const V a = odd ? odd_k(words) : even_k(words);
            _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) acc[r][v] =
                _mm512_fmadd_ps(a, b[v], acc[r][v]);
        }
    }
}

#include "gemm_avx512_fp32.h"
#include "gemm_tile.h"
#include "gemm_finish.h"
#include "layer_kernels.h"
#include "gemm_transpose_avx2.h"

const ml_kernels ml_kernels_avx512 = {
    .tile_bf16 = TILES(bf16),
    .tile_fp32 = TILES(fp32),
    .finish_row = finish_row,
    .transpose = transpose,
    LAYER_KERNELS,
};
