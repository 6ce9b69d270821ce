// Matrix products with packed weights of 4 and 8 bits: y = x . weight^T + bias. A part of every class: include it after a
// simd header.
#pragma once
#include "quantized_int8.h"
#include "quantized_tile.h"
#ifdef __AVX512BF16__
#include "quantized_dot.h"
#endif
#ifdef TIERCEL_TILES
#include "quantized_amx.h"
#endif

namespace tiercel::TIERCEL_CLASS {

constexpr int64_t kFewRows = 4;           // up to this many rows values are widened in registers
constexpr int64_t kPassInputs = 256;      // of a panel that are widened at once, so that they stay in the first cache
constexpr int64_t kTurnRows = 96;        // rows that are multiplied by widened values in turn
constexpr int64_t kClaimed = 4;           // panels that a thread claims at most
constexpr int64_t kQuantizedAhead = 4096;  // bytes that a product of few rows prefetches ahead

// Kind: WideQuantized, DotQuantized or IntegerQuantized.
template <class Kind, Format format>
struct QuantizedProduct {
  using Math = typename Kind::Math;
  using X = typename Math::X;
  using Wide = typename Math::Wide;
  using Tile = QuantizedTile<X, Wide>;
  static constexpr bool kWidens = !std::is_same_v<Kind, IntegerQuantized>;
  static constexpr bool kUsesTiles = kHasTiles && std::is_same_v<X, bf16>;
  static constexpr bool kUsesIntegerTiles = kHasTiles && !kWidens;
  static constexpr int64_t kStride = kPassInputs + 64 / sizeof(X);  // rows start in different cache sets
  static constexpr int kThin = kFewRows < Math::kRows ? kFewRows : Math::kRows;

  const QuantizedLayout& layout;
  const PanelShape shape;
  QuantizedInput<X> in;
  const char* packed;
  const float* bias;
  void* y;
  int type;
  int64_t rows;

  void run() const {
    const int64_t tiles = (rows + Math::kRows - 1) / Math::kRows;
    const int64_t blocks = (rows + kTurnRows - 1) / kTurnRows;
    const bool is_thin = !kUsesTiles && rows <= kThin;
    const int64_t most = claimed_panels(shape.panels, blocks, is_thin ? kGroupBytes / shape.panel_bytes : kClaimed);
    const int64_t claimed = most < kClaimed ? most : kClaimed;
    const int64_t claims = (shape.panels + claimed - 1) / claimed;
    parallel_for(claims * blocks, 1, [&](int64_t piece) {
      const int64_t first = piece / blocks * claimed, block = piece % blocks;
      const int64_t last = first + claimed < shape.panels ? first + claimed : shape.panels;
      if constexpr (kUsesIntegerTiles) {
        return this->run_integer_tiles(first, last, block * rows / blocks, (block + 1) * rows / blocks);
      }
      if constexpr (!kUsesTiles) {
        if (is_thin) return run_thin(first, last);
      }
      run_piece(first, last, block * tiles / blocks, (block + 1) * tiles / blocks, tiles);
    });
  }

 private:
  template <class Values, int M>
  TIERCEL_INLINE void run_tile(int count, const Tile& tile) {
    if constexpr (kUsesTiles) {
      Math::template run<Values>(count, tile);
    } else if constexpr (M > 0) {
      if (count == M) {
        QuantizedLoop<Math, Values>::template run<M>(tile);
      } else {
        run_tile<Values, M - 1>(count, tile);
      }
    }
  }

  // Multiplies panels [first, last) by at most kThin rows, reading every panel from its first byte to its last.
  void run_thin(int64_t first, int64_t last) const {
    alignas(64) float sums[kThin * kQuantizedPanel];
    for (int64_t panel = first; panel < last; panel++) {
      memset(sums, 0, rows * kQuantizedPanel * 4);
      const char* header = packed + panel * shape.panel_bytes;
      const char* values = header + shape.header;
      run_tile<typename Kind::template Packed<format>, kThin>(
          int(rows), {shape, layout.scale_type, header, values, nullptr, in.x, in.stride, in.sums, sums, shape.groups,
                      shape.width, false, true, values + kQuantizedAhead, shape.chunk_bytes});
      store_rows(sums, panel, 0, rows);
    }
  }

