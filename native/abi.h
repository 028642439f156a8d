/* The shared-memory segment between one GPU worker (the device) and one CPU worker (a control
 * process and its attention processes). C and Python read it from here alone.
 *
 *   +----------------------+ 0
 *   | ml_header            | what the segment is; life, bell, sleepers
 *   +----------------------+ participants
 *   | ml_participant []    | control, device, attention process 0, 1, ...
 *   +----------------------+ block_tables
 *   | int32 [max_sequences][blocks_per_sequence]       KV block ids; -1: none
 *   +----------------------+ kv_checksums
 *   | uint64 [n_layers][kv_blocks]                     of blocks, where geometry.checksums is 1
 *   +----------------------+ slots[0]                  slot alpha
 *   | ml_slot              | job words, cursors, counters, result
 *   | ml_process_times []  | one for each attention process
 *   | ml_item []           | what the device asked for
 *   | ml_store [], ml_tile [], ml_task []              the same, cut into work
 *   | float [partial rows] | outputs and log-sum-exp of splits, before they are merged
 *   +----------------------+ slots[1]                  slot beta, the same again
 *   +----------------------+ activations (page aligned, so that a device can pin them)
 *   | q, k, v | out, lse   | of slot alpha, then of slot beta
 *   +----------------------+ total_bytes
 *
 * The KV arena is a file of its own, [layer][block], which only attention processes map. A block
 * belongs to NUMA node  block * n_nodes / kv_blocks.
 *
 * Whoever participates holds an OFD lock on one byte of the segment's file, byte i for participant
 * i. The kernel drops it when the process dies, however it dies; that is how death is noticed. A
 * heartbeat that stands still tells that a living process hangs. Only changes of a heartbeat count,
 * by the clock of who looks, so clocks of two processes are never compared.
 *
 * One segment is one epoch. A new epoch is a new file, and the old one's name is removed: what a
 * zombie of an old epoch still writes lands in memory that nobody reads.
 *
 *   life (control)      BUILDING -> LIVE -> RETIRED. RETIRED is final; whoever sees it leaves.
 *   state (each its own) STARTING -> READY <-> RUNNING; any -> LEFT, with a reason in `detail`.
 *
 *   slot:  idle      posted == done                          the device may prepare and fill it
 *          posted    posted != done, some cursor is above 0  tasks are there to be claimed
 *          draining  posted != done, all cursors are 0       the last tasks are running
 *          idle      done = posted                           out, lse, error, times are valid
 */
#ifndef ML_ABI_H
#define ML_ABI_H

#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* [cffi] */
enum {
    ML_ABI_VERSION = 3,
    ML_CACHE_LINE_BYTES = 64,
    ML_SLOTS = 2,
    ML_MAX_NODES = 8,
    ML_MAX_PROCESSES = 256,
    /* Attention is cut at multiples of this many KV positions, whatever the load, so that a result
     * never depends on who else is in the batch or on the number of processes. */
    ML_SPLIT_TOKENS = 512,
    /* Query rows in one tile of a chunk: a power of two between these, and a tile starts at a
     * multiple of its size, so that all its rows see the same number of splits. */
    ML_MIN_TILE_TOKENS = 8,
    ML_MAX_TILE_TOKENS = 64,
    /* Tokens that one store task writes: whole blocks, so that no two tasks share one. */
    ML_STORE_TOKENS = 64,
    ML_NO_PARTIALS = 0x7fffffff
};

enum { ML_CONTROL = 0, ML_DEVICE = 1, ML_FIRST_PROCESS = 2 }; /* participants */
enum { ML_BUILDING = 0, ML_LIVE = 1, ML_RETIRED = 2 };         /* life */
enum { ML_STARTING = 0, ML_READY = 1, ML_RUNNING = 2, ML_LEFT = 3 }; /* state */

