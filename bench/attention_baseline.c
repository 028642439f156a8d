#include "attention_baseline.h"

#include <math.h>
#include <string.h>

enum { MAX_CONTEXT = 1 << 16 };

static inline float widen(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float dot(const uint16_t *restrict a, const uint16_t *restrict b, uint32_t n) {
    float sum = 0;
    for (uint32_t i = 0; i < n; i++) sum += widen(a[i]) * widen(b[i]);
    return sum;
}

static const uint16_t *block_of(const ml_attention_shape *shape, const ml_attend_task *task,
                                uint32_t token) {
    const size_t number = (size_t)task->block_table[token / ML_BLOCK_TOKENS];
    return (const uint16_t *)task->arena_layer + number * (ml_kv_block_bytes(shape) / 2);
}

static void attend_head(const ml_attention_shape *shape, const ml_attend_task *task,
                        uint32_t head) {
    static _Thread_local float weight[MAX_CONTEXT];
    const uint32_t dim = shape->head_dim, kv_width = shape->n_kv_heads * dim;
    const uint32_t kv_head = head / (shape->n_q_heads / shape->n_kv_heads);
    const uint16_t *q = (const uint16_t *)task->q + head * dim;
    float *restrict out = task->out + head * dim;
    float largest = -INFINITY, total = 0;
    for (uint32_t t = 0; t < task->kv_end; t++) {
        const uint32_t row = t % ML_BLOCK_TOKENS * kv_width + kv_head * dim;
        weight[t] = task->scale * dot(q, block_of(shape, task, t) + row, dim);
        largest = fmaxf(largest, weight[t]);
    }
    for (uint32_t t = 0; t < task->kv_end; t++) total += weight[t] = expf(weight[t] - largest);
    memset(out, 0, dim * sizeof *out);
    for (uint32_t t = 0; t < task->kv_end; t++) {
        const uint32_t row = (ML_BLOCK_TOKENS + t % ML_BLOCK_TOKENS) * kv_width + kv_head * dim;
        const uint16_t *restrict v = block_of(shape, task, t) + row;
        for (uint32_t d = 0; d < dim; d++) out[d] += weight[t] * widen(v[d]);
    }
    for (uint32_t d = 0; d < dim; d++) out[d] /= total;
    task->lse[head] = largest + logf(total);
}

void baseline_attend(const ml_attention_shape *shape, const ml_attend_task *task) {
    for (uint32_t head = 0; head < shape->n_q_heads; head++) attend_head(shape, task, head);
}

void baseline_read(const void *memory, size_t bytes) {
    const uint64_t *words = memory;
    uint64_t sum = 0;
    for (size_t i = 0; i < bytes / sizeof *words; i++) sum += words[i];
    __asm__ volatile("" : : "r"(sum)); /* or the loop would go */
}
