/* The loops that the kernels are measured against; compiled for the machine at hand
 * (-O3 -march=native -ffast-math), so that the compiler vectorises what it can. */
#ifndef ML_ATTENTION_BASELINE_H
#define ML_ATTENTION_BASELINE_H

#include <stddef.h>

#include "attention.h"

/* Attention as one writes it down: K and V of a block as [token][kv_head][head_dim], K first. */
void baseline_attend(const ml_attention_shape *shape, const ml_attend_task *task);

/* Reads every byte once, in order. */
void baseline_read(const void *memory, size_t bytes);

#endif
