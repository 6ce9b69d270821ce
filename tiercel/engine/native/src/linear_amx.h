// Matrix products of bf16 weights by bf16 activations with the tile registers of AMX.
//
// A register has 16 outputs of 16 pairs of weights as a panel has them, 16 rows of 32 numbers of x where x lies, or the sums
// of 16 rows and 16 outputs. All eight are in use: two of x by the two of a panel. Only the last inputs, if they are fewer
// than 32, are copied, beside zeros.
//
// An output is the sum over blocks of 32 inputs in ascending order. Each block is added as the sum of its even and its odd
// inputs. Every number of rows is multiplied in this way, because other instructions add in another order: so a row of the
// result depends on its row of x alone. Denormal numbers count as zero.
//
// No processor with AMX was at hand: this has run with emulated registers only (amx_emulated.h), and its sizes of blocks
// and its prefetching are not measured.
#pragma once
#include "amx_tiles.h"
#include "linear_panel.h"

namespace tiercel::TIERCEL_CLASS {

constexpr int64_t kTileInputs = 32;
constexpr int64_t kPassRows = 2 * kTileRows;    // rows that are multiplied by a panel at once
constexpr int64_t kPairBytes = kPanel * 4;      // of a panel, for a pair of inputs
constexpr int64_t kCachedBytes = 1 << 20;       // of x, which stay in the second-level cache beside a panel
constexpr int64_t kCachedRows = 8 * kPassRows;  // at most
constexpr int64_t kTilesAhead = 4096;           // bytes of weights that are prefetched ahead

static_assert(kPanel == 2 * kTileBytes / 4, "a panel is two registers wide");

struct TileProduct {
  const bf16 *x, *packed;
  const float* bias;
  bf16* y;
  int64_t rows, outputs, inputs;

  void run() const {
    const int64_t panels = count_panels(outputs), bytes = panel_size(inputs) * int64_t(sizeof(bf16));
    const int64_t passes = (rows + kPassRows - 1) / kPassRows, blocks = (passes + block_passes() - 1) / block_passes();
    const int64_t group = claimed_panels(panels, blocks, passes > 1 ? kGroup : kGroupBytes / bytes);
    const int64_t groups = (panels + group - 1) / group;
    parallel_for(groups * blocks, 1, [&](int64_t piece) {
      const int64_t first = piece / blocks * group, last = first + group < panels ? first + group : panels;
      const int64_t block = piece % blocks, end = (block + 1) * passes / blocks * kPassRows;
      configure_tiles(config());
      for (int64_t panel = first; panel < last; panel++) {
        run_panel(panel, block * passes / blocks * kPassRows, end < rows ? end : rows);
      }
      release_tiles();
    });
  }

 private:
  int64_t block_passes() const {
    const int64_t most = kCachedBytes / (inputs * int64_t(sizeof(bf16)));
    return most < kPassRows ? 1 : (most < kCachedRows ? most : kCachedRows) / kPassRows;
  }

  int tile_rows() const { return rows < kTileRows ? int(rows) : kTileRows; }

  // Sums in registers 0 to 3, x in 4 and 5, weights in 6 and 7.
  TileConfig config() const {
    TileConfig config;
    for (int tile = 0; tile < kTiles; tile++) {
      config.row_bytes[tile] = kTileBytes;
      config.rows[tile] = uint8_t(tile < 6 ? tile_rows() : kTileRows);
    }
    return config;
  }

  // The first row of a register that is to have `row`. The last rows are multiplied together with some before them, which
  // are computed twice, so that all registers have the same number of rows.
  int64_t first_row(int64_t row) const { return row + tile_rows() <= rows ? row : rows - tile_rows(); }

