// The tile registers of AMX: eight of up to 16 rows of 64 bytes, and products of two of them.
//
// Source: Intel's Software Developer's Manual, volume 1 chapter 18 and volume 2, instructions LDTILECFG to TILEZERO.
// gcc's intrinsics are not used: those of gcc 12 do not say that they read memory, so that a store to it may be moved behind
// them, and they take the number of a register as a literal only.
#pragma once
#include "numbers.h"

namespace tiercel::TIERCEL_CLASS {

constexpr int kTiles = 8, kTileRows = 16, kTileBytes = 64;  // palette 1

// The operand of LDTILECFG, which also sets all registers to zero.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};  // those from kTiles are reserved, too
  uint8_t rows[16] = {};
};

}  // namespace tiercel::TIERCEL_CLASS

#ifdef TIERCEL_EMULATE_TILES
#include "amx_emulated.h"
#else

namespace tiercel::TIERCEL_CLASS {

TIERCEL_INLINE void configure_tiles(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
// A thread whose registers are in their initial state is switched faster, and its core may sleep deeper.
TIERCEL_INLINE void release_tiles() { asm volatile("tilerelease"); }

template <int tile>
TIERCEL_INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}
// `stride`: bytes from row to row. Only the configured bytes of the configured rows are read, or written by store_tile.
template <int tile>
TIERCEL_INLINE void load_tile(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
TIERCEL_INLINE void store_tile(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(tile) : "memory");
}
// sums [rows][outputs] float32 += x [rows][pairs][2] bf16 . weights [pairs][outputs][2] bf16.
template <int sums, int x, int weights>
TIERCEL_INLINE void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(x), "i"(weights));
}
// sums [rows][outputs] int32 += x [rows][quads][4] int8 . weights [quads][outputs][4] int8.
template <int sums, int x, int weights>
TIERCEL_INLINE void multiply_integer_tiles() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(x), "i"(weights));
}

}  // namespace tiercel::TIERCEL_CLASS
#endif
