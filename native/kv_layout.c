#include "kv_layout.h"

#include <assert.h>
#include <string.h>

const char *ml_shape_error(const ml_attention_shape *shape) {
    if (shape->kv_dtype != ML_FP32 && shape->kv_dtype != ML_BF16)
        return "kv_dtype: must be FP32 (1) or BF16 (2)";
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

void ml_store_head(const ml_attention_shape *shape, char *tile, uint32_t token, const char *k,
                   const char *v) {
    if (token == 0) memset(tile, 0, ml_tile_bytes(shape));
    if (shape->kv_dtype == ML_FP32)
        store_fp32(tile, shape->head_dim, token, k, v);
    else
        store_bf16(tile, shape->head_dim, token, k, v);
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
