/* An attention process's side of a segment. Private to the channel. */
#ifndef ML_WORKER_H
#define ML_WORKER_H

#include "futex.h"
#include "segment.h"

/* What this process did for a slot's job. */
typedef struct {
    uint32_t job;
    uint32_t unreported; /* units done, not subtracted from work_left yet */
    uint32_t tasks;
    uint64_t busy_ns;
    uint64_t kv_read_bytes;
    uint64_t begin_ns, end_ns; /* of the first and the last unit */
} ml_worker_job;

struct ml_worker {
    ml_segment *segment;
    uint8_t *arena;
    ml_worker_options options;
    ml_worker_job jobs[ML_SLOTS];
    uint32_t verified[ML_SLOTS]; /* job whose inputs were found as they should be */
    uint32_t given_up[ML_SLOTS]; /* job whose words made no sense */
    uint64_t looked_ns;          /* when control's lock was looked at last */
    float *scratch_out;          /* [scratch_rows][n_q_heads][head_dim] */
    float *scratch_lse;          /* [scratch_rows][n_q_heads] */
    int32_t *blocks;             /* [blocks_per_sequence]: checked copy of what a unit uses */
};

static inline ml_participant *ml_worker_self(const ml_worker *worker) {
    return ml_participant_of(worker->segment, ML_FIRST_PROCESS + worker->options.index);
}

static inline void ml_worker_beat(const ml_worker *worker, uint64_t now_ns) {
    atomic_store_explicit(&ml_worker_self(worker)->heartbeat, now_ns, memory_order_relaxed);
}

/* A unit of work that was claimed, with the words of its job: copies, checked in unit.c. */
typedef struct {
    uint32_t slot;
    uint32_t layer;
    uint32_t n_items, n_stores, n_tiles, n_tasks;
    ml_item item;
    uint64_t kv_read_bytes;
    uint32_t item_index; /* UINT32_MAX until it is known */
} ml_unit;

/* Both check every word that they read from the segment before they use it, and return ML_OK or
 * what is wrong. A task that reads what stores write expects them to be done: see ml_task_waits. */
int ml_run_store(ml_worker *worker, ml_unit *unit, uint32_t index);
int ml_run_task(ml_worker *worker, ml_unit *unit, uint32_t index);
/* Whether task `index` must wait for the job's stores. */
int ml_task_waits(const ml_worker *worker, const ml_unit *unit, uint32_t index);

#endif
