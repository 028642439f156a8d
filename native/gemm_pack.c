#define _GNU_SOURCE
#include <errno.h>
#include <stdalign.h>
#include <string.h>
#include <unistd.h>

#include "gemm.h"
#include "gemm_kernels.h"

/* Words of 32 columns that are converted or padded at a time: 32 KB. */
enum { CHUNK_WORDS = 256 };

static size_t div_ceil(size_t a, size_t b) { return (a + b - 1) / b; }
static size_t dtype_size(uint32_t dtype) { return dtype == ML_BF16 ? 2 : 4; }
static size_t words_of(size_t k, uint32_t dtype) { return dtype == ML_BF16 ? div_ceil(k, 2) : k; }

size_t ml_packed_size_bytes(size_t n, size_t k, uint32_t dtype) {
    return div_ceil(n, ML_PANEL_COLUMNS) * words_of(k, dtype) * ML_PANEL_ROW_BYTES;
}

size_t ml_packed_pair_size_bytes(size_t n, size_t k, uint32_t dtype) {
    return div_ceil(n, ML_HALF_PANEL_COLUMNS) * words_of(k, dtype) * ML_PANEL_ROW_BYTES;
}

/* A unit is half a panel: the columns for matrix rows 32 unit ... 32 unit + 31. */
typedef struct {
    const ml_pack_call *call;
    const ml_kernels *kernels;
    size_t first_unit, n_words;
} plan;

static char *unit_address(const plan *p, size_t unit) {
    const uint32_t role = p->call->role;
    const size_t half = role == ML_PACK_PLAIN ? unit : 2 * unit + (role == ML_PACK_UP);
    return (char *)p->call->packed + half / 2 * p->n_words * ML_PANEL_ROW_BYTES +
           half % 2 * (ML_PANEL_ROW_BYTES / 2);
}

/* The source row for matrix row `row`, NULL where this call has none. */
static const char *source_row(const ml_pack_call *call, size_t row) {
    if (row < call->first_row || row >= call->first_row + call->n_rows) return NULL;
    return (const char *)call->source + (row - call->first_row) * call->source_stride_bytes;
}

/* 32 columns over words first_word ... + n_words - 1 of k. */
typedef struct {
    const char *columns[ML_HALF_PANEL_COLUMNS]; /* NULL: not this call's */
    size_t first_word, n_words;
    char *out;
} chunk;

static void write_some(const chunk *c) {
    for (size_t i = 0; i < ML_HALF_PANEL_COLUMNS; i++)
        for (size_t word = 0; c->columns[i] && word < c->n_words; word++)
            memcpy(c->out + word * ML_PANEL_ROW_BYTES + i * 4, c->columns[i] + word * 4, 4);
}

static void write_chunk(const plan *p, const chunk *c) {
    for (size_t i = 0; i < ML_HALF_PANEL_COLUMNS; i++)
        if (!c->columns[i]) {
            write_some(c);
            return;
        }
    p->kernels->transpose(c->columns, c->n_words, c->out);
}

typedef char staging[ML_HALF_PANEL_COLUMNS][CHUNK_WORDS * 4];

/* Converts the chunk's columns into `stage`; what lies beyond k becomes 0. */
static void stage_chunk(const plan *p, size_t first_row, chunk *c, staging stage) {
    const ml_pack_call *call = p->call;
    const size_t per_word = call->packed_dtype == ML_BF16 ? 2 : 1;
    const size_t first = c->first_word * per_word;
    size_t n = c->n_words * per_word;
    if (n > call->k - first) n = call->k - first;
    for (size_t i = 0; i < ML_HALF_PANEL_COLUMNS; i++) {
        const char *row = source_row(call, first_row + i);
        c->columns[i] = row || first_row + i >= call->n ? stage[i] : NULL;
        memset(stage[i], 0, c->n_words * 4);
        if (row)
            p->kernels->convert(n, row + first * dtype_size(call->source_dtype), call->source_dtype,
                                stage[i], call->packed_dtype);
    }
}

