/* What bench/attention.py times: decode attention over many sequences, the paper's baseline
 * (a loop that the compiler vectorises) and a read of the same memory, on one or more threads. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "attention.h"
#include "attention_baseline.h"

/* [cffi] */
enum { BENCH_KERNEL = 0, BENCH_BASELINE = 1, BENCH_READ = 2 };
enum { BENCH_STORE_NOTHING = 0, BENCH_STORE_BEFORE = 1, BENCH_STORE_ON_THE_WAY = 2 };

/* n_sequences of equal context, one query each (or n_queries, at its end). */
typedef struct {
    ml_attention_shape shape;
    void *arena_layer;
    size_t arena_bytes;
    const int32_t *block_tables; /* (n_sequences, context blocks) */
    const void *q;               /* (n_sequences, n_queries, n_q_heads, head_dim) */
    const void *new_kv;          /* (2, n_kv_heads, head_dim), the same for all sequences */
    void *out;                   /* likewise */
    float *lse;                  /* (n_sequences, n_queries, n_q_heads) */
    uint32_t n_sequences;
    uint32_t context;
    uint32_t n_queries;
    uint32_t what;  /* BENCH_KERNEL ... */
    uint32_t store; /* BENCH_STORE_...: the last position of each sequence */
    float scale;
} bench_job;

/* Zeroed memory in huge pages where the system gives them; NULL where there is none. */
void *bench_allocate(size_t bytes);
void bench_free(void *memory);

/* Seconds for the job on n_threads threads, each pinned to a core: from the first one's start to
 * the last one's end, or, with cpu_time, the mean of what each of them computed (on a busy machine
 * the wall clock counts other programs as well). */
double bench_run(const bench_job *job, uint32_t n_threads, int cpu_time);
/* [/cffi] */

enum { MAX_THREADS = 256 };

typedef struct {
    const bench_job *job;
    pthread_barrier_t *start;
    _Atomic uint32_t *cursor;
    uint32_t thread, n_threads;
    float *scratch; /* of one sequence: outputs, then log-sum-exp */
    double begin_s, end_s, cpu_s;
} worker;

