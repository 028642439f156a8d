/* Working with a segment (abi.h): making and opening it, the device's side, the loop of an
 * attention process. Functions return an ml_status unless they say otherwise; after ML_SYSTEM_ERROR
 * errno tells what. Handles are for one thread at a time, ml_port_cancel excepted. */
#ifndef ML_CHANNEL_H
#define ML_CHANNEL_H

#include <stddef.h>
#include <stdint.h>

#include "abi.h"
#include "attention.h"

/* [cffi] */
typedef struct ml_segment ml_segment;
typedef struct ml_port ml_port;
typedef struct ml_worker ml_worker;

/* Static text; for any number. */
const char *ml_status_text(int status);
/* NULL where a segment can have this geometry, else what is wrong, with the field's name. */
const char *ml_geometry_error(const ml_geometry *geometry);
/* Fills `layout`; ML_BAD_SEGMENT where the geometry is wrong. */
int ml_layout_of(const ml_geometry *geometry, ml_layout *layout);

/* Make a segment of the empty file `fd` (kept open until ml_segment_close, which closes it): memory
 * is reserved here, so that no later write can meet a full file system (SIGBUS). Life: BUILDING. */
int ml_segment_create(int fd, const ml_geometry *geometry, uint64_t epoch, ml_segment **segment);
/* Map a segment that somebody made; ML_BAD_SEGMENT where the file is not one of this version, or
 * its words do not fit each other or the file's size. Takes `fd` over where it returns ML_OK. */
int ml_segment_open(int fd, ml_segment **segment);
/* The same for `bytes` of page-aligned memory that the caller keeps (no locks, no peers). */
int ml_segment_attach(void *base, uint64_t bytes, ml_segment **segment);
void ml_segment_close(ml_segment *segment);

const ml_geometry *ml_segment_geometry(const ml_segment *segment);
const ml_layout *ml_segment_layout(const ml_segment *segment);
uint64_t ml_segment_epoch(const ml_segment *segment);
uint8_t *ml_segment_base(const ml_segment *segment);
uint32_t ml_segment_life(const ml_segment *segment);
void ml_segment_publish(ml_segment *segment); /* BUILDING -> LIVE */
/* -> RETIRED, and wakes everybody. cause: ML_PEER_DIED or ML_PEER_HUNG, and the participant whom it
 * is about; ML_EPOCH_RETIRED otherwise. */
void ml_segment_retire(ml_segment *segment, int cause, uint32_t culprit);

/* Take a participant's lock; ML_SLOT_BUSY where another process holds it. */
int ml_participate(ml_segment *segment, uint32_t participant);
/* 1: its lock is held (by another process or handle); 0: nobody holds it; -1: cannot tell. */
int ml_participant_alive(const ml_segment *segment, uint32_t participant);
void ml_participant_beat(ml_segment *segment, uint32_t participant);
/* Take the control lock of a segment's file, if nobody has it. 1: somebody has; 0: it is ours until
 * `fd` is closed; -1: cannot tell. For who removes what dead owners left: with the lock, nobody can
 * become the owner meanwhile. */
int ml_file_is_owned(int fd);
/* Number of jobs posted. */
uint64_t ml_segment_jobs(const ml_segment *segment);

typedef struct {
    uint64_t heartbeat, tasks, busy_ns, kv_read_bytes;
    uint32_t state, detail, pid, cpu;
} ml_participant_view;
void ml_participant_read(const ml_segment *segment, uint32_t participant,
                         ml_participant_view *view);

/* Map `bytes` of `fd`, spread over `n_nodes` NUMA nodes (see abi.h; `nodes` are the kernel's
 * numbers; n_nodes 1 binds nothing), with huge pages where `huge`, and reserve all of it. Binding
 * and huge pages are best effort. Releases nothing on failure but what it mapped. */
int ml_arena_reserve(int fd, const ml_layout *layout, const ml_geometry *geometry,
                     const uint32_t *nodes, int huge, void **arena);
