// The innermost loops of a matrix product with instructions that multiply pairs of bf16 (AVX512-BF16).
#pragma once
#include "linear_tile.h"

namespace tiercel::TIERCEL_CLASS {

// Products of pairs and their sums in float32; denormal numbers count as zero.
struct DotProduct {
  using W = bf16;
  using X = bf16;
  static constexpr int kRows = 12;

  template <int M>
  static __attribute__((noinline)) void run(Tile<W, X> t) {
    constexpr int V = kPanel / F32::N;
    __m512 sums[M][V];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        sums[m][v] = t.is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(t.c + m * kPanel + v * F32::N);
      }
    }
    const W* weights = t.weights;
    const X* x = t.x;
    const char* ahead = t.ahead;
    const int64_t stride = stride_of<M>(t);
    for (int64_t k = 0; k + 1 < t.inputs; k += 2, weights += 2 * kPanel, ahead += t.step) {
      __builtin_prefetch(ahead, 0, 2);
      __builtin_prefetch(ahead + 64, 0, 2);
      __m512bh pairs[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) pairs[v] = load_pairs(weights + v * 2 * F32::N);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        int both;
        memcpy(&both, x + m * stride + k, 4);
        const __m512bh pair = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) sums[m][v] = _mm512_dpbf16_ps(sums[m][v], pairs[v], pair);
      }
    }
    if (t.inputs % 2) {
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        const __m512bh pair = (__m512bh)_mm512_set1_epi32(x[m * stride + t.inputs - 1].bits);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
          sums[m][v] = _mm512_dpbf16_ps(sums[m][v], load_pairs(weights + v * 2 * F32::N), pair);
        }
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) _mm512_storeu_ps(t.c + m * kPanel + v * F32::N, sums[m][v]);
    }
  }

 private:
  TIERCEL_INLINE __m512bh load_pairs(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
};

}  // namespace tiercel::TIERCEL_CLASS
