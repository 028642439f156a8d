/* The device's side: block tables, posting jobs, waiting for them, watching the peers. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "futex.h"
#include "port.h"

/* A sleeping device looks this often whether its peers live. */
enum { LOOK_NS = 50000000 };
/* Attention processes die with control, and when control is killed they may be gone before its own
 * last thread is. So control gets this long to say who died, or to be seen dead itself. */
enum { VERDICT_NS = 500000000 };

/* ---- open and close ---- */

static int allocate(ml_port *port) {
    const ml_segment *segment = port->segment;
    port->peers = calloc(ml_participants(segment), sizeof *port->peers);
    port->row_marks = calloc(segment->geometry.max_sequences, sizeof *port->row_marks);
    port->token_marks = calloc(segment->geometry.max_slot_tokens, sizeof *port->token_marks);
    port->tasks = calloc(segment->layout.max_tasks, sizeof *port->tasks);
    port->classes = calloc(segment->layout.max_tasks, sizeof *port->classes);
    return port->peers && port->row_marks && port->token_marks && port->tasks && port->classes;
}

static void start_watching(ml_port *port) {
    for (uint32_t i = 0; i < ml_participants(port->segment); i++)
        port->peers[i].changed_ns = ml_now_ns();
}

static void introduce(const ml_segment *segment) {
    ml_participant *self = ml_participant_of(segment, ML_DEVICE);
    atomic_store_explicit(&self->pid, (uint32_t)getpid(), memory_order_relaxed);
    atomic_store_explicit(&self->cpu, UINT32_MAX, memory_order_relaxed);
    atomic_store_explicit(&self->state, ML_READY, memory_order_relaxed);
}

int ml_port_open(ml_segment *segment, uint64_t peer_timeout_ns, uint64_t spin_ns, ml_port **port) {
    if (ml_segment_life(segment) != ML_LIVE) return ML_EPOCH_RETIRED;
    int status = ml_participate(segment, ML_DEVICE);
    if (status != ML_OK) return status;
    ml_port *opened = calloc(1, sizeof *opened);
    if (opened) {
        opened->segment = segment;
        opened->peer_timeout_ns = peer_timeout_ns;
        opened->spin_ns = spin_ns;
    }
    if (!opened || !allocate(opened)) {
        if (opened) ml_port_close(opened);
        errno = ENOMEM;
        return ML_SYSTEM_ERROR;
    }
    introduce(segment);
    start_watching(opened);
    *port = opened;
    return ML_OK;
}

void ml_port_close(ml_port *port) {
    free(port->peers);
    free(port->row_marks);
    free(port->token_marks);
    free(port->tasks);
    free(port->classes);
    free(port);
}

/* ---- block tables ---- */

int ml_port_set_blocks(ml_port *port, uint32_t row, uint32_t first_index, const int32_t *blocks,
                       uint32_t n_blocks) {
    const ml_segment *segment = port->segment;
    uint32_t capacity = segment->layout.blocks_per_sequence;
    if (row >= segment->geometry.max_sequences) return ML_BAD_ITEM_ROW;
    if (n_blocks > capacity || first_index > capacity - n_blocks) return ML_BAD_ITEM_POSITION;
    for (uint32_t i = 0; i < n_blocks; i++)
        if (blocks[i] < 0 || (uint32_t)blocks[i] >= segment->geometry.kv_blocks)
            return ML_BAD_BLOCK;
    _Atomic int32_t *entries = ml_block_row(segment, row) + first_index;
    /* Relaxed: the release of the next post makes them visible. */
    for (uint32_t i = 0; i < n_blocks; i++)
        atomic_store_explicit(&entries[i], blocks[i], memory_order_relaxed);
    return ML_OK;
}

