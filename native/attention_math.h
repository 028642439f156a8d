/* Numbers that all kernels share: BF16 conversion and the coefficients of 2^x. Private. */
#ifndef ML_ATTENTION_MATH_H
#define ML_ATTENTION_MATH_H

#include <stdint.h>
#include <string.h>

#define ML_LOG2E 1.44269504088896340736f
#define ML_LN2 0.693147180559945309417f

static inline float ml_float_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t ml_bits_from_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float ml_float_from_bf16(uint16_t value) {
    return ml_float_from_bits((uint32_t)value << 16);
}

/* Round to nearest, ties to even; NaN stays a (quiet) NaN. */
static inline uint16_t ml_bf16_from_float(float value) {
    const uint32_t bits = ml_bits_from_float(value);
    if (value != value) return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/* 2^f for f in [-0.5, 0.5]: the minimax polynomial of degree 6 for relative error (1.9e-9 before
 * rounding; found by Remez exchange). The constant is exactly 1, so that 2^0 is. */
#define ML_EXP2_C0 0x1.000000p+0f
#define ML_EXP2_C1 0x1.62e430p-1f
#define ML_EXP2_C2 0x1.ebfbdap-3f
#define ML_EXP2_C3 0x1.c6aed4p-5f
#define ML_EXP2_C4 0x1.3b2dbcp-7f
#define ML_EXP2_C5 0x1.5f456ap-10f
#define ML_EXP2_C6 0x1.41d334p-13f

/* 2^x for finite x <= 127; below -126 the result is 2^-126, which is nothing beside the sums here. */
static inline float ml_exp2(float x) {
    x = x < -126.0f ? -126.0f : x;
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    const float shifted = x + magic;
    const float f = x - (shifted - magic);
    float p = ML_EXP2_C6;
    p = p * f + ML_EXP2_C5;
    p = p * f + ML_EXP2_C4;
    p = p * f + ML_EXP2_C3;
    p = p * f + ML_EXP2_C2;
    p = p * f + ML_EXP2_C1;
    p = p * f + ML_EXP2_C0;
    /* The integer is in the low bits of `shifted`; add it to the exponent of p. */
    return ml_float_from_bits(ml_bits_from_float(p) + (ml_bits_from_float(shifted) << 23));
}

#endif
