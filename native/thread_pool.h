/* A pool of threads for loops whose iterations are claimed one chunk at a time.
 *
 * Threads start with the first loop (not with the pool), spin for a bounded time between loops and
 * then sleep on a futex, so that a process that shares its cores with others does not burn them. A
 * pool survives fork(): the child starts threads of its own with its first loop. Loops of one pool
 * run one after the other; a second caller waits. */
#ifndef ML_THREAD_POOL_H
#define ML_THREAD_POOL_H

#include <stddef.h>
#include <stdint.h>

/* [cffi] */
enum { ML_POOL_MAX_THREADS = 256 };

typedef struct ml_pool ml_pool;

/* A pool of n_threads (the caller of a loop is one of them), or NULL when memory is short or
 * n_threads is not within 1 ... ML_POOL_MAX_THREADS. `spin_ns`: how long an idle thread spins
 * before it sleeps. */
ml_pool *ml_pool_create(uint32_t n_threads, uint64_t spin_ns);
void ml_pool_destroy(ml_pool *pool);
uint32_t ml_pool_threads(const ml_pool *pool);
/* Threads that exist beside the caller: 0 before the first loop. */
uint32_t ml_pool_threads_started(const ml_pool *pool);

/* Waits for the loop that is running, if any. 0, or -1 when n_threads is out of range. */
int ml_pool_resize(ml_pool *pool, uint32_t n_threads);

/* [/cffi] */

typedef struct ml_loop ml_loop;

/* One thread's share of a loop: claims chunks with ml_claim until none is left. `thread` <
 * ml_pool_threads(). */
typedef void (*ml_loop_body)(ml_loop *loop, uint32_t thread, void *context);

/* Runs `body` on up to ml_pool_threads() threads, the caller's among them, and returns when all
 * tasks are done. Tasks 0 ... n_tasks-1 are claimed in ascending order, `chunk` >= 1 at a time. */
void ml_pool_run(ml_pool *pool, size_t n_tasks, size_t chunk, ml_loop_body body, void *context);

/* The next half-open range [*begin, *end) of tasks; 0 when the loop is exhausted. */
int ml_claim(ml_loop *loop, size_t *begin, size_t *end);

#endif
