/* Mutates the words that other processes write, and runs the attention loop and the device's wait
 * on them: `channel_fuzz MUTATIONS SEED DIRECTORY`. Compiled with AddressSanitizer and UBSan,
 * segment and arena in allocations of exactly their size. Nothing may crash, hang, or touch q, k
 * and v. */
#define _GNU_SOURCE
#include <assert.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "channel.h"
#include "segment.h"
#include "worker.h"

enum { N_JOBS = 24, N_WORKERS = 2, HANG_S = 30 };

static const ml_geometry GEOMETRY = {.n_layers = 2, .n_q_heads = 2, .n_kv_heads = 1, .head_dim = 16,
                                     .kv_dtype = ML_FP32, .kv_blocks = 128, .max_sequences = 4,
                                     .max_context_tokens = 1600, .max_slot_tokens = 48,
                                     .n_processes = N_WORKERS, .n_nodes = 2, .scale = 0.25f};

typedef struct {
    uint64_t random;
    uint8_t *memory;      /* the segment */
    uint8_t *inputs;      /* what q, k, v must still be */
    uint8_t *jobs[N_JOBS]; /* control words of posted jobs: [control_bytes] */
    uint64_t control_bytes; /* up to the second slot's partials: everything but bulk data */
    ml_segment *segment;
    ml_worker *workers[N_WORKERS];
    ml_port *port;
    void *arena;
    uint64_t counts[ML_STATUS_COUNT];
} fuzz;

static uint64_t next(uint64_t *state) { /* xorshift64* */
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(0x2545f4914f6cdd1d);
}

static uint32_t below(uint64_t *state, uint32_t n) { return (uint32_t)(next(state) >> 32) % n; }

static void expect(int condition, const char *what) {
    if (condition) return;
    fprintf(stderr, "FAILED: %s\n", what);
    abort();
}

static void hangs(int signal_number) {
    (void)signal_number;
    static const char text[] = "FAILED: hangs\n";
    if (write(2, text, sizeof text - 1) < 0) _exit(3);
    abort();
}

/* A segment made in a file, copied to memory that the sanitizer watches. */
static uint8_t *new_memory(const char *directory, uint64_t *bytes) {
    char path[4096];
    snprintf(path, sizeof path, "%s/fuzzed.seg", directory);
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
    expect(fd >= 0, "create");
    ml_segment *made;
    expect(ml_segment_create(fd, &GEOMETRY, 7, &made) == ML_OK, "ml_segment_create");
    ml_segment_publish(made);
    *bytes = ml_segment_layout(made)->total_bytes;
    uint8_t *memory = aligned_alloc(4096, *bytes);
    memcpy(memory, ml_segment_base(made), *bytes);
    ml_segment_close(made);
    unlink(path);
    return memory;
}

static uint64_t slot_control_end(const fuzz *f, uint32_t slot) {
    const ml_layout *layout = ml_segment_layout(f->segment);
    return layout->slots + slot * layout->slot_bytes + layout->partial_out;
}

/* Random items that prepare takes: decodes and chunks, short and over several splits. */
static void post_random_job(fuzz *f, ml_port *port, uint32_t slot) {
    ml_item items[4];
    uint32_t n_items = 1 + below(&f->random, 4), offset = 0;
    for (uint32_t i = 0; i < n_items; i++) {
        uint32_t n_tokens = below(&f->random, 2) ? 1 : 1 + below(&f->random, 12);
        uint32_t start = below(&f->random, below(&f->random, 2) ? 1500 : 40);
        uint32_t flags = below(&f->random, 4) ? 0 : below(&f->random, 3);
        items[i] = (ml_item){.row = i, .start_position = start, .n_tokens = n_tokens,
                             .slot_offset = offset, .flags = flags};
        offset += n_tokens;
    }
    ml_job_result result;
    expect(ml_port_prepare(port, slot, items, n_items, &result) == ML_OK, "prepare");
    expect(ml_port_post(port, slot, below(&f->random, GEOMETRY.n_layers)) == ML_OK, "post");
}

