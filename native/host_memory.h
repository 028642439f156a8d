/* Reading and copying host memory: the bandwidth benchmark, and the emulated link's copy. */
#ifndef ML_HOST_MEMORY_H
#define ML_HOST_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#include "thread_pool.h"

/* [cffi] */
/* Seconds that the pool's threads need to read `data` (64-byte aligned) once, each a
 * contiguous share of it. */
double ml_read_seconds(ml_pool *pool, const void *data, size_t size_bytes);

/* One packet over an emulated link of bytes_per_s: copied in pieces of piece_bytes, each of which
 * ends no earlier than the link could have delivered it; sleeps in between. The link begins with
 * the packet at ready_ns or at link_free_ns, whichever is later (CLOCK_MONOTONIC; ready_ns 0: now).
 * Returns the time at which the last byte has arrived: the next packet's link_free_ns. bytes_per_s
 * 0: not paced. */
typedef struct {
    void *to;
    const void *from;
    size_t size_bytes, piece_bytes;
    double bytes_per_s;
    uint64_t ready_ns, link_free_ns;
} ml_paced_copy_call;

uint64_t ml_paced_copy(const ml_paced_copy_call *call);
/* [/cffi] */

#endif
