// Packed weights of 4 and 8 bits: their layout, packing, and the rows of a weight by their numbers.
//
// A panel has kQuantizedPanel outputs. It is a sequence of groups, one after another, so that a product of few rows reads
// memory in the order of its addresses. A group has one row of scales, one of offsets if there are any, one of the numbers
// that sums of integers start with if the class wants them, and its values in chunks of eight inputs. A chunk has 32 bits per
// output and row: with 8 bits two rows of four inputs each, with 4 bits one row. There input i is at bit
// 16 * (i % 2) + 4 * (i / 2), so that one look-up of 16-bit words gives a pair of inputs for every output.
#pragma once
#include "linear_panel.h"

namespace tiercel::TIERCEL_CLASS {

constexpr int kQuantizedPanel = 4 * F32::N;
constexpr int kChunk = 8;  // inputs

// What values are. float8 is e4m3fn without its NaN.
enum Format { kInt4, kInt8, kFloat8 };
constexpr int bits_of_format(Format format) { return format == kInt4 ? 4 : 8; }

#if defined(__AVX512VNNI__) && !defined(TIERCEL_TILES)
#define TIERCEL_UNSIGNED_X  // the instruction multiplies x + 128 by the values, so that sums start with -128 * their sum
constexpr bool kHasStarts = true;
#else
constexpr bool kHasStarts = false;
#endif
#ifdef TIERCEL_TILES
constexpr bool kHasTiles = true;  // for x in bf16 or rounded to 8 bits
#else
constexpr bool kHasTiles = false;
#endif

TIERCEL_INLINE int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// The offsets in bytes that follow from a layout.
struct PanelShape {
  int64_t groups, panels;
  int64_t width;        // inputs of a group, rounded up to chunks, or to what two tile registers have of them
  int64_t scale_bytes;  // of a row of scales
  bool has_offsets;
  int64_t starts;       // where a group has its starts
  int64_t header;       // bytes of a group before its values
  int64_t chunk_bytes;
  int64_t group_bytes, panel_bytes;

