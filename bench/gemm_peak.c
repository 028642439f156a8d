/* Multiply-adds on registers alone, in the thread's own time: what no matrix product can exceed. */
#define _GNU_SOURCE
#include <immintrin.h>
#include <stdint.h>
#include <time.h>

enum { ACCUMULATORS = 24 };

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

__attribute__((target("avx512f,avx512bf16"))) static double bf16_seconds(uint64_t rounds) {
    __m512 acc[ACCUMULATORS];
    __m512i a = _mm512_set1_epi32(0x3f803f80);
    for (int i = 0; i < ACCUMULATORS; i++) acc[i] = _mm512_setzero_ps();
    const double start = now_s();
    for (uint64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 24
        for (int i = 0; i < ACCUMULATORS; i++)
            acc[i] = _mm512_dpbf16_ps(acc[i], (__m512bh)a, (__m512bh)a);
        __asm__ volatile("" : "+v"(a));
    }
    const double seconds = now_s() - start;
    for (int i = 1; i < ACCUMULATORS; i++) acc[0] = _mm512_add_ps(acc[0], acc[i]);
    volatile float keep = _mm512_reduce_add_ps(acc[0]);
    (void)keep;
    return seconds;
}

/* FLOP per second of one core in `vdpbf16ps`, 0 where there is none. */
double bf16_flop_per_s(uint64_t rounds) {
    if (!__builtin_cpu_supports("avx512bf16")) return 0;
    return (double)rounds * ACCUMULATORS * 64 / bf16_seconds(rounds);
}