static void pack_staged(const plan *p, size_t unit, size_t first_word) {
    alignas(64) staging stage;
    for (size_t word = first_word; word < p->n_words; word += CHUNK_WORDS) {
        chunk c = {.first_word = word, .n_words = p->n_words - word};
        if (c.n_words > CHUNK_WORDS) c.n_words = CHUNK_WORDS;
        c.out = unit_address(p, unit) + word * ML_PANEL_ROW_BYTES;
        stage_chunk(p, unit * ML_HALF_PANEL_COLUMNS, &c, stage);
        write_chunk(p, &c);
    }
}

/* Straight from the source where the types agree and 32 rows are all there. */
static void pack_unit(const plan *p, size_t unit) {
    const ml_pack_call *call = p->call;
    const size_t first_row = unit * ML_HALF_PANEL_COLUMNS;
    const int is_whole =
        source_row(call, first_row) && source_row(call, first_row + ML_HALF_PANEL_COLUMNS - 1);
    size_t direct = 0;
    if (is_whole && call->source_dtype == call->packed_dtype) {
        direct = call->packed_dtype == ML_BF16 ? call->k / 2 : call->k;
        chunk c = {.n_words = direct, .out = unit_address(p, unit)};
        for (size_t i = 0; i < ML_HALF_PANEL_COLUMNS; i++)
            c.columns[i] = source_row(call, first_row + i);
        p->kernels->transpose(c.columns, c.n_words, c.out);
    }
    pack_staged(p, unit, direct);
}

static void pack_units(ml_loop *loop, uint32_t thread, void *context) {
    (void)thread;
    const plan *p = context;
    for (size_t begin, end; ml_claim(loop, &begin, &end);)
        for (; begin < end; begin++) pack_unit(p, p->first_unit + begin);
}

void ml_pack(ml_pool *pool, const ml_pack_call *call) {
    if (!call->n_rows) return;
    const size_t end = call->first_row + call->n_rows;
    size_t end_unit = div_ceil(end, ML_HALF_PANEL_COLUMNS);
    /* A last panel of 32 columns or fewer has a second half, all padding. */
    if (end == call->n && call->role == ML_PACK_PLAIN) end_unit += end_unit % 2;
    plan p = {
        .call = call,
        .kernels = ml_kernels_selected(),
        .first_unit = call->first_row / ML_HALF_PANEL_COLUMNS,
        .n_words = words_of(call->k, call->packed_dtype),
    };
    ml_pool_run(pool, end_unit - p.first_unit, 1, pack_units, &p);
}

/* 0, errno, or -1 at the end of the file. */
static int read_fully(int fd, char *to, size_t size_bytes, uint64_t offset_bytes) {
    while (size_bytes) {
        ssize_t n = pread(fd, to, size_bytes, (off_t)offset_bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return n < 0 ? errno : -1;
        to += n;
        size_bytes -= (size_t)n;
        offset_bytes += (uint64_t)n;
    }
    return 0;
}

int ml_pack_file(ml_pool *pool, const ml_pack_call *call, int fd, uint64_t offset_bytes,
                 void *scratch, size_t scratch_bytes) {
    const size_t row_bytes = call->k * dtype_size(call->source_dtype);
    /* Whole panels at a time, counted from the matrix's first row. */
    const size_t most = scratch_bytes / row_bytes / ML_PANEL_COLUMNS * ML_PANEL_COLUMNS;
    ml_pack_call piece = *call;
    piece.source = scratch;
    piece.source_stride_bytes = row_bytes;
    const size_t end = call->first_row + call->n_rows;
    for (; piece.first_row < end; piece.first_row += piece.n_rows) {
        piece.n_rows = most - piece.first_row % ML_PANEL_COLUMNS;
        if (piece.n_rows > end - piece.first_row) piece.n_rows = end - piece.first_row;
        int status = read_fully(fd, scratch, piece.n_rows * row_bytes, offset_bytes);
        if (status) return status;
        ml_pack(pool, &piece);
        offset_bytes += piece.n_rows * row_bytes;
    }
    return 0;
}