/* Map an arena that is reserved already. */
int ml_arena_map(int fd, uint64_t bytes, void **arena);
int ml_arena_unmap(void *arena, uint64_t bytes);
/* Die with `signal` when the thread that started this process ends. */
int ml_die_with_parent(int signal);

/* ---- device ---- */

typedef struct {
    uint64_t elapsed_ns;    /* from post to the end as the device saw it */
    uint64_t busy_ns;       /* sum over the attention processes */
    uint64_t longest_ns;    /* of the busiest one */
    uint64_t kv_read_bytes; /* that the kernels went through */
    uint32_t tasks;
    uint32_t peer;  /* participant that died or hangs */
    uint32_t item;  /* that a job or prepare failed on */
    uint32_t error; /* ml_status of the job; ML_OK: outputs are valid */
} ml_job_result;

/* Becomes the segment's device. spin_ns: how long a wait may spin before it sleeps;
 * peer_timeout_ns: how long a heartbeat may stand still. */
int ml_port_open(ml_segment *segment, uint64_t peer_timeout_ns, uint64_t spin_ns, ml_port **port);
void ml_port_close(ml_port *port);
/* blocks become entries first_index, ... of a sequence's row. ML_BAD_ITEM_ROW, ML_BAD_ITEM_POSITION
 * and ML_BAD_BLOCK tell what does not fit; nothing is changed then. */
int ml_port_set_blocks(ml_port *port, uint32_t row, uint32_t first_index, const int32_t *blocks,
                       uint32_t n_blocks);
/* All entries of the row become -1: a job that names it before set_blocks is refused. */
int ml_port_clear_row(ml_port *port, uint32_t row);
/* Cut the items into work, once; post then runs it for a layer, as often as wanted. result->item
 * tells the culprit when it fails. */
int ml_port_prepare(ml_port *port, uint32_t slot, const ml_item *items, uint32_t n_items,
                    ml_job_result *result);
/* Publish: everything written to the slot's q, k, v before is seen by the attention processes. */
int ml_port_post(ml_port *port, uint32_t slot, uint32_t layer);
/* Wait for the slot's job. ML_OK: it ended, result->error tells how. */
int ml_port_wait(ml_port *port, uint32_t slot, uint64_t timeout_ns, ml_job_result *result);
/* When the attention processes worked for the slot's job, which has ended: those that did write
 * begin and end (CLOCK_MONOTONIC) to spans[index], the others 0 and 0. One for each process. */
typedef struct {
    uint64_t begin_ns, end_ns;
} ml_process_span;
void ml_port_process_spans(const ml_port *port, uint32_t slot, ml_process_span *spans);
/* Look once at all peers: ML_OK, ML_EPOCH_RETIRED, or ML_PEER_DIED, ML_PEER_HUNG and *peer. */
int ml_port_check_peers(ml_port *port, uint32_t *peer);
/* From any thread: present and later waits end with ML_CANCELLED. */
void ml_port_cancel(ml_port *port);

/* ---- attention process ---- */

typedef struct {
    uint32_t index;    /* of this attention process */
    uint32_t node;     /* index of its NUMA node, below n_nodes */
    uint32_t cpu;      /* that it is pinned to, for the statistics; UINT32_MAX: none */
    uint32_t pid;
    uint64_t spin_ns;  /* how long an idle process spins before it sleeps */
    uint64_t stall_ns; /* how long stores of another process may take */
} ml_worker_options;

/* `arena` holds kv_arena_bytes and stays the caller's. */
int ml_worker_open(ml_segment *segment, void *arena, const ml_worker_options *options,
                   ml_worker **worker);
void ml_worker_close(ml_worker *worker);
/* Run what is posted now; returns the number of tasks and stores that it ran. */
uint32_t ml_worker_poll(ml_worker *worker);
/* Run jobs until the epoch is retired (ML_EPOCH_RETIRED) or control dies (ML_PEER_DIED). */
int ml_worker_run(ml_worker *worker);
/* [/cffi] */

#endif
