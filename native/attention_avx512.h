/* What the AVX-512 files share. Include after the file's target pragma. Private. */
#ifndef ML_ATTENTION_AVX512_H
#define ML_ATTENTION_AVX512_H

#include <immintrin.h>

#include "attention_math.h"
#include "attention_x86.h"

/* 2^x as in ml_exp2, but exact zero far below. */
INLINE __m512 exp2_avx512(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_set1_ps(ML_EXP2_C6);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(ML_EXP2_C5));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(ML_EXP2_C4));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(ML_EXP2_C3));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(ML_EXP2_C2));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(ML_EXP2_C1));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(ML_EXP2_C0));
    return _mm512_scalef_ps(p, whole);
}

/* Raises the row's reference to the maximum of the visible scores; returns the factor for its
 * earlier sums. Seldom called. */
static __attribute__((noinline)) float raise_reference(ml_row *row, __m512 score,
                                                       __mmask16 visible) {
    const float maximum = _mm512_mask_reduce_max_ps(visible, score);
    const float step = row->reference - maximum; /* -infinity for the first tile */
    row->reference = maximum;
    return step < -126.0f ? 0.0f : ml_exp2(step);
}

/* Turns n_rows scores into weights 2^(scale score - reference), 0 where the row may not see;
 * rescale[r] is what the row's earlier sums are to be multiplied with. */
INLINE void weigh(ml_row *rows, const ml_tile *tile, const int n_rows, __m512 *score,
                  float *rescale) {
    __mmask16 visible[8];
    UNROLL for (int r = 0; r < n_rows; r++) {
        score[r] = _mm512_mul_ps(score[r], _mm512_set1_ps(tile->scale_log2));
        visible[r] = (__mmask16)((1u << ml_visible_tokens(rows + r, tile)) - 1u);
        const __m512 limit = _mm512_set1_ps(rows[r].reference + ML_REFERENCE_SLACK);
        rescale[r] = 1.0f;
        if (__builtin_expect(_mm512_mask_cmp_ps_mask(visible[r], score[r], limit, _CMP_GT_OQ), 0))
            rescale[r] = raise_reference(rows + r, score[r], visible[r]);
    }
    UNROLL for (int r = 0; r < n_rows; r++) {
        const __m512 x = _mm512_sub_ps(score[r], _mm512_set1_ps(rows[r].reference));
        score[r] = _mm512_maskz_mov_ps(visible[r], exp2_avx512(x));
    }
}

INLINE void add_weights(ml_row *row, __m512 weight, float rescale) {
    const __m512 sum = _mm512_load_ps(row->sum);
    _mm512_store_ps(row->sum, _mm512_fmadd_ps(sum, _mm512_set1_ps(rescale), weight));
}

INLINE void add_scaled(float *acc, __m512 sum, float rescale) {
    const __m512 earlier = _mm512_loadu_ps(acc);
    _mm512_storeu_ps(acc, _mm512_fmadd_ps(earlier, _mm512_set1_ps(rescale), sum));
}

#endif
