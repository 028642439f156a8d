/* What the AVX-512 files share. Include after the file's target pragma. Private. */
#ifndef ML_ATTENTION_AVX512_H
#define ML_ATTENTION_AVX512_H

#include <immintrin.h>

#include "attention_math.h"
#include "attention_x86.h"

/* p(f) with n coefficients, highest power first. */
INLINE __m512 polynomial(__m512 f, const float *coefficients, const int n) {
    __m512 p = _mm512_set1_ps(coefficients[0]);
    UNROLL for (int i = 1; i < n; i++)
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(coefficients[i]));
    return p;
}

/* 2^x; `precise` to FP32, else to BF16 and a good deal more. */
INLINE __m512 exp2_avx512(__m512 x, const int precise) {
    static const float degree6[] = ML_EXP2_D6, degree4[] = ML_EXP2_D4;
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    const __m512 p = precise ? polynomial(f, degree6, 7) : polynomial(f, degree4, 5);
    return _mm512_scalef_ps(p, x); /* p * 2^floor(x) */
}

/* Raises the row's reference to the maximum of the visible scores and rescales its sums; returns
 * score - reference. Seldom called. */
static __attribute__((noinline)) __m512 raise_reference(ml_row *row, const ml_kv_tile *tile,
                                                        __m512 score, __mmask16 visible) {
    score = _mm512_mul_ps(score, _mm512_set1_ps(tile->scale_log2));
    const float maximum = _mm512_mask_reduce_max_ps(visible, score);
    const float step = row->reference - maximum; /* -infinity for the first tile */
    const __m512 factor = _mm512_set1_ps(step < -126.0f ? 0.0f : ml_exp2(step));
    row->reference = maximum;
    _mm512_store_ps(row->sum, _mm512_mul_ps(factor, _mm512_load_ps(row->sum)));
    for (float *acc = row->acc; acc < row->acc + tile->head_dim; acc += 16)
        _mm512_storeu_ps(acc, _mm512_mul_ps(factor, _mm512_loadu_ps(acc)));
    return _mm512_sub_ps(score, _mm512_set1_ps(maximum));
}

/* Turns n_rows products q . k into weights 2^(scale q . k - reference), 0 where the row may not
 * see. */
INLINE void weigh(ml_row *rows, const ml_kv_tile *tile, const int n_rows, const int precise,
                  __m512 *score) {
    const __m512 scale = _mm512_set1_ps(tile->scale_log2);
    const __m512 slack = _mm512_set1_ps(ML_REFERENCE_SLACK);
    __mmask16 visible[8];
    UNROLL for (int r = 0; r < n_rows; r++) {
        visible[r] = (__mmask16)((1u << ml_visible_tokens(rows + r, tile)) - 1u);
        const __m512 x = _mm512_fmsub_ps(score[r], scale, _mm512_set1_ps(rows[r].reference));
        const __mmask16 over = _mm512_mask_cmp_ps_mask(visible[r], x, slack, _CMP_GT_OQ);
        if (__builtin_expect(over == 0, 1))
            score[r] = x;
        else
            score[r] = raise_reference(rows + r, tile, score[r], visible[r]);
    }
    UNROLL for (int r = 0; r < n_rows; r++)
        score[r] = _mm512_maskz_mov_ps(visible[r], exp2_avx512(score[r], precise));
}

#endif
