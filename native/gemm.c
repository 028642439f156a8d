#include "gemm.h"

#include <stdalign.h>

#include "cpu_features.h"
#include "gemm_kernels.h"

/* BLOCK_WORDS of a panel (256 KB) and BLOCK_ROWS of the left side stay in a core's second-level
 * cache; changing them changes no result. */
enum {
    BLOCK_WORDS = 1024,
    BLOCK_ROWS = 96,
    STREAM_AHEAD_BYTES = 1024,
    LINES_PER_WORD = ML_PANEL_ROW_BYTES / 64
};

typedef struct {
    const ml_gemm_call *call;
    const ml_kernels *kernels;
    ml_finish finish;
    size_t n_panels, panel_columns; /* columns of the output that a panel holds */
    size_t n_words, panel_bytes;    /* words of k, of which the last may be half filled */
} plan;

/* Part of a group's rows times one panel. */
typedef struct {
    uint32_t group;
    size_t first_row, n_rows, panel;
} task;

/* Task numbers go through groups, in them through blocks of rows, in these through panels, so
 * that a thread that takes neighbours reads one long run of weights. */
typedef struct {
    uint32_t group;
    size_t first_task; /* of the group */
} place;

const ml_kernels *ml_kernels_selected(void) {
    static const ml_kernels *const by_isa[ML_ISA_COUNT] = {
        [ML_ISA_SCALAR] = &ml_kernels_scalar,
        [ML_ISA_AVX2] = &ml_kernels_avx2,
        [ML_ISA_AVX512] = &ml_kernels_avx512,
        [ML_ISA_AVX512_BF16] = &ml_kernels_avx512_bf16,
    };
    return by_isa[ml_isa_selected()];
}

static size_t div_ceil(size_t a, size_t b) { return (a + b - 1) / b; }
static size_t min_size(size_t a, size_t b) { return a < b ? a : b; }

static size_t group_rows(const ml_gemm_call *call, uint32_t group) {
    return (size_t)(call->offsets[group + 1] - call->offsets[group]);
}

/* Blocks of nearly equal height, each a multiple of the micro-kernel's. */
static size_t block_rows(size_t n_rows) {
    const size_t n_blocks = div_ceil(n_rows, BLOCK_ROWS);
    return div_ceil(div_ceil(n_rows, n_blocks), ML_TILE_ROWS) * ML_TILE_ROWS;
}

static size_t group_blocks(size_t n_rows) {
    return n_rows ? div_ceil(n_rows, block_rows(n_rows)) : 0;
}

static size_t group_tasks(const plan *p, uint32_t group) {
    return group_blocks(group_rows(p->call, group)) * p->n_panels;
}

/* `number` is at or after the place that was found last. */
static task locate(const plan *p, place *at, size_t number) {
    for (size_t n; number - at->first_task >= (n = group_tasks(p, at->group)); at->group++)
        at->first_task += n;
    const size_t n_rows = group_rows(p->call, at->group), height = block_rows(n_rows);
    const size_t within = number - at->first_task;
    const size_t first = within / p->n_panels * height;
    return (task){at->group, (size_t)p->call->offsets[at->group] + first,
                  min_size(height, n_rows - first), within % p->n_panels};
}

static const char *panel_of(const plan *p, const task *t) {
    return (const char *)p->call->weights[t->group] + t->panel * p->panel_bytes;
}

static const char *a_row(const ml_gemm_call *call, size_t row) {
    const size_t source = call->row_index ? (size_t)call->row_index[row] : row;
    return (const char *)call->a + source * call->a_stride_bytes;
}

static void finish_tile(const plan *p, const task *t, size_t first_row, size_t n_rows,
                        const float *acc) {
    const ml_gemm_call *call = p->call;
    const size_t column = t->panel * p->panel_columns;
    const size_t n = min_size(p->panel_columns, call->n_out - column);
    const size_t offset = column * (call->out_dtype == ML_BF16 ? 2 : 4);
    for (size_t i = 0; i < n_rows; i++) {
        const size_t row = first_row + i;
        const void *residual = NULL;
        if (call->epilogue == ML_ADD)
            residual = (const char *)call->residual + row * call->residual_stride_bytes + offset;
        p->kernels->finish_row(&p->finish, acc + i * ML_PANEL_COLUMNS, n, residual,
                               (char *)call->out + row * call->out_stride_bytes + offset);
    }
}

/* The lines that finish_tile will write arrive, owned, while the products are computed: worth 5 %
 * where the output exceeds the second-level cache. In assembly, since GCC turns its builtin into
 * prefetcht0, which fetches lines to share; processors without prefetchw take it for a no-op. */
static void fetch_outputs(const plan *p, const task *t, size_t first_row, size_t n_rows) {
    const ml_gemm_call *call = p->call;
    const size_t size = call->out_dtype == ML_BF16 ? 2 : 4, column = t->panel * p->panel_columns;
    const size_t n_bytes = min_size(p->panel_columns, call->n_out - column) * size;
    for (size_t i = 0; i < n_rows; i++) {
        const char *out = (const char *)call->out + (first_row + i) * call->out_stride_bytes;
        for (size_t byte = 0; byte < n_bytes; byte += 64)
            __asm__ volatile("prefetchw %0" : : "m"(out[column * size + byte]));
    }
}

/* Words first_word ... + n_words - 1 of k; what is to be fetched meanwhile, or NULL. */
typedef struct {
    size_t first_word, n_words;
    int half_word; /* the one word is half filled: k is odd */
    const char *next;
    size_t next_lines;
} slice;

