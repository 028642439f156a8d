#define _GNU_SOURCE
#include "thread_pool.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { CACHE_LINE = 64 };
static const uint32_t GATE_OPEN = 1u << 31; /* the low bits count the threads inside the loop */

/* What a loop's threads read. Written by the caller only while the gate is shut and empty. */
struct ml_loop {
    size_t n_tasks, chunk;
    ml_loop_body body;
    void *context;
    alignas(CACHE_LINE) atomic_size_t cursor; /* next task nobody has claimed */
};

typedef struct {
    ml_pool *pool;
    uint32_t index; /* 1 ... n_threads - 1 */
} worker;

/* gate        opened and shut by the caller; counted up by threads that come in, down by those that
 *             leave. Open, or shut and not yet empty: the loop's fields are fixed.
 * generation  written by the caller alone, under `run`: counts loops, and is the futex word on
 * which idle threads sleep. A thread comes in only while the gate is open: one that wakes late
 * never delays the caller, who waits for those inside alone. */
struct ml_pool {
    struct ml_loop loop;
    alignas(CACHE_LINE) _Atomic uint32_t gate;
    alignas(CACHE_LINE) _Atomic uint32_t generation;
    alignas(CACHE_LINE) _Atomic uint32_t sleepers;
    _Atomic uint32_t caller_sleeps;
    _Atomic uint32_t stopping;
    pthread_mutex_t run;
    uint64_t spin_ns;
    uint32_t n_threads, n_started;
    ml_pool *next; /* in the list of all pools */
    pthread_t threads[ML_POOL_MAX_THREADS];
    worker workers[ML_POOL_MAX_THREADS];
};

static void futex_wait(_Atomic uint32_t *word, uint32_t seen) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int n) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0);
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Spins until *word differs from `seen` or the time is over; the value last read. */
static uint32_t spin_while(_Atomic uint32_t *word, uint32_t seen, uint64_t spin_ns) {
    uint64_t deadline = spin_ns ? now_ns() + spin_ns : 0;
    for (;;) {
        for (int i = 0; i < 32; i++) {
            uint32_t value = atomic_load_explicit(word, memory_order_acquire);
            if (value != seen) return value;
            __builtin_ia32_pause();
        }
        if (!spin_ns || now_ns() >= deadline) return seen;
    }
}

int ml_claim(ml_loop *loop, size_t *begin, size_t *end) {
    /* Relaxed: the tasks' data was published by the gate; the cursor only hands out numbers. */
    size_t first = atomic_fetch_add_explicit(&loop->cursor, loop->chunk, memory_order_relaxed);
    if (first >= loop->n_tasks) return 0;
    *begin = first;
    *end = loop->n_tasks - first < loop->chunk ? loop->n_tasks : first + loop->chunk;
    return 1;
}

static int enter(ml_pool *pool) {
    uint32_t gate = atomic_load_explicit(&pool->gate, memory_order_relaxed);
    while (gate & GATE_OPEN) {
        /* Acquire: pairs with the caller's release when it opened the gate; the loop's fields are
         * visible. */
        if (atomic_compare_exchange_weak_explicit(&pool->gate, &gate, gate + 1,
                                                  memory_order_acquire, memory_order_relaxed))
            return 1;
    }
    return 0;
}

static void leave(ml_pool *pool) {
    /* Release: the caller that reads 0 sees everything this thread wrote. Sequentially consistent
     * with caller_sleeps. */
    if (atomic_fetch_sub(&pool->gate, 1) == 1 && atomic_load(&pool->caller_sleeps))
        futex_wake(&pool->gate, 1);
}

static uint32_t wait_for_loop(ml_pool *pool, uint32_t seen) {
    uint32_t generation = spin_while(&pool->generation, seen, pool->spin_ns);
    while (generation == seen) {
        atomic_fetch_add(&pool->sleepers, 1);
        futex_wait(&pool->generation, seen); /* returns at once when the word has changed */
        atomic_fetch_sub(&pool->sleepers, 1);
        generation = atomic_load_explicit(&pool->generation, memory_order_acquire);
    }
    return generation;
}

static void *worker_main(void *argument) {
    worker *self = argument;
    ml_pool *pool = self->pool;
    uint32_t seen = 0;
    for (;;) {
        if (enter(pool)) {
            seen = atomic_load_explicit(&pool->generation,
                                        memory_order_relaxed); /* fixed while we are inside */
            pool->loop.body(&pool->loop, self->index, pool->loop.context);
            leave(pool);
        }
        if (atomic_load_explicit(&pool->stopping, memory_order_acquire)) return NULL;
        seen = wait_for_loop(pool, seen);
    }
}

static void publish(ml_pool *pool, int wake) {
    atomic_fetch_add(&pool->generation, 1); /* sequentially consistent against `sleepers` */
    if (wake > 0 && atomic_load(&pool->sleepers)) futex_wake(&pool->generation, wake);
}

static void forget_threads(ml_pool *pool) {
    pool->n_started = 0;
    atomic_store(&pool->stopping, 0);
    atomic_store(&pool->gate, 0);
    atomic_store(&pool->sleepers, 0);
    atomic_store(&pool->caller_sleeps, 0);
}

