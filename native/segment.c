/* A segment's file: making, opening, taking part in it. */
#define _GNU_SOURCE
#include "checksum.h"
#include "segment.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>

#include "futex.h"

_Static_assert(sizeof(off_t) == 8, "segments are larger than 2 GB");

/* ---- locks ---- */

/* OFD locks belong to the open file, not to the process: two handles of one process exclude each
 * other as two processes do, and closing some other descriptor of the file does not drop them. */
static int lock_byte(int fd, int command, uint32_t participant, struct flock *lock) {
    *lock = (struct flock){
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)participant, .l_len = 1};
    return fcntl(fd, command, lock);
}

int ml_participate(ml_segment *segment, uint32_t participant) {
    struct flock lock;
    if (participant >= ml_participants(segment)) return ML_BAD_SEGMENT;
    if (segment->fd < 0) return ML_OK;
    if (lock_byte(segment->fd, F_OFD_SETLK, participant, &lock) == 0) return ML_OK;
    return errno == EAGAIN || errno == EACCES ? ML_SLOT_BUSY : ML_SYSTEM_ERROR;
}

int ml_participant_alive(const ml_segment *segment, uint32_t participant) {
    struct flock lock;
    if (segment->fd < 0 || participant >= ml_participants(segment)) return -1;
    if (lock_byte(segment->fd, F_OFD_GETLK, participant, &lock) != 0) return -1;
    return lock.l_type != F_UNLCK;
}

int ml_file_is_owned(int fd) {
    struct flock lock;
    if (lock_byte(fd, F_OFD_SETLK, ML_CONTROL, &lock) == 0) return 0;
    return errno == EAGAIN || errno == EACCES ? 1 : -1;
}

void ml_participant_beat(ml_segment *segment, uint32_t participant) {
    ml_participant *self = ml_participant_of(segment, participant);
    atomic_store_explicit(&self->heartbeat, ml_now_ns(), memory_order_relaxed);
}

void ml_participant_read(const ml_segment *segment, uint32_t participant,
                         ml_participant_view *view) {
    memset(view, 0, sizeof *view);
    if (participant >= ml_participants(segment)) return;
    ml_participant *it = ml_participant_of(segment, participant);
    view->heartbeat = atomic_load_explicit(&it->heartbeat, memory_order_relaxed);
    view->tasks = atomic_load_explicit(&it->tasks, memory_order_relaxed);
    view->busy_ns = atomic_load_explicit(&it->busy_ns, memory_order_relaxed);
    view->kv_read_bytes = atomic_load_explicit(&it->kv_read_bytes, memory_order_relaxed);
    view->state = atomic_load_explicit(&it->state, memory_order_relaxed);
    view->detail = atomic_load_explicit(&it->detail, memory_order_relaxed);
    view->pid = atomic_load_explicit(&it->pid, memory_order_relaxed);
    view->cpu = atomic_load_explicit(&it->cpu, memory_order_relaxed);
}

/* ---- making and opening ---- */

static int reserve_file(int fd, uint64_t bytes) {
    int error;
    do error = posix_fallocate(fd, 0, (off_t)bytes);
    while (error == EINTR);
    errno = error;
    return error ? ML_SYSTEM_ERROR : ML_OK;
}

static void *map_file(int fd, uint64_t bytes) {
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return base == MAP_FAILED ? NULL : base;
}

static ml_segment *new_segment(void *base, int fd, const ml_geometry *geometry, uint64_t epoch) {
    ml_segment *segment = calloc(1, sizeof *segment);
    if (!segment) return NULL;
    ml_layout_of(geometry, &segment->layout);
    segment->base = base;
    segment->bytes = segment->layout.total_bytes;
    segment->fd = fd;
    segment->epoch = epoch;
    segment->geometry = *geometry;
    segment->shape = (ml_attention_shape){.n_q_heads = geometry->n_q_heads,
                                          .n_kv_heads = geometry->n_kv_heads,
                                          .head_dim = geometry->head_dim,
                                          .kv_dtype = geometry->kv_dtype};
    return segment;
}

