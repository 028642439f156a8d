/* Runs packing, products, the expert block and the layer operations over random shapes with every
 * instruction set of the machine, in buffers of exactly the size needed, for AddressSanitizer and
 * UBSan; products are compared with double arithmetic. Prints a line per instruction set; exit
 * status 1 on a difference. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu_features.h"
#include "host_memory.h"
#include "moe.h"

static uint64_t random_state;
static ml_pool *pool;

static uint32_t random_below(uint32_t limit) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 33) % limit;
}

static size_t element_bytes(uint32_t dtype) { return dtype == ML_BF16 ? 2 : 4; }

/* Small multiples of 1/8: exact in BF16. */
static void *random_matrix(size_t n, uint32_t dtype) {
    char *m = malloc(n * element_bytes(dtype));
    for (size_t i = 0; i < n; i++) {
        const float value = (float)random_below(33) / 8.0f - 2.0f;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        const uint16_t half = (uint16_t)(bits >> 16);
        memcpy(m + i * element_bytes(dtype), dtype == ML_BF16 ? (const void *)&half : &value,
               element_bytes(dtype));
    }
    return m;
}

static double element(const void *m, size_t i, uint32_t dtype) {
    if (dtype == ML_FP32) return ((const float *)m)[i];
    const uint32_t bits = (uint32_t)((const uint16_t *)m)[i] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void *pack_rows(const void *source, size_t n, size_t k, uint32_t from, uint32_t to) {
    void *packed = aligned_alloc(64, ml_packed_size_bytes(n, k, to));
    const size_t cut = random_below((uint32_t)n + 1), row = k * element_bytes(from);
    ml_pack_call call = {.packed = packed,
                         .source = source,
                         .source_stride_bytes = row,
                         .n = n,
                         .k = k,
                         .n_rows = cut,
                         .packed_dtype = to,
                         .source_dtype = from};
    ml_pack(pool, &call);
    call.source = (const char *)source + cut * row;
    call.first_row = cut;
    call.n_rows = n - cut;
    ml_pack(pool, &call);
    return packed;
}

static int check_product(void) {
    const uint32_t dtype = random_below(2) ? ML_BF16 : ML_FP32;
    const uint32_t from = random_below(2) ? ML_BF16 : ML_FP32;
    const size_t m = 1 + random_below(random_below(8) ? 20 : 120);
    const size_t n = 1 + random_below(150), k = 1 + random_below(random_below(8) ? 90 : 2500);
    void *a = random_matrix(m * k, dtype), *w = random_matrix(n * k, from);
    const void *packed = pack_rows(w, n, k, from, dtype);
    float *out = malloc(m * n * sizeof *out);
    memset(out, 0xff, m * n * sizeof *out);
    const int32_t offsets[2] = {0, (int32_t)m};
    ml_gemm(pool, &(ml_gemm_call){.offsets = offsets,
                                  .weights = &packed,
                                  .a = a,
                                  .a_stride_bytes = k * element_bytes(dtype),
                                  .out = out,
                                  .out_stride_bytes = n * sizeof *out,
                                  .n_groups = 1,
                                  .n_out = (uint32_t)n,
                                  .k = (uint32_t)k,
                                  .dtype = dtype,
                                  .out_dtype = ML_FP32});
    int wrong = 0;
    for (size_t i = 0; i < m && !wrong; i++)
        for (size_t j = 0; j < n; j++) {
            double sum = 0;
            for (size_t l = 0; l < k; l++)
                sum += element(a, i * k + l, dtype) * element(w, j * k + l, from);
            wrong |= !(fabs(out[i * n + j] - sum) <= 1e-6 * (double)k * 4);
        }
    if (wrong) printf("product of (%zu, %zu, %zu) differs\n", m, n, k);
    free(a), free(w), free((void *)(uintptr_t)packed), free(out);
    return wrong;
}

static void *packed_pair(size_t n, size_t k, uint32_t dtype) {
    void *packed = aligned_alloc(64, ml_packed_pair_size_bytes(n, k, dtype));
    for (uint32_t role = ML_PACK_GATE; role <= ML_PACK_UP; role++) {
        void *source = random_matrix(n * k, dtype);
        ml_pack(pool, &(ml_pack_call){.packed = packed,
                                      .source = source,
                                      .source_stride_bytes = k * element_bytes(dtype),
                                      .n = n,
                                      .k = k,
                                      .n_rows = n,
                                      .packed_dtype = dtype,
                                      .source_dtype = dtype,
                                      .role = role});
        free(source);
    }
    return packed;
}

static void *packed_random(size_t n, size_t k, uint32_t dtype) {
    void *source = random_matrix(n * k, dtype), *packed = pack_rows(source, n, k, dtype, dtype);
    free(source);
    return packed;
}

/* The whole block; every output must be written (a finite number). */
static int check_experts(void) {
    enum { EXPERTS = 5 };
    ml_moe_call call = {.shape = {.n_tokens = 1 + random_below(40),
                                  .hidden = 1 + random_below(80),
                                  .inner = 1 + random_below(80),
                                  .n_experts = EXPERTS,
                                  .top_k = 1 + random_below(EXPERTS),
                                  .renormalise = 1,
                                  .dtype = random_below(2) ? ML_BF16 : ML_FP32}};
    const uint32_t dtype = call.shape.dtype;
    const size_t n = call.shape.n_tokens * call.shape.hidden;
    void *x = random_matrix(n, dtype), *out = malloc(n * element_bytes(dtype));
    void *router = packed_random(EXPERTS, call.shape.hidden, dtype), *gate_up[EXPERTS],
         *down[EXPERTS];
    for (int e = 0; e < EXPERTS; e++) {
        gate_up[e] = packed_pair(call.shape.inner, call.shape.hidden, dtype);
        down[e] = packed_random(call.shape.hidden, call.shape.inner, dtype);
    }
    memset(out, 0xff, n * element_bytes(dtype));
    call.x = call.residual = x;
    call.out = out;
    call.x_stride_bytes = call.residual_stride_bytes = call.out_stride_bytes =
        call.shape.hidden * element_bytes(dtype);
    call.router = router;
    call.gate_up = (const void *const *)gate_up;
    call.down = (const void *const *)down;
    call.workspace = aligned_alloc(64, ml_moe_workspace_bytes(&call.shape));
    ml_moe(pool, &call);
    int wrong = 0;
    for (size_t i = 0; i < n; i++) wrong |= !isfinite(element(out, i, dtype));
    if (wrong) printf("expert block left outputs unwritten\n");
    for (int e = 0; e < EXPERTS; e++) free(gate_up[e]), free(down[e]);
    free(x), free(out), free(router), free(call.workspace);
    return wrong;
}

/* Norm, rotary, argmax and conversion on rows with odd tails. */
static int check_rows(void) {
    const uint32_t dtype = random_below(2) ? ML_BF16 : ML_FP32, half = 1 + random_below(20);
    const size_t rows = 1 + random_below(9), dim = 2 * half + random_below(3), n = 3 * dim;
    const size_t size = element_bytes(dtype), row = n * size;
    void *x = random_matrix(rows * n, dtype), *weight = random_matrix(n, dtype);
    void *out = malloc(rows * row), *q = malloc(rows * dim * size), *k = malloc(rows * dim * size),
         *v = malloc(rows * dim * size), *angles = random_matrix(4 * half, ML_FP32);
    int64_t *best = malloc(rows * sizeof *best);
    int32_t *at = calloc(rows, sizeof *at);
    float *wide = malloc(rows * n * sizeof *wide);
    at[rows - 1] = 3;
    ml_rms_norm(pool,
                &(ml_rms_norm_call){x, NULL, weight, out, row, 0, row, rows, n, 1e-5f, dtype});
    ml_rotary(pool,
              &(ml_rotary_call){x, at, angles, angles, NULL, q, k, v, row, dim * size, dim * size,
                                dim * size, rows, 1, 1, (uint32_t)dim, 2 * half, dtype});
    ml_argmax(pool, x, row, rows, n, dtype, best);
    ml_convert(pool, x, row, dtype, wide, n * sizeof *wide, ML_FP32, rows, n);
    int wrong = 0;
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < n; i++) {
            const double value = element(x, r * n + i, dtype);
            wrong |= wide[r * n + i] != (float)value;
            wrong |= value > element(x, r * n + (size_t)best[r], dtype);
        }
    if (wrong) printf("rows of %zu differ\n", n);
    free(x), free(weight), free(out), free(q), free(k), free(v), free(angles), free(best), free(at),
        free(wide);
    return wrong;
}

static int check_copy(void) {
    const size_t n = random_below(5000);
    char *from = malloc(n + 1), *to = malloc(n + 1);
    for (size_t i = 0; i < n; i++) from[i] = (char)random_below(256);
    ml_paced_copy(&(ml_paced_copy_call){
        .to = to, .from = from, .size_bytes = n, .piece_bytes = 999, .bytes_per_s = 1e9});
    const int wrong = n && memcmp(from, to, n) != 0;
    if (wrong) printf("copy of %zu bytes differs\n", n);
    free(from), free(to);
    return wrong;
}

int main(int argc, char **argv) {
    const int rounds = argc > 1 ? atoi(argv[1]) : 50;
    pool = ml_pool_create(3, 20000);
    for (int isa = 0; isa < ML_ISA_COUNT; isa++) {
        if (ml_isa_set(isa)) continue;
        int wrong = 0;
        random_state = 1;
        for (int i = 0; i < rounds && !wrong; i++)
            wrong = check_product() || check_experts() || check_rows() || check_copy();
        printf("%s: %s\n", ml_isa_name(isa), wrong ? "differs" : "ok");
        if (wrong) return 1;
    }
    ml_pool_destroy(pool);
    return 0;
}
