// Products with the tile registers of AMX: x in bf16 by values that were widened to bf16, and x rounded to 8 bits by
// integers of 8 bits as a panel has them.
//
// A register has 16 outputs of 16 pairs (of integers: of 16 times four inputs), 16 rows of 32 (64) inputs of x, or the sums
// of 16 rows and 16 outputs. Two registers of rows are multiplied by two of outputs at a time, as in linear_amx.h: sums in
// registers 0 to 3, x in 4 and 5, values in 6 and 7. Every number of rows is multiplied in this way. Groups may have fewer
// inputs than a register.
#pragma once
#include "amx_tiles.h"
#include "quantized_tile.h"

namespace tiercel::TIERCEL_CLASS {

constexpr int kTileOutputs = 2 * kTileRows;  // of a panel that are multiplied at a time

static_assert(kQuantizedPanel % kTileOutputs == 0, "a panel is a multiple of two registers wide");

// Inputs that are multiplied at once; the width of every group is a multiple of them.
TIERCEL_INLINE int64_t block_inputs(const PanelShape& shape, int64_t number_bytes) {
  const int64_t most = kTileBytes / number_bytes;
  return shape.width < most ? shape.width : most;
}

// The registers for products of `rows` rows of x, whose numbers have `number_bytes`.
TIERCEL_INLINE TileConfig config_of(const PanelShape& shape, int64_t number_bytes, int64_t rows) {
  const int64_t bytes = block_inputs(shape, number_bytes) * number_bytes;
  TileConfig config;
  for (int tile = 0; tile < kTiles; tile++) {
    config.row_bytes[tile] = uint16_t(tile == 4 || tile == 5 ? bytes : kTileBytes);
    config.rows[tile] = uint8_t(tile < 6 ? (rows < kTileRows ? rows : kTileRows) : bytes / 4);
  }
  return config;
}

// Values in bf16, and the loop over the tiles of a panel. It is used as those of quantized_tile.h, for 1 to 32 rows.
struct TileMath {
  using X = bf16;
  using Wide = bf16;
  using Sum = F32;
  using Tile = QuantizedTile<bf16, bf16>;
  static constexpr int kRows = 2 * kTileRows;

  template <class Values>
  static void run(int rows, const Tile& t) {
    for (int output = 0; output < kQuantizedPanel; output += kTileOutputs) {
      const char* header = t.header;
      for (int64_t g = 0; g < t.groups; g++, header += t.shape.group_bytes) {
        alignas(64) float sums[2 * kTileRows * kTileOutputs];
        if (!t.is_first) {
          for (int m = 0; m < rows; m++) memcpy(sums + m * kTileOutputs, t.c + m * kQuantizedPanel + output, kTileOutputs * 4);
        }
        if (rows > kTileRows) {
          multiply<true>(t, g, output, sums);
        } else {
          multiply<false>(t, g, output, sums);
        }
        if (t.is_part) {
          for (int m = 0; m < rows; m++) memcpy(t.c + m * kQuantizedPanel + output, sums + m * kTileOutputs, kTileOutputs * 4);
        } else {
          const auto group = GroupScales::load_group(header, t.shape, t.scale_type, Values::kUnit);
          for (int m = 0; m < rows; m++) {
            const float* x_sum = t.x_sums ? t.x_sums + m * t.shape.groups + g : nullptr;
            for (int v = 0; v < kTileOutputs / F32::N; v++) {
              float* c = t.c + m * kQuantizedPanel + output + v * F32::N;
              store(c, group.add(load(c), load(sums + m * kTileOutputs + v * F32::N), x_sum, output / F32::N + v));
            }
          }
        }
      }
    }
  }

 private:
  template <bool has_two>
  TIERCEL_INLINE void multiply(const Tile& t, int64_t group, int output, float* sums) {
    constexpr int64_t kRowBytes = kTileOutputs * 4, kPairBytes = kQuantizedPanel * 4;
    float* second = sums + kTileRows * kTileOutputs;
    if (t.is_first) {
      zero_tile<0>();
      zero_tile<1>();
      if constexpr (has_two) zero_tile<2>();
      if constexpr (has_two) zero_tile<3>();
    } else {
      load_tile<0>(sums, kRowBytes);
      load_tile<1>(sums + kTileRows, kRowBytes);
      if constexpr (has_two) load_tile<2>(second, kRowBytes);
      if constexpr (has_two) load_tile<3>(second + kTileRows, kRowBytes);
    }
    const int64_t block = block_inputs(t.shape, sizeof(bf16)), stride = t.stride * int64_t(sizeof(bf16));
    for (int64_t k = group * t.inputs; k < (group + 1) * t.inputs; k += block) {
      const bf16* values = t.wide + k * kQuantizedPanel + 2 * output;
      load_tile<6>(values, kPairBytes);
      load_tile<7>(values + kTileBytes / sizeof(bf16), kPairBytes);
      load_tile<4>(t.x + k, stride);
      multiply_tiles<0, 4, 6>();
      multiply_tiles<1, 4, 7>();
      if constexpr (has_two) {
        load_tile<5>(t.x + k + kTileRows * t.stride, stride);
        multiply_tiles<2, 5, 6>();
        multiply_tiles<3, 5, 7>();
      }
    }
    store_tile<0>(sums, kRowBytes);
    store_tile<1>(sums + kTileRows, kRowBytes);
    if constexpr (has_two) store_tile<2>(second, kRowBytes);
    if constexpr (has_two) store_tile<3>(second + kTileRows, kRowBytes);
  }
};

#ifndef __AVX512BF16__  // emulated for any processor
template <Format format>
struct DotValues {
  static constexpr float kUnit = 1;

