/* What the AVX2 and AVX-512 files share. Include after the file's target pragma. Private. */
#ifndef ML_ATTENTION_X86_H
#define ML_ATTENTION_X86_H

#include <immintrin.h>

#include "attention_kernels.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

enum { LINE = 64 };

/* Asks for two lines to be brought into the second-level cache (requests for the first-level cache
 * would wait for its few miss buffers). A busy processor drops such requests, so every line is
 * asked for twice: a tile before it is used (`far`), and half a tile before (`near`). */
INLINE void fetch(const char *far, const char *near, size_t offset) {
    _mm_prefetch(far + offset, _MM_HINT_T1);
    _mm_prefetch(near + offset, _MM_HINT_T1);
}

/* Bytes of a tile's K, and of its V. */
INLINE size_t half_tile(const ml_kv_tile *tile, const int is_bf16) {
    return tile->head_dim * ML_BLOCK_TOKENS * (is_bf16 ? 2u : 4u);
}

/* Cases of a switch over the number of rows: `body` with n_rows a constant, so that sums stay in
 * registers. */
#define ROW_CASE(body, n) \
    case n:               \
        body(rows, tile, n);  \
        break;
#define ROW_CASES_4(body) ROW_CASE(body, 1) ROW_CASE(body, 2) ROW_CASE(body, 3) ROW_CASE(body, 4)
#define ROW_CASES_8(body)                                                        \
    ROW_CASES_4(body) ROW_CASE(body, 5) ROW_CASE(body, 6) ROW_CASE(body, 7) ROW_CASE(body, 8)

/* An ml_tile_fn out of `body(rows, tile, n_rows)`; `cases` is one of the two above. */
#define DEFINE_TILE_FUNCTION(name, body, cases)                            \
    static void name(ml_row *rows, uint32_t n_rows, const ml_kv_tile *tile) { \
        switch (n_rows) {                                                  \
            cases(body) default : break;                                   \
        }                                                                  \
    }

#endif
