/* From instruction set and KV dtype to kernel. */
#include "attention_kernels.h"
#include "cpu_features.h"

#include <stddef.h>

static const ml_kernel *const kernels[ML_ISA_COUNT][ML_INT8 + 1] = {
    [ML_ISA_SCALAR] = {[ML_FP32] = &ml_scalar_fp32,
                       [ML_BF16] = &ml_scalar_bf16,
                       [ML_INT8] = &ml_scalar_int8},
    [ML_ISA_AVX2] = {[ML_FP32] = &ml_avx2_fp32,
                     [ML_BF16] = &ml_avx2_bf16,
                     [ML_INT8] = &ml_avx2_int8},
    [ML_ISA_AVX512] = {[ML_FP32] = &ml_avx512_fp32,
                       [ML_BF16] = &ml_avx512_bf16,
                       [ML_INT8] = &ml_avx512_int8},
    [ML_ISA_AVX512_BF16] = {[ML_FP32] = &ml_avx512_fp32,
                            [ML_BF16] = &ml_avx512_bf16_bf16,
                            [ML_INT8] = &ml_avx512_int8},
};

const ml_kernel *ml_kernel_for(uint32_t kv_dtype) {
    const int isa = ml_isa_selected();
    if (kv_dtype == ML_INT8 && isa >= ML_ISA_AVX512 && ml_cpu_has_vnni())
        return &ml_avx512_vnni_int8;
    return kernels[isa][kv_dtype];
}

static ml_merge_row_fn *const merge_rows[ML_ISA_COUNT] = {
    [ML_ISA_SCALAR] = ml_scalar_merge_row,
    [ML_ISA_AVX2] = ml_avx2_merge_row,
    [ML_ISA_AVX512] = ml_avx512_merge_row,
    [ML_ISA_AVX512_BF16] = ml_avx512_merge_row,
};

ml_merge_row_fn *ml_merge_row(void) { return merge_rows[ml_isa_selected()]; }
