/* From instruction set and KV dtype to kernel. */
#include "attention_kernels.h"
#include "cpu_features.h"

#include <stddef.h>

static const ml_kernel *const kernels[ML_ISA_COUNT][ML_BF16 + 1] = {
    [ML_ISA_SCALAR] = {[ML_FP32] = &ml_scalar_fp32, [ML_BF16] = &ml_scalar_bf16},
    [ML_ISA_AVX2] = {[ML_FP32] = &ml_avx2_fp32, [ML_BF16] = &ml_avx2_bf16},
    [ML_ISA_AVX512] = {[ML_FP32] = &ml_avx512_fp32, [ML_BF16] = &ml_avx512_bf16},
    [ML_ISA_AVX512_BF16] = {[ML_FP32] = &ml_avx512_fp32, [ML_BF16] = &ml_avx512_bf16_bf16},
};

const ml_kernel *ml_kernel_for(uint32_t kv_dtype) { return kernels[ml_isa_selected()][kv_dtype]; }

static ml_merge_row_fn *const merge_rows[ML_ISA_COUNT] = {
    [ML_ISA_SCALAR] = ml_scalar_merge_row,
    [ML_ISA_AVX2] = ml_avx2_merge_row,
    [ML_ISA_AVX512] = ml_avx512_merge_row,
    [ML_ISA_AVX512_BF16] = ml_avx512_merge_row,
};

ml_merge_row_fn *ml_merge_row(void) { return merge_rows[ml_isa_selected()]; }