static uint64_t checksum_of(const ml_header *header) {
    return ml_checksum(ML_CHECKSUM_START, header, offsetof(ml_header, checksum));
}

uint64_t ml_inputs_checksum(const ml_segment *segment, uint32_t slot, uint32_t n_rows) {
    const ml_geometry *g = &segment->geometry;
    const ml_layout *layout = &segment->layout;
    const uint8_t *base = ml_activations_of(segment, slot);
    const size_t head_bytes = (size_t)n_rows * g->head_dim * layout->element_bytes;
    uint64_t hash = ml_checksum(ML_CHECKSUM_START, base + layout->q, g->n_q_heads * head_bytes);
    hash = ml_checksum(hash, base + layout->k, g->n_kv_heads * head_bytes);
    return ml_checksum(hash, base + layout->v, g->n_kv_heads * head_bytes);
}

uint64_t ml_outputs_checksum(const ml_segment *segment, uint32_t slot, uint32_t n_rows) {
    const ml_geometry *g = &segment->geometry;
    const ml_layout *layout = &segment->layout;
    const uint8_t *base = ml_activations_of(segment, slot);
    const size_t n_heads = (size_t)n_rows * g->n_q_heads;
    uint64_t hash = ml_checksum(ML_CHECKSUM_START, base + layout->out,
                                n_heads * g->head_dim * layout->element_bytes);
    return ml_checksum(hash, base + layout->lse, n_heads * sizeof(float));
}

static void write_header(ml_segment *segment) {
    ml_header *header = ml_header_of(segment);
    header->magic = ML_MAGIC;
    header->version = ML_ABI_VERSION;
    header->header_bytes = sizeof *header;
    header->epoch = segment->epoch;
    header->total_bytes = segment->layout.total_bytes;
    header->kv_arena_bytes = segment->layout.kv_arena_bytes;
    header->geometry = segment->geometry;
    header->checksum = checksum_of(header);
    uint64_t entries =
        (uint64_t)segment->geometry.max_sequences * segment->layout.blocks_per_sequence;
    memset(segment->base + segment->layout.block_tables, 0xff, entries * sizeof(int32_t));
    atomic_store_explicit(&header->life, ML_BUILDING, memory_order_release);
}

/* The lock comes first and the name is checked under it: from then on whoever cleans up after
 * dead processes sees that this file has an owner. */
static int own_file(int fd) {
    struct flock lock;
    struct stat status;
    if (lock_byte(fd, F_OFD_SETLK, ML_CONTROL, &lock) != 0)
        return errno == EAGAIN || errno == EACCES ? ML_SLOT_BUSY : ML_SYSTEM_ERROR;
    if (fstat(fd, &status) != 0) return ML_SYSTEM_ERROR;
    return status.st_nlink == 0 ? ML_SLOT_BUSY : ML_OK;
}

int ml_segment_create(int fd, const ml_geometry *geometry, uint64_t epoch, ml_segment **segment) {
    ml_layout layout;
    int status = ml_layout_of(geometry, &layout);
    if (status == ML_OK) status = own_file(fd);
    if (status == ML_OK) status = reserve_file(fd, layout.total_bytes);
    if (status != ML_OK) return status;
    void *base = map_file(fd, layout.total_bytes);
    if (!base) return ML_SYSTEM_ERROR;
    *segment = new_segment(base, fd, geometry, epoch);
    if (!*segment) {
        munmap(base, layout.total_bytes);
        errno = ENOMEM;
        return ML_SYSTEM_ERROR;
    }
    write_header(*segment);
    return ML_OK;
}

