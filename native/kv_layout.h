/* Where a position's K and V lie (the picture is in attention.h). Private to the kernels. */
#ifndef ML_KV_LAYOUT_H
#define ML_KV_LAYOUT_H

#include "attention.h"

/* Bytes of an element of a query, key or value, given the cache's dtype. */
static inline size_t ml_element_bytes(uint32_t kv_dtype) { return kv_dtype == ML_FP32 ? 4 : 2; }

/* Bytes of one head of a query, key or value. */
static inline size_t ml_head_bytes(const ml_attention_shape *shape) {
    return shape->head_dim * ml_element_bytes(shape->kv_dtype);
}

/* Bytes of an INT8 tile's K and its scales, and of its V and its scales. */
static inline size_t ml_int8_half_bytes(uint32_t head_dim) {
    return ML_BLOCK_TOKENS * (head_dim + sizeof(float));
}

/* Bytes of one KV head of one block: K tile and V tile. */
static inline size_t ml_tile_bytes(const ml_attention_shape *shape) {
    if (shape->kv_dtype == ML_INT8) return 2u * ml_int8_half_bytes(shape->head_dim);
    return 2u * ML_BLOCK_TOKENS * shape->head_dim * ml_element_bytes(shape->kv_dtype);
}

/* Store one token of one KV head, k and v each (head_dim), into its tile; token 0 clears the tile
 * first (see ml_kv_store). */
void ml_store_head(const ml_attention_shape *shape, char *tile, uint32_t token, const char *k,
                   const char *v);

/* n BF16 values as INT8 times the factor returned, -127 to 127. NaN and infinities give a factor
 * that is none either, so that they are not lost. */
float ml_quantise(const uint16_t *values, uint32_t n, int8_t *quantised);

#endif
