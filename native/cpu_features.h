/* Which instruction sets this machine can run, and which one the kernels use. */
#ifndef ML_CPU_FEATURES_H
#define ML_CPU_FEATURES_H

#include <stdint.h>

/* [cffi] */
/* Each one includes those before it. AVX2 means AVX2 + FMA; AVX512 means F + BW + DQ + VL. */
typedef enum {
    ML_ISA_SCALAR = 0,
    ML_ISA_AVX2 = 1,
    ML_ISA_AVX512 = 2,
    ML_ISA_AVX512_BF16 = 3,
    ML_ISA_COUNT = 4
} ml_isa;

/* "scalar", "avx2", "avx512" or "avx512_bf16"; NULL for anything else. */
const char *ml_isa_name(int isa);
/* Bit (1 << isa) is set where both the processor and the operating system support it. */
uint32_t ml_isa_supported_mask(void);
/* The one in use: what ml_isa_set chose last, at first the best that is supported. */
int ml_isa_selected(void);
/* Choose; returns 0, or -1 (and changes nothing) where `isa` is not supported. */
int ml_isa_set(int isa);
/* 1 where 8-bit dot products (AVX512_VNNI) may be used along with ML_ISA_AVX512. */
int ml_cpu_has_vnni(void);
/* With 0, ml_cpu_has_vnni says no from now on; with 1, what is true. */
void ml_cpu_allow_vnni(int allowed);
/* [/cffi] */

#endif
