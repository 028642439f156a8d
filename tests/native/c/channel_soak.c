/* Jobs through the channel as fast as they go, from this process to attention loops in processes of
 * their own: `channel_soak SECONDS PROCESSES SPIN_NS DIRECTORY`.
 *
 * Each job adds one token to the sequence of its slot and attends to all of it. With q = 0 the
 * output is the mean of all values stored so far, so that a job lost, doubled or out of order shows
 * in all later outputs of the round; and the loops' own counters must add up to what was posted. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "channel.h"
#include "futex.h"
#include "segment.h"

enum { CONTEXT = 48, HEAD_DIM = 16 };

static ml_geometry geometry = {.n_layers = 1, .n_q_heads = 1, .n_kv_heads = 1, .head_dim = HEAD_DIM,
                               .kv_dtype = ML_FP32, .kv_blocks = 8, .max_sequences = 2,
                               .max_context_tokens = CONTEXT, .max_slot_tokens = 1, .n_nodes = 1,
                               .scale = 0.25f};

static void expect(int condition, const char *what) {
    if (condition) return;
    fprintf(stderr, "FAILED: %s\n", what);
    exit(1);
}

static int attention_process(const char *path, void *arena, uint32_t index, uint64_t spin_ns) {
    ml_segment *segment;
    ml_worker *worker;
    ml_die_with_parent(9);
    expect(ml_segment_open(open(path, O_RDWR), &segment) == ML_OK, "open");
    expect(ml_participate(segment, ML_FIRST_PROCESS + index) == ML_OK, "participate");
    ml_worker_options options = {.index = index, .spin_ns = spin_ns, .stall_ns = 10000000000u};
    expect(ml_worker_open(segment, arena, &options, &worker) == ML_OK, "worker");
    return ml_worker_run(worker) == ML_EPOCH_RETIRED ? 0 : 1;
}

static void wait_until_ready(ml_segment *segment) {
    ml_participant_view view = {0};
    for (uint32_t i = 0; i < geometry.n_processes; i++)
        do {
            usleep(1000);
            ml_participant_read(segment, ML_FIRST_PROCESS + i, &view);
        } while (view.state == ML_STARTING);
}

typedef struct {
    ml_segment *segment;
    ml_port *port;
    uint64_t n_posted[ML_SLOTS];
    double sum[ML_SLOTS];
} device;

static float *row(const device *d, uint32_t slot, uint64_t offset) {
    return (float *)(void *)(ml_activations_of(d->segment, slot) + offset);
}

static void post(device *d, uint32_t slot) {
    const ml_layout *layout = ml_segment_layout(d->segment);
    uint32_t position = (uint32_t)(d->n_posted[slot] % CONTEXT);
    ml_item item = {.row = slot, .start_position = position, .n_tokens = 1};
    ml_job_result result;
    float value = (float)(d->n_posted[slot] * 2654435761u % 4096);
    d->sum[slot] = (position ? d->sum[slot] : 0) + (double)value;
    for (int i = 0; i < HEAD_DIM; i++) row(d, slot, layout->v)[i] = value;
    row(d, slot, layout->out)[HEAD_DIM - 1] = NAN;
    expect(ml_port_prepare(d->port, slot, &item, 1, &result) == ML_OK, "prepare");
    expect(ml_port_post(d->port, slot, 0) == ML_OK, "post");
    d->n_posted[slot]++;
}

static void wait_and_check(device *d, uint32_t slot) {
    const ml_layout *layout = ml_segment_layout(d->segment);
    ml_job_result result;
    int status = ml_port_wait(d->port, slot, 10000000000u, &result);
    if (status != ML_OK) fprintf(stderr, "wait: %s\n", ml_status_text(status));
    expect(status == ML_OK && result.error == ML_OK && result.tasks == 1, "each job ends, once");
    double n = (double)((d->n_posted[slot] - 1) % CONTEXT + 1);
    double mean = row(d, slot, layout->out)[HEAD_DIM - 1];
    expect(fabs(mean - d->sum[slot] / n) < 4096 * 1e-6, "output is that of all jobs, in order");
    expect(fabs(row(d, slot, layout->lse)[0] - log(n)) < 1e-5, "lse too");
}

int main(int n_arguments, char **arguments) {
    if (n_arguments != 5) return 2;
    double duration_s = atof(arguments[1]);
    geometry.n_processes = (uint32_t)atoi(arguments[2]);
    uint64_t spin_ns = strtoull(arguments[3], NULL, 10);
    char path[4096];
    snprintf(path, sizeof path, "%s/soaked.seg", arguments[4]);
    ml_segment *control;
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
    expect(fd >= 0, "create");
    expect(ml_segment_create(fd, &geometry, 1, &control) == ML_OK, "ml_segment_create");
    uint64_t arena_bytes = ml_segment_layout(control)->kv_arena_bytes;
    int shared = MAP_SHARED | MAP_ANONYMOUS;
    void *arena = mmap(NULL, arena_bytes, PROT_READ | PROT_WRITE, shared, -1, 0);
    for (uint32_t i = 0; i < geometry.n_processes; i++)
        if (fork() == 0) _exit(attention_process(path, arena, i, spin_ns));
    wait_until_ready(control);
    ml_segment_publish(control);
    device d = {0};
    expect(ml_segment_open(open(path, O_RDWR), &d.segment) == ML_OK, "open");
    expect(ml_port_open(d.segment, 60000000000u, spin_ns, &d.port) == ML_OK, "port");
    static const int32_t BLOCKS[2][3] = {{5, 0, 3}, {1, 7, 4}};
    for (uint32_t slot = 0; slot < ML_SLOTS; slot++)
        expect(ml_port_set_blocks(d.port, slot, 0, BLOCKS[slot], 3) == ML_OK, "blocks");
    uint64_t start_ns = ml_now_ns(), end_ns = start_ns + (uint64_t)(duration_s * 1e9);
    post(&d, 0);
    while (ml_now_ns() < end_ns)
        for (int i = 0; i < 100; i++) {
            ml_participant_beat(control, ML_CONTROL);
            post(&d, 1);
            wait_and_check(&d, 0);
            post(&d, 0);
            wait_and_check(&d, 1);
        }
    wait_and_check(&d, 0);
    double elapsed_s = (double)(ml_now_ns() - start_ns) / 1e9;
    ml_segment_retire(control, ML_EPOCH_RETIRED, 0);
    for (uint32_t i = 0; i < geometry.n_processes; i++) {
        int status;
        wait(&status);
        expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "attention processes leave in peace");
    }
    uint64_t n_tasks = 0;
    for (uint32_t i = 0; i < geometry.n_processes; i++) {
        ml_participant_view view;
        ml_participant_read(control, ML_FIRST_PROCESS + i, &view);
        n_tasks += view.tasks;
    }
    expect(n_tasks == d.n_posted[0] + d.n_posted[1], "as many tasks as jobs");
    ml_port_close(d.port);
    ml_segment_close(d.segment);
    ml_segment_close(control);
    unlink(path);
    printf("jobs: %llu, per second: %.0f\n", (unsigned long long)n_tasks,
           (double)n_tasks / elapsed_s);
    return 0;
}
