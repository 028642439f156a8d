/* Waiting on a word that other processes change: clock, pause, futex. Private to the channel. */
#ifndef ML_FUTEX_H
#define ML_FUTEX_H

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "abi.h"

enum { ML_NS_PER_S = 1000000000 };

static inline uint64_t ml_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * ML_NS_PER_S + (uint64_t)now.tv_nsec;
}

static inline void ml_pause(void) { __builtin_ia32_pause(); }

/* Sleep while *word == seen, for at most timeout_ns; may return early for no reason. Not the
 * PRIVATE kind, which would only be seen by threads of this process. */
static inline void ml_futex_wait(ml_word32 *word, uint32_t seen, uint64_t timeout_ns) {
    struct timespec timeout = {.tv_sec = (time_t)(timeout_ns / ML_NS_PER_S),
                               .tv_nsec = (long)(timeout_ns % ML_NS_PER_S)};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &timeout, NULL, 0);
}

static inline void ml_futex_wake(ml_word32 *word) {
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Spin while *word == seen, for at most spin_ns; returns whether it changed. The clock is read once
 * in 32 pauses (about a microsecond), since reading it costs as much as several pauses. */
static inline int ml_spin_while(const ml_word32 *word, uint32_t seen, uint64_t spin_ns) {
    uint64_t end_ns = ml_now_ns() + spin_ns;
    do {
        for (int i = 0; i < 32; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != seen) return 1;
            ml_pause();
        }
    } while (ml_now_ns() < end_ns);
    return 0;
}

#endif
