// Matrix products with packed weights of 16 bits: y = x . weight^T + bias. A part of every class: include it after a simd header.
#pragma once
#include "linear_panel.h"
#include "linear_tile.h"
#if defined(TIERCEL_TILES)
#include "linear_amx.h"
#elif defined(__AVX512BF16__)
#include "linear_dot.h"
#endif

namespace tiercel::TIERCEL_CLASS {

constexpr int64_t kRowBlock = 48;        // rows whose slices of x stay in the second-level cache

// Tiles of 1 to `kRows` rows by number of rows.
template <class P, int M>
TIERCEL_INLINE void run_tile(int rows, const Tile<typename P::W, typename P::X>& tile) {
  if constexpr (M > 0) {
    if (rows == M) {
      P::template run<M>(tile);
    } else {
      run_tile<P, M - 1>(rows, tile);
    }
  }
}

template <class X, class T>
TIERCEL_INLINE void copy_row(const T* from, X* to, int64_t count) {
  if constexpr (std::is_same_v<X, T>) {
    memcpy(to, from, count * sizeof(X));
  } else {
    int64_t i = 0;
    for (; i + F32::N <= count; i += F32::N) store(to + i, load(from + i));
    if (i < count) store_first(to + i, load_first(from + i, int(count - i)), int(count - i));
  }
}

// P: the innermost loops. T: how x and y are stored.
template <class P, class T>
struct Product {
  using W = typename P::W;
  using X = typename P::X;

  const T* x;
  const W* packed;
  const float* bias;
  T* y;
  int64_t rows, outputs, inputs;

  void run() const {
    const int64_t panels = count_panels(outputs), size = panel_size(inputs);
    const int64_t tiles = (rows + P::kRows - 1) / P::kRows;
    const int64_t blocks = (tiles * P::kRows + kRowBlock - 1) / kRowBlock;
    const bool is_thin = std::is_same_v<X, T> && rows <= kThinRows;
    const int64_t group = claimed_panels(panels, blocks, is_thin ? kGroupBytes / (size * int64_t(sizeof(W))) : kGroup);
    const int64_t groups = (panels + group - 1) / group;
    parallel_for(groups * blocks, 1, [&](int64_t piece) {
      const int64_t first = piece / blocks * group, block = piece % blocks;
      const int64_t last = first + group < panels ? first + group : panels;
      if constexpr (std::is_same_v<X, T>) {
        if (is_thin) return run_thin(first, last);
      }
      run_piece(first, last, block * tiles / blocks, (block + 1) * tiles / blocks, tiles);
    });
  }

 private:
  // Multiplies panels [first, last) by at most kThinRows. A panel is read from its first byte to the last, because memory
  // is read fastest in the order of its addresses.
  void run_thin(int64_t first, int64_t last) const {
    alignas(64) float sums[kThinRows * kPanel];
    for (int64_t panel = first; panel < last; panel++) {
      const W* weights = packed + panel * panel_size(inputs);
      const Tile<W, X> t{weights, x, inputs, inputs, sums, true, (const char*)weights + kThinAhead, kPanel * 2 * sizeof(W)};
      run_tile<P, kThinRows>(int(rows), t);
      const int64_t start = panel * kPanel, width = outputs - start < kPanel ? outputs - start : kPanel;
      store_panel(sums, bias ? bias + start : nullptr, y + start, outputs, rows, width);
    }
  }

  // Multiplies panels [first, last) by the rows of some tiles; tile i of n has the rows from i * rows / n.
  void run_piece(int64_t first, int64_t last, int64_t first_tile, int64_t last_tile, int64_t tiles) const {
    alignas(64) float sums[kGroup * kRowBlock * kPanel];
    alignas(64) X kept[kRowBlock * kStride<X>];
    const int64_t size = panel_size(inputs), begin = first_tile * rows / tiles, count = last_tile * rows / tiles - begin;
    const int64_t slice = tiles > 1 ? kSlice : kShortSlice;
    for (int64_t k = 0; k < inputs; k += slice) {
      const int64_t width = inputs - k < slice ? inputs - k : slice;
      for (int64_t m = 0; m < count; m++) copy_row(x + (begin + m) * inputs + k, kept + m * kStride<X>, width);
      for (int64_t panel = first; panel < last; panel++) {
        const W* weights = packed + panel * size + k * kPanel;
        const W* next = panel + 1 < last ? weights + size : packed + first * size + (k + slice) * kPanel;
        float* c = sums + (panel - first) * count * kPanel;
        for (int64_t tile = first_tile; tile < last_tile; tile++) {
          const int64_t row = tile * rows / tiles - begin, end = (tile + 1) * rows / tiles - begin;
          Tile<W, X> t{weights, kept + row * kStride<X>, kStride<X>, width, c + row * kPanel, k == 0, nullptr, 0};
          // Each tile prefetches its share of the following slice, so that memory is read all the time.
          const int64_t bytes = kPanel * 2 * sizeof(W);
          t.step = bytes / (last_tile - first_tile);
          t.ahead = (const char*)next + (tile - first_tile) * t.step * (width / 2);
          run_tile<P, P::kRows>(int(end - row), t);
        }
      }
    }
    for (int64_t panel = first; panel < last; panel++) {
      const int64_t start = panel * kPanel, width = outputs - start < kPanel ? outputs - start : kPanel;
      store_panel(sums + (panel - first) * count * kPanel, bias ? bias + start : nullptr, y + begin * outputs + start,
                  outputs, count, width);
    }
  }
};

template <class P, class T>
static void multiply(const void* x, const void* packed, const float* bias, void* y, int64_t rows, int64_t outputs,
                     int64_t inputs) {
  Product<P, T>{(const T*)x, (const typename P::W*)packed, bias, (T*)y, rows, outputs, inputs}.run();
}

static void linear(int weight_type, int type, const void* x, const void* packed, const float* bias, void* y, int64_t rows,
                   int64_t outputs, int64_t inputs) {
  if (rows <= 0) return;
#if defined(TIERCEL_TILES)
  if (weight_type == kBfloat16 && type == kBfloat16) {
    return TileProduct{(const bf16*)x, (const bf16*)packed, bias, (bf16*)y, rows, outputs, inputs}.run();
  }
#elif defined(__AVX512BF16__)
  if (weight_type == kBfloat16 && type == kBfloat16) {
    return multiply<DotProduct, bf16>(x, packed, bias, y, rows, outputs, inputs);
  }
#endif
  with_type(type, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    if (weight_type == kBfloat16) {
      multiply<WideProduct<bf16>, T>(x, packed, bias, y, rows, outputs, inputs);
    } else {
      multiply<WideProduct<fp16>, T>(x, packed, bias, y, rows, outputs, inputs);
    }
  });
}

}  // namespace tiercel::TIERCEL_CLASS
