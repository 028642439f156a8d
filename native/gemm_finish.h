/* What becomes of a finished accumulator row. Included after vector_math.h and gemm.h. */

/* gate and up are columns 0-31 and 32-63; the steps are rounded where transformers' are. */
ML_INLINE f32x16 swiglu(const ml_finish *f, const float *acc, size_t column) {
    f32x16 gate = round_to(f->dtype, load(ML_FP32, acc, column, LANES));
    f32x16 up = round_to(f->dtype, load(ML_FP32, acc, column + ML_PANEL_COLUMNS / 2, LANES));
    return round_to(f->dtype, silu_lanes(gate)) * up;
}

static void finish_row(const ml_finish *f, const float *acc, size_t n, const void *residual,
                       void *out) {
    for (size_t i = 0; i < n; i += LANES) {
        const size_t left = n - i;
        f32x16 x;
        if (f->epilogue == ML_SWIGLU) {
            x = swiglu(f, acc, i);
        } else {
            x = load(ML_FP32, acc, i, LANES);
            if (f->epilogue == ML_ADD)
                x = load(f->out_dtype, residual, i, left) + round_to(f->dtype, x);
        }
        store(f->out_dtype, out, i, left, x);
    }
}
