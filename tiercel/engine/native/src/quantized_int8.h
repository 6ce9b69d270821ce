// The innermost loops for x rounded to 8 bits: products of integers, whose sums of 32 bits are exact.
#pragma once
#include "quantized_tile.h"

namespace tiercel::TIERCEL_CLASS {

#if defined(TIERCEL_UNSIGNED_X)
struct QuadOperand {
  __m512i v;
};
TIERCEL_INLINE QuadOperand load_quads(const void* p) { return {_mm512_loadu_si512(p)}; }
TIERCEL_INLINE QuadOperand splat_quad(int32_t quad) { return {_mm512_set1_epi32(quad)}; }
TIERCEL_INLINE void add_quads(I32& sum, QuadOperand x, QuadOperand values) {
  sum.v = _mm512_dpbusd_epi32(sum.v, x.v, values.v);
}
#elif defined(__AVX512BW__)
struct QuadOperand {  // the first and third, the second and fourth of every four numbers, in 16 bits
  __m512i even, odd;
};
TIERCEL_INLINE QuadOperand apart(__m512i v) { return {_mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8), _mm512_srai_epi16(v, 8)}; }
TIERCEL_INLINE QuadOperand load_quads(const void* p) { return apart(_mm512_loadu_si512(p)); }
TIERCEL_INLINE QuadOperand splat_quad(int32_t quad) { return apart(_mm512_set1_epi32(quad)); }
TIERCEL_INLINE void add_quads(I32& sum, QuadOperand x, QuadOperand values) {
  sum.v = _mm512_add_epi32(sum.v, _mm512_madd_epi16(x.even, values.even));
  sum.v = _mm512_add_epi32(sum.v, _mm512_madd_epi16(x.odd, values.odd));
}
#elif defined(__AVX2__)
struct QuadOperand {
  __m256i even, odd;
};
// No instruction multiplies bytes of any sign without saturating sums of two products, so they are widened to 16 bits.
TIERCEL_INLINE QuadOperand apart(__m256i v) { return {_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8), _mm256_srai_epi16(v, 8)}; }
TIERCEL_INLINE QuadOperand load_quads(const void* p) { return apart(_mm256_loadu_si256((const __m256i*)p)); }
TIERCEL_INLINE QuadOperand splat_quad(int32_t quad) { return apart(_mm256_set1_epi32(quad)); }
TIERCEL_INLINE void add_quads(I32& sum, QuadOperand x, QuadOperand values) {
  sum.v = _mm256_add_epi32(sum.v, _mm256_madd_epi16(x.even, values.even));
  sum.v = _mm256_add_epi32(sum.v, _mm256_madd_epi16(x.odd, values.odd));
}
#else
struct QuadOperand {
  int8_t v[4 * F32::N];
};
TIERCEL_INLINE QuadOperand load_quads(const void* p) {
  QuadOperand r;
  memcpy(r.v, p, sizeof r.v);
  return r;
}
TIERCEL_INLINE QuadOperand splat_quad(int32_t quad) {
  QuadOperand r;
  for (int i = 0; i < F32::N; i++) memcpy(r.v + 4 * i, &quad, 4);
  return r;
}
TIERCEL_INLINE void add_quads(I32& sum, QuadOperand x, QuadOperand values) {
  for (int i = 0; i < F32::N; i++) {
    for (int k = 4 * i; k < 4 * i + 4; k++) sum.v[i] += int32_t(x.v[k]) * int32_t(values.v[k]);
  }
}
#endif

struct IntegerMath {
  using X = Rounded;
  using Wide = int8_t;  // not used: values are multiplied as they are packed
  using Sum = I32;
  using Factor = QuadOperand;
  using Operand = QuadOperand;
  static constexpr int kInputs = 4, kRows = kWideRows / 2;

  TIERCEL_INLINE I32 start(const char* starts, int vector) {
    return kHasStarts ? load_ints((const int32_t*)starts + vector * F32::N) : splat_int(0);
  }
  TIERCEL_INLINE QuadOperand load_factor(const Rounded* x) {
    int32_t quad;
    memcpy(&quad, x, 4);
    return splat_quad(quad);
  }
  TIERCEL_INLINE void add(I32& sum, QuadOperand factor, QuadOperand operand) { add_quads(sum, factor, operand); }
};

struct IntegerValues {
  static constexpr float kUnit = 1;

  TIERCEL_INLINE const char* at(const char* chunk, const int8_t*) { return chunk; }
  template <int step>
  TIERCEL_INLINE QuadOperand load_operand(const char* chunk, int vector) {
    return load_quads((const int32_t*)chunk + step * kQuantizedPanel + vector * F32::N);
  }
};

struct IntegerQuantized {
  using Math = IntegerMath;
  template <Format>
  using Packed = IntegerValues;
  template <Format>
  using Widened = IntegerValues;
};

}  // namespace tiercel::TIERCEL_CLASS
