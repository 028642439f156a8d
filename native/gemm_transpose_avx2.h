/* Packing's transpose of 32-bit words, eight by eight. Included by the AVX2 and AVX-512 files. */
ML_INLINE __m256i load_words(const char *p) { return _mm256_loadu_si256((const __m256i *)p); }

/* Eight words of eight columns, stored past the caches: packing writes more than they hold. */
ML_INLINE void transpose_8x8(const char *const *columns, size_t word, char *out) {
    __m256i in[8], pair[8], quad[8];
    UNROLL_FULLY for (int i = 0; i < 8; i++) in[i] = load_words(columns[i] + word * 4);
    UNROLL_FULLY for (int i = 0; i < 8; i += 2) {
        pair[i] = _mm256_unpacklo_epi32(in[i], in[i + 1]);
        pair[i + 1] = _mm256_unpackhi_epi32(in[i], in[i + 1]);
    }
    UNROLL_FULLY for (int i = 0; i < 8; i += 4) UNROLL_FULLY for (int j = 0; j < 2; j++) {
        quad[i + 2 * j] = _mm256_unpacklo_epi64(pair[i + j], pair[i + 2 + j]);
        quad[i + 2 * j + 1] = _mm256_unpackhi_epi64(pair[i + j], pair[i + 2 + j]);
    }
    UNROLL_FULLY for (int i = 0; i < 4; i++) {
        const __m256i low = _mm256_permute2x128_si256(quad[i], quad[i + 4], 0x20);
        const __m256i high = _mm256_permute2x128_si256(quad[i], quad[i + 4], 0x31);
        _mm256_stream_si256((__m256i *)(out + (word + i) * ML_PANEL_ROW_BYTES), low);
        _mm256_stream_si256((__m256i *)(out + (word + i + 4) * ML_PANEL_ROW_BYTES), high);
    }
}

static void transpose(const char *const *columns, size_t n_words, char *out) {
    size_t word = 0;
    for (; word + 8 <= n_words; word += 8)
        for (size_t c = 0; c < ML_HALF_PANEL_COLUMNS; c += 8)
            transpose_8x8(columns + c, word, out + c * 4);
    for (; word < n_words; word++)
        for (size_t c = 0; c < ML_HALF_PANEL_COLUMNS; c++)
            memcpy(out + word * ML_PANEL_ROW_BYTES + c * 4, columns[c] + word * 4, 4);
    _mm_sfence();
}