static void run_tile(const plan *p, const slice *s, size_t first_row, size_t n_rows,
                     ml_tile *tile) {
    const char *rows[ML_TILE_ROWS];
    uint16_t padded[ML_TILE_ROWS][2];
    for (size_t i = 0; i < n_rows; i++) {
        rows[i] = a_row(p->call, first_row + i) + s->first_word * 4;
        if (!s->half_word) continue;
        padded[i][0] = *(const uint16_t *)(const void *)rows[i];
        padded[i][1] = 0;
        rows[i] = (const char *)padded[i];
    }
    tile->rows = rows;
    (p->call->dtype == ML_BF16 ? p->kernels->tile_bf16 : p->kernels->tile_fp32)[n_rows - 1](tile);
}

/* What a tile fetches while it runs. One tile alone reads every word of the panel once, as memory
 * delivers it: it runs a short distance ahead of itself. Several share the next slice evenly, so
 * that the reads spread over the whole time. */
static void share_prefetch(const slice *s, size_t tile_index, size_t n_tiles, ml_tile *tile) {
    const size_t steps = s->n_words / ML_PREFETCH_WORDS;
    if (n_tiles == 1) {
        tile->prefetch = tile->panel + STREAM_AHEAD_BYTES;
        tile->prefetch_lines = ML_PREFETCH_WORDS * LINES_PER_WORD;
        return;
    }
    if (!s->next || !steps) return;
    const size_t lines = div_ceil(div_ceil(s->next_lines, n_tiles), steps);
    const size_t first = tile_index * lines * steps;
    if (first >= s->next_lines) return;
    tile->prefetch = s->next + first * 64;
    tile->prefetch_lines = lines;
}

static void run_slice(const plan *p, const task *t, const slice *s, int is_last, float *acc) {
    const size_t n_tiles = div_ceil(t->n_rows, ML_TILE_ROWS);
    const int keeps = !is_last || s->first_word > 0;
    for (size_t i = 0, first = 0, n; i < n_tiles; i++, first += n) {
        n = div_ceil(t->n_rows - first, n_tiles - i); /* of nearly equal height */
        /* Sums that wait for the next slice of k have a place of their own. */
        ml_tile tile = {
            .panel = panel_of(p, t) + s->first_word * ML_PANEL_ROW_BYTES,
            .n_words = s->n_words,
            .acc = acc + (keeps ? first * ML_PANEL_COLUMNS : 0),
            .accumulate = s->first_word > 0,
        };
        share_prefetch(s, i, n_tiles, &tile);
        if (is_last) fetch_outputs(p, t, t->first_row + first, n);
        run_tile(p, s, t->first_row + first, n, &tile);
        if (is_last) finish_tile(p, t, t->first_row + first, n, tile.acc);
    }
}

static void run_task(const plan *p, const task *t, const task *next) {
    alignas(64) float acc[BLOCK_ROWS * ML_PANEL_COLUMNS];
    const int is_odd = p->call->dtype == ML_BF16 && p->call->k % 2;
    const size_t whole = p->n_words - (size_t)is_odd;
    const char *next_panel = next && panel_of(p, next) != panel_of(p, t) ? panel_of(p, next) : NULL;
    for (size_t word = 0; word < whole; word += BLOCK_WORDS) {
        slice s = {.first_word = word, .n_words = min_size(BLOCK_WORDS, whole - word)};
        const size_t end = word + s.n_words;
        s.next = end < whole ? panel_of(p, t) + end * ML_PANEL_ROW_BYTES : next_panel;
        s.next_lines = min_size(BLOCK_WORDS, end < whole ? whole - end : whole) * LINES_PER_WORD;
        run_slice(p, t, &s, end == p->n_words, acc);
    }
    if (is_odd) {
        const slice s = {.first_word = whole, .n_words = 1, .half_word = 1};
        run_slice(p, t, &s, 1, acc);
    }
}

/* A thread claims its next task before it runs the one it has: it knows what to fetch ahead. */
static void run_tasks(ml_loop *loop, uint32_t thread, void *context) {
    (void)thread;
    const plan *p = context;
    place at = {0};
    size_t number, end;
    if (!ml_claim(loop, &number, &end)) return;
    task current = locate(p, &at, number);
    for (int more = 1; more;) {
        task next;
        more = ++number < end || ml_claim(loop, &number, &end);
        if (more) next = locate(p, &at, number);
        run_task(p, &current, more ? &next : NULL);
        if (more) current = next;
    }
}

void ml_gemm(ml_pool *pool, const ml_gemm_call *call) {
    const size_t panel_columns =
        call->epilogue == ML_SWIGLU ? ML_HALF_PANEL_COLUMNS : ML_PANEL_COLUMNS;
    const size_t n_words = call->dtype == ML_BF16 ? div_ceil(call->k, 2) : call->k;
    plan p = {
        .call = call,
        .kernels = ml_kernels_selected(),
        .finish = {call->dtype, call->out_dtype, call->epilogue},
        .n_panels = div_ceil(call->n_out, panel_columns),
        .panel_columns = panel_columns,
        .n_words = n_words,
        .panel_bytes = n_words * ML_PANEL_ROW_BYTES,
    };
    size_t n_tasks = 0;
    for (uint32_t g = 0; g < call->n_groups; g++) n_tasks += group_tasks(&p, g);
    size_t chunk = n_tasks / (ml_pool_threads(pool) * 8u);
    chunk = chunk < 1 ? 1 : min_size(chunk, 4);
    ml_pool_run(pool, n_tasks, chunk, run_tasks, &p);
}
