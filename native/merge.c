/* Merge of the results of several KV ranges by log-sum-exp. */
#include "attention_kernels.h"

#include <assert.h>
#include <math.h>

/* More ranges than anyone needs; weights live on the stack. */
enum { MAX_SPLITS = 4096 };

/* weights[i] = exp(lse_i - max) / sum; returns the merged lse, -infinity where all parts are
 * empty. */
static float merge_weights(const ml_merge_task *task, uint32_t row, float *weights) {
    const float *lse = task->lse_parts + row;
    float maximum = -INFINITY, sum = 0.0f;
    for (uint32_t i = 0; i < task->n_splits; i++)
        maximum = fmaxf(maximum, lse[i * task->lse_split_stride]);
    for (uint32_t i = 0; i < task->n_splits; i++) {
        const float part = lse[i * task->lse_split_stride];
        weights[i] = part == -INFINITY ? 0.0f : expf(part - maximum);
        sum += weights[i];
    }
    if (sum == 0.0f) return -INFINITY;
    for (uint32_t i = 0; i < task->n_splits; i++) weights[i] /= sum;
    return maximum + logf(sum);
}

void ml_merge(const ml_merge_task *task) {
    assert(task->n_splits <= MAX_SPLITS);
    assert(task->head_dim % 16 == 0);
    ml_merge_row_fn *const merge_row = ml_merge_row();
    float weights[MAX_SPLITS];
    for (uint32_t row = 0; row < task->n_rows; row++) {
        float lse = task->lse_parts[row];
        weights[0] = 1.0f;
        if (task->n_splits > 1) lse = merge_weights(task, row, weights);
        merge_row(task, row, weights);
        if (task->lse) task->lse[row] = lse;
    }
}
