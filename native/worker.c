/* The loop of an attention process: claim, run, report, sleep. */
#define _GNU_SOURCE
#include "worker.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>

/* A sleeping process shows its heartbeat and looks at control this often. */
enum { LOOK_NS = 250000000 };
enum { KIND_NONE, KIND_STORE, KIND_TASK, KIND_CORRUPT };

/* ---- open and close ---- */

int ml_worker_open(ml_segment *segment, void *arena, const ml_worker_options *options,
                   ml_worker **worker) {
    const ml_geometry *g = &segment->geometry;
    const ml_layout *layout = &segment->layout;
    if (options->index >= g->n_processes || options->node >= g->n_nodes) return ML_BAD_SEGMENT;
    ml_worker *opened = calloc(1, sizeof *opened);
    if (!opened) return ML_SYSTEM_ERROR;
    opened->segment = segment;
    opened->arena = arena;
    opened->options = *options;
    opened->scratch_out = calloc((size_t)layout->scratch_rows * g->n_q_heads, g->head_dim * 4);
    opened->scratch_lse = calloc((size_t)layout->scratch_rows * g->n_q_heads, 4);
    opened->blocks = calloc(layout->blocks_per_sequence, sizeof *opened->blocks);
    if (!opened->scratch_out || !opened->scratch_lse || !opened->blocks) {
        ml_worker_close(opened);
        errno = ENOMEM;
        return ML_SYSTEM_ERROR;
    }
    *worker = opened;
    return ML_OK;
}

void ml_worker_close(ml_worker *worker) {
    free(worker->scratch_out);
    free(worker->scratch_lse);
    free(worker->blocks);
    free(worker);
}

static void set_state(const ml_worker *worker, uint32_t state) {
    atomic_store_explicit(&ml_worker_self(worker)->state, state, memory_order_relaxed);
}

/* ---- the end of a job ---- */

static void set_error(ml_slot *words, int status, uint32_t item) {
    uint64_t none = 0;
    uint64_t error = (uint64_t)item << 32 | (uint32_t)status;
    atomic_compare_exchange_strong_explicit(&words->error, &none, error, memory_order_relaxed,
                                            memory_order_relaxed);
}

static void end_job(const ml_worker *worker, uint32_t slot, uint32_t job) {
    const ml_segment *segment = worker->segment;
    ml_slot *words = ml_slot_of(segment, slot);
    if (segment->geometry.checksums) {
        uint64_t n_rows = atomic_load_explicit(&words->n_rows, memory_order_relaxed);
        uint32_t most = (uint32_t)ml_min(n_rows, segment->geometry.max_slot_tokens);
        uint64_t checksum = ml_outputs_checksum(segment, slot, most);
        atomic_store_explicit(&words->outputs_checksum, checksum, memory_order_relaxed);
    }
    /* Sequentially consistent, as in sleep_on of channel.c: either we see that the device sleeps,
     * or it sees that the job has ended before it goes to sleep. */
    atomic_store_explicit(&words->done, job, memory_order_seq_cst);
    if (atomic_load_explicit(&words->device_sleeps, memory_order_seq_cst) != 0)
        ml_futex_wake(&words->done);
}

/* Words that make no sense: tell the device, and leave this job alone. */
static void give_up(ml_worker *worker, uint32_t slot) {
    ml_slot *words = ml_slot_of(worker->segment, slot);
    uint32_t job = atomic_load_explicit(&words->posted, memory_order_relaxed);
    worker->given_up[slot] = job;
    worker->jobs[slot] = (ml_worker_job){0};
    set_error(words, ML_BAD_CURSOR, 0);
    end_job(worker, slot, job);
}

static void add(ml_word64 *total, uint64_t n) {
    /* The process is the word's only writer, so that no read-modify-write is needed. */
    uint64_t old = atomic_load_explicit(total, memory_order_relaxed);
    atomic_store_explicit(total, old + n, memory_order_relaxed);
}

/* Tell what this process did, and end the job if nothing is left of it. Counting once for all units
 * instead of once for each keeps the counter's line from wandering between cores. */
