#define _GNU_SOURCE
#include "host_memory.h"

#include <emmintrin.h>
#include <errno.h>
#include <string.h>
#include <time.h>

/* A task of the read benchmark: long enough that finding the next one does not count. */
enum { READ_TASK_BYTES = 4 << 20, READ_AHEAD_BYTES = 1024 };

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void sleep_until(uint64_t ns) {
    const struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) {
    }
}

typedef struct {
    const char *data;
    size_t size_bytes;
} span;

/* One load of each line is enough: memory moves whole lines. */
static void read_span(const char *data, size_t size_bytes) {
    __m128i sum[4] = {_mm_setzero_si128(), _mm_setzero_si128(), _mm_setzero_si128(),
                      _mm_setzero_si128()};
    size_t i = 0;
    for (; i + 256 <= size_bytes; i += 256)
        for (int line = 0; line < 4; line++) {
            const char *at = data + i + 64 * line;
            __builtin_prefetch(at + READ_AHEAD_BYTES, 0, 2);
            const __m128i word = _mm_load_si128((const __m128i *)(const void *)at);
            sum[line] = _mm_xor_si128(sum[line], word);
        }
    sum[0] = _mm_xor_si128(_mm_xor_si128(sum[0], sum[1]), _mm_xor_si128(sum[2], sum[3]));
    volatile int keep = _mm_cvtsi128_si32(sum[0]);
    (void)keep;
}

static void read_tasks(ml_loop *loop, uint32_t thread, void *context) {
    (void)thread;
    const span *s = context;
    for (size_t begin, end; ml_claim(loop, &begin, &end);) {
        const size_t first = begin * READ_TASK_BYTES;
        size_t n = s->size_bytes - first;
        if (n > (end - begin) * READ_TASK_BYTES) n = (end - begin) * READ_TASK_BYTES;
        read_span(s->data + first, n);
    }
}

double ml_read_seconds(ml_pool *pool, const void *data, size_t size_bytes) {
    span s = {data, size_bytes};
    const size_t n_tasks = (size_bytes + READ_TASK_BYTES - 1) / READ_TASK_BYTES;
    const uint64_t start = now_ns();
    ml_pool_run(pool, n_tasks, 1, read_tasks, &s);
    return (double)(now_ns() - start) * 1e-9;
}

/* Past the caches: the reader of the copy is another core, and later. */
static void copy_past_caches(char *to, const char *from, size_t n) {
    const size_t head = (size_t)(-(uintptr_t)to & 15) < n ? (size_t)(-(uintptr_t)to & 15) : n;
    memcpy(to, from, head);
    size_t i = head;
    for (; i + 64 <= n; i += 64)
        for (int j = 0; j < 64; j += 16)
            _mm_stream_si128((__m128i *)(void *)(to + i + j),
                             _mm_loadu_si128((const __m128i *)(const void *)(from + i + j)));
    memcpy(to + i, from + i, n - i);
    _mm_sfence();
}

uint64_t ml_paced_copy(const ml_paced_copy_call *call) {
    uint64_t start = call->ready_ns ? call->ready_ns : now_ns();
    if (call->link_free_ns > start) start = call->link_free_ns;
    uint64_t arrived = start;
    for (size_t done = 0, n; done < call->size_bytes; done += n) {
        n = call->size_bytes - done;
        if (n > call->piece_bytes) n = call->piece_bytes;
        copy_past_caches((char *)call->to + done, (const char *)call->from + done, n);
        arrived = now_ns();
        if (call->bytes_per_s <= 0) continue;
        const double link_ns = (double)(done + n) / call->bytes_per_s * 1e9;
        const uint64_t due = start + (uint64_t)link_ns;
        if (due <= arrived) continue; /* memory is slower than the link, or we were held up */
        sleep_until(due);
        arrived = due; /* not when we woke: the next packet makes up for that */
    }
    return arrived;
}