/* Copy the geometry out of `base` once and check the copy: the shared one may change meanwhile. */
static int checked_geometry(const void *base, uint64_t bytes, ml_geometry *geometry,
                            uint64_t *epoch) {
    ml_layout layout;
    ml_header header;
    if (bytes < sizeof header) return ML_BAD_SEGMENT;
    memcpy(&header, base, sizeof header);
    if (header.magic != ML_MAGIC || header.version != ML_ABI_VERSION) return ML_BAD_SEGMENT;
    if (header.header_bytes != sizeof header || header.total_bytes != bytes) return ML_BAD_SEGMENT;
    if (header.checksum != checksum_of(&header)) return ML_BAD_SEGMENT;
    if (ml_layout_of(&header.geometry, &layout) != ML_OK) return ML_BAD_SEGMENT;
    if (layout.total_bytes != bytes || layout.kv_arena_bytes != header.kv_arena_bytes)
        return ML_BAD_SEGMENT;
    *geometry = header.geometry;
    *epoch = header.epoch;
    return ML_OK;
}

static int open_mapped(void *base, uint64_t bytes, int fd, ml_segment **segment) {
    ml_geometry geometry;
    uint64_t epoch;
    int status = checked_geometry(base, bytes, &geometry, &epoch);
    if (status != ML_OK) return status;
    *segment = new_segment(base, fd, &geometry, epoch);
    if (*segment) return ML_OK;
    errno = ENOMEM;
    return ML_SYSTEM_ERROR;
}

int ml_segment_attach(void *base, uint64_t bytes, ml_segment **segment) {
    return open_mapped(base, bytes, -1, segment);
}

int ml_segment_open(int fd, ml_segment **segment) {
    struct stat status;
    if (fstat(fd, &status) != 0) return ML_SYSTEM_ERROR;
    uint64_t bytes = (uint64_t)status.st_size;
    if (!S_ISREG(status.st_mode) || bytes < sizeof(ml_header)) return ML_BAD_SEGMENT;
    void *base = map_file(fd, bytes);
    if (!base) return ML_SYSTEM_ERROR;
    int opened = open_mapped(base, bytes, fd, segment);
    if (opened != ML_OK) munmap(base, bytes);
    return opened;
}

void ml_segment_close(ml_segment *segment) {
    if (segment->fd >= 0) {
        munmap(segment->base, segment->bytes);
        close(segment->fd);
    }
    free(segment);
}

const ml_geometry *ml_segment_geometry(const ml_segment *segment) { return &segment->geometry; }
const ml_layout *ml_segment_layout(const ml_segment *segment) { return &segment->layout; }
uint64_t ml_segment_epoch(const ml_segment *segment) { return segment->epoch; }
uint8_t *ml_segment_base(const ml_segment *segment) { return segment->base; }

uint64_t ml_segment_jobs(const ml_segment *segment) {
    uint64_t jobs = 0;
    for (uint32_t slot = 0; slot < ML_SLOTS; slot++)
        jobs = ml_max(jobs, atomic_load_explicit(&ml_slot_of(segment, slot)->order,
                                                 memory_order_relaxed));
    return jobs;
}

/* Acquire: who sees LIVE sees the whole header. */
uint32_t ml_segment_life(const ml_segment *segment) {
    return atomic_load_explicit(&ml_header_of(segment)->life, memory_order_acquire);
}

void ml_segment_publish(ml_segment *segment) {
    atomic_store_explicit(&ml_header_of(segment)->life, ML_LIVE, memory_order_release);
}

void ml_segment_retire(ml_segment *segment, int cause, uint32_t culprit) {
    ml_header *header = ml_header_of(segment);
    if (ml_segment_life(segment) == ML_RETIRED) return; /* the first cause stays */
    atomic_store_explicit(&header->culprit, culprit, memory_order_relaxed);
    atomic_store_explicit(&header->cause, (uint32_t)cause, memory_order_relaxed);
    atomic_store_explicit(&header->life, ML_RETIRED, memory_order_release);
    /* Changing the bell makes who is about to sleep on it come back; the device's futexes are not
     * changed (they tell results), so a device about to sleep notices at its next look. */
    atomic_fetch_add_explicit(&header->bell, 1, memory_order_release);
    ml_futex_wake(&header->bell);
    for (uint32_t slot = 0; slot < ML_SLOTS; slot++)
        ml_futex_wake(&ml_slot_of(segment, slot)->done);
}