int ml_port_clear_row(ml_port *port, uint32_t row) {
    const ml_segment *segment = port->segment;
    if (row >= segment->geometry.max_sequences) return ML_BAD_ITEM_ROW;
    _Atomic int32_t *entries = ml_block_row(segment, row);
    for (uint32_t i = 0; i < segment->layout.blocks_per_sequence; i++)
        atomic_store_explicit(&entries[i], -1, memory_order_relaxed);
    return ML_OK;
}

/* ---- jobs ---- */

/* Acquire: a job that has ended no longer reads what prepare and post overwrite, and its outputs
 * are visible. */
static int is_done(const ml_port *port, uint32_t slot) {
    const ml_slot *words = ml_slot_of(port->segment, slot);
    return atomic_load_explicit(&words->done, memory_order_acquire) == port->slots[slot].job;
}

int ml_port_prepare(ml_port *port, uint32_t slot, const ml_item *items, uint32_t n_items,
                    ml_job_result *result) {
    memset(result, 0, sizeof *result);
    if (slot >= ML_SLOTS) return ML_BAD_LAYER;
    if (!is_done(port, slot)) return ML_SLOT_BUSY;
    port->slots[slot].prepared = 0;
    int status = ml_plan(port, slot, items, n_items, &result->item);
    port->slots[slot].prepared = status == ML_OK;
    return status;
}

static void write_job(const ml_port_slot *own, ml_slot *words, uint32_t layer, uint64_t order) {
    atomic_store_explicit(&words->layer, layer, memory_order_relaxed);
    atomic_store_explicit(&words->n_items, own->n_items, memory_order_relaxed);
    atomic_store_explicit(&words->n_stores, own->n_stores, memory_order_relaxed);
    atomic_store_explicit(&words->n_tiles, own->n_tiles, memory_order_relaxed);
    atomic_store_explicit(&words->n_tasks, own->n_tasks, memory_order_relaxed);
    atomic_store_explicit(&words->order, order, memory_order_relaxed);
    atomic_store_explicit(&words->n_rows, own->n_rows, memory_order_relaxed);
    for (uint32_t i = 0; i <= ML_MAX_NODES; i++)
        atomic_store_explicit(&words->node_begin[i], own->node_begin[i], memory_order_relaxed);
    atomic_store_explicit(&words->error, 0, memory_order_relaxed);
    atomic_store_explicit(&words->stores_left, own->n_stores, memory_order_relaxed);
    atomic_store_explicit(&words->work_left, own->n_stores + own->n_tasks, memory_order_relaxed);
    atomic_store_explicit(&words->posted, own->job, memory_order_relaxed);
}

/* Release: a process that claims from a cursor sees the job, and the slot's q, k, v. */
static void open_cursors(const ml_port_slot *own, ml_slot *words) {
    uint64_t job = (uint64_t)own->job << 32;
    atomic_store_explicit(&words->store_cursor.word, job | own->n_stores, memory_order_release);
    for (uint32_t i = 0; i < ML_MAX_NODES; i++) {
        uint32_t n_tasks = own->node_begin[i + 1] - own->node_begin[i];
        atomic_store_explicit(&words->node_cursors[i].word, job | n_tasks, memory_order_release);
    }
}

/* The bell changes before sleepers are counted, and a sleeper counts itself before it looks at the
 * bell; both sequentially consistent, so that one of the two sees the other. */
static void ring(ml_header *header) {
    atomic_fetch_add_explicit(&header->bell, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&header->sleepers, memory_order_seq_cst) != 0)
        ml_futex_wake(&header->bell);
}

int ml_port_post(ml_port *port, uint32_t slot, uint32_t layer) {
    if (slot >= ML_SLOTS || layer >= port->segment->geometry.n_layers) return ML_BAD_LAYER;
    if (ml_segment_life(port->segment) != ML_LIVE) return ML_EPOCH_RETIRED;
    ml_port_slot *own = &port->slots[slot];
    if (!is_done(port, slot)) return ML_SLOT_BUSY;
    if (!own->prepared) return ML_NOT_PREPARED;
    own->job = own->job == UINT32_MAX ? 1 : own->job + 1;
    own->posted_ns = ml_now_ns();
    ml_slot *words = ml_slot_of(port->segment, slot);
    uint64_t checksum = port->segment->geometry.checksums
                            ? ml_inputs_checksum(port->segment, slot, own->n_rows)
                            : 0;
    atomic_store_explicit(&words->inputs_checksum, checksum, memory_order_relaxed);
    write_job(own, words, layer, ++port->order);
    open_cursors(own, words);
    ring(ml_header_of(port->segment));
    return ML_OK;
}