  // Multiplies panels [first, last) by the rows of some tiles; tile i of n has the rows from i * rows / n.
  void run_piece(int64_t first, int64_t last, int64_t first_tile, int64_t last_tile, int64_t tiles) const {
    alignas(64) float sums[kClaimed * (kTurnRows + Math::kRows) * kQuantizedPanel];
    alignas(64) X kept[(kTurnRows + Math::kRows) * kStride];
    alignas(64) Wide wide[kWidens ? kPassInputs * kQuantizedPanel : 1];
    const int64_t begin = first_tile * rows / tiles, count = last_tile * rows / tiles - begin;
    const int64_t inputs = shape.groups * shape.width;  // in whole chunks
    const bool is_whole = shape.groups == 1;            // one scale per output, applied to the sum over all inputs
    memset(sums, 0, (last - first) * count * kQuantizedPanel * 4);
    start_tiles();
    for (int64_t k = 0; k < inputs; k += kPassInputs) {
      const int64_t width = inputs - k < kPassInputs ? inputs - k : kPassInputs;
      for (int64_t m = 0; m < count; m++) memcpy(kept + m * kStride, in.x + (begin + m) * in.stride + k, width * sizeof(X));
      const int64_t group = k / shape.width, groups = is_whole ? 1 : width / shape.width, each = width / groups;
      const int64_t place = is_whole ? k / kChunk * shape.chunk_bytes : group * shape.group_bytes;
      const int64_t bytes = is_whole ? width / kChunk * shape.chunk_bytes : groups * shape.group_bytes;
      for (int64_t panel = first; panel < last; panel++) {
        const char* start = packed + panel * shape.panel_bytes;
        const char* values = start + shape.header + place;
        if constexpr (kWidens) {
          for (int64_t g = 0; g < groups; g++) {
            widen_values<Math, typename Kind::template Packed<format>>(values + g * shape.group_bytes, shape.chunk_bytes,
                                                                     each / kChunk, wide + g * each * kQuantizedPanel);
          }
        }
        // The tiles prefetch the values that are multiplied next, so that memory is read all the time.
        const char* next = panel + 1 < last ? values + shape.panel_bytes : packed + first * shape.panel_bytes + place + bytes;
        const int64_t step = (bytes / (width / kChunk) / (last_tile - first_tile) + 63) / 64 * 64;
        for (int64_t tile = first_tile; tile < last_tile; tile++) {
          const int64_t row = tile * rows / tiles - begin, end = (tile + 1) * rows / tiles - begin;
          const char* header = is_whole ? start : start + group * shape.group_bytes;
          const float* x_sums = in.sums ? in.sums + (begin + row) * shape.groups + group : nullptr;
          float* c = sums + ((panel - first) * count + row) * kQuantizedPanel;
          const bool is_first = !is_whole || k == 0;
          run_tile<typename Kind::template Widened<format>, Math::kRows>(
              int(end - row), {shape, layout.scale_type, header, values, wide, kept + row * kStride, kStride, x_sums, c,
                               groups, each, is_whole, is_first, next + (tile - first_tile) * step * (width / kChunk), step});
        }
      }
    }
    end_tiles();
    for (int64_t panel = first; panel < last; panel++) {
      float* c = sums + (panel - first) * count * kQuantizedPanel;
      if (is_whole) scale_rows(c, panel, begin, count);
      store_rows(c, panel, begin, count);
    }
  }

  void start_tiles() const {
#ifdef TIERCEL_TILES
    if constexpr (kUsesTiles) configure_tiles(config_of(shape, sizeof(X), rows));
#endif
  }
  void end_tiles() const {
#ifdef TIERCEL_TILES
    if constexpr (kUsesTiles) release_tiles();
#endif
  }

#ifdef TIERCEL_TILES
  // Multiplies panels [first, last) by rows [begin, end).
  void run_integer_tiles(int64_t first, int64_t last, int64_t begin, int64_t end) const {
    alignas(64) float totals[(kTurnRows + 1) * kQuantizedPanel];
    const IntegerTiles product{shape, in, layout.scale_type};
    configure_tiles(config_of(shape, sizeof(X), rows));
    for (int64_t panel = first; panel < last; panel++) {
      product.run(packed + panel * shape.panel_bytes, begin, end - begin, totals);
      store_rows(totals, panel, begin, end - begin);
    }
    release_tiles();
  }
#endif