static void report(ml_worker *worker, uint32_t slot) {
    ml_worker_job *own = &worker->jobs[slot];
    if (own->unreported == 0) return;
    ml_slot *words = ml_slot_of(worker->segment, slot);
    ml_process_times *times = &ML_SLOT_PART(worker->segment, slot, times,
                                            ml_process_times)[worker->options.index];
    atomic_store_explicit(&times->tasks, own->tasks, memory_order_relaxed);
    atomic_store_explicit(&times->busy_ns, own->busy_ns, memory_order_relaxed);
    atomic_store_explicit(&times->kv_read_bytes, own->kv_read_bytes, memory_order_relaxed);
    atomic_store_explicit(&times->begin_ns, own->begin_ns, memory_order_relaxed);
    atomic_store_explicit(&times->end_ns, own->end_ns, memory_order_relaxed);
    atomic_store_explicit(&times->job, own->job, memory_order_relaxed);
    uint32_t n = own->unreported;
    own->unreported = 0;
    /* acq_rel: releases outputs and times to who ends the job, acquires those of the others. */
    uint32_t before = atomic_fetch_sub_explicit(&words->work_left, n, memory_order_acq_rel);
    if (before == n) end_job(worker, slot, own->job);
    if (before < n) give_up(worker, slot);
}

/* ---- claiming ---- */

/* Take one of the cursor's units: how many were left, with the taken one; 0 where none was. More
 * than `most` means that the word is damaged; it is left alone then. */
static uint32_t claim(ml_cursor *cursor, uint32_t most, uint32_t *job) {
    uint64_t word = atomic_load_explicit(&cursor->word, memory_order_relaxed);
    while ((uint32_t)word != 0 && (uint32_t)word <= most) {
        /* Acquire pairs with the release of post: the job's words are those of this claim. */
        if (atomic_compare_exchange_weak_explicit(&cursor->word, &word, word - 1,
                                                  memory_order_acquire, memory_order_relaxed)) {
            *job = (uint32_t)(word >> 32);
            return (uint32_t)word;
        }
    }
    return (uint32_t)word;
}

static void read_job(const ml_slot *words, uint32_t slot, ml_unit *unit) {
    *unit = (ml_unit){.slot = slot, .item_index = UINT32_MAX};
    unit->layer = atomic_load_explicit(&words->layer, memory_order_relaxed);
    unit->n_items = atomic_load_explicit(&words->n_items, memory_order_relaxed);
    unit->n_stores = atomic_load_explicit(&words->n_stores, memory_order_relaxed);
    unit->n_tiles = atomic_load_explicit(&words->n_tiles, memory_order_relaxed);
    unit->n_tasks = atomic_load_explicit(&words->n_tasks, memory_order_relaxed);
}

static int claim_store(ml_worker *worker, uint32_t slot, ml_unit *unit, uint32_t *index,
                       uint32_t *job) {
    ml_slot *words = ml_slot_of(worker->segment, slot);
    uint32_t most = worker->segment->layout.max_stores;
    uint32_t left = claim(&words->store_cursor, most, job);
    if (left == 0) return KIND_NONE;
    if (left > most) return KIND_CORRUPT;
    read_job(words, slot, unit);
    if (unit->n_stores > most || left > unit->n_stores) return KIND_CORRUPT;
    *index = unit->n_stores - left;
    return KIND_STORE;
}

static int claim_task_of(ml_worker *worker, uint32_t slot, uint32_t node, ml_unit *unit,
                         uint32_t *index, uint32_t *job) {
    ml_slot *words = ml_slot_of(worker->segment, slot);
    uint32_t most = worker->segment->layout.max_tasks;
    uint32_t left = claim(&words->node_cursors[node], most, job);
    if (left == 0) return KIND_NONE;
    if (left > most) return KIND_CORRUPT;
    read_job(words, slot, unit);
    uint32_t end = atomic_load_explicit(&words->node_begin[node + 1], memory_order_relaxed);
    if (unit->n_tasks > most || end > unit->n_tasks || left > end) return KIND_CORRUPT;
    *index = end - left;
    return KIND_TASK;
}