/* ---- waiting ---- */

static int check_peer(ml_port *port, uint32_t participant) {
    if (participant == ML_DEVICE) return ML_OK;
    if (ml_participant_alive(port->segment, participant) == 0) return ML_PEER_DIED;
    ml_peer *peer = &port->peers[participant];
    ml_participant *words = ml_participant_of(port->segment, participant);
    uint64_t heartbeat = atomic_load_explicit(&words->heartbeat, memory_order_relaxed);
    uint64_t now_ns = ml_now_ns();
    if (heartbeat != peer->heartbeat || port->segment->fd < 0) {
        peer->heartbeat = heartbeat;
        peer->changed_ns = now_ns;
    }
    return now_ns - peer->changed_ns > port->peer_timeout_ns ? ML_PEER_HUNG : ML_OK;
}

/* Whether control has had its time since the first death of an attention process was seen. */
static int is_verdict_due(ml_port *port) {
    uint64_t now_ns = ml_now_ns();
    if (port->death_seen_ns == 0) port->death_seen_ns = now_ns;
    return now_ns - port->death_seen_ns >= VERDICT_NS;
}

int ml_port_check_peers(ml_port *port, uint32_t *peer) {
    ml_header *header = ml_header_of(port->segment);
    /* Retired first: then control knows best who was the cause, and the others are leaving. */
    if (ml_segment_life(port->segment) == ML_RETIRED) {
        *peer = atomic_load_explicit(&header->culprit, memory_order_relaxed);
        uint32_t cause = atomic_load_explicit(&header->cause, memory_order_relaxed);
        return cause == ML_PEER_DIED || cause == ML_PEER_HUNG ? (int)cause : ML_EPOCH_RETIRED;
    }
    uint32_t n_participants = ml_participants(port->segment);
    for (uint32_t i = 0; i < n_participants; i++) {
        int status = check_peer(port, i);
        if (status == ML_OK) continue;
        if (status == ML_PEER_DIED && i != ML_CONTROL && !is_verdict_due(port)) return ML_OK;
        *peer = i;
        return status;
    }
    return ML_OK;
}

static void collect(ml_port *port, uint32_t slot, ml_job_result *result) {
    ml_port_slot *own = &port->slots[slot];
    const ml_slot *words = ml_slot_of(port->segment, slot);
    ml_process_times *times = ML_SLOT_PART(port->segment, slot, times, ml_process_times);
    uint64_t error = atomic_load_explicit(&words->error, memory_order_relaxed);
    result->error = (uint32_t)error;
    result->item = (uint32_t)(error >> 32);
    result->elapsed_ns = ml_now_ns() - own->posted_ns;
    for (uint32_t i = 0; i < port->segment->geometry.n_processes; i++) {
        if (atomic_load_explicit(&times[i].job, memory_order_relaxed) != own->job) continue;
        uint64_t busy_ns = atomic_load_explicit(&times[i].busy_ns, memory_order_relaxed);
        result->busy_ns += busy_ns;
        result->longest_ns = ml_max(result->longest_ns, busy_ns);
        result->kv_read_bytes +=
            atomic_load_explicit(&times[i].kv_read_bytes, memory_order_relaxed);
        result->tasks += atomic_load_explicit(&times[i].tasks, memory_order_relaxed);
    }
    if (result->error == ML_OK && port->segment->geometry.checksums &&
        atomic_load_explicit(&words->outputs_checksum, memory_order_relaxed) !=
            ml_outputs_checksum(port->segment, slot, own->n_rows)) {
        result->error = ML_BAD_SLOT_CHECKSUM;
        result->item = UINT32_MAX;
    }
    if (result->error != ML_OK) own->prepared = 0;
}