/* Flags of an item. */
enum {
    ML_STORE_ONLY = 1,          /* k and v are stored; no attention, out and lse stay as they are */
    ML_ATTEND_EARLIER_ONLY = 2  /* attention over positions before start_position only */
};

/* What a call or a job may come to. Texts: ml_status_text. */
typedef enum {
    ML_OK = 0,
    ML_TIMED_OUT,
    ML_CANCELLED,
    ML_PEER_DIED,
    ML_PEER_HUNG,
    ML_EPOCH_RETIRED,
    ML_SLOT_BUSY,
    ML_NOT_PREPARED,
    ML_BAD_SEGMENT,
    ML_BAD_LAYER,
    ML_BAD_ITEM_ROW,
    ML_BAD_ITEM_POSITION,
    ML_BAD_ITEM_SLOT,
    ML_BAD_ITEM_FLAGS,
    ML_DUPLICATE_ROW,
    ML_OVERLAPPING_SLOTS,
    ML_BAD_BLOCK,
    ML_TOO_MANY_ITEMS,
    ML_BAD_TASK,
    ML_BAD_TILE,
    ML_BAD_STORE,
    ML_BAD_CURSOR,
    ML_STORE_STALLED,
    ML_BAD_KV_CHECKSUM,
    ML_BAD_SLOT_CHECKSUM,
    ML_SYSTEM_ERROR,
    ML_STATUS_COUNT
} ml_status;

/* Fixed when the segment is made. */
typedef struct {
    uint32_t n_layers;
    uint32_t n_q_heads;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t kv_dtype; /* ml_dtype */
    uint32_t kv_blocks; /* of 16 tokens, in every layer */
    uint32_t max_sequences; /* rows of the block table */
    uint32_t max_context_tokens;
    uint32_t max_slot_tokens;
    uint32_t n_processes;
    uint32_t n_nodes; /* NUMA nodes over which the arena is spread */
    float scale; /* of q.k */
    uint32_t checksums; /* 1: KV blocks and activations are verified whenever they are read */
} ml_geometry;

/* Tokens [start_position, start_position + n_tokens) of the sequence in `row` of the block table;
 * their q, k, v (in) and out, lse (back) are rows slot_offset, slot_offset + 1, ... of the slot. */
typedef struct {
    uint32_t row;
    uint32_t start_position;
    uint32_t n_tokens;
    uint32_t slot_offset;
    uint32_t flags;
} ml_item;

/* Offsets in the segment, in bytes, and capacities; a function of the geometry alone. */
typedef struct {
    uint64_t participants;
    uint64_t block_tables;
    uint64_t slots; /* the first slot's words */
    uint64_t slot_bytes; /* from one slot's words to the next one's */
    /* From the start of a slot's words: */
    uint64_t times, items, stores, tiles, tasks, partial_out, partial_lse;
    uint64_t kv_checksums; /* uint64 [n_layers][kv_blocks], from the segment's start; or empty */
    uint64_t activations; /* the first slot's, from the start of the segment */
    uint64_t activation_bytes; /* of one slot */
    /* From the start of a slot's activations: */
    uint64_t q, k, v, out, lse;
    uint64_t total_bytes;
    uint64_t kv_layer_bytes; /* of the arena */
    uint64_t kv_arena_bytes;
    uint64_t scratch_bytes; /* private to each attention process */
    uint32_t element_bytes; /* of q, k, v and out */
    uint32_t blocks_per_sequence;
    uint32_t max_items, max_stores, max_tiles, max_tasks;
    uint32_t partial_rows, scratch_rows; /* a row: n_q_heads * head_dim floats, n_q_heads lse */
} ml_layout;
/* [/cffi] */

/* A word that several processes use. Lock-free or it would not work across processes. */
typedef _Atomic uint32_t ml_word32;
typedef _Atomic uint64_t ml_word64;
_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2, "needs lock-free words");
_Static_assert(sizeof(ml_word32) == 4 && sizeof(ml_word64) == 8, "futexes are plain 32-bit words");

