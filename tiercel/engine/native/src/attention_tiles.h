// Attention over one tile of keys: packed keys and values, their products with rows of queries, and the softmax between.
// A part of every class.
//
// Keys and values are packed into 32-bit words, so that one loop multiplies both. Keys: word w of all keys of the tile
// adjoins, a word being one float or two bfloat16 numbers of a row. Values: a word is one float of a key, or the numbers of
// two successive keys in bfloat16.
#pragma once
#include <cmath>

#include "attention_simd.h"
#include "quantized_kv.h"

namespace tiercel::TIERCEL_CLASS {

constexpr int kTileKeys = 64;
constexpr float kLowest = -1e30f;  // the maximum of no scores; finite, so that differences of maxima are numbers

// Arithmetic of the products: the number type of rows, and how a word of packed keys or values enters the sum.

// Rows and packed words are floats.
struct FloatMath {
  using Row = float;
  static constexpr int kHalves = 1;
  static constexpr bool kHasPairs = false;
  using Vector = F32;
  TIERCEL_INLINE Vector unpack(const uint32_t* words, int) { return as_floats(load_words(words)); }
  TIERCEL_INLINE Vector spread(const Row* x) { return splat(*x); }
  TIERCEL_INLINE F32 add(F32 sum, Vector x, Vector y) { return fma(x, y, sum); }
};

// Rows are floats, packed words are pairs of bfloat16, widened in registers.
struct WideningMath {
  using Row = float;
  static constexpr int kHalves = 2;
  static constexpr bool kHasPairs = true;
  using Vector = F32;
  TIERCEL_INLINE Vector unpack(const uint32_t* words, int half) {
    return half == 0 ? low_half(load_words(words)) : high_half(load_words(words));
  }
  TIERCEL_INLINE Vector spread(const Row* x) { return splat(*x); }
  TIERCEL_INLINE F32 add(F32 sum, Vector x, Vector y) { return fma(x, y, sum); }
};

#if defined(__AVX512BF16__)
// Rows and packed words are pairs of bfloat16.
struct DotMath {
  using Row = uint32_t;
  static constexpr int kHalves = 1;
  static constexpr bool kHasPairs = true;
  using Vector = Words;
  TIERCEL_INLINE Vector unpack(const uint32_t* words, int) { return load_words(words); }
  TIERCEL_INLINE Vector spread(const Row* x) { return spread_word(*x); }
  TIERCEL_INLINE F32 add(F32 sum, Vector x, Vector y) { return dot(sum, x, y); }
};
constexpr int kBlockRows = 6;  // with 4 vectors 24 sums in 32 registers
constexpr int block_vectors(int rows) { return rows <= 6 ? 4 : 2; }
#else
constexpr int kBlockRows = 5;  // with 2 vectors 10 sums in 16 registers
constexpr int block_vectors(int rows) { return rows <= 2 ? 4 : 2; }
#endif

// The cache lines that are needed next, fetched in small numbers while the products keep the processor busy: fetched at once,
// they would fill the queue of misses, and everything behind them would wait.
struct Ahead {
  const char* const* rows;
  int64_t left, bytes, offset;  // rows from this one on, bytes of each, and where the bytes begin
  const char *at, *end;
  int64_t per_step = 1;  // lines to fetch in each step of a product