static int claim_unit(ml_worker *worker, uint32_t slot, ml_unit *unit, uint32_t *index,
                      uint32_t *job) {
    int kind = claim_store(worker, slot, unit, index, job);
    uint32_t n_nodes = worker->segment->geometry.n_nodes;
    for (uint32_t i = 0; i < n_nodes && kind == KIND_NONE; i++)
        kind = claim_task_of(worker, slot, (worker->options.node + i) % n_nodes, unit, index, job);
    return kind;
}

/* ---- running ---- */

static void account(ml_worker *worker, const ml_unit *unit, uint32_t job, uint64_t start_ns) {
    ml_worker_job *own = &worker->jobs[unit->slot];
    uint64_t now_ns = ml_now_ns();
    if (own->job != job) *own = (ml_worker_job){.job = job, .begin_ns = start_ns};
    own->end_ns = now_ns;
    own->unreported++;
    own->tasks++;
    own->busy_ns += now_ns - start_ns;
    own->kv_read_bytes += unit->kv_read_bytes;
    ml_participant *self = ml_worker_self(worker);
    add(&self->tasks, 1);
    add(&self->busy_ns, now_ns - start_ns);
    add(&self->kv_read_bytes, unit->kv_read_bytes);
    ml_worker_beat(worker, now_ns);
}

/* Whether q, k and v are what the device wrote; looked at once for each job. */
static int verify_inputs(ml_worker *worker, uint32_t slot, uint32_t job) {
    const ml_segment *segment = worker->segment;
    if (!segment->geometry.checksums || worker->verified[slot] == job) return ML_OK;
    const ml_slot *words = ml_slot_of(segment, slot);
    uint32_t n_rows = atomic_load_explicit(&words->n_rows, memory_order_relaxed);
    if (n_rows > segment->geometry.max_slot_tokens ||
        ml_inputs_checksum(segment, slot, n_rows) !=
            atomic_load_explicit(&words->inputs_checksum, memory_order_relaxed))
        return ML_BAD_SLOT_CHECKSUM;
    worker->verified[slot] = job;
    return ML_OK;
}

static void run_store(ml_worker *worker, ml_unit *unit, uint32_t index, uint32_t job) {
    ml_slot *words = ml_slot_of(worker->segment, unit->slot);
    uint64_t start_ns = ml_now_ns();
    int status = verify_inputs(worker, unit->slot, job);
    if (status == ML_OK) status = ml_run_store(worker, unit, index);
    if (status != ML_OK) set_error(words, status, unit->item_index);
    account(worker, unit, job, start_ns);
    atomic_fetch_sub_explicit(&words->stores_left, 1, memory_order_release);
}

/* Until all stores of the job are done. Who waits helps: a process that sees a task of a new job
 * before it saw its stores would otherwise wait for stores that nobody takes. */
static int finish_stores(ml_worker *worker, uint32_t slot) {
    ml_slot *words = ml_slot_of(worker->segment, slot);
    uint64_t deadline_ns = 0;
    while (atomic_load_explicit(&words->stores_left, memory_order_acquire) != 0) {
        ml_unit unit;
        uint32_t index, job;
        int kind = claim_store(worker, slot, &unit, &index, &job);
        if (kind == KIND_STORE) run_store(worker, &unit, index, job);
        if (kind == KIND_CORRUPT) return ML_BAD_CURSOR;
        if (kind != KIND_NONE) continue;
        uint64_t now_ns = ml_now_ns();
        if (deadline_ns == 0) deadline_ns = now_ns + worker->options.stall_ns;
        if (now_ns > deadline_ns) return ML_STORE_STALLED;
        if (ml_segment_life(worker->segment) == ML_RETIRED) return ML_EPOCH_RETIRED;
        sched_yield();
    }
    return ML_OK;
}

