// The left side of a product with a quantised weight: x in the order of the weight's inputs, in the type that the innermost
// loops read, with the sums of its groups.
#pragma once
#include "quantized_panel.h"

namespace tiercel::TIERCEL_CLASS {

// Where the parts are in the memory that the caller gives, in bytes.
struct RoomShape {
  int64_t stride;  // numbers from row to row
  int64_t sums, scales, bytes;

  // `copies`: whether x is copied, as numbers of `number_bytes`.
  RoomShape(const QuantizedLayout& layout, int64_t rows, bool copies, int64_t number_bytes)
      : stride(round_up(layout.inputs, 64)),
        // Registers of rows may be read whose last ones do not exist.
        sums(copies ? (rows + (kHasTiles && layout.rounds_x ? 32 : 0)) * stride * number_bytes : 0),
        scales(sums + (layout.has_offsets ? round_up(rows * (layout.inputs / layout.group) * 4, 64) : 0)),
        bytes(scales + (layout.rounds_x ? round_up(rows * 4, 64) : 0)) {}
};

// x [rows][stride]; a row ends with zeros up to whole chunks.
template <class X>
struct QuantizedInput {
  const X* x;
  int64_t stride;
  const float* sums;    // of every row and group; null without offsets
  const float* scales;  // of every row; null if x is not rounded to 8 bits
};

template <class X, class T>
static void copy_inputs(const QuantizedLayout& layout, const T* from, X* to, int64_t stride) {
  int64_t i = 0;
  if (layout.order) {
    for (; i < layout.inputs; i++) from_float(to_float(from[layout.order[i]]), to[i]);
  } else if constexpr (std::is_same_v<X, T>) {
    memcpy(to, from, layout.inputs * sizeof(X));
    i = layout.inputs;
  } else {
    for (; i + F32::N <= layout.inputs; i += F32::N) store(to + i, load(from + i));
    for (; i < layout.inputs; i++) from_float(to_float(from[i]), to[i]);
  }
  memset(to + i, 0, (stride - i) * sizeof(X));
}

#ifdef TIERCEL_UNSIGNED_X
using Rounded = uint8_t;
constexpr int kZero = 128;
#else
using Rounded = int8_t;
constexpr int kZero = 0;
#endif

// Rounds a row to integers of -128 to 127, ties to even, and returns the scale, as `round_activations` in
// engine/models/activation_rounding.py does. A result that would be a NaN there has a scale here that makes it one.
template <class T>
static float round_row(const QuantizedLayout& layout, const T* x, Rounded* to) {
  const int64_t count = layout.inputs;
  uint32_t most = 0;
  for (int64_t i = 0; i < count; i++) {
    const uint32_t bits = bits_of(to_float(x[i])) & 0x7fffffff;
    most = bits > most ? bits : most;  // a NaN is above infinity
  }
  const uint32_t infinity = 0x7f800000;
  const bool has_scale = layout.x_scale != 0;
  const float scale = has_scale && most <= infinity ? layout.x_scale : float_of(most) / 127;
  if (most > infinity || (most == infinity && !has_scale) || scale == 0) {
    memset(to, kZero, count);
    return scale;
  }
  constexpr float kWhole = 0x1.8p23f;  // a sum with it has no fraction
  for (int64_t i = 0; i < count; i++) {
    float one = to_float(x[layout.order ? layout.order[i] : i]) / scale;
    one = one > 127 ? 127 : one < -128 ? -128 : one;
    to[i] = Rounded(int32_t((one + kWhole) - kWhole) + kZero);
  }
  return scale;
}

template <class X>
TIERCEL_INLINE float sum_of(const X* x, int64_t count) {
  F32 sums = splat(0);
  int64_t i = 0;
  for (; i + F32::N <= count; i += F32::N) sums = sums + load(x + i);
  return sum(i < count ? sums + load_first(x + i, int(count - i)) : sums);
}
TIERCEL_INLINE float sum_of(const Rounded* x, int64_t count) {
  int32_t sum = 0;
  for (int64_t i = 0; i < count; i++) sum += x[i];
  return float(sum - kZero * int32_t(count));
}

template <class X>
static void sum_groups(const QuantizedLayout& layout, const QuantizedInput<X>& in, int64_t row, float* sums) {
  const int64_t groups = layout.inputs / layout.group;
  for (int64_t g = 0; g < groups; g++) {
    sums[row * groups + g] = sum_of(in.x + row * in.stride + g * layout.group, layout.group);
  }
}

// Whether x cannot be read where it is.
template <class X, class T>
TIERCEL_INLINE bool copies_input(const QuantizedLayout& layout) {
  return !std::is_same_v<X, T> || layout.order || layout.inputs % (kHasTiles ? 64 : kChunk);
}

template <class X, class T>
static QuantizedInput<X> prepare_input(const QuantizedLayout& layout, const T* x, int64_t rows, char* room) {
  const bool copies = copies_input<X, T>(layout);
  const RoomShape shape(layout, rows, copies, sizeof(X));
  float* sums = layout.has_offsets ? (float*)(room + shape.sums) : nullptr;
  QuantizedInput<X> in{(const X*)x, layout.inputs, sums, nullptr};
  if (copies) in = {(const X*)room, shape.stride, sums, nullptr};
  if (!copies && !sums) return in;
  parallel_for(rows, 4, [&](int64_t row) {
    if (copies) copy_inputs(layout, x + row * layout.inputs, (X*)room + row * shape.stride, shape.stride);
    if (sums) sum_groups(layout, in, row, sums);
  });
  return in;
}

template <class T>
static QuantizedInput<Rounded> round_input(const QuantizedLayout& layout, const T* x, int64_t rows, char* room) {
  const RoomShape shape(layout, rows, true, sizeof(Rounded));
  float* sums = layout.has_offsets ? (float*)(room + shape.sums) : nullptr;
  float* scales = (float*)(room + shape.scales);
  const QuantizedInput<Rounded> in{(const Rounded*)room, shape.stride, sums, scales};
  parallel_for(rows, 4, [&](int64_t row) {
    Rounded* to = (Rounded*)room + row * shape.stride;
    scales[row] = round_row(layout, x + row * layout.inputs, to);
    memset(to + layout.inputs, 0, shape.stride - layout.inputs);
    if (sums) sum_groups(layout, in, row, sums);
  });
  return in;
}

}  // namespace tiercel::TIERCEL_CLASS
