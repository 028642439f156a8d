/* AVX2 + FMA: passes of 16 columns, 12 accumulators; few rows take more columns at once. */
#include <immintrin.h>

#pragma GCC target("avx2,fma")
#include "vector_math.h"

#define V                  __m256
#define V_LANES            8
#define BF16_VECTORS(rows) ((rows) == 1 ? 8 : (rows) == 2 ? 4 : 2)
#define FP32_VECTORS(rows) BF16_VECTORS(rows)

ML_INLINE V v_zero(void) { return _mm256_setzero_ps(); }
ML_INLINE V v_load(const float *p) { return _mm256_loadu_ps(p); }
ML_INLINE void v_store(float *p, V x) { _mm256_storeu_ps(p, x); }

ML_INLINE __m256i broadcast_word(const char *row, size_t word) {
    int32_t bits;
    memcpy(&bits, row + word * 4, sizeof bits);
    return _mm256_set1_epi32(bits);
}

/* The word's two BF16 numbers as FP32: the one at even k, then the one at odd k. */
ML_INLINE V even_k(__m256i words) { return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16)); }
ML_INLINE V odd_k(__m256i words) {
    return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32((int)0xffff0000)));
}

ML_INLINE __m256i panel_words(const char *panel, size_t word, int vector) {
    return _mm256_load_si256((const __m256i *)(panel + word * 256 + vector * 32));
}

ML_INLINE void step_bf16(const int rows, const int vectors, V acc[][8], const char *const *row,
                         const char *panel, size_t word) {
    _Pragma("GCC unroll 2") for (int odd = 0; odd < 2; odd++) {
        /* Hides that both halves load the same words: kept from one to the other they would push
         * accumulators out of the 16 registers. */
        __asm__("" : "+r"(word));
        V b[8];
        _Pragma("GCC unroll 8") for (int v = 0; v < vectors; v++) {
            const __m256i words = panel_words(panel, word, v);
            b[v] = odd ? odd_k(words) : even_k(words);
        }
        _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++) {
            const __m256i words = broadcast_word(row[r], word);
            const V a = odd ? odd_k(words) : even_k(words);
            _Pragma("GCC unroll 8") for (int v = 0; v < vectors; v++) acc[r][v] =
                _mm256_fmadd_ps(a, b[v], acc[r][v]);
        }
    }
}

ML_INLINE void step_fp32(const int rows, const int vectors, V acc[][8], const char *const *row,
                         const char *panel, size_t word) {
    V b[8];
    _Pragma("GCC unroll 8") for (int v = 0; v < vectors; v++) b[v] =
        _mm256_castsi256_ps(panel_words(panel, word, v));
    _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++) {
        const V a = _mm256_castsi256_ps(broadcast_word(row[r], word));
        _Pragma("GCC unroll 8") for (int v = 0; v < vectors; v++) acc[r][v] =
            _mm256_fmadd_ps(a, b[v], acc[r][v]);
    }
}

#include "gemm_tile.h"
#include "gemm_finish.h"
#include "layer_kernels.h"
#include "gemm_transpose_avx2.h"

const ml_kernels ml_kernels_avx2 = {
    .tile_bf16 = TILES(bf16),
    .tile_fp32 = TILES(fp32),
    .finish_row = finish_row,
    .transpose = transpose,
    LAYER_KERNELS,
};
