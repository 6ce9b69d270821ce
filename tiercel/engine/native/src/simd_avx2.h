// Vectors of eight floats for AVX2 with FMA and F16C. The functions are those of simd_portable.h.
#pragma once
#include <immintrin.h>

#include "numbers.h"

namespace tiercel::TIERCEL_CLASS {

struct F32 {
  static constexpr int N = 8;
  __m256 v;
};

constexpr int kPanel = 16;     // outputs of a panel of packed weights, see linear_panel.h
constexpr int kWideRows = 6;  // rows of a tile whose sums fit in the registers
constexpr int kThinAhead = 16384;  // bytes that a product of a row or two prefetches ahead; other distances were slower

TIERCEL_INLINE F32 splat(float x) { return {_mm256_set1_ps(x)}; }
TIERCEL_INLINE F32 widened(__m128i bits, const bf16*) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
}
TIERCEL_INLINE F32 widened(__m128i bits, const fp16*) { return {_mm256_cvtph_ps(bits)}; }
TIERCEL_INLINE __m128i narrowed(F32 x, const fp16*) { return _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT); }
TIERCEL_INLINE __m128i narrowed(F32 x, const bf16*) {
  const __m256i bits = _mm256_castps_si256(x.v), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i near = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
  const __m256i words = _mm256_blendv_epi8(near, nan, is_nan);
  const __m256i packed = _mm256_packus_epi32(words, words);  // of each half: its four words twice
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}

TIERCEL_INLINE F32 load(const float* p) { return {_mm256_loadu_ps(p)}; }
template <class T>
TIERCEL_INLINE F32 load(const T* p) {
  return widened(_mm_loadu_si128((const __m128i*)p), p);
}
// The first (even) or second (odd) numbers of N pairs.
TIERCEL_INLINE F32 load_even(const bf16* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)p), 16))};
}
TIERCEL_INLINE F32 load_odd(const bf16* p) {
  return {_mm256_and_ps(_mm256_loadu_ps((const float*)p), _mm256_castsi256_ps(_mm256_set1_epi32(0xffff0000)))};
}
TIERCEL_INLINE void store(float* p, F32 x) { _mm256_storeu_ps(p, x.v); }
template <class T>
TIERCEL_INLINE void store(T* p, F32 x) {
  _mm_storeu_si128((__m128i*)p, narrowed(x, p));
}
template <class T>
TIERCEL_INLINE F32 load_first(const T* p, int count) {  // the others are 0 and not read
  alignas(32) T kept[F32::N] = {};
  for (int i = 0; i < count; i++) kept[i] = p[i];
  return load(kept);
}
template <class T>
TIERCEL_INLINE void store_first(T* p, F32 x, int count) {
  alignas(32) T kept[F32::N];
  store(kept, x);
  for (int i = 0; i < count; i++) p[i] = kept[i];
}
TIERCEL_INLINE F32 operator+(F32 a, F32 b) { return {_mm256_add_ps(a.v, b.v)}; }
TIERCEL_INLINE F32 operator-(F32 a, F32 b) { return {_mm256_sub_ps(a.v, b.v)}; }
TIERCEL_INLINE F32 operator*(F32 a, F32 b) { return {_mm256_mul_ps(a.v, b.v)}; }
TIERCEL_INLINE F32 operator/(F32 a, F32 b) { return {_mm256_div_ps(a.v, b.v)}; }
TIERCEL_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
// c += a * b. As an instruction, because gcc 12 reorders the products of a tile and spills its sums.
TIERCEL_INLINE void add_product(F32& c, F32 a, F32 b) {
  asm volatile("vfmadd231ps %2, %1, %0" : "+x"(c.v) : "x"(a.v), "x"(b.v));
}
TIERCEL_INLINE F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.v, b.v)}; }
TIERCEL_INLINE F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.v, b.v)}; }
TIERCEL_INLINE float sum(F32 a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
TIERCEL_INLINE float largest(F32 a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
// Cephes' polynomial after range reduction by log 2, relative error about 2e-7; exp(-inf) is 0, below -87.3 too.
TIERCEL_INLINE F32 exp(F32 a) {
  const __m256 low = _mm256_cmp_ps(a.v, _mm256_set1_ps(-87.3f), _CMP_LT_OQ);
  const __m256 x = _mm256_min_ps(_mm256_max_ps(a.v, _mm256_set1_ps(-87.3f)), _mm256_set1_ps(88.3f));
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.9875691500e-4f);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
  p = _mm256_fmadd_ps(p, _mm256_mul_ps(r, r), _mm256_add_ps(r, _mm256_set1_ps(1.f)));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  const __m256 y = _mm256_mul_ps(p, _mm256_castsi256_ps(power));
  const __m256 kept = _mm256_andnot_ps(low, y);
  return {_mm256_blendv_ps(kept, a.v, _mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q))};  // NaN stays NaN
}

