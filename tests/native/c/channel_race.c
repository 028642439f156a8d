/* One device and several attention loops as threads of one process, for ThreadSanitizer:
 * `channel_race JOBS DIRECTORY`. Both slots are always in flight; every output is compared with
 * what the same job gave when nothing ran beside it. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "channel.h"
#include "segment.h"

enum { N_LOOPS = 3, N_KINDS = 4 };

static const ml_geometry GEOMETRY = {.n_layers = 2, .n_q_heads = 2, .n_kv_heads = 1, .head_dim = 16,
                                     .kv_dtype = ML_FP32, .kv_blocks = 1024, .max_sequences = 16,
                                     .max_context_tokens = 1600, .max_slot_tokens = 256,
                                     .n_processes = N_LOOPS, .n_nodes = 2, .scale = 0.25f};

static void expect(int condition, const char *what) {
    if (condition) return;
    fprintf(stderr, "FAILED: %s\n", what);
    abort();
}

typedef struct {
    pthread_t thread;
    ml_worker *worker;
    int reason;
} loop;

static void *run(void *argument) {
    loop *l = argument;
    l->reason = ml_worker_run(l->worker);
    return NULL;
}

static ml_segment *new_segment(const char *directory) {
    char path[4096];
    snprintf(path, sizeof path, "%s/raced.seg", directory);
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
    expect(fd >= 0, "create");
    ml_segment *made, *segment;
    expect(ml_segment_create(fd, &GEOMETRY, 1, &made) == ML_OK, "ml_segment_create");
    ml_segment_publish(made);
    uint64_t bytes = ml_segment_layout(made)->total_bytes;
    uint8_t *memory = aligned_alloc(4096, bytes);
    memcpy(memory, ml_segment_base(made), bytes);
    ml_segment_close(made);
    unlink(path);
    expect(ml_segment_attach(memory, bytes, &segment) == ML_OK, "ml_segment_attach");
    return segment;
}

static float *rows(const ml_segment *segment, uint32_t slot, uint64_t offset) {
    return (float *)(void *)(ml_activations_of(segment, slot) + offset);
}

/* Sequences 8 * slot + 0 ... 7: kind 0 a batch of decodes, 1 one long chunk, 2 a mix, 3 one decode.
 * */
static uint32_t prepare(ml_port *port, uint32_t slot, uint32_t kind) {
    ml_item items[8] = {{0}};
    uint32_t n_items = kind == 0 ? 8 : kind == 2 ? 5 : 1, offset = 0;
    for (uint32_t i = 0; i < n_items; i++) {
        uint32_t chunk = kind == 1 ? 200 : kind == 2 && i < 2 ? 70 : 1;
        items[i] = (ml_item){.row = 8 * slot + i, .start_position = 100 * i + 300,
                             .n_tokens = chunk, .slot_offset = offset};
        offset += chunk;
    }
    ml_job_result result;
    expect(ml_port_prepare(port, slot, items, n_items, &result) == ML_OK, "prepare");
    return offset;
}

static void fill_inputs(const ml_segment *segment) {
    const ml_layout *layout = ml_segment_layout(segment);
    for (uint32_t slot = 0; slot < ML_SLOTS; slot++) {
        uint64_t n = layout->out / 4;
        float *inputs = rows(segment, slot, 0);
        for (uint64_t i = 0; i < n; i++)
            inputs[i] = (float)(i * 2654435761u % 1000) / 500.0f - 1.0f;
    }
}

int main(int n_arguments, char **arguments) {
    if (n_arguments != 3) return 2;
    uint32_t n_jobs = (uint32_t)strtoul(arguments[1], NULL, 10);
    ml_segment *segment = new_segment(arguments[2]);
    const ml_layout *layout = ml_segment_layout(segment);
    void *arena = aligned_alloc(64, layout->kv_arena_bytes);
    memset(arena, 0, layout->kv_arena_bytes);
    fill_inputs(segment);
    loop loops[N_LOOPS];
    for (uint32_t i = 0; i < N_LOOPS; i++) {
        ml_worker_options options = {.index = i, .node = i % 2, .stall_ns = 10000000000u};
        options.spin_ns = i == 0 ? 20000 : 0;
        expect(ml_worker_open(segment, arena, &options, &loops[i].worker) == ML_OK, "worker");
        pthread_create(&loops[i].thread, NULL, run, &loops[i]);
    }
    ml_port *port;
    expect(ml_port_open(segment, 60000000000u, 5000, &port) == ML_OK, "port");
    for (uint32_t row = 0; row < 16; row++)
        for (int32_t i = 0; i < 63; i++) {
            int32_t block = (int32_t)((row * 63 + (uint32_t)i) * 37 % 1024);
            expect(ml_port_set_blocks(port, row, (uint32_t)i, &block, 1) == ML_OK, "block");
        }
    uint64_t row_floats = (uint64_t)GEOMETRY.n_q_heads * GEOMETRY.head_dim;
    uint64_t out_bytes = layout->lse - layout->out;
    float *expected[ML_SLOTS][N_KINDS];
    ml_job_result result;
    for (uint32_t round = 0; round < 2; round++) /* the second time the cache is the final one */
        for (uint32_t kind = 0; kind < N_KINDS; kind++)
            for (uint32_t slot = 0; slot < ML_SLOTS; slot++) {
                prepare(port, slot, kind);
                for (uint32_t layer = 0; layer < 2; layer++) {
                    expect(ml_port_post(port, slot, layer) == ML_OK, "post");
                    expect(ml_port_wait(port, slot, 60000000000u, &result) == ML_OK, "wait");
                }
                if (round == 0) expected[slot][kind] = malloc(out_bytes);
                memcpy(expected[slot][kind], rows(segment, slot, layout->out), out_bytes);
            }
    for (uint32_t job = 0; job < n_jobs; job++) {
        uint32_t kinds[ML_SLOTS], n_rows[ML_SLOTS];
        for (uint32_t slot = 0; slot < ML_SLOTS; slot++) {
            kinds[slot] = (job * 7 + slot * 3 + job / 5) % N_KINDS;
            n_rows[slot] = prepare(port, slot, kinds[slot]);
            expect(ml_port_post(port, slot, 1) == ML_OK, "post");
        }
        for (uint32_t slot = 0; slot < ML_SLOTS; slot++) {
            expect(ml_port_wait(port, slot, 60000000000u, &result) == ML_OK, "wait");
            expect(result.error == ML_OK, "job");
            expect(memcmp(rows(segment, slot, layout->out), expected[slot][kinds[slot]],
                          n_rows[slot] * row_floats * 4) == 0, "outputs are the same");
        }
    }
    ml_segment_retire(segment, ML_EPOCH_RETIRED, 0);
    for (uint32_t i = 0; i < N_LOOPS; i++) {
        pthread_join(loops[i].thread, NULL);
        expect(loops[i].reason == ML_EPOCH_RETIRED, "loops leave when the epoch ends");
        ml_worker_close(loops[i].worker);
    }
    for (uint32_t slot = 0; slot < ML_SLOTS; slot++)
        for (uint32_t kind = 0; kind < N_KINDS; kind++) free(expected[slot][kind]);
    ml_port_close(port);
    free(ml_segment_base(segment));
    ml_segment_close(segment);
    free(arena);
    printf("jobs: %u\n", 2 * n_jobs);
    return 0;
}