  TIERCEL_INLINE Ahead of(const char* const* rows, int64_t count, int64_t offset, int64_t bytes) {
    const char* at = count > 0 ? rows[0] + offset : nullptr;
    uintptr_t page = 0;
    for (int64_t k = 0; k < count; k++) {  // start to translate the addresses of all pages at once
      const uintptr_t here = uintptr_t(rows[k] + offset + bytes - 1) / 4096;
      if (here != page) __builtin_prefetch((const char*)(here * 4096), 0, 2);
      page = here;
    }
    return {rows, count, bytes, offset, at, count > 0 ? at + bytes : at};
  }
  __attribute__((always_inline)) void fetch() {
    if (at == end) {
      if (left <= 1) return;
      left--;
      at = *++rows + offset;
      end = at + bytes;
    }
    __builtin_prefetch(at, 0, 2);
    at = end - at > 64 ? at + 64 : end;
  }
  __attribute__((always_inline)) void fetch(int64_t lines) {
    for (int64_t i = 0; i < lines; i++) fetch();
  }
};

// Multiplies R rows with C vectors of packed words: out[r][c] (+)= sum over s of rows[r][s] * words[s][c].
template <class Math, int R, int C>
TIERCEL_INLINE void multiply_block(const typename Math::Row* rows, int64_t row_stride, const uint32_t* words,
                                          int64_t words_stride, int64_t steps, float* out, int64_t out_stride, bool adds,
                                          Ahead& ahead) {
  constexpr int N = F32::N;
  F32 sums[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) sums[r][c] = adds ? load(out + r * out_stride + c * N) : splat(0);
  for (int64_t s = 0; s < steps; s++, words += words_stride, rows += Math::kHalves) {
    ahead.fetch(ahead.per_step);
#pragma GCC unroll 2
    for (int half = 0; half < Math::kHalves; half++) {
      typename Math::Vector ys[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) ys[c] = Math::unpack(words + c * N, half);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const typename Math::Vector x = Math::spread(rows + r * row_stride + half);
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sums[r][c] = Math::add(sums[r][c], x, ys[c]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(out + r * out_stride + c * N, sums[r][c]);
}

// Multiplies R rows with `columns` columns, a multiple of the vector size.
template <class Math, int R>
static void multiply_rows(const typename Math::Row* rows, int64_t row_stride, const uint32_t* words, int64_t words_stride,
                          int64_t columns, int64_t steps, float* out, int64_t out_stride, bool adds, Ahead& ahead) {
  constexpr int N = F32::N, C = block_vectors(R);
  int64_t c = 0;
  for (; c + C * N <= columns; c += C * N)
    multiply_block<Math, R, C>(rows, row_stride, words + c, words_stride, steps, out + c, out_stride, adds, ahead);
  for (; c < columns; c += N)
    multiply_block<Math, R, 1>(rows, row_stride, words + c, words_stride, steps, out + c, out_stride, adds, ahead);
}

template <class Math>
TIERCEL_INLINE void multiply(int count, const typename Math::Row* rows, int64_t row_stride, const uint32_t* words,
                                    int64_t words_stride, int64_t columns, int64_t steps, float* out, int64_t out_stride,
                                    bool adds, Ahead& ahead) {
#define TIERCEL_CASE(R) \
  case R: return multiply_rows<Math, R>(rows, row_stride, words, words_stride, columns, steps, out, out_stride, adds, ahead);
  switch (count) {
    TIERCEL_CASE(1)
    TIERCEL_CASE(2)
    TIERCEL_CASE(3)
    TIERCEL_CASE(4)
    TIERCEL_CASE(5)
#if defined(__AVX512BF16__)
    TIERCEL_CASE(6)
    TIERCEL_CASE(7)
    TIERCEL_CASE(8)
#endif
  }
#undef TIERCEL_CASE
}

// Rows of the next block, if `left` remain: the fastest division as measured on Zen 4.
TIERCEL_INLINE int next_block(int64_t left) {
#if defined(__AVX512BF16__)
  return left <= 8 ? int(left) : kBlockRows;
#else
  return left == 6 || left == 8 ? 4 : left < kBlockRows ? int(left) : kBlockRows;
#endif
}

// Packs the keys of a tile. rows: the tile's keys, with a row of zeros for each that must not be read.
TIERCEL_INLINE void pack_keys(const char* const* rows, int64_t offset, int64_t words, int64_t count, uint32_t* out,
                              Ahead& ahead, int64_t lines) {
  for (int64_t k = 0; k < count; k += F32::N) {
    ahead.fetch(lines);
    transpose_rows(rows + k, offset, words, out + k, kTileKeys);
  }
}

TIERCEL_INLINE void pack_values(const char* const* rows, int64_t offset, int64_t size, int64_t count, int64_t width,
                                uint32_t* out, const bf16*, Ahead& ahead, int64_t lines) {
  for (int64_t k = 0; k < count; k += 2) {
    if (k % F32::N == 0) ahead.fetch(lines);
    interleave_rows((const uint16_t*)(rows[k] + offset), (const uint16_t*)(rows[k + 1] + offset), size, width,
                    out + k / 2 * width);
  }
}
template <class T>
TIERCEL_INLINE void pack_values(const char* const* rows, int64_t offset, int64_t size, int64_t count, int64_t width,
                                uint32_t* out, const T*, Ahead& ahead, int64_t lines) {
  for (int64_t k = 0; k < count; k++) {
    if (k % F32::N == 0) ahead.fetch(lines);
    const T* row = (const T*)(rows[k] + offset);
    float* to = (float*)out + k * width;
    int64_t i = 0;
    for (; i + F32::N <= size; i += F32::N) store(to + i, load(row + i));
    if (i < size) store(to + i, load_first(row + i, int(size - i)));
  }
}

// The same for keys and values of 8 bits. room: kTileKeys * size bytes.
template <class T>
TIERCEL_INLINE void pack_quantized_keys(const char* const* rows, int64_t offset, int64_t size, int64_t count, uint32_t* room,
                                        uint32_t* out, const T* tag, Ahead& ahead, int64_t lines) {
  const int64_t words = (size + 3) / 4;  // the last one may reach into the value
  for (int64_t k = 0; k < count; k += F32::N) {
    ahead.fetch(lines);
    transpose_rows(rows + k, offset, words, room + k, kTileKeys);
    for (int64_t w = 0; w < words; w++) {
      const Words bytes = load_words(room + w * kTileKeys + k);
      uint32_t* to = out + 2 * w * kTileKeys + k;
      store_words(to, join_halves(widen_byte<0>(bytes, tag), widen_byte<1>(bytes, tag)));
      if (4 * w + 2 < size) store_words(to + kTileKeys, join_halves(widen_byte<2>(bytes, tag), widen_byte<3>(bytes, tag)));
    }
  }
}
template <class T>
TIERCEL_INLINE void pack_quantized_values(const char* const* rows, int64_t offset, int64_t size, int64_t count, int64_t width,
                                          uint32_t* out, const T* tag, Ahead& ahead, int64_t lines) {
  for (int64_t k = 0; k < count; k += 2) {
    if (k % F32::N == 0) ahead.fetch(lines);
    for (int64_t i = 0; i < width; i += F32::N) {
      const F32 low = widen_lowest(load_bytes(rows[k] + offset + i, size - i), tag);
      const F32 high = widen_lowest(load_bytes(rows[k + 1] + offset + i, size - i), tag);
      store_words(out + k / 2 * width + i, join_halves(low, high));
    }
  }
}

// How scores become probabilities, the same for all rows of a layer.
struct Softness {
  float scale, softcap;  // softcap 0: none
};

TIERCEL_INLINE F32 capped(F32 x, float softcap) {  // softcap * tanh(x / softcap)
  const F32 power = exp(min(x * splat(2.f / softcap), splat(80.f)));
  return splat(softcap) - splat(2.f * softcap) / (power + splat(1.f));
}

template <class Row>
constexpr bool kIsExact = true;
template <>
constexpr bool kIsExact<uint32_t> = false;  // pairs of bfloat16
TIERCEL_INLINE void put_probabilities(float* row, int64_t column, F32 p) { store(row + column, p); }
TIERCEL_INLINE void put_probabilities(uint32_t* row, int64_t column, F32 p) { store((bf16*)row + column, p); }

// Turns one row of scores into exp(score - maximum), exactly to about 2e-7 where probabilities are floats. Keys outside
// [from, to) get 0. Returns the new maximum of the row, adds the vector of the probabilities' sums to `sums` after it was
// scaled to the new maximum, and puts the factor for earlier results into `scaling`. value_scales: null, or by which the
// probabilities are multiplied behind their sum.
template <class Row>
TIERCEL_INLINE float soften(float* scores, int64_t columns, int64_t from, int64_t to, Softness how, float before, float* sums,
                            const float* value_scales, Row* probabilities, float& scaling) {
  constexpr int N = F32::N;
  constexpr float kLog2E = 1.44269504f;
  F32 most = splat(-INFINITY);
  if (how.softcap > 0 || from > 0 || to < columns) {
    for (int64_t c = 0; c < columns; c += N) {
      F32 x = load(scores + c);
      if (how.softcap > 0) x = capped(x * splat(how.scale), how.softcap) * splat(1.f / how.scale);
      if (from > c || to < c + N) x = keep_lanes(x, from - c, to - c);
      store(scores + c, x);
      most = max(x, most);
    }
  } else {
    for (int64_t c = 0; c < columns; c += N) most = max(load(scores + c), most);
  }
  const float found = largest(most) * how.scale, after = found > before ? found : before;
  F32 sum = load(sums);
  scaling = 1.f;
  if (after > before) {
    scaling = expf(before - after);
    sum = sum * splat(scaling);
  }
  const F32 scale = splat(how.scale), factor = splat(how.scale * kLog2E);
  for (int64_t c = 0; c < columns; c += N) {
    F32 x = load(scores + c);
    x = kIsExact<Row> ? fma(x, scale, splat(-after)) * splat(kLog2E) : fma(x, factor, splat(-after * kLog2E));
    const F32 p = exp2_below<kIsExact<Row>>(x);
    sum = sum + p;
    put_probabilities(probabilities, c, value_scales == nullptr ? p : p * load(value_scales + c));
  }
  store(sums, sum);
  return after;
}

}  // namespace tiercel::TIERCEL_CLASS
