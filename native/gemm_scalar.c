/* Portable C: the reference of the kernels' structure, and what runs where nothing better does. */
#include "gemm.h"
#include "gemm_kernels.h"
#include "vector_math.h"

ML_INLINE float word_bf16(const char *row, size_t word, int odd) {
    uint32_t bits;
    memcpy(&bits, row + word * 4, sizeof bits);
    bits = odd ? bits & 0xffff0000u : bits << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

ML_INLINE float word_fp32(const char *row, size_t word) {
    float value;
    memcpy(&value, row + word * 4, sizeof value);
    return value;
}

/* One row against the panel, even k before odd k. */
ML_INLINE void row_bf16(const ml_tile *t, const char *row, float *acc) {
    for (size_t word = 0; word < t->n_words; word++) {
        const float even = word_bf16(row, word, 0), odd = word_bf16(row, word, 1);
        const char *panel = t->panel + word * ML_PANEL_ROW_BYTES;
        for (size_t c = 0; c < ML_PANEL_COLUMNS; c++) {
            acc[c] += even * word_bf16(panel, c, 0);
            acc[c] += odd * word_bf16(panel, c, 1);
        }
    }
}

ML_INLINE void row_fp32(const ml_tile *t, const char *row, float *acc) {
    for (size_t word = 0; word < t->n_words; word++) {
        const float a = word_fp32(row, word);
        const char *panel = t->panel + word * ML_PANEL_ROW_BYTES;
        for (size_t c = 0; c < ML_PANEL_COLUMNS; c++) acc[c] += a * word_fp32(panel, c);
    }
}

ML_INLINE void tile(const ml_tile *t, size_t n_rows, int is_bf16) {
    for (size_t r = 0; r < n_rows; r++) {
        float *acc = t->acc + r * ML_PANEL_COLUMNS;
        if (!t->accumulate) memset(acc, 0, ML_PANEL_COLUMNS * sizeof *acc);
        if (is_bf16)
            row_bf16(t, t->rows[r], acc);
        else
            row_fp32(t, t->rows[r], acc);
    }
}

#define DEFINE_TILES(rows)                                                                         \
    static void tile_bf16_##rows(const ml_tile *t) { tile(t, rows, 1); }                           \
    static void tile_fp32_##rows(const ml_tile *t) { tile(t, rows, 0); }
DEFINE_TILES(1)
DEFINE_TILES(2)
DEFINE_TILES(3)
DEFINE_TILES(4)
DEFINE_TILES(5)
DEFINE_TILES(6)

static void transpose(const char *const *columns, size_t n_words, char *out) {
    for (size_t word = 0; word < n_words; word++)
        for (size_t c = 0; c < ML_HALF_PANEL_COLUMNS; c++)
            memcpy(out + word * ML_PANEL_ROW_BYTES + c * 4, columns[c] + word * 4, 4);
}

#include "gemm_finish.h"
#include "layer_kernels.h"

const ml_kernels ml_kernels_scalar = {
    .tile_bf16 = {tile_bf16_1, tile_bf16_2, tile_bf16_3, tile_bf16_4, tile_bf16_5, tile_bf16_6},
    .tile_fp32 = {tile_fp32_1, tile_fp32_2, tile_fp32_3, tile_fp32_4, tile_fp32_5, tile_fp32_6},
    .finish_row = finish_row,
    .transpose = transpose,
    LAYER_KERNELS,
};
