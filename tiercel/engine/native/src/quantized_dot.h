// The innermost loops with instructions that multiply pairs of bf16 (AVX512-BF16). All values are exact in bf16.
#pragma once
#include "quantized_tile.h"

namespace tiercel::TIERCEL_CLASS {

// Products of pairs and their sums in float32; denormal numbers count as zero.
struct PairMath {
  using X = bf16;
  using Wide = bf16;
  using Sum = F32;
  using Factor = __m512bh;
  using Operand = __m512bh;
  static constexpr int kInputs = 2, kRows = 6;

  TIERCEL_INLINE F32 start(const char*, int) { return splat(0); }
  TIERCEL_INLINE __m512bh load_factor(const bf16* x) {
    int pair;
    memcpy(&pair, x, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  TIERCEL_INLINE void add(F32& sum, __m512bh factor, __m512bh operand) { sum.v = _mm512_dpbf16_ps(sum.v, operand, factor); }
};

TIERCEL_INLINE __m512bh look_up_pairs(__m512i words) {
  // By the lowest five bits of each word, of which the fifth does not count.
  alignas(64) static constexpr uint16_t kTable[32] = {
      0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0,
      0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
      0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
  return (__m512bh)_mm512_permutexvar_epi16(words, _mm512_load_si512(kTable));
}

// Moves a byte of each word to its top, and zeros below it.
template <int byte>
TIERCEL_INLINE __m512i top_byte(__m512i words) {
  if constexpr (byte == 3) return _mm512_and_si512(words, _mm512_set1_epi32(0xff000000));
  constexpr int zeros = 0x00808080;  // an index with a sign gives zero
  const __m128i first =
      _mm_setr_epi32(zeros | byte << 24, zeros | (byte + 4) << 24, zeros | (byte + 8) << 24, zeros | (byte + 12) << 24);
  return _mm512_shuffle_epi8(words, _mm512_broadcast_i32x4(first));
}

// Pairs of inputs for a vector of outputs. An integer of 8 bits comes as a multiple of 2^24, which saves a shift.
template <Format format>
struct DotValues {
  static constexpr float kUnit = format == kInt8 ? 0x1p-24f : 1;

  TIERCEL_INLINE const char* at(const char* chunk, const bf16*) { return chunk; }
  template <int step>
  TIERCEL_INLINE __m512bh load_operand(const char* chunk, int vector) {
    if constexpr (format == kInt4) {
      return look_up_pairs(_mm512_srli_epi32(_mm512_loadu_si512(chunk + vector * 64), 4 * step));
    }
    const __m512i words = _mm512_loadu_si512(chunk + (step / 2 * kVectors + vector) * 64);
    const __m512i even = float_bits(top_byte<2 * (step % 2)>(words)), odd = float_bits(top_byte<2 * (step % 2) + 1>(words));
    // The upper half of each float is its bf16: the others bits are zeros.
    const __m512i upper_halves = _mm512_broadcast_i32x4(_mm_setr_epi32(0x0302, 0x0706, 0x0b0a, 0x0f0e));
    return (__m512bh)_mm512_mask_shuffle_epi8(odd, 0x3333333333333333, even, upper_halves);
  }
  template <int step = 0>
  TIERCEL_INLINE void widen(const char* chunk, bf16* wide) {
    if constexpr (step < 4) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) {
        _mm512_storeu_si512(wide + (step * kQuantizedPanel + v * F32::N) * 2, (__m512i)load_operand<step>(chunk, v));
      }
      widen<step + 1>(chunk, wide);
    }
  }

 private:
  TIERCEL_INLINE __m512i float_bits(__m512i top) {
    if constexpr (format == kInt8) return _mm512_castps_si512(_mm512_cvtepi32_ps(top));
    const __m512i bits = _mm512_and_si512(_mm512_srai_epi32(top, 4), _mm512_set1_epi32(int(kFloat8Bits)));
    return _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(kFloat8Unit)));
  }
};

template <Format format>
struct DotWidenedValues {
  static constexpr float kUnit = DotValues<format>::kUnit;

  TIERCEL_INLINE const bf16* at(const char*, const bf16* wide) { return wide; }
  template <int step>
  TIERCEL_INLINE __m512bh load_operand(const bf16* wide, int vector) {
    return (__m512bh)_mm512_loadu_si512(wide + (step * kQuantizedPanel + vector * F32::N) * 2);
  }
};

struct DotQuantized {
  using Math = PairMath;
  template <Format format>
  using Packed = DotValues<format>;
  template <Format format>
  using Widened = DotWidenedValues<format>;
};

}  // namespace tiercel::TIERCEL_CLASS
