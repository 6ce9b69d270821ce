// The innermost loops of a product with a quantised weight: a tile of a few rows of x by one panel.
//
// An output is the sum over its groups in ascending order, each the product of a scale and the sum over the group's inputs in
// ascending order. Whether values are widened in registers or were widened into memory before, the numbers are the same, so
// that a row of the result depends on its row of x alone.
#pragma once
#include "quantized_input.h"

namespace tiercel::TIERCEL_CLASS {

constexpr int kVectors = kQuantizedPanel / F32::N;

// One tile: c [rows][kQuantizedPanel] += x [rows][stride] . the groups of a panel.
template <class X, class Wide>
struct QuantizedTile {
  const PanelShape& shape;
  int scale_type;
  const char* header;  // of the first group
  const char* values;  // of the first group
  const Wide* wide;    // the values of all groups if they were widened before
  const X* x;
  int64_t stride;
  const float* x_sums;  // of the first row and the first group; null without offsets
  float* c;
  int64_t groups;
  int64_t inputs;  // of each group, in whole chunks
  bool is_part;    // of one group: c has the sum so far, without its scale
  bool is_first;   // part
  const char* ahead;  // memory to prefetch, `step` bytes after each chunk
  int64_t step;
};

TIERCEL_INLINE F32 to_total(F32 sum) { return sum; }
TIERCEL_INLINE F32 to_total(I32 sum) { return to_floats(sum); }
TIERCEL_INLINE F32 load_sum(const float* c, F32) { return load(c); }
TIERCEL_INLINE I32 load_sum(const float* c, I32) { return load_ints((const int32_t*)c); }
TIERCEL_INLINE void store_sum(float* c, F32 sum) { store(c, sum); }
TIERCEL_INLINE void store_sum(float* c, I32 sum) { store_ints((int32_t*)c, sum); }

// The scales and offsets of a group's vectors of outputs.
struct GroupScales {
  F32 scales[kVectors], offsets[kVectors];
  bool has_offsets;

  // `unit`: what values have to be multiplied by.
  TIERCEL_INLINE GroupScales load_group(const char* header, const PanelShape& shape, int type, float unit) {
    GroupScales group;
    group.has_offsets = shape.has_offsets;
    load_row(header, type, group.scales);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) group.scales[v] = group.scales[v] * splat(unit);
    if (shape.has_offsets) load_row(header + shape.scale_bytes, type, group.offsets);
    return group;
  }

  // Adds a group's sums of a vector of outputs, and the share of the offsets, to the total.
  inline __attribute__((always_inline)) F32 add(F32 total, F32 sums, const float* x_sum, int v) const {
    total = fma(sums, scales[v], total);
    return has_offsets ? fma(splat(*x_sum), offsets[v], total) : total;
  }

 private:
  TIERCEL_INLINE void load_row(const char* row, int type, F32 (&to)[kVectors]) {
    with_type(type, [&](auto* tag) {
      using T = std::remove_pointer_t<decltype(tag)>;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) to[v] = load((const T*)row + v * F32::N);
    });
  }
};

// Math: how numbers are multiplied. It has the types X of x, Wide of widened values, Sum of a vector of outputs, Factor of
// some inputs of x and Operand of their values, `kInputs` of them at once. Values: where operands come from.
template <class Math, class Values>
struct QuantizedLoop {
  using Tile = QuantizedTile<typename Math::X, typename Math::Wide>;
  using Sum = typename Math::Sum;