void ml_port_process_spans(const ml_port *port, uint32_t slot, ml_process_span *spans) {
    const ml_process_times *times = ML_SLOT_PART(port->segment, slot, times, ml_process_times);
    for (uint32_t i = 0; i < port->segment->geometry.n_processes; i++) {
        spans[i] = (ml_process_span){0, 0};
        if (atomic_load_explicit(&times[i].job, memory_order_relaxed) != port->slots[slot].job)
            continue;
        spans[i].begin_ns = atomic_load_explicit(&times[i].begin_ns, memory_order_relaxed);
        spans[i].end_ns = atomic_load_explicit(&times[i].end_ns, memory_order_relaxed);
    }
}

static int is_cancelled(const ml_port *port) {
    return atomic_load_explicit(&port->cancelled, memory_order_acquire) != 0;
}

/* Sleep until `done` changes from `seen`, at most wait_ns. */
static void sleep_on(ml_slot *words, uint32_t seen, uint64_t wait_ns) {
    /* Sequentially consistent on both sides (see end_job in worker.c): either the process that ends
     * the job sees that we sleep, or we see that it has ended. */
    atomic_store_explicit(&words->device_sleeps, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&words->done, memory_order_seq_cst) == seen)
        ml_futex_wait(&words->done, seen, wait_ns);
    atomic_store_explicit(&words->device_sleeps, 0, memory_order_relaxed);
}

static int wait_asleep(ml_port *port, uint32_t slot, uint64_t deadline_ns, uint32_t *peer) {
    ml_slot *words = ml_slot_of(port->segment, slot);
    for (;;) {
        uint32_t seen = atomic_load_explicit(&words->done, memory_order_acquire);
        if (seen == port->slots[slot].job) return ML_OK;
        if (is_cancelled(port)) return ML_CANCELLED;
        uint64_t now_ns = ml_now_ns();
        if (now_ns >= deadline_ns) return ML_TIMED_OUT;
        ml_participant_beat(port->segment, ML_DEVICE);
        sleep_on(words, seen, ml_min(LOOK_NS, deadline_ns - now_ns));
        if (is_done(port, slot)) return ML_OK;
        int status = ml_port_check_peers(port, peer);
        /* Looked at again, since a job may end and its process leave between two looks. */
        if (status != ML_OK) return is_done(port, slot) ? ML_OK : status;
    }
}

int ml_port_wait(ml_port *port, uint32_t slot, uint64_t timeout_ns, ml_job_result *result) {
    memset(result, 0, sizeof *result);
    if (slot >= ML_SLOTS) return ML_BAD_LAYER;
    if (port->slots[slot].job == 0) return ML_NOT_PREPARED;
    if (is_cancelled(port)) return ML_CANCELLED;
    ml_participant_beat(port->segment, ML_DEVICE);
    uint64_t deadline_ns = ml_now_ns() + timeout_ns;
    ml_slot *words = ml_slot_of(port->segment, slot);
    uint32_t seen = atomic_load_explicit(&words->done, memory_order_acquire);
    if (seen != port->slots[slot].job && port->spin_ns > 0)
        ml_spin_while(&words->done, seen, ml_min(port->spin_ns, timeout_ns));
    int status = wait_asleep(port, slot, deadline_ns, &result->peer);
    if (status == ML_OK) collect(port, slot, result);
    return status;
}

void ml_port_cancel(ml_port *port) {
    atomic_store_explicit(&port->cancelled, 1, memory_order_release);
    for (uint32_t slot = 0; slot < ML_SLOTS; slot++)
        ml_futex_wake(&ml_slot_of(port->segment, slot)->done);
}
