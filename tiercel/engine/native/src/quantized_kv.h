// Keys and values of 8 bits with a scale for each token and head. The layout and the rounding are those of
// engine/forward/kv_cache.py. A part of every class: include it after a simd header.
#pragma once
#include "attention_simd.h"
#include "numbers.h"

namespace tiercel {

struct int8 {
  static constexpr float kLimit = 127;
  uint8_t bits;
};
struct fp8 {  // float8_e4m3fn without its NaN, which is never stored
  static constexpr float kLimit = 448;
  uint8_t bits;
};

template <class T>
constexpr bool kIsQuantized = sizeof(T) == 1;

// Calls f with a null pointer of a cache's type; see `with_type`.
template <class F>
TIERCEL_INLINE void with_cache_type(int type, F f) {
  if (type == kInt8) {
    f((int8*)nullptr);
  } else if (type == kFp8) {
    f((fp8*)nullptr);
  } else {
    with_type(type, f);
  }
}

}  // namespace tiercel

namespace tiercel::TIERCEL_CLASS {

// Rounds to nearest even; |x| is at most 127.
TIERCEL_INLINE void round_to(float x, int8& out) {
  out.bits = uint8_t(bits_of(x + 12582912.f));  // adding 1.5 * 2^23 leaves the integer in the low bits
}
// Rounds to nearest even; |x| is at most 448.
TIERCEL_INLINE void round_to(float x, fp8& out) {
  const uint32_t bits = bits_of(x), rest = bits & 0x7fffffff, odd = rest >> 20 & 1;
  const uint32_t normal = (rest - 0x3c000000 + 0x7ffff + odd) >> 20;
  const uint32_t small = bits_of(float_of(rest) + 16384.f) - 0x46800000;  // below 2^-6: in units of 2^-9
  out.bits = uint8_t((rest < 0x3c800000 ? small : normal) | (bits >> 24 & 0x80));
}

// Stores one vector of `size` floats; returns its scale. The loops are written so that the compiler vectorises them.
template <class T>
TIERCEL_INLINE bf16 quantize(const float* x, int64_t size, T* out) {
  uint32_t peak = 0;
  for (int64_t i = 0; i < size; i++) {
    const uint32_t rest = bits_of(x[i]) & 0x7fffffff;  // ordered as the magnitudes, infinity and NaN at the end
    peak = rest > peak ? rest : peak;
  }
  bf16 scale;
  from_float(float_of(peak) / T::kLimit, scale);
  if (peak >= 0x7f800000 || scale.bits < 0x80) {
    memset(out, 0, size);
    return {uint16_t(peak >= 0x7f800000 ? 0x7fc0 : 0)};
  }
  const float unit = to_float(scale), limit = T::kLimit;
  for (int64_t i = 0; i < size; i++) {
    const float ratio = x[i] / unit, above = ratio < -limit ? -limit : ratio;
    round_to(above > limit ? limit : above, out[i]);
  }
  return scale;
}

// Reading: stored numbers without their scales, which bfloat16 holds exactly, as words for the products of
// attention_tiles.h. The bits of fp8, shifted to those of a float, are its number divided by 2^120, subnormal ones too.
//
// `widen_byte<B>(words, tag)`: the number in byte B of each word, as a float. `widen_lowest(words, tag)`: of words that are
// sign-extended bytes. `load_bytes(p, count)`: sign-extended bytes, 0 from `count` on. `join_halves`: words of two numbers.

#if defined(__AVX512BF16__)

constexpr float kFp8Unit = 0x1p120f;
template <int B>
TIERCEL_INLINE F32 widen_byte(Words w, const int8*) {
  if constexpr (B < 3) w = _mm512_slli_epi32(w, 24 - 8 * B);
  return {_mm512_cvtepi32_ps(_mm512_srai_epi32(w, 24))};
}
TIERCEL_INLINE F32 scaled_fp8(Words w) {
  return {_mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(int(0x87f00000)))), _mm512_set1_ps(kFp8Unit))};
}
template <int B>
TIERCEL_INLINE F32 widen_byte(Words w, const fp8*) {
  if constexpr (B < 3) w = _mm512_slli_epi32(w, 24 - 8 * B);
  return scaled_fp8(_mm512_srai_epi32(w, 4));
}
TIERCEL_INLINE F32 widen_lowest(Words w, const int8*) { return {_mm512_cvtepi32_ps(w)}; }
TIERCEL_INLINE F32 widen_lowest(Words w, const fp8*) { return scaled_fp8(_mm512_slli_epi32(w, 20)); }
TIERCEL_INLINE Words load_bytes(const void* p, int64_t count) {
  if (count >= F32::N) return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first(int(count)), p));
}
TIERCEL_INLINE Words join_halves(F32 low, F32 high) {
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(low.v), 16), _mm512_castps_si512(high.v));
}
TIERCEL_INLINE void store_words(uint32_t* p, Words w) { _mm512_storeu_si512(p, w); }

