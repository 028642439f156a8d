/* Rows of what lies between the matrix products, for the including file's instruction set.
 * Included after vector_math.h and gemm_kernels.h. Steps are rounded where transformers' Mixtral
 * rounds. */

static void convert(size_t n, const void *in, uint32_t in_dtype, void *out, uint32_t out_dtype) {
    for (size_t i = 0; i < n; i += LANES)
        store(out_dtype, out, i, n - i, load(in_dtype, in, i, n - i));
}

ML_INLINE void norm_row_of(const uint32_t dtype, const ml_norm_row *r) {
    f32x16 squares = splat(0.0f);
    for (size_t i = 0; i < r->n; i += LANES) {
        f32x16 x = load(dtype, r->hidden, i, r->n - i);
        if (r->delta) {
            x = round_to(dtype, x + load(dtype, r->delta, i, r->n - i));
            store(dtype, r->hidden, i, r->n - i, x);
        }
        squares += x * x;
    }
    const float scale = 1.0f / sqrtf(sum_lanes(squares) / (float)r->n + r->eps);
    for (size_t i = 0; i < r->n; i += LANES) {
        const f32x16 x = round_to(dtype, load(dtype, r->hidden, i, r->n - i) * scale);
        store(dtype, r->out, i, r->n - i, x * load(dtype, r->weight, i, r->n - i));
    }
}

static void norm_row(const ml_norm_row *r) {
    if (r->dtype == ML_BF16)
        norm_row_of(ML_BF16, r);
    else
        norm_row_of(ML_FP32, r);
}

static void rotate_head(uint32_t dtype, size_t head_dim, size_t rotary_dim, const float *cos,
                        const float *sin, const void *x, void *out) {
    const size_t half = rotary_dim / 2;
    for (size_t i = 0; i < half; i += LANES) {
        const size_t n = half - i;
        const f32x16 c = round_to(dtype, load(ML_FP32, cos, i, n));
        const f32x16 s = round_to(dtype, load(ML_FP32, sin, i, n));
        const f32x16 low = load(dtype, x, i, n), high = load(dtype, x, half + i, n);
        const f32x16 new_low = round_to(dtype, low * c) - round_to(dtype, high * s);
        const f32x16 new_high = round_to(dtype, high * c) + round_to(dtype, low * s);
        store(dtype, out, i, n, new_low);
        store(dtype, out, half + i, n, new_high);
    }
    for (size_t i = rotary_dim; i < head_dim; i += LANES)
        store(dtype, out, i, head_dim - i, load(dtype, x, i, head_dim - i));
}

static void softmax_row(uint32_t dtype, size_t n, const void *logits, float *probabilities) {
    f32x16 largest = splat(-INFINITY), total = splat(0.0f);
    for (size_t i = 0; i < n; i += LANES) {
        f32x16 x = load(dtype, logits, i, n - i);
        for (size_t lane = n - i; lane < LANES; lane++) x[lane] = -INFINITY;
        store(ML_FP32, probabilities, i, LANES, x);
        largest = choose(x > largest, x, largest);
    }
    const float shift = max_lanes(largest);
    for (size_t i = 0; i < n; i += LANES) {
        f32x16 e = exp_lanes(load(ML_FP32, probabilities, i, LANES) - shift);
        store(ML_FP32, probabilities, i, LANES, e);
        for (size_t lane = n - i; lane < LANES; lane++) e[lane] = 0.0f;
        total += e;
    }
    const float sum = sum_lanes(total);
    for (size_t i = 0; i < n; i += LANES)
        store(ML_FP32, probabilities, i, LANES, load(ML_FP32, probabilities, i, LANES) / sum);
}

static void combine_row(uint32_t dtype, size_t n, size_t n_rows, const void *const *rows,
                        const float *weights, const void *residual, void *out) {
    for (size_t i = 0; i < n; i += LANES) {
        f32x16 sum = splat(0.0f);
        for (size_t j = 0; j < n_rows; j++) {
            const f32x16 part = round_to(dtype, load(dtype, rows[j], i, n - i) * weights[j]);
            sum = round_to(dtype, sum + part);
        }
        if (residual) sum = load(dtype, residual, i, n - i) + sum;
        store(dtype, out, i, n - i, sum);
    }
}

/* Lane by lane the first of the largest; then the first among the lanes. */
static int64_t argmax_row(uint32_t dtype, size_t n, const void *x) {
    f32x16 best = splat(-INFINITY);
    i32x16 where = (i32x16){0} - 1, is_nan = {0};
    i32x16 index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (size_t i = 0; i < n; i += LANES, index += LANES) {
        const f32x16 v = load(dtype, x, i, n - i);
        const i32x16 better = ((v > best) | (where < 0)) & (index < (int32_t)n);
        is_nan |= v != v;
        best = choose(better, v, best);
        where = (better & index) | (~better & where);
    }
    int64_t found = -1;
    for (int lane = 0; lane < LANES; lane++) {
        if (is_nan[lane]) return -1;
        if (where[lane] < 0) continue;
        if (found < 0 || best[lane] > best[found % LANES] ||
            (best[lane] == best[found % LANES] && where[lane] < found))
            found = where[lane];
    }
    return found;
}

#define LAYER_KERNELS                                                                              \
    .convert = convert, .norm_row = norm_row, .rotate_head = rotate_head,                          \
    .softmax_row = softmax_row, .combine_row = combine_row, .argmax_row = argmax_row
