// Loops over the threads of torch's OpenMP pool.
#pragma once
#include <omp.h>

#include <cstdint>

#include "numbers.h"

namespace tiercel {

// Calls f(i) for i in [0, count), on all threads. Threads claim one piece after another, so a thread that lost its core to
// another process delays only the piece it holds. `grain`: pieces claimed at once.
template <class F>
TIERCEL_INLINE void parallel_for(int64_t count, int64_t grain, F f) {
  if (count <= grain || omp_get_max_threads() == 1) {
    for (int64_t i = 0; i < count; i++) f(i);
    return;
  }
#pragma omp parallel for schedule(dynamic, grain)
  for (int64_t i = 0; i < count; i++) f(i);
}

// The grain of a loop over rows of `size` elements whose pieces have at least `elements`.
TIERCEL_INLINE int64_t grain_of(int64_t size, int64_t elements) { return size >= elements ? 1 : elements / size; }

}  // namespace tiercel