#define ML_LINE alignas(ML_CACHE_LINE_BYTES)
#define ML_MAGIC UINT64_C(0x6769534c2d456f4d)

typedef struct {
    /* Written by control before life becomes LIVE (release); constant from then on. */
    ML_LINE uint64_t magic;
    uint32_t version;
    uint32_t header_bytes;
    uint64_t epoch;
    uint64_t total_bytes;
    uint64_t kv_arena_bytes;
    ml_geometry geometry;
    uint64_t checksum; /* FNV-1a of the bytes before it: a damaged header is not worked with */
    /* Writer: control. Release: who acquires LIVE sees the words above, and who acquires RETIRED
     * the two below: the participant for whose sake, and ML_PEER_DIED or ML_PEER_HUNG; or
     * ML_EPOCH_RETIRED where nothing is wrong with anybody. */
    ML_LINE ml_word32 life;
    ml_word32 culprit;
    ml_word32 cause;
    /* Writer: device; control rings it too when it retires the segment. Futex that sleeping
     * attention processes wait on: 1 is added for every job posted. */
    ML_LINE ml_word32 bell;
    /* Attention processes that sleep or are about to. One that dies asleep leaves it too high,
     * which costs a needless wake and nothing else. */
    ML_LINE ml_word32 sleepers;
} ml_header;
_Static_assert(offsetof(ml_header, geometry) == 40, "header layout");
_Static_assert(offsetof(ml_header, life) == 128, "constants fill two lines");
_Static_assert(offsetof(ml_header, bell) == 192, "the bell has a line of its own");
_Static_assert(offsetof(ml_header, sleepers) == 256, "sleepers have a line of their own");
_Static_assert(sizeof(ml_header) == 320, "header layout");
_Static_assert(sizeof(ml_geometry) == 52 && sizeof(ml_item) == 20, "same on both sides");

/* Writer of all of it: the participant itself. Readers only look, so relaxed is enough. */
typedef struct {
    ML_LINE ml_word64 heartbeat; /* changes at least every 0.3 s while it lives and works */
    ml_word64 tasks;
    ml_word64 busy_ns;
    ml_word64 kv_read_bytes;
    ml_word32 state;
    ml_word32 detail; /* ml_status: why it LEFT */
    ml_word32 pid;
    ml_word32 cpu; /* that it is pinned to; UINT32_MAX: none */
} ml_participant;
_Static_assert(sizeof(ml_participant) == ML_CACHE_LINE_BYTES, "one line for each participant");

/* A cursor is (job << 32 | tasks left). Taking a task is a compare-and-exchange of the whole word:
 * whoever comes late, with an older job in mind, fails instead of taking a task of a newer job
 * unknowingly. Device: release store when it posts, so that a claim (acquire) sees the whole job.
 * Attention processes: the exchange. */
typedef struct {
    ML_LINE ml_word64 word;
} ml_cursor;
_Static_assert(sizeof(ml_cursor) == ML_CACHE_LINE_BYTES, "a cursor has a line of its own");

