// The instructions of amx_tiles.h in plain C++, for tests on processors without AMX.
//
// They do what Intel's manual says, to the bit, and abort with a message where the processor would raise an exception.
#pragma once
#include <cstdio>
#include <cstdlib>

#include "amx_tiles.h"

namespace tiercel::TIERCEL_CLASS {

struct EmulatedTiles {
  bool is_configured;
  TileConfig config;
  uint8_t bytes[kTiles][kTileRows][kTileBytes];
};

static thread_local EmulatedTiles emulated;

static void check_tiles(bool is_right, const char* what) {
  if (is_right) return;
  fprintf(stderr, "emulated tiles: %s\n", what);
  abort();
}

static void configure_tiles(const TileConfig& config) {
  check_tiles(config.palette <= 1, "LDTILECFG: there are palettes 0 and 1");
  emulated = {};
  if (config.palette == 0) return;  // as after TILERELEASE
  check_tiles(config.start_row == 0, "LDTILECFG: a start row is for handlers of interrupts, and not emulated");
  for (uint8_t one : config.reserved) check_tiles(one == 0, "LDTILECFG: a reserved byte is not 0");
  for (int tile = 0; tile < 16; tile++) {
    const int rows = config.rows[tile], bytes = config.row_bytes[tile];
    check_tiles(tile < kTiles || (rows == 0 && bytes == 0), "LDTILECFG: a reserved byte is not 0");
    check_tiles(rows <= kTileRows && bytes <= kTileBytes, "LDTILECFG: a tile has up to 16 rows of 64 bytes");
    check_tiles((rows == 0) == (bytes == 0), "LDTILECFG: a tile has rows without bytes, or bytes without rows");
  }
  emulated.is_configured = true;
  emulated.config = config;
}

static void release_tiles() { emulated = {}; }

static int rows_of(int tile) {
  check_tiles(emulated.is_configured, "the tiles are not configured");
  check_tiles(emulated.config.rows[tile] > 0, "the tile has no rows in this configuration");
  return emulated.config.rows[tile];
}
static int bytes_of(int tile) { return emulated.config.row_bytes[tile]; }

template <int tile>
static void zero_tile() {
  static_assert(tile < kTiles);
  rows_of(tile);
  memset(emulated.bytes[tile], 0, sizeof(emulated.bytes[tile]));
}

template <int tile>
static void load_tile(const void* p, int64_t stride) {
  zero_tile<tile>();  // the rows and bytes beyond the configured ones
  for (int i = 0; i < rows_of(tile); i++) memcpy(emulated.bytes[tile][i], (const char*)p + i * stride, bytes_of(tile));
}

template <int tile>
static void store_tile(void* p, int64_t stride) {
  static_assert(tile < kTiles);
  for (int i = 0; i < rows_of(tile); i++) memcpy((char*)p + i * stride, emulated.bytes[tile][i], bytes_of(tile));
}

// Denormal numbers count as zero, as operands and as results.
static float without_denormal(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0, x) : x; }
static float multiply_pairs(bf16 a, bf16 b, float c) {
  return without_denormal(__builtin_fmaf(without_denormal(to_float(a)), without_denormal(to_float(b)), c));
}

template <int sums, int x, int weights>
static void multiply_tiles() {
  static_assert(sums < kTiles && x < kTiles && weights < kTiles);
  static_assert(sums != x && sums != weights && x != weights, "the processor refuses equal registers");
  check_tiles(rows_of(sums) == rows_of(x), "TDPBF16PS: sums and x differ in rows");
  check_tiles(bytes_of(sums) == bytes_of(weights), "TDPBF16PS: sums and weights differ in the bytes of a row");
  check_tiles(bytes_of(x) / 4 == rows_of(weights), "TDPBF16PS: x has not as many pairs as weights has rows");
  check_tiles(bytes_of(x) % 4 == 0 && bytes_of(sums) % 4 == 0, "TDPBF16PS: a row is not made of pairs");
  for (int m = 0; m < rows_of(sums); m++) {
    for (int n = 0; n < bytes_of(sums) / 4; n++) {
      float even = 0, odd = 0, sum;
      for (int k = 0; k < bytes_of(x) / 4; k++) {
        bf16 a[2], b[2];
        memcpy(a, emulated.bytes[x][m] + 4 * k, 4);
        memcpy(b, emulated.bytes[weights][k] + 4 * n, 4);
        even = multiply_pairs(a[0], b[0], even);
        odd = multiply_pairs(a[1], b[1], odd);
      }
      memcpy(&sum, emulated.bytes[sums][m] + 4 * n, 4);
      sum = without_denormal(without_denormal(sum) + without_denormal(even + odd));
      memcpy(emulated.bytes[sums][m] + 4 * n, &sum, 4);
    }
  }
}

template <int sums, int x, int weights>
static void multiply_integer_tiles() {
  static_assert(sums < kTiles && x < kTiles && weights < kTiles);
  static_assert(sums != x && sums != weights && x != weights, "the processor refuses equal registers");
  check_tiles(rows_of(sums) == rows_of(x), "TDPBSSD: sums and x differ in rows");
  check_tiles(bytes_of(sums) == bytes_of(weights), "TDPBSSD: sums and weights differ in the bytes of a row");
  check_tiles(bytes_of(x) / 4 == rows_of(weights), "TDPBSSD: x has not as many quads as weights has rows");
  check_tiles(bytes_of(x) % 4 == 0 && bytes_of(sums) % 4 == 0, "TDPBSSD: a row is not made of quads");
  for (int m = 0; m < rows_of(sums); m++) {
    for (int n = 0; n < bytes_of(sums) / 4; n++) {
      int32_t sum;
      memcpy(&sum, emulated.bytes[sums][m] + 4 * n, 4);
      for (int k = 0; k < bytes_of(x) / 4; k++) {
        for (int i = 0; i < 4; i++) {
          sum += int32_t(int8_t(emulated.bytes[x][m][4 * k + i])) * int32_t(int8_t(emulated.bytes[weights][k][4 * n + i]));
        }
      }
      memcpy(emulated.bytes[sums][m] + 4 * n, &sum, 4);
    }
  }
}

}  // namespace tiercel::TIERCEL_CLASS