  // Applies the scales and offsets of a panel with one group to sums [count][kQuantizedPanel].
  void scale_rows(float* sums, int64_t panel, int64_t begin, int64_t count) const {
    constexpr float unit = Kind::template Packed<format>::kUnit;
    const auto group = GroupScales::load_group(packed + panel * shape.panel_bytes, shape, layout.scale_type, unit);
    for (int64_t m = 0; m < count; m++) {
      for (int v = 0; v < kVectors; v++, sums += F32::N) {
        const F32 sum = to_total(load_sum(sums, typename Math::Sum{}));
        store(sums, group.add(splat(0), sum, in.sums ? in.sums + begin + m : nullptr, v));
      }
    }
  }

  // Stores `count` rows from `begin`: the sums times the scale of the row, if x has scales, and the bias.
  void store_rows(float* sums, int64_t panel, int64_t begin, int64_t count) const {
    const int64_t start = panel * kQuantizedPanel, rest = layout.outputs - start;
    const int64_t width = rest < kQuantizedPanel ? rest : kQuantizedPanel;
    for (int64_t m = 0; in.scales && m < count; m++) {
      const F32 scale = splat(in.scales[begin + m]);
      for (int v = 0; v < kVectors; v++) {
        float* one = sums + m * kQuantizedPanel + v * F32::N;
        store(one, load(one) * scale);
      }
    }
    with_type(type, [&](auto* tag) {
      using T = std::remove_pointer_t<decltype(tag)>;
      store_panel<kQuantizedPanel>(sums, bias ? bias + start : nullptr, (T*)y + begin * layout.outputs + start,
                                   layout.outputs, count, width);
    });
  }
};

// Calls f with the kind of product for x of a type, and a null pointer of this type.
template <class F>
TIERCEL_INLINE void with_kind(const QuantizedLayout& layout, int type, F f) {
  with_type(type, [&](auto* tag) {
    if (layout.rounds_x) return f(IntegerQuantized{}, tag);
#if defined(TIERCEL_TILES)
    if constexpr (std::is_same_v<decltype(tag), bf16*>) return f(TileQuantized{}, tag);
#elif defined(__AVX512BF16__)
    if constexpr (std::is_same_v<decltype(tag), bf16*>) return f(DotQuantized{}, tag);
#endif
    f(WideQuantized{}, tag);
  });
}

static int64_t quantized_room(const QuantizedLayout* layout, int type, int64_t rows) {
  int64_t bytes = 0;
  with_kind(*layout, type, [&](auto kind, auto* tag) {
    using X = typename decltype(kind)::Math::X;
    const bool copies = layout->rounds_x || copies_input<X, std::remove_pointer_t<decltype(tag)>>(*layout);
    bytes = RoomShape(*layout, rows, copies, sizeof(X)).bytes;
  });
  return bytes;
}

static void quantized_linear(const QuantizedLayout* layout, int type, const void* x, const void* packed, const float* bias,
                             void* y, int64_t rows, void* room) {
  if (rows <= 0) return;
  const PanelShape shape(*layout);
  with_kind(*layout, type, [&](auto kind, auto* tag) {
    using Kind = decltype(kind);
    using T = std::remove_pointer_t<decltype(tag)>;
    if constexpr (std::is_same_v<Kind, IntegerQuantized>) {
      const auto in = round_input(*layout, (const T*)x, rows, (char*)room);
      QuantizedProduct<Kind, kInt8>{*layout, shape, in, (const char*)packed, bias, y, type, rows}.run();
    } else {
      const auto in = prepare_input<typename Kind::Math::X>(*layout, (const T*)x, rows, (char*)room);
      if (layout->is_float8) {
        QuantizedProduct<Kind, kFloat8>{*layout, shape, in, (const char*)packed, bias, y, type, rows}.run();
      } else if (layout->bits == 8) {
        QuantizedProduct<Kind, kInt8>{*layout, shape, in, (const char*)packed, bias, y, type, rows}.run();
      } else {
        QuantizedProduct<Kind, kInt4>{*layout, shape, in, (const char*)packed, bias, y, type, rows}.run();
      }
    }
  });
}

}  // namespace tiercel::TIERCEL_CLASS
