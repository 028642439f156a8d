/* The device's side of a segment. Private to the channel. */
#ifndef ML_PORT_H
#define ML_PORT_H

#include "segment.h"

/* What the device knows of a slot; never read back from shared memory. */
typedef struct {
    uint32_t job;      /* number of the job posted last */
    uint32_t prepared; /* 1: the arrays below are in the segment and may be posted */
    uint32_t n_items, n_stores, n_tiles, n_tasks;
    uint32_t n_rows; /* up to the last that an item uses */
    uint32_t node_begin[ML_MAX_NODES + 1];
    uint64_t posted_ns;
} ml_port_slot;

typedef struct {
    uint64_t heartbeat;  /* that was seen last */
    uint64_t changed_ns; /* when it was seen to change */
} ml_peer;

struct ml_port {
    ml_segment *segment;
    uint64_t peer_timeout_ns;
    uint64_t spin_ns;
    uint64_t order;
    _Atomic uint32_t cancelled;
    ml_port_slot slots[ML_SLOTS];
    ml_peer *peers;        /* [participants] */
    uint64_t death_seen_ns; /* when an attention process was first seen dead; 0: none is */
    /* For prepare: */
    uint32_t mark;         /* of this call, in the two arrays below */
    uint32_t *row_marks;   /* [max_sequences] */
    uint32_t *token_marks; /* [max_slot_tokens] */
    ml_task *tasks;        /* [max_tasks], unsorted */
    uint8_t *classes;      /* [max_tasks], by which they are sorted */
};

/* Cut items into stores, tiles and tasks in the segment (plan.c), and count them in slots[slot]. */
int ml_plan(ml_port *port, uint32_t slot, const ml_item *items, uint32_t n_items,
            uint32_t *bad_item);

#endif