// Rounds to a storage type and back.
TIERCEL_INLINE F32 rounded(F32 x, const float*) { return x; }
template <class T>
TIERCEL_INLINE F32 rounded(F32 x, const T* p) {
  return widened(narrowed(x, p), p);
}

// As many 32-bit integers as floats; products and sums wrap around. A mask has one lane per float.
struct I32 {
  __m256i v;
};
struct Mask {
  __m256 v;
};
TIERCEL_INLINE I32 splat_int(int32_t x) { return {_mm256_set1_epi32(x)}; }
TIERCEL_INLINE I32 load_ints(const int32_t* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
TIERCEL_INLINE void store_ints(int32_t* p, I32 x) { _mm256_storeu_si256((__m256i*)p, x.v); }
TIERCEL_INLINE I32 operator^(I32 a, I32 b) { return {_mm256_xor_si256(a.v, b.v)}; }
TIERCEL_INLINE I32 operator&(I32 a, I32 b) { return {_mm256_and_si256(a.v, b.v)}; }
TIERCEL_INLINE I32 operator+(I32 a, I32 b) { return {_mm256_add_epi32(a.v, b.v)}; }
TIERCEL_INLINE I32 operator*(I32 a, I32 b) { return {_mm256_mullo_epi32(a.v, b.v)}; }
template <int S>
TIERCEL_INLINE I32 shifted(I32 a) {  // right, zeros enter
  return {_mm256_srli_epi32(a.v, S)};
}
template <int S>
TIERCEL_INLINE I32 shifted_signed(I32 a) {  // right, the sign enters
  return {_mm256_srai_epi32(a.v, S)};
}
template <int S>
TIERCEL_INLINE I32 shifted_left(I32 a) {
  return {_mm256_slli_epi32(a.v, S)};
}
TIERCEL_INLINE F32 to_floats(I32 a) { return {_mm256_cvtepi32_ps(a.v)}; }
TIERCEL_INLINE F32 as_floats(I32 a) { return {_mm256_castsi256_ps(a.v)}; }
TIERCEL_INLINE I32 as_ints(F32 a) { return {_mm256_castps_si256(a.v)}; }
TIERCEL_INLINE Mask is_above(F32 a, F32 b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ)}; }
TIERCEL_INLINE Mask mask_of(const uint8_t* bits, int first) {  // lane i: bit `first` + i; `first` is a multiple of 8
  const __m256i places = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i lanes = _mm256_and_si256(_mm256_set1_epi32(bits[first / 8]), places);
  return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(lanes, places))};
}
TIERCEL_INLINE Mask is_number(F32 a) { return {_mm256_cmp_ps(a.v, a.v, _CMP_ORD_Q)}; }
TIERCEL_INLINE F32 select(Mask mask, F32 yes, F32 no) { return {_mm256_blendv_ps(no.v, yes.v, mask.v)}; }
TIERCEL_INLINE I32 select(Mask mask, I32 yes, I32 no) {
  return {_mm256_blendv_epi8(no.v, yes.v, _mm256_castps_si256(mask.v))};
}

}  // namespace tiercel::TIERCEL_CLASS
