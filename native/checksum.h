/* FNV-1a over 64-bit words: notices memory that somebody else changed. Not for enemies. */
#ifndef ML_CHECKSUM_H
#define ML_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define ML_CHECKSUM_START UINT64_C(0xcbf29ce484222325)

/* Goes on from `hash`; a rest of fewer than 8 bytes counts as padded with zeros. */
static inline uint64_t ml_checksum(uint64_t hash, const void *data, size_t size_bytes) {
    const char *bytes = data;
    for (size_t at = 0; at < size_bytes; at += 8) {
        uint64_t word = 0;
        memcpy(&word, bytes + at, size_bytes - at < 8 ? size_bytes - at : 8);
        hash = (hash ^ word) * UINT64_C(0x100000001b3);
        hash ^= hash >> 32; /* high bits matter too */
    }
    return hash;
}

#endif