  // Multiplies a panel by rows [begin, end).
  void run_panel(int64_t panel, int64_t begin, int64_t end) const {
    alignas(64) float sums[2][kTileRows * kPanel];
    alignas(64) bf16 rest[kTileRows * 2 * kPanel] = {};
    const bf16* weights = packed + panel * panel_size(inputs);
    const int64_t whole = inputs / kTileInputs * kTileInputs;
    memcpy(rest, weights + whole * kPanel, (panel_size(inputs) - whole * kPanel) * sizeof(bf16));
    for (int64_t row = begin; row < end; row += kPassRows) {
      const bool has_two = row + kTileRows < end;
      const int64_t one = first_row(row), two = has_two ? first_row(row + kTileRows) : one;
      if (has_two) {
        multiply_rows<true>(weights, rest, x + one * inputs, x + two * inputs, row == begin, sums);
      } else {
        multiply_rows<false>(weights, rest, x + one * inputs, x + one * inputs, row == begin, sums);
      }
      store_rows(sums[0], one, row, end, panel);
      if (has_two) store_rows(sums[1], two, row + kTileRows, end, panel);
    }
  }

  // Stores rows from `row`, at most a register full, of the sums of a register that begins with row `first`.
  void store_rows(const float* sums, int64_t first, int64_t row, int64_t end, int64_t panel) const {
    const int64_t start = panel * kPanel, width = outputs - start < kPanel ? outputs - start : kPanel;
    const int64_t count = end - row < kTileRows ? end - row : kTileRows;
    store_panel(sums + (row - first) * kPanel, bias ? bias + start : nullptr, y + row * outputs + start, outputs, count, width);
  }

  // Multiplies one or two registers of rows by a panel. `rest`: its last pairs, beside zeros.
  template <bool has_two>
  void multiply_rows(const bf16* weights, const bf16* rest, const bf16* one, const bf16* two, bool fetches,
                     float (&sums)[2][kTileRows * kPanel]) const {
    const int64_t stride = inputs * int64_t(sizeof(bf16));
    zero_tile<0>();
    zero_tile<1>();
    if constexpr (has_two) {
      zero_tile<2>();
      zero_tile<3>();
    }
    int64_t k = 0;
    for (; k + kTileInputs <= inputs; k += kTileInputs) {
      const bf16* now = weights + k * kPanel;
      if (fetches) {
#pragma GCC unroll 32
        for (int64_t i = 0; i < kTileRows * kPairBytes; i += 64) __builtin_prefetch((const char*)now + kTilesAhead + i, 0, 2);
      }
      add_block<has_two>(now, one + k, two + k, stride);
    }
    if (k < inputs) {
      alignas(64) bf16 last[2][kTileRows * kTileInputs] = {};
      for (int64_t m = 0; m < tile_rows(); m++) {
        memcpy(last[0] + m * kTileInputs, one + m * inputs + k, (inputs - k) * sizeof(bf16));
        if (has_two) memcpy(last[1] + m * kTileInputs, two + m * inputs + k, (inputs - k) * sizeof(bf16));
      }
      add_block<has_two>(rest, last[0], last[1], kTileBytes);
    }
    store_tile<0>(sums[0], kPairBytes);
    store_tile<1>(sums[0] + kPanel / 2, kPairBytes);
    if constexpr (has_two) {
      store_tile<2>(sums[1], kPairBytes);
      store_tile<3>(sums[1] + kPanel / 2, kPairBytes);
    }
  }

  // Adds the products of 32 inputs.
  template <bool has_two>
  TIERCEL_INLINE void add_block(const bf16* weights, const bf16* one, const bf16* two, int64_t stride) {
    load_tile<6>(weights, kPairBytes);
    load_tile<7>(weights + kPanel, kPairBytes);
    load_tile<4>(one, stride);
    multiply_tiles<0, 4, 6>();
    multiply_tiles<1, 4, 7>();
    if constexpr (has_two) {
      load_tile<5>(two, stride);
      multiply_tiles<2, 5, 6>();
      multiply_tiles<3, 5, 7>();
    }
  }
};

}  // namespace tiercel::TIERCEL_CLASS