static double now_s(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void *bench_allocate(size_t bytes) {
    const size_t page = (size_t)1 << 21;
    const size_t rounded = (bytes + page - 1) / page * page;
    char *memory = aligned_alloc(page, rounded);
    if (!memory) return NULL;
    madvise(memory, rounded, MADV_HUGEPAGE);
    for (size_t i = 0; i < rounded; i += 4096) memory[i] = 0;
    return memory;
}

void bench_free(void *memory) { free(memory); }

static size_t element_bytes(const bench_job *job) {
    return job->shape.kv_dtype == ML_FP32 ? 4 : 2;
}

static const int32_t *table_of(const bench_job *job, uint32_t sequence) {
    const uint32_t n_blocks = (job->context + ML_BLOCK_TOKENS - 1) / ML_BLOCK_TOKENS;
    return job->block_tables + (size_t)sequence * n_blocks;
}

static const void *first_block(const bench_job *job, uint32_t sequence) {
    if (sequence >= job->n_sequences) return NULL;
    const size_t number = (size_t)table_of(job, sequence)[0];
    return (const char *)job->arena_layer + number * ml_kv_block_bytes(&job->shape);
}

/* As an attention process does it: into its own scratch, and from there, merged (one range) and
 * rounded, into the job's output. */
static void attend_sequence(const worker *w, uint32_t sequence, uint32_t following) {
    const bench_job *job = w->job;
    const uint32_t n_rows = job->n_queries * job->shape.n_q_heads;
    const size_t row = (size_t)job->shape.n_q_heads * job->shape.head_dim;
    const size_t at = sequence * job->n_queries * row * element_bytes(job);
    ml_attend_task task = {
        .arena_layer = job->arena_layer,
        .block_table = table_of(job, sequence),
        .q = (const char *)job->q + at,
        .q_row_stride_bytes = row * element_bytes(job),
        .out = w->scratch,
        .lse = w->scratch + job->n_queries * row,
        .next_block = first_block(job, following),
        .kv_end = job->context,
        .n_queries = job->n_queries,
        .query_position = job->context - job->n_queries,
        .scale = job->scale,
    };
    const size_t kv_row = job->shape.n_kv_heads * job->shape.head_dim * element_bytes(job);
    const char *k = job->new_kv, *v = k + kv_row;
    if (job->store == BENCH_STORE_BEFORE)
        ml_kv_store(&job->shape, job->arena_layer, task.block_table, job->context - 1, 1, k, v,
                    kv_row);
    if (job->store == BENCH_STORE_ON_THE_WAY) {
        task.new_k = k;
        task.new_v = v;
    }
    if (job->what == BENCH_BASELINE) {
        baseline_attend(&job->shape, &task);
        return;
    }
    ml_attend(&job->shape, &task);
    const ml_merge_task merge = {.out_parts = task.out,
                                 .lse_parts = task.lse,
                                 .out = (char *)job->out + at,
                                 .lse = job->lse + (size_t)sequence * n_rows,
                                 .n_splits = 1,
                                 .n_rows = n_rows,
                                 .head_dim = job->shape.head_dim,
                                 .out_dtype = job->shape.kv_dtype == ML_FP32 ? ML_FP32 : ML_BF16};
    ml_merge(&merge);
}

/* A slice of the arena for each thread, in order. */
static void read_slice(const worker *w) {
    const size_t lines = w->job->arena_bytes / 64 / w->n_threads;
    const char *begin = (const char *)w->job->arena_layer + lines * 64 * w->thread;
    baseline_read(begin, lines * 64);
}

static void *run_worker(void *argument) {
    worker *w = argument;
    cpu_set_t allowed, one;
    sched_getaffinity(0, sizeof allowed, &allowed);
    CPU_ZERO(&one);
    for (int cpu = 0, seen = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &allowed) && seen++ == (int)w->thread) CPU_SET(cpu, &one);
    if (CPU_COUNT(&one)) pthread_setaffinity_np(pthread_self(), sizeof one, &one);
    const size_t n_rows = (size_t)w->job->n_queries * w->job->shape.n_q_heads;
    w->scratch = aligned_alloc(64, n_rows * (w->job->shape.head_dim + 16) * sizeof(float));
    pthread_barrier_wait(w->start);
    w->begin_s = now_s(CLOCK_MONOTONIC);
    w->cpu_s = -now_s(CLOCK_THREAD_CPUTIME_ID);
    if (w->job->what == BENCH_READ) {
        read_slice(w);
    } else {
        uint32_t mine = atomic_fetch_add(w->cursor, 1);
        while (mine < w->job->n_sequences) {
            const uint32_t following = atomic_fetch_add(w->cursor, 1);
            attend_sequence(w, mine, following);
            mine = following;
        }
    }
    w->cpu_s += now_s(CLOCK_THREAD_CPUTIME_ID);
    w->end_s = now_s(CLOCK_MONOTONIC);
    free(w->scratch);
    return NULL;
}

double bench_run(const bench_job *job, uint32_t n_threads, int cpu_time) {
    pthread_t threads[MAX_THREADS];
    worker workers[MAX_THREADS];
    pthread_barrier_t start;
    _Atomic uint32_t cursor = 0;
    if (n_threads > MAX_THREADS) n_threads = MAX_THREADS;
    pthread_barrier_init(&start, NULL, n_threads);
    for (uint32_t i = 0; i < n_threads; i++) {
        workers[i] = (worker){job, &start, &cursor, i, n_threads, NULL, 0, 0, 0};
        pthread_create(&threads[i], NULL, run_worker, &workers[i]);
    }
    double begin_s = 0, end_s = 0, cpu_s = 0;
    for (uint32_t i = 0; i < n_threads; i++) {
        pthread_join(threads[i], NULL);
        if (i == 0 || workers[i].begin_s < begin_s) begin_s = workers[i].begin_s;
        if (workers[i].end_s > end_s) end_s = workers[i].end_s;
        cpu_s += workers[i].cpu_s / n_threads;
    }
    pthread_barrier_destroy(&start);
    return cpu_time ? cpu_s : end_s - begin_s;
}