typedef struct {
    /* Writer: device, before the cursors. Readers hold a claim, which keeps the job from ending
     * and thereby these words from changing. */
    ML_LINE ml_word32 posted; /* number of the job; 0: none yet */
    ml_word32 layer;
    ml_word32 n_items;
    ml_word32 n_stores;
    ml_word32 n_tiles;
    ml_word32 n_tasks;
    ml_word64 order; /* of all jobs of both slots: the older one goes first (a hint) */
    ml_word32 n_rows;   /* of q, k, v, out and lse that items may use: the first ones */
    ml_word64 inputs_checksum; /* of those of q, k and v; 0 where geometry.checksums is */
    ml_word32 node_begin[ML_MAX_NODES + 1]; /* node i: tasks [node_begin[i], node_begin[i + 1]) */
    /* Store tasks are claimed first; then those of the own node, then any. */
    ml_cursor store_cursor;
    ml_cursor node_cursors[ML_MAX_NODES];
    /* Stores not finished yet. Device sets it; attention processes subtract (release) after
     * storing, and acquire 0 before they read what others stored. */
    ML_LINE ml_word32 stores_left;
    /* Stores and tasks not finished yet. As above; who brings it to 0 ends the job (acq_rel: it has
     * then seen what all others wrote, and passes it on through `done`). */
    ML_LINE ml_word32 work_left;
    /* First error: status in the low half, item in the high one. Device clears, any other sets. */
    ML_LINE ml_word64 error;
    /* Writer: who ends the job. Release of everything that the job wrote. The device's futex. */
    ML_LINE ml_word32 done;
    /* Of the rows of out and lse, before `done`; where geometry.checksums is 1. */
    ml_word64 outputs_checksum;
    /* Writer: device. 1 while it sleeps or is about to: only then is a wake needed. */
    ML_LINE ml_word32 device_sleeps;
} ml_slot;
_Static_assert(offsetof(ml_slot, store_cursor) == 128, "job words fill two lines");
_Static_assert(offsetof(ml_slot, node_cursors) == 192, "cursors follow, a line each");
_Static_assert(offsetof(ml_slot, stores_left) == 704, "counters follow, a line each");
_Static_assert(offsetof(ml_slot, work_left) == 768, "work_left has a line of its own");
_Static_assert(offsetof(ml_slot, error) == 832, "error has a line of its own");
_Static_assert(offsetof(ml_slot, done) == 896, "done has a line of its own");
_Static_assert(offsetof(ml_slot, device_sleeps) == 960, "device_sleeps has a line of its own");
_Static_assert(sizeof(ml_slot) == 1024, "slot layout");

/* What one process did for a job. Writer: that process, before it subtracts from work_left. */
typedef struct {
    ML_LINE ml_word32 job; /* that the numbers belong to */
    ml_word32 tasks;
    ml_word64 busy_ns;
    ml_word64 kv_read_bytes;
    ml_word64 begin_ns; /* of its first unit and end of its last one; CLOCK_MONOTONIC */
    ml_word64 end_ns;
} ml_process_times;
_Static_assert(sizeof(ml_process_times) == ML_CACHE_LINE_BYTES, "one line for each process");

/* The four below are written by the device in prepare, and read by who holds a claim. */

/* Tokens [first_token, first_token + n_tokens) of an item are stored. */
typedef struct {
    uint32_t item;
    uint32_t first_token;
    uint32_t n_tokens;
    uint32_t reserved;
} ml_store;
_Static_assert(sizeof(ml_store) == 16, "store layout");

/* Query rows [first_token, first_token + n_tokens) of an item. Their splits are computed by n_tasks
 * tasks; whoever finishes last merges them. */
typedef struct {
    ML_LINE uint32_t item;
    uint32_t first_token;
    uint32_t n_tokens;
    uint32_t n_splits;
    uint32_t n_tasks;
    uint32_t partials; /* row of [n_splits][n_tokens] partial rows; ML_NO_PARTIALS: n_tasks is 1 */
    uint32_t after_stores; /* 1: reads what store tasks write */
    /* Tasks finished since prepare, modulo nothing: job after job adds n_tasks, so that it need not
     * be cleared. acq_rel: the last one sees the partials of all. */
    ml_word32 finished;
} ml_tile;
_Static_assert(sizeof(ml_tile) == ML_CACHE_LINE_BYTES, "one line for each tile's counter");

/* Splits [first_split, end_split) of a tile. */
typedef struct {
    uint32_t tile;
    uint32_t first_split;
    uint32_t end_split;
    uint32_t store_first; /* 1: its item is one token, which this task stores as it attends */
} ml_task;
_Static_assert(sizeof(ml_task) == 16, "task layout");

#endif