/* ---- arena ---- */

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
enum { MPOL_PREFERRED_NODE = 1, POPULATE_BYTES = 256 << 20 };

/* Best effort: where the kernel has no NUMA, or forbids it, memory comes from anywhere. */
static void bind_to_node(uint8_t *start, uint8_t *end, uint32_t node) {
    uint64_t mask[16] = {0};
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t first = (uintptr_t)start / page * page;
    uintptr_t last = (uintptr_t)end / page * page;
    if (node >= 64 * 16 - 1 || last <= first) return;
    mask[node / 64] = UINT64_C(1) << node % 64;
    syscall(SYS_mbind, first, last - first, MPOL_PREFERRED_NODE, mask, 64 * 16, 0);
}

static void spread(uint8_t *arena, const ml_layout *layout, const ml_geometry *geometry,
                   const uint32_t *nodes) {
    uint64_t block_bytes = layout->kv_layer_bytes / geometry->kv_blocks;
    for (uint32_t layer = 0; layer < geometry->n_layers; layer++) {
        uint8_t *start = arena + layer * layout->kv_layer_bytes;
        for (uint64_t i = 0; i < geometry->n_nodes; i++) {
            uint64_t first = ml_div_ceil(i * geometry->kv_blocks, geometry->n_nodes);
            uint64_t end = ml_div_ceil((i + 1) * geometry->kv_blocks, geometry->n_nodes);
            bind_to_node(start + first * block_bytes, start + end * block_bytes, nodes[i]);
        }
    }
}

/* Fault every page in, so that the memory is there (and on its node) or we learn it now. */
static int populate(uint8_t *arena, uint64_t bytes, int fd) {
    for (uint64_t done = 0; done < bytes; done += POPULATE_BYTES) {
        uint64_t length = ml_min(POPULATE_BYTES, bytes - done);
        while (madvise(arena + done, length, MADV_POPULATE_WRITE) != 0) {
            if (errno == EINTR || errno == EAGAIN) continue;
            if (errno == EINVAL) return reserve_file(fd, bytes); /* kernel before 5.14 */
            if (errno == EFAULT) errno = ENOSPC; /* a write would have met SIGBUS */
            return ML_SYSTEM_ERROR;
        }
    }
    return ML_OK;
}

int ml_arena_reserve(int fd, const ml_layout *layout, const ml_geometry *geometry,
                     const uint32_t *nodes, int huge, void **arena) {
    uint64_t bytes = layout->kv_arena_bytes;
    if (ftruncate(fd, (off_t)bytes) != 0) return ML_SYSTEM_ERROR;
    uint8_t *base = map_file(fd, bytes);
    if (!base) return ML_SYSTEM_ERROR;
    if (huge) madvise(base, bytes, MADV_HUGEPAGE);
    if (geometry->n_nodes > 1) spread(base, layout, geometry, nodes);
    int status = populate(base, bytes, fd);
    int error = errno;
    if (status != ML_OK) munmap(base, bytes);
    errno = error;
    *arena = base;
    return status;
}

int ml_arena_map(int fd, uint64_t bytes, void **arena) {
    struct stat status;
    if (fstat(fd, &status) != 0) return ML_SYSTEM_ERROR;
    if ((uint64_t)status.st_size != bytes) return ML_BAD_SEGMENT;
    *arena = map_file(fd, bytes);
    return *arena ? ML_OK : ML_SYSTEM_ERROR;
}

int ml_arena_unmap(void *arena, uint64_t bytes) {
    return munmap(arena, bytes) == 0 ? ML_OK : ML_SYSTEM_ERROR;
}

int ml_die_with_parent(int signal) {
    return prctl(PR_SET_PDEATHSIG, signal) == 0 ? ML_OK : ML_SYSTEM_ERROR;
}
