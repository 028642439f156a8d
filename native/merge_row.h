/* One row of a merge, for whatever instruction set the including file targets (all compute the same
 * bits). That file includes vector_math.h and defines ML_MERGE_ROW, the function's name. Private. */
#include "attention_kernels.h"

void ML_MERGE_ROW(const ml_merge_task *task, uint32_t row, const float *weights) {
    const size_t start = (size_t)row * task->head_dim;
    for (size_t at = start; at < start + task->head_dim; at += LANES) {
        f32x16 sum = {0};
        for (uint32_t i = 0; i < task->n_splits; i++) {
            const float *part = task->out_parts + i * task->out_split_stride;
            sum += splat(weights[i]) * load(ML_FP32, part, at, LANES);
        }
        store(task->out_dtype, task->out, at, LANES, sum);
    }
}
