/* Where a position's K and V lie (the picture is in attention.h). Private to the kernels. */
#ifndef ML_KV_LAYOUT_H
#define ML_KV_LAYOUT_H

#include "attention.h"

/* Bytes of an activation or cache element. */
static inline size_t ml_element_bytes(uint32_t dtype) { return dtype == ML_FP32 ? 4 : 2; }

/* Bytes of one head of a query, key or value. */
static inline size_t ml_head_bytes(const ml_attention_shape *shape) {
    return shape->head_dim * ml_element_bytes(shape->kv_dtype);
}

/* Bytes of one KV head of one block: K tile and V tile. */
static inline size_t ml_tile_bytes(const ml_attention_shape *shape) {
    return 2u * ML_BLOCK_TOKENS * shape->head_dim * ml_element_bytes(shape->kv_dtype);
}

/* Store one token of one KV head, k and v each (head_dim), into its tile; token 0 clears the tile
 * first (see ml_kv_store). */
void ml_store_head(const ml_attention_shape *shape, char *tile, uint32_t token, const char *k,
                   const char *v);

#endif
