/* AVX-512 with BF16 dot products: 6 rows x 64 columns in 24 accumulators. */
#include <immintrin.h>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")
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

ML_INLINE void step_bf16(const int rows, const int vectors, V acc[][8], const char *const *row,
                         const char *panel, size_t word) {
    __m512i b[4];
    _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) b[v] =
        _mm512_load_si512(panel + word * 256 + v * 64);
    _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++) {
        const __m512i a = broadcast_word(row[r], word);
        _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) acc[r][v] =
            _mm512_dpbf16_ps(acc[r][v], (__m512bh)a, (__m512bh)b[v]);
    }
}

#include "gemm_avx512_fp32.h"
#include "gemm_tile.h"
#include "gemm_finish.h"
#include "layer_kernels.h"
#include "gemm_transpose_avx2.h"

const ml_kernels ml_kernels_avx512_bf16 = {
    .tile_bf16 = TILES(bf16),
    .tile_fp32 = TILES(fp32),
    .finish_row = finish_row,
    .transpose = transpose,
    LAYER_KERNELS,
};
