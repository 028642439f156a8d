/* An INT8 tile widened to an FP32 one and given to the FP32 kernel, for whatever instruction set the
 * including file targets: where there are no 8-bit dot products. That file includes vector_math.h
 * and defines ML_INT8_TILE, the function's name, and ML_FP32_TILE, the kernel's. Private. */
#include "attention_kernels.h"
#include "kv_layout.h"

/* K [head_dim / 4][16 tokens][4 dims], bytes of value + 128, to [head_dim][16 tokens]. */
static void widen_k(const char *k, uint32_t head_dim, float *wide) {
    const f32x16 scale = load(ML_FP32, k + head_dim * ML_BLOCK_TOKENS, 0, LANES);
    for (uint32_t i = 0; i < head_dim / 4; i++, k += 64) {
        i32x16 bytes;
        memcpy(&bytes, k, sizeof bytes);
        for (int j = 0; j < 4; j++, wide += LANES) {
            const i32x16 value = (bytes >> 8 * j & 255) - 128;
            store(ML_FP32, wide, 0, LANES, __builtin_convertvector(value, f32x16) * scale);
        }
    }
}

/* V [head_dim / 16][4 token quads][16 dims][4 tokens] to [head_dim / 16][16 tokens][16 dims]. */
static void widen_v(const char *v, uint32_t head_dim, float *wide) {
    const float *scale = (const float *)(const void *)(v + head_dim * ML_BLOCK_TOKENS);
    for (uint32_t i = 0; i < head_dim / 4; i++, v += 64) {
        i32x16 bytes;
        memcpy(&bytes, v, sizeof bytes);
        for (uint32_t j = 0; j < 4; j++, wide += LANES) {
            const i32x16 value = (i32x16)((u32x16)bytes << (24 - 8 * j)) >> 24;
            const f32x16 factor = splat(scale[i % 4 * 4 + j]);
            store(ML_FP32, wide, 0, LANES, __builtin_convertvector(value, f32x16) * factor);
        }
    }
}

static void ML_INT8_TILE(ml_row *rows, uint32_t n_rows, const ml_kv_tile *tile) {
    _Alignas(64) float wide[2 * ML_BLOCK_TOKENS * ML_MAX_HEAD_DIM];
    const char *kv = tile->kv;
    const size_t half_bytes = ml_int8_half_bytes(tile->head_dim);
    for (size_t offset = 0; offset < 2 * half_bytes; offset += 64)
        __builtin_prefetch(tile->next + offset, 0, 2);
    widen_k(kv, tile->head_dim, wide);
    widen_v(kv + half_bytes, tile->head_dim, wide + ML_BLOCK_TOKENS * tile->head_dim);
    ml_kv_tile widened = *tile;
    widened.kv = widened.next = (const char *)wide;
    ML_FP32_TILE(rows, n_rows, &widened);
}
