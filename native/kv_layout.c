#include "attention_math.h"
#include "kv_layout.h"

#include <assert.h>
#include <string.h>

const char *ml_shape_error(const ml_attention_shape *shape) {
    if (shape->kv_dtype < ML_FP32 || shape->kv_dtype > ML_INT8)
        return "kv_dtype: must be FP32 (1), BF16 (2) or INT8 (3)";
    if (shape->head_dim == 0 || shape->head_dim % 16 != 0 || shape->head_dim > ML_MAX_HEAD_DIM)
        return "head_dim: must be a multiple of 16 from 16 to 256";
    if (shape->n_kv_heads == 0) return "n_kv_heads: must be at least 1";
    if (shape->n_q_heads == 0 || shape->n_q_heads % shape->n_kv_heads != 0)
        return "n_q_heads: must be a multiple of n_kv_heads, at least n_kv_heads";
    return NULL;
}

size_t ml_kv_block_bytes(const ml_attention_shape *shape) {
    return shape->n_kv_heads * ml_tile_bytes(shape);
}

/* One token of one head into its tile. */
static void store_fp32(char *tile, uint32_t head_dim, uint32_t token, const void *k,
                       const void *v) {
    const uint32_t *k_source = k, *v_source = v;
    uint32_t *k_tile = (uint32_t *)(void *)tile, *v_tile = k_tile + head_dim * ML_BLOCK_TOKENS;
    for (uint32_t d = 0; d < head_dim; d++) k_tile[d * ML_BLOCK_TOKENS + token] = k_source[d];
    for (uint32_t d = 0; d < head_dim; d += 16)
        memcpy(v_tile + d * ML_BLOCK_TOKENS + token * 16, v_source + d, 16 * sizeof *v_source);
}

static void store_bf16(char *tile, uint32_t head_dim, uint32_t token, const void *k,
                       const void *v) {
    const char *k_pairs = k;
    const uint16_t *v_source = v;
    uint16_t *v_tile = (uint16_t *)(void *)tile + head_dim * ML_BLOCK_TOKENS;
    v_tile += token / 2 * 32 + token % 2;
    for (uint32_t i = 0; i < head_dim / 2; i++)
        memcpy(tile + (i * ML_BLOCK_TOKENS + token) * 4u, k_pairs + i * 4u, 4);
    for (uint32_t d = 0; d < head_dim; d += 16)
        for (uint32_t j = 0; j < 16; j++) v_tile[d * ML_BLOCK_TOKENS + 2 * j] = v_source[d + j];
}

float ml_quantise(const uint16_t *values, uint32_t n, int8_t *quantised) {
    uint32_t largest = 0; /* bits of magnitudes order as magnitudes do, NaN last */
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t magnitude = values[i] & 0x7fffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    const float scale = ml_float_from_bf16((uint16_t)largest) / 127.0f;
    const float inverse = scale >= 0x1p-126f && scale < 0x1p126f ? 1.0f / scale : 0.0f;
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    for (uint32_t i = 0; i < n; i++) {
        const float shifted = ml_float_from_bf16(values[i]) * inverse + magic;
        quantised[i] = (int8_t)(uint8_t)ml_bits_from_float(shifted);
    }
    return scale;
}

/* K bytes are value + 128: the dot product wants one unsigned operand. */
static void store_int8(char *tile, uint32_t head_dim, uint32_t token, const void *k,
                       const void *v) {
    int8_t bytes[ML_MAX_HEAD_DIM];
    const size_t scales = head_dim * ML_BLOCK_TOKENS;
    float scale = ml_quantise(k, head_dim, bytes);
    memcpy(tile + scales + token * sizeof scale, &scale, sizeof scale);
    for (uint32_t d = 0; d < head_dim; d++)
        tile[(d / 4 * ML_BLOCK_TOKENS + token) * 4 + d % 4] = (char)(bytes[d] ^ -128);
    tile += ml_int8_half_bytes(head_dim);
    scale = ml_quantise(v, head_dim, bytes);
    memcpy(tile + scales + token * sizeof scale, &scale, sizeof scale);
    for (uint32_t d = 0; d < head_dim; d++)
        tile[((d / 16 * 4 + token / 4) * 16 + d % 16) * 4 + token % 4] = (char)bytes[d];
}

void ml_store_head(const ml_attention_shape *shape, char *tile, uint32_t token, const char *k,
                   const char *v) {
    if (token == 0) memset(tile, 0, ml_tile_bytes(shape));
    switch (shape->kv_dtype) {
        case ML_FP32: store_fp32(tile, shape->head_dim, token, k, v); break;
        case ML_BF16: store_bf16(tile, shape->head_dim, token, k, v); break;
        default: store_int8(tile, shape->head_dim, token, k, v); break;
    }
}

static void store_token(const ml_attention_shape *shape, char *block, uint32_t token,
                        const char *k, const char *v) {
    const size_t tile_bytes = ml_tile_bytes(shape), head_bytes = ml_head_bytes(shape);
    for (uint32_t head = 0; head < shape->n_kv_heads; head++)
        ml_store_head(shape, block + head * tile_bytes, token, k + head * head_bytes,
                      v + head * head_bytes);
}

void ml_kv_store(const ml_attention_shape *shape, void *arena_layer, const int32_t *block_table,
                 uint32_t position, uint32_t n_tokens, const void *k, const void *v,
                 size_t row_stride_bytes) {
    assert(ml_shape_error(shape) == NULL);
    const size_t block_bytes = ml_kv_block_bytes(shape);
    for (uint32_t i = 0; i < n_tokens; i++) {
        const uint32_t at = position + i;
        char *block = (char *)arena_layer + (size_t)block_table[at / ML_BLOCK_TOKENS] * block_bytes;
        store_token(shape, block, at % ML_BLOCK_TOKENS, (const char *)k + i * row_stride_bytes,
                    (const char *)v + i * row_stride_bytes);
    }
}
