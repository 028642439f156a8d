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

/* 2^f for f in [0, 1): polynomials whose constant is 1, so that 2^0 is, fitted for the least
 * largest relative error: 2.0e-9 before rounding for degree 6, 2.9e-6 for degree 4. */
#define ML_EXP2_D6                                                         \
    {0x1.c54176p-13f, 0x1.46d64cp-10f, 0x1.3d0b92p-7f, 0x1.c68912p-5f,     \
     0x1.ebfd58p-3f,  0x1.62e42cp-1f,  1.0f}
#define ML_EXP2_D4 {0x1.b7f734p-7f, 0x1.abf868p-5f, 0x1.ee2452p-3f, 0x1.62d6c6p-1f, 1.0f}

/* 2^x for finite x <= 127; below -126 the result is 2^-126, nothing beside the sums here. */
static inline float ml_exp2(float x) {
    static const float coefficients[] = ML_EXP2_D6;
    x = x < -126.0f ? -126.0f : x;
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    const float shifted = (x - 0.5f) + magic;
    const float f = x - (shifted - magic); /* in [0, 1] */
    float p = coefficients[0];
    for (int i = 1; i < 7; i++) p = p * f + coefficients[i];
    /* The integer is in the low bits of `shifted`; add it to the exponent of p. */
    return ml_float_from_bits(ml_bits_from_float(p) + (ml_bits_from_float(shifted) << 23));
}

#endif