#elif defined(__AVX2__)

constexpr float kFp8Unit = 0x1p120f;
template <int B>
TIERCEL_INLINE F32 widen_byte(Words w, const int8*) {
  if constexpr (B < 3) w = _mm256_slli_epi32(w, 24 - 8 * B);
  return {_mm256_cvtepi32_ps(_mm256_srai_epi32(w, 24))};
}
TIERCEL_INLINE F32 scaled_fp8(Words w) {
  return {_mm256_mul_ps(_mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(int(0x87f00000)))), _mm256_set1_ps(kFp8Unit))};
}
template <int B>
TIERCEL_INLINE F32 widen_byte(Words w, const fp8*) {
  if constexpr (B < 3) w = _mm256_slli_epi32(w, 24 - 8 * B);
  return scaled_fp8(_mm256_srai_epi32(w, 4));
}
TIERCEL_INLINE F32 widen_lowest(Words w, const int8*) { return {_mm256_cvtepi32_ps(w)}; }
TIERCEL_INLINE F32 widen_lowest(Words w, const fp8*) { return scaled_fp8(_mm256_slli_epi32(w, 20)); }
TIERCEL_INLINE Words load_bytes(const void* p, int64_t count) {
  if (count >= F32::N) return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
  int64_t kept = 0;
  memcpy(&kept, p, count);
  return _mm256_cvtepi8_epi32(_mm_cvtsi64_si128(kept));
}
TIERCEL_INLINE Words join_halves(F32 low, F32 high) {
  return _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(low.v), 16), _mm256_castps_si256(high.v));
}
TIERCEL_INLINE void store_words(uint32_t* p, Words w) { _mm256_storeu_si256((__m256i*)p, w); }

#else

#define TIERCEL_EACH for (int i = 0; i < F32::N; i++)
TIERCEL_INLINE float widen_number(uint8_t bits, const int8*) { return float(int8_t(bits)); }
TIERCEL_INLINE float widen_number(uint8_t bits, const fp8*) {
  return float_of(uint32_t(bits & 0x80) << 24 | uint32_t(bits & 0x7f) << 20) * 0x1p120f;
}
template <int B, class T>
TIERCEL_INLINE F32 widen_byte(Words w, const T* tag) {
  F32 r;
  TIERCEL_EACH r.v[i] = widen_number(uint8_t(w.v[i] >> 8 * B), tag);
  return r;
}
template <class T>
TIERCEL_INLINE F32 widen_lowest(Words w, const T* tag) {
  return widen_byte<0>(w, tag);
}
TIERCEL_INLINE Words load_bytes(const void* p, int64_t count) {
  Words r;
  TIERCEL_EACH r.v[i] = i < count ? ((const uint8_t*)p)[i] : 0;
  return r;
}
TIERCEL_INLINE Words join_halves(F32 low, F32 high) {
  Words r;
  TIERCEL_EACH r.v[i] = bits_of(low.v[i]) >> 16 | bits_of(high.v[i]);
  return r;
}
TIERCEL_INLINE void store_words(uint32_t* p, Words w) { memcpy(p, w.v, sizeof w.v); }
#undef TIERCEL_EACH

#endif

}  // namespace tiercel::TIERCEL_CLASS