static void set_up(fuzz *f, const char *directory) {
    uint64_t bytes;
    f->memory = new_memory(directory, &bytes);
    expect(ml_segment_attach(f->memory, bytes, &f->segment) == ML_OK, "attach");
    const ml_layout *layout = ml_segment_layout(f->segment);
    f->control_bytes = slot_control_end(f, 1);
    f->arena = aligned_alloc(64, layout->kv_arena_bytes);
    memset(f->arena, 0, layout->kv_arena_bytes);
    for (uint32_t i = 0; i < N_WORKERS; i++) {
        ml_worker_options options = {.index = i, .node = i, .stall_ns = 20000};
        expect(ml_worker_open(f->segment, f->arena, &options, &f->workers[i]) == ML_OK, "worker");
    }
    for (uint64_t i = layout->activations; i < bytes; i++) f->memory[i] = (uint8_t)(i % 61);
    f->inputs = malloc(bytes - layout->activations);
    memcpy(f->inputs, f->memory + layout->activations, bytes - layout->activations);
    uint8_t *fresh = malloc(f->control_bytes);
    memcpy(fresh, f->memory, f->control_bytes);
    for (int i = 0; i < N_JOBS; i++) {
        memcpy(f->memory, fresh, f->control_bytes);
        ml_port *port;
        expect(ml_port_open(f->segment, 1000000000, 0, &port) == ML_OK, "port");
        for (int32_t row = 0; row < 4; row++)
            for (int32_t block = 0; block < 100; block++) {
                int32_t id = (31 * row + 7 * block) % 128;
                int status = ml_port_set_blocks(port, (uint32_t)row, (uint32_t)block, &id, 1);
                expect(status == ML_OK, "block");
            }
        for (uint32_t slot = 0; slot < ML_SLOTS; slot++) post_random_job(f, port, slot);
        f->jobs[i] = malloc(f->control_bytes);
        memcpy(f->jobs[i], f->memory, f->control_bytes);
        if (i + 1 < N_JOBS) ml_port_close(port);
        else f->port = port;
    }
    free(fresh);
}

/* A place that matters: header, participants, block tables, or a slot's words, equally often. */
static uint64_t pick_word(const fuzz *f, uint64_t *random) {
    const ml_layout *layout = ml_segment_layout(f->segment);
    uint32_t slot = below(random, ML_SLOTS);
    uint64_t words = layout->slots + slot * layout->slot_bytes;
    const uint64_t begins[] = {0, layout->participants, layout->block_tables, words,
                               words, words + layout->items, words + layout->stores,
                               words + layout->tiles, words + layout->tasks};
    const uint64_t ends[] = {sizeof(ml_header), layout->block_tables, layout->slots,
                             words + layout->times, words + layout->items, words + layout->stores,
                             words + layout->tiles, words + layout->tasks,
                             words + layout->tasks + 32 * sizeof(ml_task)};
    uint32_t area = below(random, 9);
    uint64_t n_words = (ends[area] - begins[area]) / 4;
    /* The beginnings of the arrays are where the job is. */
    uint32_t near = (uint32_t)(n_words < 48 ? n_words : 48);
    uint64_t index = below(random, below(random, 3) ? near : (uint32_t)n_words);
    return begins[area] + 4 * index;
}

static uint32_t pick_value(const fuzz *f, uint64_t *random, uint32_t old) {
    static const uint32_t EDGES[] = {0, 1, 2, 15, 16, 31, 63, 64, 127, 128, 511, 512, 1599, 1600,
                                     0x7fffffff, 0x80000000, 0xfffffff0, 0xffffffff};
    uint32_t other;
    switch (below(random, 6)) {
        case 0: return EDGES[below(random, sizeof EDGES / sizeof *EDGES)];
        case 1: return old + 1;
        case 2: return old - 1;
        case 3: return old ^ (UINT32_C(1) << below(random, 32));
        case 4: memcpy(&other, f->memory + pick_word(f, random), 4); return other;
        default: return (uint32_t)next(random);
    }
}

static void mutate(const fuzz *f, uint64_t *random) {
    uint64_t at = pick_word(f, random);
    _Atomic uint32_t *word = (_Atomic uint32_t *)(void *)(f->memory + at);
    uint32_t old = atomic_load_explicit(word, memory_order_relaxed);
    atomic_store_explicit(word, pick_value(f, random, old), memory_order_relaxed);
}

static void check_inputs(const fuzz *f) {
    const ml_layout *layout = ml_segment_layout(f->segment);
    for (uint32_t slot = 0; slot < ML_SLOTS; slot++) {
        uint64_t at = slot * layout->activation_bytes;
        expect(memcmp(f->inputs + at, f->memory + layout->activations + at, layout->out) == 0,
               "q, k and v are as they were");
    }
}

