// Vectors of sixteen floats for AVX-512 with BF16. The functions are those of simd_portable.h.
#pragma once
#include <immintrin.h>

#include "numbers.h"

namespace tiercel::TIERCEL_CLASS {

struct F32 {
  static constexpr int N = 16;
  __m512 v;
};

TIERCEL_INLINE __mmask16 first(int count) { return __mmask16((1u << count) - 1); }
constexpr int kPanel = 32;     // outputs of a panel of packed weights, see linear_panel.h
constexpr int kWideRows = 12;  // rows of a tile whose sums fit in the registers
constexpr int kThinAhead = 2048;  // bytes that a product of a row or two prefetches ahead; other distances were slower

TIERCEL_INLINE F32 splat(float x) { return {_mm512_set1_ps(x)}; }
TIERCEL_INLINE F32 widened(__m256i bits, const bf16*) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
TIERCEL_INLINE F32 widened(__m256i bits, const fp16*) { return {_mm512_cvtph_ps(bits)}; }
TIERCEL_INLINE __m256i narrowed(F32 x, const fp16*) { return _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT); }
TIERCEL_INLINE __m256i narrowed(F32 x, const bf16*) { return (__m256i)_mm512_cvtneps_pbh(x.v); }

TIERCEL_INLINE F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
template <class T>
TIERCEL_INLINE F32 load(const T* p) {
  return widened(_mm256_loadu_si256((const __m256i*)p), p);
}
// The first (even) or second (odd) numbers of N pairs.
TIERCEL_INLINE F32 load_even(const bf16* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))}; }
TIERCEL_INLINE F32 load_odd(const bf16* p) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(0xffff0000)))};
}
TIERCEL_INLINE void store(float* p, F32 x) { _mm512_storeu_ps(p, x.v); }
template <class T>
TIERCEL_INLINE void store(T* p, F32 x) {
  _mm256_storeu_si256((__m256i*)p, narrowed(x, p));
}
TIERCEL_INLINE F32 load_first(const float* p, int count) { return {_mm512_maskz_loadu_ps(first(count), p)}; }
template <class T>
TIERCEL_INLINE F32 load_first(const T* p, int count) {  // the others are 0 and not read
  return widened(_mm256_maskz_loadu_epi16(first(count), p), p);
}
TIERCEL_INLINE void store_first(float* p, F32 x, int count) { _mm512_mask_storeu_ps(p, first(count), x.v); }
template <class T>
TIERCEL_INLINE void store_first(T* p, F32 x, int count) {
  _mm256_mask_storeu_epi16(p, first(count), narrowed(x, p));
}
TIERCEL_INLINE F32 operator+(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
TIERCEL_INLINE F32 operator-(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
TIERCEL_INLINE F32 operator*(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
TIERCEL_INLINE F32 operator/(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
TIERCEL_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// c += a * b. As an instruction, because gcc 12 reorders the products of a tile and spills its sums.
TIERCEL_INLINE void add_product(F32& c, F32 a, F32 b) {
  asm volatile("vfmadd231ps %2, %1, %0" : "+v"(c.v) : "v"(a.v), "v"(b.v));
}
TIERCEL_INLINE F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
TIERCEL_INLINE F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
TIERCEL_INLINE float sum(F32 a) { return _mm512_reduce_add_ps(a.v); }
TIERCEL_INLINE float largest(F32 a) { return _mm512_reduce_max_ps(a.v); }
// Cephes' polynomial after range reduction by log 2, relative error about 2e-7; exp(-inf) is 0.
TIERCEL_INLINE F32 exp(F32 a) {
  const __m512 x = _mm512_min_ps(_mm512_max_ps(a.v, _mm512_set1_ps(-104.f)), _mm512_set1_ps(88.7f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.f)));
  const __m512 y = _mm512_scalef_ps(p, n);
  return {_mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), a.v)};  // NaN stays NaN
}

// Rounds to a storage type and back.
TIERCEL_INLINE F32 rounded(F32 x, const float*) { return x; }
template <class T>
TIERCEL_INLINE F32 rounded(F32 x, const T* p) {
  return widened(narrowed(x, p), p);
}

// As many 32-bit integers as floats; products and sums wrap around. A mask has one lane per float.
struct I32 {
  __m512i v;
};
struct Mask {
  __mmask16 v;
};
TIERCEL_INLINE I32 splat_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
TIERCEL_INLINE I32 load_ints(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
TIERCEL_INLINE void store_ints(int32_t* p, I32 x) { _mm512_storeu_si512(p, x.v); }
TIERCEL_INLINE I32 operator^(I32 a, I32 b) { return {_mm512_xor_si512(a.v, b.v)}; }
TIERCEL_INLINE I32 operator&(I32 a, I32 b) { return {_mm512_and_si512(a.v, b.v)}; }
TIERCEL_INLINE I32 operator+(I32 a, I32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
TIERCEL_INLINE I32 operator*(I32 a, I32 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
template <int S>
TIERCEL_INLINE I32 shifted(I32 a) {  // right, zeros enter
  return {_mm512_srli_epi32(a.v, S)};
}
template <int S>
TIERCEL_INLINE I32 shifted_signed(I32 a) {  // right, the sign enters
  return {_mm512_srai_epi32(a.v, S)};
}
template <int S>
TIERCEL_INLINE I32 shifted_left(I32 a) {
  return {_mm512_slli_epi32(a.v, S)};
}
TIERCEL_INLINE F32 to_floats(I32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
TIERCEL_INLINE F32 as_floats(I32 a) { return {_mm512_castsi512_ps(a.v)}; }
TIERCEL_INLINE I32 as_ints(F32 a) { return {_mm512_castps_si512(a.v)}; }
TIERCEL_INLINE Mask is_above(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
TIERCEL_INLINE Mask mask_of(const uint8_t* bits, int first) {  // lane i: bit `first` + i; `first` is a multiple of 16
  return {__mmask16(bits[first / 8] | bits[first / 8 + 1] << 8)};
}
TIERCEL_INLINE Mask is_number(F32 a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_ORD_Q)}; }
TIERCEL_INLINE F32 select(Mask mask, F32 yes, F32 no) { return {_mm512_mask_mov_ps(no.v, mask.v, yes.v)}; }
TIERCEL_INLINE I32 select(Mask mask, I32 yes, I32 no) { return {_mm512_mask_mov_epi32(no.v, mask.v, yes.v)}; }

}  // namespace tiercel::TIERCEL_CLASS
