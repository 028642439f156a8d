/* Merge of the results of several KV ranges by log-sum-exp. */
#include "attention.h"
#include "attention_math.h"

#include <assert.h>
#include <math.h>

/* More ranges than anyone needs; weights live on the stack. */
enum { MAX_SPLITS = 4096, CHUNK = 16 };

/* weight[i] = exp(lse_i - max) / sum; returns the merged lse, -infinity where all parts are empty. */
static float merge_weights(const ml_merge_task *task, uint32_t row, float *weight) {
    const float *lse = task->lse_parts + row;
    float maximum = -INFINITY, sum = 0.0f;
    for (uint32_t i = 0; i < task->n_splits; i++)
        maximum = fmaxf(maximum, lse[i * task->lse_split_stride]);
    for (uint32_t i = 0; i < task->n_splits; i++) {
        const float part = lse[i * task->lse_split_stride];
        weight[i] = part == -INFINITY ? 0.0f : expf(part - maximum);
        sum += weight[i];
    }
    if (sum == 0.0f) return -INFINITY;
    for (uint32_t i = 0; i < task->n_splits; i++) weight[i] /= sum;
    return maximum + logf(sum);
}

static void store_chunk(const ml_merge_task *task, size_t at, const float *value) {
    if (task->out_dtype == ML_FP32) {
        memcpy((float *)task->out + at, value, CHUNK * sizeof(float));
        return;
    }
    uint16_t *out = (uint16_t *)task->out + at;
    for (int i = 0; i < CHUNK; i++) out[i] = ml_bf16_from_float(value[i]);
}

static void merge_row(const ml_merge_task *task, uint32_t row, const float *weight) {
    const size_t start = (size_t)row * task->head_dim;
    for (size_t d = start; d < start + task->head_dim; d += CHUNK) {
        float sum[CHUNK] = {0};
        for (uint32_t i = 0; i < task->n_splits; i++) {
            const float *part = task->out_parts + i * task->out_split_stride + d;
            for (int j = 0; j < CHUNK; j++) sum[j] += weight[i] * part[j];
        }
        store_chunk(task, d, sum);
    }
}

void ml_merge(const ml_merge_task *task) {
    assert(task->n_splits <= MAX_SPLITS);
    assert(task->head_dim % CHUNK == 0);
    float weight[MAX_SPLITS];
    for (uint32_t row = 0; row < task->n_rows; row++) {
        const float lse = merge_weights(task, row, weight);
        merge_row(task, row, weight);
        if (task->lse) task->lse[row] = lse;
    }
}
