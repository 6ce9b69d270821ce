// Root-mean-square norm of a sum. A part of every class: include it after a simd header.
#pragma once
#include <cmath>

#include "parallel.h"

namespace tiercel::TIERCEL_CLASS {

constexpr int64_t kNormGrain = 16384;  // elements; fewer are computed sooner than another thread wakes up

template <class T>
static void add_norm_row(const T* x, T* residual, const T* weight, T* out, int64_t size, float eps) {
  constexpr int N = F32::N;
  F32 squares = splat(0);
  const T* total = residual ? residual : x;
  for (int64_t i = 0; i < size; i += N) {
    const int count = size - i < N ? int(size - i) : N;
    F32 one = count == N ? load(x + i) : load_first(x + i, count);
    if (residual) {
      one = rounded(one + (count == N ? load(residual + i) : load_first(residual + i, count)), x);
      count == N ? store(residual + i, one) : store_first(residual + i, one, count);
    }
    squares = fma(one, one, squares);
  }
  const F32 scale = splat(1.f / sqrtf(sum(squares) / float(size) + eps));
  for (int64_t i = 0; i < size; i += N) {
    const int count = size - i < N ? int(size - i) : N;
    // The normed value is rounded before the weight is applied, as transformers does.
    if (count == N) {
      store(out + i, rounded(load(total + i) * scale, x) * load(weight + i));
    } else {
      const F32 normed = rounded(load_first(total + i, count) * scale, x);
      store_first(out + i, normed * load_first(weight + i, count), count);
    }
  }
}

static void add_norm(int type, const void* x, void* residual, const void* weight, void* out, int64_t rows, int64_t size,
                     float eps) {
  with_type(type, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    parallel_for(rows, grain_of(size, kNormGrain), [&](int64_t row) {
      T* kept = residual ? (T*)residual + row * size : nullptr;
      add_norm_row((const T*)x + row * size, kept, (const T*)weight, (T*)out + row * size, size, eps);
    });
  });
}

}  // namespace tiercel::TIERCEL_CLASS