/* All jobs have the same number here: workers must not remember that they gave one up. */
static void forget(ml_worker *worker) {
    memset(worker->given_up, 0, sizeof worker->given_up);
    memset(worker->jobs, 0, sizeof worker->jobs);
}

static void run_loops(fuzz *f) {
    for (uint32_t i = 0; i < N_WORKERS; i++) forget(f->workers[i]);
    for (int round = 0; round < 2; round++)
        for (uint32_t i = 0; i < N_WORKERS; i++) ml_worker_poll(f->workers[i]);
    for (uint32_t slot = 0; slot < ML_SLOTS; slot++) {
        ml_job_result result;
        int status = ml_port_wait(f->port, slot, 0, &result);
        f->counts[status == ML_OK && result.error < ML_STATUS_COUNT ? (int)result.error : status]++;
    }
}

/* The header as whoever opens the segment sees it. */
static void open_mutated(fuzz *f) {
    ml_segment *opened;
    const ml_layout *layout = ml_segment_layout(f->segment);
    if (ml_segment_attach(f->memory, layout->total_bytes, &opened) != ML_OK) return;
    const ml_layout *found = ml_segment_layout(opened);
    expect(found->total_bytes == layout->total_bytes, "an accepted header fits the memory");
    ml_worker *worker;
    ml_worker_options options = {.stall_ns = 20000};
    if (found->kv_arena_bytes == layout->kv_arena_bytes &&
        ml_worker_open(opened, f->arena, &options, &worker) == ML_OK) {
        ml_worker_poll(worker);
        ml_worker_close(worker);
    }
    ml_segment_close(opened);
}

typedef struct {
    const fuzz *f;
    uint64_t random;
    _Atomic int stop;
} scribbler;

static void *scribble(void *argument) {
    scribbler *s = argument;
    while (!atomic_load(&s->stop)) mutate(s->f, &s->random);
    return NULL;
}

/* Words that change while they are read. */
static void run_scribbled(fuzz *f, uint64_t n_jobs) {
    scribbler s = {.f = f, .random = next(&f->random) | 1};
    pthread_t thread;
    expect(pthread_create(&thread, NULL, scribble, &s) == 0, "thread");
    for (uint64_t i = 0; i < n_jobs; i++) {
        alarm(HANG_S);
        memcpy(f->memory, f->jobs[below(&f->random, N_JOBS)], f->control_bytes);
        run_loops(f);
        check_inputs(f);
    }
    atomic_store(&s.stop, 1);
    pthread_join(thread, NULL);
}

static void tear_down(fuzz *f) {
    ml_port_close(f->port);
    for (uint32_t i = 0; i < N_WORKERS; i++) ml_worker_close(f->workers[i]);
    ml_segment_close(f->segment);
    for (int i = 0; i < N_JOBS; i++) free(f->jobs[i]);
    free(f->memory);
    free(f->inputs);
    free(f->arena);
}

int main(int n_arguments, char **arguments) {
    if (n_arguments != 4) return 2;
    uint64_t n_mutations = strtoull(arguments[1], NULL, 10), done = 0;
    fuzz f = {.random = strtoull(arguments[2], NULL, 10) * 2 + 1};
    signal(SIGALRM, hangs);
    set_up(&f, arguments[3]);
    /* Unharmed jobs come to a good end: otherwise nothing would be tested. */
    for (int i = 0; i < N_JOBS; i++) {
        memcpy(f.memory, f.jobs[i], f.control_bytes);
        run_loops(&f);
    }
    expect(f.counts[ML_OK] == N_JOBS * ML_SLOTS, "unharmed jobs end well");
    while (done < n_mutations) {
        alarm(HANG_S);
        memcpy(f.memory, f.jobs[below(&f.random, N_JOBS)], f.control_bytes);
        uint32_t n = 1 + below(&f.random, 4);
        for (uint32_t i = 0; i < n; i++) mutate(&f, &f.random);
        done += n;
        if (below(&f.random, 8) == 0) open_mutated(&f);
        run_loops(&f);
        check_inputs(&f);
    }
    run_scribbled(&f, n_mutations / 100);
    for (int i = 0; i < ML_STATUS_COUNT; i++)
        if (f.counts[i]) printf("%s: %llu\n", ml_status_text(i), (unsigned long long)f.counts[i]);
    printf("mutations: %llu\n", (unsigned long long)done);
    tear_down(&f);
    return 0;
}