  template <int M>
  static __attribute__((noinline)) void run(const Tile& t) {
    const char *header = t.header, *values = t.values, *ahead = t.ahead;
    const typename Math::Wide* wide = t.wide;
    const typename Math::X* x = t.x;
    const int64_t stride = t.stride;
    for (int64_t g = 0; g < t.groups; g++) {
      Sum sums[M][kVectors];
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) {
          sums[m][v] = t.is_first ? Math::start(header + t.shape.starts, v)
                                  : load_sum(t.c + m * kQuantizedPanel + v * F32::N, Sum{});
        }
      }
      const char* chunk = values;
      for (int64_t i = 0; i < t.inputs; i += kChunk, ahead += t.step) {
        for (int64_t byte = 0; byte < t.step; byte += 64) __builtin_prefetch(ahead + byte, 0, 2);
        add_steps<0, M>(sums, Values::at(chunk, wide), x, stride);
        chunk += t.shape.chunk_bytes, wide += kChunk * kQuantizedPanel, x += kChunk;
      }
      if (t.is_part) {
        store_sums<M>(sums, t.c);
      } else {
        add_totals<M>(sums, GroupScales::load_group(header, t.shape, t.scale_type, Values::kUnit), t, g);
      }
      header += t.shape.group_bytes, values += t.shape.group_bytes;
    }
  }

 private:
  template <int M>
  TIERCEL_INLINE void store_sums(const Sum (&sums)[M][kVectors], float* c) {
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) store_sum(c + m * kQuantizedPanel + v * F32::N, sums[m][v]);
    }
  }

  template <int M>
  TIERCEL_INLINE void add_totals(const Sum (&sums)[M][kVectors], const GroupScales& group, const Tile& t, int64_t g) {
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) {
        float* c = t.c + m * kQuantizedPanel + v * F32::N;
        const float* x_sum = t.x_sums ? t.x_sums + m * t.shape.groups + g : nullptr;
        store(c, group.add(load(c), to_total(sums[m][v]), x_sum, v));
      }
    }
  }

  template <int step, int M, class Place>
  TIERCEL_INLINE void add_steps(Sum (&sums)[M][kVectors], Place place, const typename Math::X* x, int64_t stride) {
    if constexpr (step * Math::kInputs < kChunk) {
      typename Math::Operand operands[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) operands[v] = Values::template load_operand<step>(place, v);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        const typename Math::Factor factor = Math::load_factor(x + m * stride + step * Math::kInputs);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) Math::add(sums[m][v], factor, operands[v]);
      }
      add_steps<step + 1, M>(sums, place, x, stride);
    }
  }
};

// Writes the values of a group's chunks as the loops with widened values read them.
template <class Math, class Values>
static void widen_values(const char* values, int64_t chunk_bytes, int64_t chunks, typename Math::Wide* wide) {
  for (int64_t i = 0; i < chunks; i++, values += chunk_bytes, wide += kChunk * kQuantizedPanel) {
    Values::widen(values, wide);
  }
}

// Values widened to float32, products and sums in float32.
struct WideMath {
  using X = float;
  using Wide = float;
  using Sum = F32;
  using Factor = F32;
  using Operand = F32;
  static constexpr int kInputs = 1, kRows = kWideRows / 2;

  TIERCEL_INLINE F32 start(const char*, int) { return splat(0); }
  TIERCEL_INLINE F32 load_factor(const float* x) { return splat(*x); }
  TIERCEL_INLINE void add(F32& sum, F32 factor, F32 operand) { add_product(sum, factor, operand); }
};

template <Format format>
struct WideValues {
  static constexpr float kUnit = 1;
  static constexpr int kBits = bits_of_format(format);

  TIERCEL_INLINE const char* at(const char* chunk, const float*) { return chunk; }
  template <int i>
  TIERCEL_INLINE F32 load_operand(const char* chunk, int vector) {
    constexpr int row = kBits == 8 ? i / 4 : 0, shift = kBits == 8 ? 8 * (i % 4) : 16 * (i % 2) + 4 * (i / 2);
    const I32 words = load_ints((const int32_t*)chunk + row * kQuantizedPanel + vector * F32::N);
    const I32 top = shifted_left<32 - kBits - shift>(words);
    if constexpr (format == kFloat8) {
      return as_floats(shifted_signed<4>(top) & splat_int(int32_t(kFloat8Bits))) * splat(kFloat8Unit);
    }
    return to_floats(shifted_signed<32 - kBits>(top));
  }
  template <int i = 0>
  TIERCEL_INLINE void widen(const char* chunk, float* wide) {
    if constexpr (i < kChunk) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) store(wide + i * kQuantizedPanel + v * F32::N, load_operand<i>(chunk, v));
      widen<i + 1>(chunk, wide);
    }
  }
};

struct WidenedValues {
  static constexpr float kUnit = 1;

  TIERCEL_INLINE const float* at(const char*, const float* wide) { return wide; }
  template <int i>
  TIERCEL_INLINE F32 load_operand(const float* wide, int vector) {
    return load(wide + i * kQuantizedPanel + vector * F32::N);
  }
};

struct WideQuantized {
  using Math = WideMath;
  template <Format format>
  using Packed = WideValues<format>;
  template <Format>
  using Widened = WidenedValues;
};

}  // namespace tiercel::TIERCEL_CLASS