  TIERCEL_INLINE void widen(const char* chunk, bf16* wide) {
    alignas(64) float values[kChunk * kQuantizedPanel];
    WideValues<format>::widen(chunk, values);
    for (int i = 0; i < kChunk; i++) {
      for (int output = 0; output < kQuantizedPanel; output++) {
        from_float(values[i * kQuantizedPanel + output], wide[(i / 2 * kQuantizedPanel + output) * 2 + i % 2]);
      }
    }
  }
};
#endif

struct TileQuantized {
  using Math = TileMath;
  template <Format format>
  using Packed = DotValues<format>;
  template <Format format>
  using Widened = DotValues<format>;
};

struct IntegerTiles {
  const PanelShape& shape;
  const QuantizedInput<Rounded>& in;
  int scale_type;

  // Multiplies rows [begin, begin + count) by a panel, and writes the totals [count][kQuantizedPanel]. The registers are
  // configured before, and rows of x may be read whose numbers do not count.
  void run(const char* panel, int64_t begin, int64_t count, float* totals) const {
    alignas(64) int32_t sums[2][kTileRows * kTileOutputs];
    memset(totals, 0, count * kQuantizedPanel * 4);
    for (int64_t row = 0; row < count; row += 2 * kTileRows) {
      const int64_t two = row + kTileRows < count ? row + kTileRows : row;
      for (int64_t output = 0; output < kQuantizedPanel; output += kTileOutputs) {
        const char* header = panel;
        for (int64_t g = 0; g < shape.groups; g++, header += shape.group_bytes) {
          const Rounded* x = in.x + begin * in.stride + g * shape.width;
          const auto group = GroupScales::load_group(header, shape, scale_type, 1);
          multiply_group(header + shape.header + output * 4, x + row * in.stride, x + two * in.stride, sums);
          for (int64_t m = row; m < count && m < row + 2 * kTileRows; m++) {
            const int64_t in_tile = m - row;
            const int32_t* sum = sums[in_tile / kTileRows] + in_tile % kTileRows * kTileOutputs;
            const float* x_sum = in.sums ? in.sums + (begin + m) * shape.groups + g : nullptr;
            for (int v = 0; v < kTileOutputs / F32::N; v++) {
              const int vector = int(output / F32::N) + v;
              float* total = totals + m * kQuantizedPanel + vector * F32::N;
              const F32 one = to_floats(load_ints(sum + v * F32::N));
              store(total, group.add(load(total), one, x_sum, vector));
            }
          }
        }
      }
    }
  }

 private:
  int64_t block() const { return block_inputs(shape, sizeof(Rounded)); }

  void multiply_group(const char* values, const Rounded* one, const Rounded* two,
                      int32_t (&sums)[2][kTileRows * kTileOutputs]) const {
    constexpr int64_t kRowBytes = kQuantizedPanel * 4;
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
    for (int64_t k = 0; k < shape.width; k += block(), values += block() / 4 * kRowBytes) {
      load_tile<6>(values, kRowBytes);
      load_tile<7>(values + kTileBytes, kRowBytes);
      load_tile<4>(one + k, in.stride);
      multiply_integer_tiles<0, 4, 6>();
      multiply_integer_tiles<1, 4, 7>();
      if (two == one) continue;
      load_tile<5>(two + k, in.stride);
      multiply_integer_tiles<2, 5, 6>();
      multiply_integer_tiles<3, 5, 7>();
    }
    store_tile<0>(sums[0], kTileOutputs * 4);
    store_tile<1>(sums[0] + kTileRows, kTileOutputs * 4);
    store_tile<2>(sums[1], kTileOutputs * 4);
    store_tile<3>(sums[1] + kTileRows, kTileOutputs * 4);
  }
};

}  // namespace tiercel::TIERCEL_CLASS
