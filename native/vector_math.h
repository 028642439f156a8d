/* Sixteen lanes of plain arithmetic for whatever instruction set the including file targets.
 *
 * Included once by each gemm_<isa>.c, after its target pragma: GCC lowers the 64-byte vectors to
 * what there is. All operations are single roundings in a fixed order (the build says
 * -ffp-contract=off), so every instruction set computes the same bits. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "dtype.h"

#define ML_INLINE static inline __attribute__((always_inline))

typedef float f32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

enum { LANES = 16 };

ML_INLINE f32x16 splat(float x) { return x - (f32x16){0}; }

ML_INLINE f32x16 choose(i32x16 mask, f32x16 yes, f32x16 no) {
    return (f32x16)(((u32x16)mask & (u32x16)yes) | (~(u32x16)mask & (u32x16)no));
}

/* Upper halves of the words after rounding to nearest even; NaN stays NaN. */
ML_INLINE u32x16 round_bf16_bits(f32x16 x) {
    u32x16 bits = (u32x16)x;
    u32x16 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    u32x16 is_nan = (u32x16)((bits & 0x7fffffffu) > 0x7f800000u);
    return (is_nan & (bits | 0x400000u)) | (~is_nan & rounded);
}

ML_INLINE f32x16 round_bf16(f32x16 x) { return (f32x16)(round_bf16_bits(x) & 0xffff0000u); }

ML_INLINE f32x16 widen_bf16(u16x16 x) { return (f32x16)(__builtin_convertvector(x, u32x16) << 16); }

/* To the precision of `dtype`, as FP32. */
ML_INLINE f32x16 round_to(uint32_t dtype, f32x16 x) { return dtype == ML_BF16 ? round_bf16(x) : x; }

ML_INLINE size_t dtype_bytes(uint32_t dtype) { return dtype == ML_BF16 ? 2 : 4; }

/* Elements i ... i+15 of an array of `dtype`, of which `n` <= 16 exist; the others are 0. */
ML_INLINE f32x16 load(uint32_t dtype, const void *array, size_t i, size_t n) {
    const char *from = (const char *)array + i * dtype_bytes(dtype);
    if (dtype == ML_BF16) {
        u16x16 half = {0};
        if (n >= LANES)
            memcpy(&half, from, sizeof half);
        else
            memcpy(&half, from, n * 2);
        return widen_bf16(half);
    }
    f32x16 full = {0};
    if (n >= LANES)
        memcpy(&full, from, sizeof full);
    else
        memcpy(&full, from, n * 4);
    return full;
}

ML_INLINE void store(uint32_t dtype, void *array, size_t i, size_t n, f32x16 x) {
    char *to = (char *)array + i * dtype_bytes(dtype);
    if (dtype == ML_BF16) {
        u16x16 half = __builtin_convertvector(round_bf16_bits(x) >> 16, u16x16);
        if (n >= LANES)
            memcpy(to, &half, sizeof half);
        else
            memcpy(to, &half, n * 2);
    } else if (n >= LANES) {
        memcpy(to, &x, sizeof x);
    } else {
        memcpy(to, &x, n * 4);
    }
}

/* Sum and maximum over the lanes, always in the same tree. */
ML_INLINE float sum_lanes(f32x16 x) {
    float lanes[LANES];
    memcpy(lanes, &x, sizeof lanes);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

ML_INLINE float max_lanes(f32x16 x) {
    float lanes[LANES];
    memcpy(lanes, &x, sizeof lanes);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++)
            if (lanes[i + width] > lanes[i]) lanes[i] = lanes[i + width];
    return lanes[0];
}

/* e^x within 2 ulp for x in [-87, 88], beyond that its value at the border; NaN gives NaN.
 * x = n ln 2 + r, |r| <= ln 2 / 2; e^r by its Taylor polynomial of degree 7. */
ML_INLINE f32x16 exp_lanes(f32x16 x) {
    x = choose(x > 88.0f, splat(88.0f), x);
    x = choose(x < -87.0f, splat(-87.0f), x);
    const float to_integer = 12582912.0f; /* 1.5 * 2^23: the sum's low mantissa bits are round(x) */
    f32x16 shifted = x * 1.44269504f + to_integer;
    f32x16 n = shifted - to_integer;
    f32x16 r = x - n * 0.693359375f; /* ln 2 in two parts; the first product is exact */
    r = r - n * -2.12194440e-4f;
    f32x16 p = splat(1.0f / 5040.0f);
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    u32x16 exponent = ((u32x16)shifted - 0x4b400000u + 127u) << 23;
    return p * (f32x16)exponent;
}

ML_INLINE f32x16 silu_lanes(f32x16 x) { return x / (1.0f + exp_lanes(-x)); }