  explicit PanelShape(const QuantizedLayout& layout)
      : groups(layout.inputs / layout.group),
        panels((layout.outputs + kQuantizedPanel - 1) / kQuantizedPanel),
        width(round_up(layout.group, kHasTiles && groups == 1 ? 64 : kChunk)),
        scale_bytes(kQuantizedPanel * (layout.scale_type == kFloat32 ? 4 : 2)),
        has_offsets(layout.has_offsets),
        starts(scale_bytes * (layout.has_offsets ? 2 : 1)),
        header(starts + (kHasStarts && layout.rounds_x ? kQuantizedPanel * 4 : 0)),
        chunk_bytes(kQuantizedPanel * layout.bits),
        group_bytes(header + width / kChunk * chunk_bytes),
        panel_bytes(groups * group_bytes) {}
};

static int64_t quantized_bytes(const QuantizedLayout* layout) {
  const PanelShape shape(*layout);
  return shape.panels * shape.panel_bytes;
}

TIERCEL_INLINE float scale_at(const char* row, int type, int64_t output) {
  if (type == kFloat32) return ((const float*)row)[output];
  return type == kFloat16 ? to_float(((const fp16*)row)[output]) : to_float(((const bf16*)row)[output]);
}
TIERCEL_INLINE void set_scale(char* row, int type, int64_t output, float scale) {
  if (type == kFloat32) {
    ((float*)row)[output] = scale;
  } else if (type == kFloat16) {
    from_float(scale, ((fp16*)row)[output]);
  } else {
    from_float(scale, ((bf16*)row)[output]);
  }
}

TIERCEL_INLINE int nibble_shift(int64_t input) { return int(16 * (input % 2) + 4 * (input / 2)); }

// The float of a float8 in the upper 8 bits: sign, 4 bits of exponent, 3 of mantissa. They move to where a float has them,
// and the bias of the exponent from 7 to 127. Also right for numbers below the smallest normal one.
constexpr uint32_t kFloat8Bits = 0x87f00000;
constexpr float kFloat8Unit = 0x1p120f;

TIERCEL_INLINE float value_at(const QuantizedLayout& layout, const char* values, int64_t output, int64_t input) {
  const char* chunk = values + input / kChunk * kQuantizedPanel * layout.bits;
  const int64_t i = input % kChunk;
  if (layout.bits == 8) {
    const int8_t byte = ((const int8_t*)chunk)[(i / 4 * kQuantizedPanel + output) * 4 + i % 4];
    return layout.is_float8 ? float_of(uint32_t(int32_t(byte) * (1 << 20)) & kFloat8Bits) * kFloat8Unit : byte;
  }
  uint32_t word;
  memcpy(&word, chunk + output * 4, 4);
  return float(int32_t(word << (28 - nibble_shift(i))) >> 28);
}

// Packs values [count] of a group's output.
static void pack_values(const int8_t* from, int64_t count, int bits, int64_t output, char* values) {
  for (int64_t first = 0; first < count; first += kChunk, values += kQuantizedPanel * bits) {
    int8_t chunk[kChunk] = {};
    memcpy(chunk, from + first, count - first < kChunk ? count - first : kChunk);
    if (bits == 8) {
      memcpy(values + output * 4, chunk, 4);
      memcpy(values + (kQuantizedPanel + output) * 4, chunk + 4, 4);
    } else {
      uint32_t word = 0;
      for (int i = 0; i < kChunk; i++) word |= uint32_t(chunk[i] & 15) << nibble_shift(i);
      memcpy(values + output * 4, &word, 4);
    }
  }
}

static void quantized_pack(const QuantizedLayout* layout, const int8_t* values, const float* scales, const float* offsets,
                           void* packed) {
  const PanelShape shape(*layout);
  const int64_t outputs = layout->outputs, inputs = layout->inputs, size = layout->group;
  parallel_for(shape.panels, 1, [&](int64_t panel) {
    const int64_t start = panel * kQuantizedPanel, rest = outputs - start;
    char* group = (char*)packed + panel * shape.panel_bytes;
    memset(group, 0, shape.panel_bytes);
    for (int64_t g = 0; g < shape.groups; g++, group += shape.group_bytes) {
      for (int64_t i = 0; i < (rest < kQuantizedPanel ? rest : kQuantizedPanel); i++) {
        const int64_t place = (start + i) * shape.groups + g;
        const int8_t* from = values + (start + i) * inputs + g * size;
        set_scale(group, layout->scale_type, i, scales[place]);
        if (layout->has_offsets) set_scale(group + shape.scale_bytes, layout->scale_type, i, offsets[place]);
        if (kHasStarts && layout->rounds_x) {
          int32_t sum = 0;
          for (int64_t k = 0; k < size; k++) sum += from[k];
          ((int32_t*)(group + shape.starts))[i] = -128 * sum;
        }
        pack_values(from, size, layout->bits, i, group + shape.header);
      }
    }
  });
}

template <class T>
static void gather_quantized(const QuantizedLayout& layout, const char* packed, int64_t token, T* out) {
  const PanelShape shape(layout);
  const int64_t output = token % kQuantizedPanel;
  const char* group = packed + token / kQuantizedPanel * shape.panel_bytes;
  for (int64_t g = 0; g < shape.groups; g++, group += shape.group_bytes) {
    const float scale = scale_at(group, layout.scale_type, output);
    const float offset = layout.has_offsets ? scale_at(group + shape.scale_bytes, layout.scale_type, output) : 0;
    for (int64_t k = 0; k < layout.group; k++) {
      const int64_t input = g * layout.group + k;
      const float value = scale * value_at(layout, group + shape.header, output, k);
      from_float(layout.has_offsets ? value + offset : value, out[layout.order ? layout.order[input] : input]);
    }
  }
}

static int quantized_embed(const QuantizedLayout* layout, int type, const int64_t* tokens, const void* packed, void* out,
                           int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    if (tokens[i] < 0 || tokens[i] >= layout->outputs) return 0;
  }
  with_type(type, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    parallel_for(count, 4, [&](int64_t i) {
      gather_quantized(*layout, (const char*)packed, tokens[i], (T*)out + i * layout->inputs);
    });
  });
  return 1;
}

}  // namespace tiercel::TIERCEL_CLASS
