// The activation of a gated MLP. A part of every class: include it after a simd header.
#pragma once
#include "parallel.h"

namespace tiercel::TIERCEL_CLASS {

constexpr int64_t kActivationGrain = 8192;  // elements; fewer are computed sooner than another thread wakes up

// silu(gate) is rounded to the storage type before the product, as transformers does.
template <class T>
static void silu_mul_row(const T* gate, const T* up, T* out, int64_t size) {
  constexpr int N = F32::N;
  const F32 one = splat(1), zero = splat(0);
  for (int64_t i = 0; i < size; i += N) {
    const int count = size - i < N ? int(size - i) : N;
    const F32 x = count == N ? load(gate + i) : load_first(gate + i, count);
    const F32 factor = count == N ? load(up + i) : load_first(up + i, count);
    const F32 y = rounded(x / (one + exp(zero - x)), gate) * factor;
    count == N ? store(out + i, y) : store_first(out + i, y, count);
  }
}

static void silu_mul(int type, const void* gate_up, void* out, int64_t rows, int64_t size) {
  with_type(type, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    parallel_for(rows, grain_of(size, kActivationGrain), [&](int64_t row) {
      const T* gate = (const T*)gate_up + row * 2 * size;
      silu_mul_row(gate, gate + size, (T*)out + row * size, size);
    });
  });
}

}  // namespace tiercel::TIERCEL_CLASS
