// The innermost loops of a matrix product: a tile of a few rows of x by one panel of weights.
//
// An output is the sum over the inputs in ascending order, whatever the number of rows and of threads is.
#pragma once
#include "linear_panel.h"

namespace tiercel::TIERCEL_CLASS {

constexpr int64_t kSlice = 768;  // inputs of a panel that are multiplied by all rows of a block in turn
constexpr int64_t kShortSlice = 256;  // the same for a single tile, which reads memory as fast as it can

// Up to this many rows a product waits for memory alone: x needs no copy, and a panel is multiplied as a whole.
constexpr int64_t kThinRows = 2;

// Distance of the rows of x in a tile: they start in different cache sets.
template <class X>
constexpr int64_t kStride = kSlice + 64 / sizeof(X);

// One tile: c [rows][kPanel] = x [rows][stride], of which `inputs` are used, . weights, or += if not `is_first`.
// `stride` is kStride if there are more than kThinRows, so that the addresses are constants.
// `ahead` is memory to prefetch, `step` bytes after each pair of inputs.
template <class W, class X>
struct Tile {
  const W* weights;
  const X* x;
  int64_t stride;
  int64_t inputs;
  float* c;
  bool is_first;
  const char* ahead;
  int64_t step;
};

template <int M, class W, class X>
TIERCEL_INLINE int64_t stride_of(const Tile<W, X>& tile) {
  return M > kThinRows ? kStride<X> : tile.stride;
}

// The weights of `kPanel` outputs for the first (`half` = 0) or second input of a pair.
template <int half>
TIERCEL_INLINE F32 load_half(const bf16* pairs, int vector) {
  return half ? load_odd(pairs + vector * 2 * F32::N) : load_even(pairs + vector * 2 * F32::N);
}
template <int half>
TIERCEL_INLINE F32 load_half(const fp16* pairs, int vector) {
  return load(pairs + half * kPanel + vector * F32::N);
}

// Weights widened in registers, products and sums in float32.
template <class Weight>
struct WideProduct {
  using W = Weight;
  using X = float;
  static constexpr int kRows = kWideRows;

  template <int M>
  static __attribute__((noinline)) void run(Tile<W, X> t) {
    constexpr int V = kPanel / F32::N;
    F32 sums[M][V];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[m][v] = t.is_first ? splat(0) : load(t.c + m * kPanel + v * F32::N);
    }
    const W* weights = t.weights;
    const X* x = t.x;
    const char* ahead = t.ahead;
    const int64_t stride = stride_of<M>(t);
    for (int64_t k = 0; k + 1 < t.inputs; k += 2, weights += 2 * kPanel, ahead += t.step) {
      __builtin_prefetch(ahead, 0, 2);
      add<0, M>(sums, weights, x + k, stride);
      add<1, M>(sums, weights, x + k + 1, stride);
    }
    if (t.inputs % 2) add<0, M>(sums, weights, x + t.inputs - 1, stride);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) store(t.c + m * kPanel + v * F32::N, sums[m][v]);
    }
  }

 private:
  template <int half, int M>
  TIERCEL_INLINE void add(F32 (&sums)[M][kPanel / F32::N], const W* weights, const X* x, int64_t stride) {
    constexpr int V = kPanel / F32::N;
    F32 wide[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) wide[v] = load_half<half>(weights, v);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      const F32 one = splat(x[m * stride]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) add_product(sums[m][v], one, wide[v]);
    }
  }
};

}  // namespace tiercel::TIERCEL_CLASS
