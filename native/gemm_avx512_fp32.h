/* FP32 step of the AVX-512 kernels. Included by gemm_avx512*.c. */
ML_INLINE void step_fp32(const int rows, const int vectors, V acc[][8], const char *const *row,
                         const char *panel, size_t word) {
    V b[4];
    _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) b[v] =
        _mm512_load_ps(panel + word * 256 + v * 64);
    _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++) {
        const V a = _mm512_castsi512_ps(broadcast_word(row[r], word));
        _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) acc[r][v] =
            _mm512_fmadd_ps(a, b[v], acc[r][v]);
    }
}