static void stop_threads(ml_pool *pool) {
    atomic_store_explicit(&pool->stopping, 1, memory_order_release);
    publish(pool, (int)ML_POOL_MAX_THREADS);
    for (uint32_t i = 0; i < pool->n_started; i++) pthread_join(pool->threads[i], NULL);
    forget_threads(pool);
}

/* Signals belong to the program's own threads: ours block them all. Fewer threads than asked for
 * are no error. */
static void start_threads(ml_pool *pool) {
    if (pool->n_started + 1 >= pool->n_threads) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    while (pool->n_started + 1 < pool->n_threads) {
        uint32_t i = pool->n_started;
        pool->workers[i] = (worker){pool, i + 1};
        if (pthread_create(&pool->threads[i], NULL, worker_main, &pool->workers[i])) break;
        pool->n_started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* A forked child has the pools but none of their threads, and maybe a lock that a thread it lacks
 * was holding. */
static pthread_mutex_t all_pools_lock = PTHREAD_MUTEX_INITIALIZER;
static ml_pool *all_pools;
static pthread_once_t fork_handlers = PTHREAD_ONCE_INIT;

static void before_fork(void) { pthread_mutex_lock(&all_pools_lock); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&all_pools_lock); }

static void after_fork_in_child(void) {
    for (ml_pool *pool = all_pools; pool; pool = pool->next) {
        pthread_mutex_init(&pool->run, NULL);
        forget_threads(pool);
    }
    pthread_mutex_init(&all_pools_lock, NULL);
}

static void install_fork_handlers(void) {
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

static void remember(ml_pool *pool) {
    pthread_once(&fork_handlers, install_fork_handlers);
    pthread_mutex_lock(&all_pools_lock);
    pool->next = all_pools;
    all_pools = pool;
    pthread_mutex_unlock(&all_pools_lock);
}

static void forget(ml_pool *pool) {
    pthread_mutex_lock(&all_pools_lock);
    ml_pool **link = &all_pools;
    while (*link && *link != pool) link = &(*link)->next;
    if (*link) *link = pool->next;
    pthread_mutex_unlock(&all_pools_lock);
}

ml_pool *ml_pool_create(uint32_t n_threads, uint64_t spin_ns) {
    if (n_threads < 1 || n_threads > ML_POOL_MAX_THREADS) return NULL;
    ml_pool *pool = aligned_alloc(CACHE_LINE, sizeof *pool);
    if (!pool) return NULL;
    memset(pool, 0, sizeof *pool);
    pthread_mutex_init(&pool->run, NULL);
    pool->n_threads = n_threads;
    pool->spin_ns = spin_ns;
    remember(pool);
    return pool;
}

void ml_pool_destroy(ml_pool *pool) {
    if (!pool) return;
    forget(pool);
    stop_threads(pool);
    pthread_mutex_destroy(&pool->run);
    free(pool);
}

uint32_t ml_pool_threads(const ml_pool *pool) { return pool->n_threads; }

uint32_t ml_pool_threads_started(const ml_pool *pool) { return pool->n_started; }

int ml_pool_resize(ml_pool *pool, uint32_t n_threads) {
    if (n_threads < 1 || n_threads > ML_POOL_MAX_THREADS) return -1;
    pthread_mutex_lock(&pool->run);
    if (n_threads < pool->n_threads) stop_threads(pool);
    pool->n_threads = n_threads;
    pthread_mutex_unlock(&pool->run);
    return 0;
}

static void wait_until_empty(ml_pool *pool) {
    /* Acquire (in spin_while) pairs with leave(): the results are visible. */
    uint32_t inside = atomic_fetch_and(&pool->gate, ~GATE_OPEN) & ~GATE_OPEN;
    uint64_t deadline = now_ns() + pool->spin_ns;
    while (inside && now_ns() < deadline) inside = spin_while(&pool->gate, inside, pool->spin_ns);
    if (!inside) return;
    atomic_store(&pool->caller_sleeps, 1);
    while ((inside = atomic_load(&pool->gate))) futex_wait(&pool->gate, inside);
    atomic_store(&pool->caller_sleeps, 0);
}

static void set_loop(ml_pool *pool, size_t n_tasks, size_t chunk, ml_loop_body body,
                     void *context) {
    pool->loop.n_tasks = n_tasks;
    pool->loop.chunk = chunk;
    pool->loop.body = body;
    pool->loop.context = context;
    atomic_store_explicit(&pool->loop.cursor, 0, memory_order_relaxed);
}

void ml_pool_run(ml_pool *pool, size_t n_tasks, size_t chunk, ml_loop_body body, void *context) {
    if (!n_tasks) return;
    if (!chunk) chunk = 1;
    pthread_mutex_lock(&pool->run);
    size_t n_chunks = (n_tasks + chunk - 1) / chunk;
    if (n_chunks > 1) start_threads(pool);
    set_loop(pool, n_tasks, chunk, body, context);
    if (n_chunks > 1 && pool->n_started) {
        size_t wanted = n_chunks - 1 < pool->n_started ? n_chunks - 1 : pool->n_started;
        atomic_store_explicit(&pool->gate, GATE_OPEN, memory_order_release);
        publish(pool, (int)wanted);
        body(&pool->loop, 0, context);
        wait_until_empty(pool);
    } else {
        body(&pool->loop, 0, context);
    }
    pthread_mutex_unlock(&pool->run);
}
