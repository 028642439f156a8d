/* Matrix products with weights packed beforehand: out (m, n) = a (m, k) x w (n, k) transposed, for
 * one matrix or for a group of them (the experts of a layer) over rows sorted by group.
 *
 * A packed matrix is plain bytes, 64-byte aligned, that may be copied anywhere:
 *
 *     [n / 64 panels][words of k][64 columns] of 32-bit words
 *
 * A word holds two BF16 neighbours in k, or one FP32. n is rounded up to whole panels and k to
 * whole words, both filled with zeros. A SwiGLU pair (gate and up, each of n rows) shares its
 * panels: columns 0-31 are gate rows, columns 32-63 the up rows of the same numbers.
 *
 * Every output element is accumulated in FP32 over k in ascending order in one accumulator: its
 * bits depend on its own inputs and the instruction set alone, not on m, on the row's neighbours
 * or on the number of threads. */
#ifndef ML_GEMM_H
#define ML_GEMM_H

#include <stddef.h>
#include <stdint.h>

#include "dtype.h"
#include "thread_pool.h"

/* [cffi] */
enum { ML_PANEL_COLUMNS = 64, ML_PANEL_ROW_BYTES = 256, ML_PACKED_ALIGNMENT_BYTES = 64 };

/* Which rows of the packed matrix a source fills. */
typedef enum { ML_PACK_PLAIN = 0, ML_PACK_GATE = 1, ML_PACK_UP = 2 } ml_pack_role;

/* Bytes of a packed (n, k) matrix. */
size_t ml_packed_size_bytes(size_t n, size_t k, uint32_t dtype);
/* Bytes of a packed pair of (n, k) matrices for ML_SWIGLU. */
size_t ml_packed_pair_size_bytes(size_t n, size_t k, uint32_t dtype);

/* Source rows (n_rows, k) become rows first_row ... first_row + n_rows - 1 of `packed`, converted
 * (to nearest even) where the types differ. Whoever packs row n - 1 also clears what follows it. */
typedef struct {
    void *packed;
    const void *source;
    size_t source_stride_bytes;
    size_t n, k; /* of the whole packed matrix; of one of the two for a pair */
    size_t first_row, n_rows;
    uint32_t packed_dtype, source_dtype; /* ML_FP32 or ML_BF16 */
    uint32_t role;                       /* ml_pack_role */
} ml_pack_call;

void ml_pack(ml_pool *pool, const ml_pack_call *call);
/* The same with the source in a file, its rows one after the other from offset_bytes on; they are
 * read through `scratch`, which holds at least one row for each panel column. Returns 0, the errno
 * of a read, or -1 where the file ends too early. call->source is not used. */
int ml_pack_file(ml_pool *pool, const ml_pack_call *call, int fd, uint64_t offset_bytes,
                 void *scratch, size_t scratch_bytes);

typedef enum {
    ML_STORE = 0, /* out = product */
    ML_ADD = 1,   /* out = residual + product, the product rounded to the weights' type first */
    ML_SWIGLU = 2 /* out = silu(gate) * up, every step rounded to the weights' type */
} ml_epilogue;

typedef struct {
    const int32_t *offsets;     /* (n_groups + 1): offsets[g] ... offsets[g + 1] - 1 are g's rows */
    const void *const *weights; /* (n_groups) packed matrices or pairs of one shape */
    const void *a;              /* (any, k), of the weights' type */
    const int32_t *row_index;   /* product row i reads row row_index[i] of a; NULL: row i */
    void *out;                  /* (offsets[n_groups], n_out) */
    const void *residual;       /* ML_ADD: like out; may be out itself */
    size_t a_stride_bytes, out_stride_bytes, residual_stride_bytes;
    uint32_t n_groups;
    uint32_t n_out, k; /* n_out: rows of a weight matrix, of one of the two for a pair */
    uint32_t dtype;    /* ML_FP32 or ML_BF16, of weights and a */
    uint32_t out_dtype;
    uint32_t epilogue; /* ml_epilogue */
} ml_gemm_call;

void ml_gemm(ml_pool *pool, const ml_gemm_call *call);
/* [/cffi] */

#endif
