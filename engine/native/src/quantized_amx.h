// Products of integers with the tile registers of AMX: x rounded to 8 bits by values of 8 bits.
//
// A register has 16 outputs of 16 rows of four inputs as a panel has them, 16 rows of 64 inputs of x, or the sums of 16 rows
// and 16 outputs. Two registers of rows are multiplied by two of outputs at a time, as in linear_amx.h. Sums are exact.
#pragma once
#include "amx_tiles.h"
#include "quantized_tile.h"

namespace tiercel::TIERCEL_CLASS {

constexpr int kTileOutputs = 2 * kTileRows;  // of a panel that are multiplied at a time

static_assert(kQuantizedPanel % kTileOutputs == 0, "a panel is a multiple of two registers wide");

struct IntegerTiles {
  const PanelShape& shape;
  const QuantizedInput<Rounded>& in;
  int scale_type;
  int64_t rows;  // of all x

  // Multiplies rows [begin, begin + count) by a panel, and writes the totals [count][kQuantizedPanel]. The registers are
  // configured before.
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

  // Sums in registers 0 to 3, x in 4 and 5, values in 6 and 7.
  TileConfig config() const {
    TileConfig config;
    for (int tile = 0; tile < kTiles; tile++) {
      config.row_bytes[tile] = uint16_t(tile == 4 || tile == 5 ? block() : kTileBytes);
      config.rows[tile] = uint8_t(tile < 6 ? (rows < kTileRows ? rows : kTileRows) : block() / 4);
    }
    return config;
  }

 private:
  // Inputs that are multiplied at once; the width of every group is a multiple of it.
  int64_t block() const { return shape.width < kTileBytes ? shape.width : kTileBytes; }

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
