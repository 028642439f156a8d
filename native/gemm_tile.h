/* The micro-kernels, written once: included by each gemm_<isa>.c that has defined
 *
 *   V, V_LANES                 a vector of floats and its width
 *   v_zero, v_load, v_store
 *   step_bf16, step_fp32       acc[row][vector] += word of each row times the words of the panel
 *   BF16_VECTORS(rows)         vectors of a pass over k, so that the accumulators stay in registers
 *   FP32_VECTORS(rows)
 *
 * An accumulator takes its products in ascending k whatever the number of rows, which is what makes
 * a row's result independent of its company. */
#include "gemm_kernels.h"
#include "gemm.h"

#define UNROLL_FULLY _Pragma("GCC unroll 16")

/* All rows over k, for the columns column ... column + vectors * V_LANES - 1 of the panel. */
ML_INLINE void tile_pass(const int rows, const int vectors, const int is_bf16, const ml_tile *t,
                         size_t column) {
    V acc[ML_TILE_ROWS][8];
    const char *row[ML_TILE_ROWS];
    const char *panel = t->panel + column * 4;
    const char *prefetch = t->prefetch;
    const size_t lines = column ? 0 : t->prefetch_lines, n_words = t->n_words;
    UNROLL_FULLY for (int r = 0; r < rows; r++) {
        row[r] = t->rows[r];
        UNROLL_FULLY for (int v = 0; v < vectors; v++) acc[r][v] = v_zero();
    }
    if (t->accumulate)
        UNROLL_FULLY for (int r = 0; r < rows; r++) UNROLL_FULLY for (int v = 0; v < vectors; v++)
            acc[r][v] = v_load(t->acc + r * ML_PANEL_COLUMNS + column + v * V_LANES);
    size_t word = 0;
    for (; word + ML_PREFETCH_WORDS <= n_words; word += ML_PREFETCH_WORDS) {
        for (size_t line = 0; line < lines; line++, prefetch += 64)
            __builtin_prefetch(prefetch, 0, 2);
        UNROLL_FULLY for (int i = 0; i < ML_PREFETCH_WORDS; i++) {
            if (is_bf16)
                step_bf16(rows, vectors, acc, row, panel, word + i);
            else
                step_fp32(rows, vectors, acc, row, panel, word + i);
        }
    }
    for (; word < n_words; word++) {
        if (is_bf16)
            step_bf16(rows, vectors, acc, row, panel, word);
        else
            step_fp32(rows, vectors, acc, row, panel, word);
    }
    UNROLL_FULLY for (int r = 0; r < rows; r++) UNROLL_FULLY for (int v = 0; v < vectors; v++)
        v_store(t->acc + r * ML_PANEL_COLUMNS + column + v * V_LANES, acc[r][v]);
}

#define DEFINE_TILE(name, rows, vectors, is_bf16)                                                  \
    static void name(const ml_tile *t) {                                                           \
        for (size_t column = 0; column < ML_PANEL_COLUMNS; column += (vectors) * V_LANES)          \
            tile_pass(rows, vectors, is_bf16, t, column);                                          \
    }
#define DEFINE_TILES(rows)                                                                         \
    DEFINE_TILE(tile_bf16_##rows, rows, BF16_VECTORS(rows), 1)                                     \
    DEFINE_TILE(tile_fp32_##rows, rows, FP32_VECTORS(rows), 0)

DEFINE_TILES(1)
DEFINE_TILES(2)
DEFINE_TILES(3)
DEFINE_TILES(4)
DEFINE_TILES(5)
DEFINE_TILES(6)

#define TILES(type)                                                                                \
    {tile_##type##_1, tile_##type##_2, tile_##type##_3,                                            \
     tile_##type##_4, tile_##type##_5, tile_##type##_6}
