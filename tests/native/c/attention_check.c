/* Runs store, attention and merge over random shapes with every instruction set of the machine, in
 * buffers of exactly the size needed, for AddressSanitizer and UBSan; results are compared with
 * double arithmetic. Prints a line per instruction set; exit status 1 on a difference. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "attention_math.h"
#include "cpu_features.h"

typedef struct {
    ml_attention_shape shape;
    uint32_t context, n_queries, n_blocks;
    size_t element_bytes;
    void *q, *k, *v, *arena;
    int32_t *table;
    float *out, *lse;
} sample;

static uint64_t random_state;

static uint32_t random_below(uint32_t limit) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 33) % limit;
}

static float random_value(void) { return (float)random_below(65536) / 16384.0f - 2.0f; }

static void *random_rows(const sample *s, size_t n) {
    char *rows = malloc(n * s->element_bytes);
    for (size_t i = 0; i < n; i++) {
        const float value = random_value();
        const uint16_t half = ml_bf16_from_float(value);
        memcpy(rows + i * s->element_bytes, s->element_bytes == 4 ? (const void *)&value : &half,
               s->element_bytes);
    }
    return rows;
}

static double element(const sample *s, const void *rows, size_t index) {
    if (s->element_bytes == 4) return ((const float *)rows)[index];
    return ml_float_from_bf16(((const uint16_t *)rows)[index]);
}

static void make_table(sample *s) {
    s->n_blocks = (s->context + ML_BLOCK_TOKENS - 1) / ML_BLOCK_TOKENS;
    s->table = malloc(s->n_blocks * sizeof *s->table);
    for (uint32_t i = 0; i < s->n_blocks; i++) {
        const uint32_t other = random_below(i + 1);
        s->table[i] = s->table[other];
        s->table[other] = (int32_t)i;
    }
}

static sample make_sample(void) {
    sample s = {0};
    s.shape.n_kv_heads = 1 + random_below(4);
    s.shape.n_q_heads = s.shape.n_kv_heads * (1 + random_below(12));
    s.shape.head_dim = 16 * (1 + random_below(16));
    s.shape.kv_dtype = ML_FP32 + random_below(3);
    s.element_bytes = s.shape.kv_dtype == ML_FP32 ? 4 : 2;
    s.context = 1 + random_below(90);
    s.n_queries = 1 + random_below(s.context < 12 ? s.context : 12);
    make_table(&s);
    const size_t kv_values = (size_t)s.context * s.shape.n_kv_heads * s.shape.head_dim;
    const size_t q_rows = (size_t)s.n_queries * s.shape.n_q_heads;
    s.q = random_rows(&s, q_rows * s.shape.head_dim);
    s.k = random_rows(&s, kv_values);
    s.v = random_rows(&s, kv_values);
    s.out = malloc(q_rows * s.shape.head_dim * sizeof(float));
    s.lse = malloc(q_rows * sizeof(float));
    const size_t arena_bytes = s.n_blocks * ml_kv_block_bytes(&s.shape);
    s.arena = aligned_alloc(64, arena_bytes);
    memset(s.arena, 0xff, arena_bytes); /* NaN */
    memset(s.out, 0xff, q_rows * s.shape.head_dim * sizeof(float));
    memset(s.lse, 0xff, q_rows * sizeof(float));
    return s;
}

static void free_sample(sample *s) {
    void *all[] = {s->q, s->k, s->v, s->arena, s->table, s->out, s->lse};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

/* Difference and size (squared) of one row's output against double arithmetic. */
static void compare_row(const sample *s, uint32_t query, uint32_t head, double *difference,
                        double *size) {
    const uint32_t dim = s->shape.head_dim, n_kv = s->shape.n_kv_heads;
    const uint32_t kv_head = head / (s->shape.n_q_heads / n_kv);
    const uint32_t visible = s->context - s->n_queries + query + 1;
    const size_t row = (size_t)query * s->shape.n_q_heads + head;
    double expected[ML_MAX_HEAD_DIM] = {0}, total = 0;
    for (uint32_t t = 0; t < visible; t++) {
        const size_t at = ((size_t)t * n_kv + kv_head) * dim;
        double score = 0;
        for (uint32_t d = 0; d < dim; d++)
            score += element(s, s->q, row * dim + d) * element(s, s->k, at + d);
        const double weight = exp(score / sqrt(dim)); /* at most e^64 */
        for (uint32_t d = 0; d < dim; d++) expected[d] += weight * element(s, s->v, at + d);
        total += weight;
    }
    for (uint32_t d = 0; d < dim; d++) {
        const double delta = s->out[row * dim + d] - expected[d] / total;
        *difference += delta * delta;
        *size += expected[d] / total * expected[d] / total;
    }
}

static void merge_in_place(sample *s) {
    const uint32_t n_rows = s->n_queries * s->shape.n_q_heads;
    ml_merge_task merge = {.out_parts = s->out, .lse_parts = s->lse, .out = s->out,
                           .n_splits = 1, .n_rows = n_rows, .head_dim = s->shape.head_dim,
                           .out_dtype = ML_FP32};
    ml_merge(&merge);
}

static double run_sample(void) {
    sample s = make_sample();
    const size_t kv_stride = s.shape.n_kv_heads * s.shape.head_dim * s.element_bytes;
    const uint32_t head_start = s.context / 3;
    ml_kv_store(&s.shape, s.arena, s.table, 0, head_start, s.k, s.v, kv_stride);
    ml_kv_store(&s.shape, s.arena, s.table, head_start, s.context - head_start,
                (char *)s.k + head_start * kv_stride, (char *)s.v + head_start * kv_stride,
                kv_stride);
    ml_attend_task task = {.arena_layer = s.arena, .block_table = s.table, .q = s.q,
                           .q_row_stride_bytes =
                               s.shape.n_q_heads * s.shape.head_dim * s.element_bytes,
                           .out = s.out, .lse = s.lse, .kv_end = s.context,
                           .n_queries = s.n_queries,
                           .query_position = s.context - s.n_queries,
                           .scale = 1.0f / sqrtf((float)s.shape.head_dim)};
    ml_attend(&s.shape, &task);
    merge_in_place(&s);
    double difference = 0, size = 0;
    for (uint32_t query = 0; query < s.n_queries; query++)
        for (uint32_t head = 0; head < s.shape.n_q_heads; head++)
            compare_row(&s, query, head, &difference, &size);
    static const double limits[] = {[ML_FP32] = 2e-6, [ML_BF16] = 4e-3, [ML_INT8] = 2e-2};
    const double error = sqrt(difference / size) / limits[s.shape.kv_dtype];
    free_sample(&s);
    return error;
}

int main(int argc, char **argv) {
    const int n_samples = argc > 1 ? atoi(argv[1]) : 40;
    int failed = 0;
    for (int isa = 0; isa < ML_ISA_COUNT; isa++) {
        if (ml_isa_set(isa) != 0) continue;
        random_state = 1;
        double worst = 0;
        for (int i = 0; i < n_samples; i++) {
            const double error = run_sample();
            if (!(error < 1)) failed = 1; /* NaN fails as well */
            worst = error > worst ? error : worst;
        }
        printf("%s: %d samples, largest error %.2f of the limit\n", ml_isa_name(isa), n_samples,
               worst);
    }
    return failed;
}
