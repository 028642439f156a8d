/* An open segment and where its parts lie. Private to the channel. */
#ifndef ML_SEGMENT_H
#define ML_SEGMENT_H

#include "channel.h"

/* Geometry and layout are copies, checked when the segment was opened: what other processes write
 * into the shared header later changes nothing here. */
struct ml_segment {
    uint8_t *base;
    uint64_t bytes;
    int fd; /* -1: memory of the caller */
    uint64_t epoch;
    ml_geometry geometry;
    ml_attention_shape shape;
    ml_layout layout;
};

static inline ml_header *ml_header_of(const ml_segment *segment) {
    return (ml_header *)(void *)segment->base;
}

static inline ml_participant *ml_participant_of(const ml_segment *segment, uint32_t participant) {
    return (ml_participant *)(void *)(segment->base + segment->layout.participants) + participant;
}

static inline uint32_t ml_participants(const ml_segment *segment) {
    return ML_FIRST_PROCESS + segment->geometry.n_processes;
}

static inline uint8_t *ml_slot_base(const ml_segment *segment, uint32_t slot) {
    return segment->base + segment->layout.slots + slot * segment->layout.slot_bytes;
}

static inline ml_slot *ml_slot_of(const ml_segment *segment, uint32_t slot) {
    return (ml_slot *)(void *)ml_slot_base(segment, slot);
}

static inline uint8_t *ml_activations_of(const ml_segment *segment, uint32_t slot) {
    return segment->base + segment->layout.activations + slot * segment->layout.activation_bytes;
}

/* A sequence's row of the block table. Entries are words, for a job may run that uses the first
 * ones while the device appends more. */
static inline _Atomic int32_t *ml_block_row(const ml_segment *segment, uint32_t row) {
    uint64_t entry = (uint64_t)row * segment->layout.blocks_per_sequence;
    return (_Atomic int32_t *)(void *)(segment->base + segment->layout.block_tables) + entry;
}

/* A block's checksum in one layer. Its writer is who stores into the block. */
static inline ml_word64 *ml_kv_checksum_of(const ml_segment *segment, uint32_t layer,
                                           uint32_t block) {
    uint64_t entry = (uint64_t)layer * segment->geometry.kv_blocks + block;
    return (ml_word64 *)(void *)(segment->base + segment->layout.kv_checksums) + entry;
}

/* Of the slot's first n_rows rows of q, k and v, or of out and lse. */
uint64_t ml_inputs_checksum(const ml_segment *segment, uint32_t slot, uint32_t n_rows);
uint64_t ml_outputs_checksum(const ml_segment *segment, uint32_t slot, uint32_t n_rows);

/* Part of a slot's words: `field` is the name both in ml_layout and of the member type. */
#define ML_SLOT_PART(segment, slot, field, type) \
    ((type *)(void *)(ml_slot_base(segment, slot) + (segment)->layout.field))

/* Bounds of a context, for sizes that cannot overflow 64 bits. */
enum {
    ML_MAX_LAYERS = 4096,
    ML_MAX_HEADS = 1024,
    ML_MAX_SEQUENCES = 1 << 20,
    ML_MAX_CONTEXT_TOKENS = 1 << 22,
    ML_MAX_SLOT_TOKENS = 1 << 20
};

static inline uint64_t ml_div_ceil(uint64_t a, uint64_t b) { return (a + b - 1) / b; }
static inline uint64_t ml_min(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t ml_max(uint64_t a, uint64_t b) { return a > b ? a : b; }

#endif