static void run_task(ml_worker *worker, ml_unit *unit, uint32_t index, uint32_t job) {
    ml_slot *words = ml_slot_of(worker->segment, unit->slot);
    int status = verify_inputs(worker, unit->slot, job);
    if (status == ML_OK && ml_task_waits(worker, unit, index))
        status = finish_stores(worker, unit->slot);
    uint64_t start_ns = ml_now_ns();
    if (status == ML_OK) status = ml_run_task(worker, unit, index);
    if (status != ML_OK) set_error(words, status, unit->item_index);
    account(worker, unit, job, start_ns);
}

static uint32_t run_slot(ml_worker *worker, uint32_t slot) {
    uint32_t n_run = 0;
    for (;;) {
        ml_unit unit;
        uint32_t index = 0, job = 0;
        int kind = claim_unit(worker, slot, &unit, &index, &job);
        if (kind == KIND_CORRUPT) {
            give_up(worker, slot);
            return n_run;
        }
        if (kind == KIND_NONE) break;
        if (kind == KIND_STORE) run_store(worker, &unit, index, job);
        if (kind == KIND_TASK) run_task(worker, &unit, index, job);
        n_run++;
    }
    report(worker, slot);
    return n_run;
}

static int has_given_up(const ml_worker *worker, uint32_t slot) {
    const ml_slot *words = ml_slot_of(worker->segment, slot);
    uint32_t job = atomic_load_explicit(&words->posted, memory_order_relaxed);
    return job != 0 && job == worker->given_up[slot];
}

uint32_t ml_worker_poll(ml_worker *worker) {
    uint64_t order[ML_SLOTS];
    for (uint32_t slot = 0; slot < ML_SLOTS; slot++)
        order[slot] =
            atomic_load_explicit(&ml_slot_of(worker->segment, slot)->order, memory_order_relaxed);
    uint32_t older = order[1] < order[0];
    uint32_t n_run = 0;
    for (uint32_t i = 0; i < ML_SLOTS; i++)
        if (!has_given_up(worker, older ^ i)) n_run += run_slot(worker, older ^ i);
    return n_run;
}

/* ---- the loop ---- */

/* Sleep unless the bell has rung since it was `seen`; the counterpart of ring in channel.c. */
static void sleep_on_bell(ml_header *header, uint32_t seen) {
    atomic_fetch_add_explicit(&header->sleepers, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&header->bell, memory_order_seq_cst) == seen)
        ml_futex_wait(&header->bell, seen, LOOK_NS);
    atomic_fetch_sub_explicit(&header->sleepers, 1, memory_order_relaxed);
}

/* Whether control died. Asks the kernel at most once in LOOK_NS. */
static int is_orphan(ml_worker *worker, uint64_t now_ns) {
    if (now_ns - worker->looked_ns < LOOK_NS) return 0;
    worker->looked_ns = now_ns;
    return ml_participant_alive(worker->segment, ML_CONTROL) == 0;
}

static int leave(ml_worker *worker, int reason) {
    ml_participant *self = ml_worker_self(worker);
    atomic_store_explicit(&self->detail, (uint32_t)reason, memory_order_relaxed);
    set_state(worker, ML_LEFT);
    return reason;
}

int ml_worker_run(ml_worker *worker) {
    ml_header *header = ml_header_of(worker->segment);
    ml_participant *self = ml_worker_self(worker);
    atomic_store_explicit(&self->pid, worker->options.pid, memory_order_relaxed);
    atomic_store_explicit(&self->cpu, worker->options.cpu, memory_order_relaxed);
    set_state(worker, ML_READY);
    for (;;) {
        uint64_t now_ns = ml_now_ns();
        ml_worker_beat(worker, now_ns);
        if (ml_segment_life(worker->segment) == ML_RETIRED) return leave(worker, ML_EPOCH_RETIRED);
        if (is_orphan(worker, now_ns)) return leave(worker, ML_PEER_DIED);
        /* The bell is read before the cursors: a job that comes after the look at them has changed
         * it. */
        uint32_t bell = atomic_load_explicit(&header->bell, memory_order_acquire);
        if (ml_worker_poll(worker) != 0) continue;
        uint64_t spin_ns = worker->options.spin_ns;
        if (spin_ns > 0 && ml_spin_while(&header->bell, bell, spin_ns)) continue;
        sleep_on_bell(header, bell);
    }
}
