// Uses emulated tile registers as the case named by the first argument says, and prints a sum. See test_amx.py.
#define TIERCEL_CLASS amx
#define TIERCEL_EMULATE_TILES
#include "amx_tiles.h"

using namespace tiercel;
using namespace tiercel::amx;

static TileConfig config_of(int rows, int bytes) {
  TileConfig config;
  for (int tile = 0; tile < 4; tile++) config.rows[tile] = uint8_t(rows), config.row_bytes[tile] = uint16_t(bytes);
  return config;
}

// The sum of `before` and of pairs whose numbers are (even, odd) in x and 1 in the weights, for two pairs.
static float sum_of(float before, const float (&numbers)[4], float weight = 1) {
  bf16 x[4], weights[4];
  for (int i = 0; i < 4; i++) from_float(numbers[i], x[i]), from_float(weight, weights[i]);
  TileConfig config;
  const int rows[] = {1, 1, 2}, bytes[] = {4, 8, 4};
  for (int tile = 0; tile < 3; tile++) config.rows[tile] = uint8_t(rows[tile]), config.row_bytes[tile] = uint16_t(bytes[tile]);
  configure_tiles(config);
  load_tile<0>(&before, 4);
  load_tile<1>(x, 8);
  load_tile<2>(weights, 4);
  multiply_tiles<0, 1, 2>();
  store_tile<0>(&before, 4);
  return before;
}

// The sum of `before` and of products of a row of eight integers, four times each of two, by one integer.
static float integer_sum_of(int32_t before, int8_t one, int8_t other, int8_t weight) {
  int8_t x[8], weights[8];
  for (int i = 0; i < 8; i++) x[i] = i % 2 ? one : other, weights[i] = weight;
  TileConfig config;
  const int rows[] = {1, 1, 2}, bytes[] = {4, 8, 4};
  for (int tile = 0; tile < 3; tile++) config.rows[tile] = uint8_t(rows[tile]), config.row_bytes[tile] = uint16_t(bytes[tile]);
  configure_tiles(config);
  load_tile<0>(&before, 4);
  load_tile<1>(x, 8);
  load_tile<2>(weights, 4);
  multiply_integer_tiles<0, 1, 2>();
  store_tile<0>(&before, 4);
  return float(before);
}

int main(int, char** words) {
  const auto is = [&](const char* name) { return strcmp(words[1], name) == 0; };
  char memory[kTileRows * kTileBytes] = {};
  TileConfig config = config_of(2, 8);
  float sum = 0;
  if (is("even and odd apart")) sum = sum_of(0x1p24f, {1, 1, 0, 0});  // 1 alone would be lost
  if (is("in order")) sum = sum_of(0, {0x1p24f, 0, 1, 0});            // the 1 is lost
  if (is("denormal operand")) sum = sum_of(0, {0x1p-127f, 0, 0, 0}, 0x1p127f);
  if (is("denormal result")) sum = sum_of(0, {0x1p-100f, 0, 0, 0}, 0x1p-28f);
  if (is("denormal sum")) sum = sum_of(0x1p-127f, {0, 0, 0, 0});
  if (is("rest of a tile")) {
    memset(memory, 1, sizeof(memory));
    configure_tiles(config);
    load_tile<0>(memory, 8);
    for (const auto& row : emulated.bytes[0]) {
      for (uint8_t one : row) sum += one;  // two rows of eight bytes
    }
  }
  if (is("not configured")) load_tile<0>(memory, 8);
  if (is("released")) configure_tiles(config), release_tiles(), store_tile<0>(memory, 8);
  if (is("no such tile")) configure_tiles(config), zero_tile<7>();
  if (is("too many rows")) config.rows[1] = 17, configure_tiles(config);
  if (is("too many bytes")) config.row_bytes[1] = 68, configure_tiles(config);
  if (is("rows without bytes")) config.rows[5] = 1, configure_tiles(config);
  if (is("reserved")) config.row_bytes[8] = 64, configure_tiles(config);
  if (is("palette")) config.palette = 2, configure_tiles(config);
  if (is("other rows")) config.rows[1] = 3, configure_tiles(config), multiply_tiles<0, 1, 2>();
  if (is("other bytes")) config.row_bytes[2] = 4, configure_tiles(config), multiply_tiles<0, 1, 2>();
  if (is("other pairs")) config.row_bytes[1] = 4, configure_tiles(config), multiply_tiles<0, 1, 2>();
  if (is("integers")) sum = integer_sum_of(-3, -128, -128, -128);
  if (is("integers of both signs")) sum = integer_sum_of(0, -128, -127, 127);
  if (is("integers, other rows")) config.rows[1] = 3, configure_tiles(config), multiply_integer_tiles<0, 1, 2>();
  if (is("integers, other bytes")) config.row_bytes[2] = 4, configure_tiles(config), multiply_integer_tiles<0, 1, 2>();
  if (is("integers, other quads")) config.row_bytes[1] = 4, configure_tiles(config), multiply_integer_tiles<0, 1, 2>();
  printf("%.9g\n", sum);
}
