// What attention needs of vectors beside simd_*.h: words of two 16-bit numbers, transposing, masking. A part of every class.
#pragma once
#include <cmath>

#include "numbers.h"

namespace tiercel::TIERCEL_CLASS {

// 2 ** x for x in [-0.5, 0.5]: to 2e-7 with the coefficients of Cephes' exp2f, or to 5e-5 for numbers that are rounded to
// bfloat16 afterwards.
template <bool exact>
TIERCEL_INLINE F32 exp2_fraction(F32 x) {
  if constexpr (exact) {
    F32 y = fma(splat(1.535336188e-4f), x, splat(1.339887440e-3f));
    y = fma(y, x, splat(9.618437357e-3f));
    y = fma(y, x, splat(5.550332471e-2f));
    y = fma(y, x, splat(2.402264791e-1f));
    return fma(fma(y, x, splat(6.931472028e-1f)), x, splat(1.f));
  } else {
    F32 y = fma(splat(9.6181291e-3f), x, splat(5.5504109e-2f));
    y = fma(y, x, splat(2.4022651e-1f));
    return fma(fma(y, x, splat(6.9314718e-1f)), x, splat(1.f));
  }
}

// `exp2_below<exact>(x)`: 2 ** x for x <= 0, exactly 0 for minus infinity; NaN stays NaN.

#if defined(__AVX512BF16__)

using Words = __m512i;
TIERCEL_INLINE Words load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
TIERCEL_INLINE F32 as_floats(Words w) { return {_mm512_castsi512_ps(w)}; }
TIERCEL_INLINE F32 low_half(Words w) { return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))}; }
TIERCEL_INLINE F32 high_half(Words w) {
  return {_mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(int(0xffff0000))))};
}
// Adds the products of both halves of two words, which are bfloat16.
TIERCEL_INLINE F32 dot(F32 sum, Words a, Words b) { return {_mm512_dpbf16_ps(sum.v, (__m512bh)a, (__m512bh)b)}; }
TIERCEL_INLINE Words spread_word(uint32_t word) { return _mm512_set1_epi32(int(word)); }

template <bool exact>
TIERCEL_INLINE F32 exp2_below(F32 x) {
  x.v = _mm512_max_ps(_mm512_set1_ps(-160.f), x.v);  // the second operand is returned if one is NaN
  const __m512 n = _mm512_roundscale_ps(x.v, 8);
  return {_mm512_scalef_ps(exp2_fraction<exact>({_mm512_sub_ps(x.v, n)}).v, n)};
}

// Keeps the lanes [from, to); the others become minus infinity.
TIERCEL_INLINE F32 keep_lanes(F32 x, int64_t from, int64_t to) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __mmask16 kept = _mm512_cmpge_epi32_mask(lanes, _mm512_set1_epi32(int(from))) &
                         _mm512_cmplt_epi32_mask(lanes, _mm512_set1_epi32(int(to)));
  return {_mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), kept, x.v)};
}

// Transposes sixteen rows of `words` words each: word w of row r goes to out[w * stride + r].
TIERCEL_INLINE void transpose_rows(const char* const* rows, int64_t offset, int64_t words, uint32_t* out, int64_t stride) {
  for (int64_t w = 0; w < words; w += 16) {
    const __mmask16 present = words - w >= 16 ? __mmask16(0xffff) : first(int(words - w));
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) a[r] = _mm512_maskz_loadu_epi32(present, rows[r] + offset + w * 4);
#pragma GCC unroll 8
    for (int r = 0; r < 16; r += 2) {
      b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
      b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < 16; r += 4) {  // a[r + i]: words i, 4 + i, 8 + i, 12 + i of rows r to r + 3
      a[r] = _mm512_unpacklo_epi64(b[r], b[r + 2]);
      a[r + 1] = _mm512_unpackhi_epi64(b[r], b[r + 2]);
      a[r + 2] = _mm512_unpacklo_epi64(b[r + 1], b[r + 3]);
      a[r + 3] = _mm512_unpackhi_epi64(b[r + 1], b[r + 3]);
    }
    uint32_t* to = out + w * stride;
    const int64_t count = words - w < 16 ? words - w : 16;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const __m512i even_low = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88), odd_low = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
      const __m512i even_high = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
      const __m512i odd_high = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
      if (i < count) _mm512_storeu_si512(to + i * stride, _mm512_shuffle_i32x4(even_low, even_high, 0x88));
      if (4 + i < count) _mm512_storeu_si512(to + (4 + i) * stride, _mm512_shuffle_i32x4(odd_low, odd_high, 0x88));
      if (8 + i < count) _mm512_storeu_si512(to + (8 + i) * stride, _mm512_shuffle_i32x4(even_low, even_high, 0xdd));
      if (12 + i < count) _mm512_storeu_si512(to + (12 + i) * stride, _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd));
    }
  }
}

// Interleaves two rows of 16-bit numbers: word i of `out` is a[i] (low half) and b[i]; zeros follow up to `width`.
TIERCEL_INLINE void interleave_rows(const uint16_t* a, const uint16_t* b, int64_t count, int64_t width, uint32_t* out) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36,
                                       4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t i = 0; i < width; i += 32) {
    const int64_t left = count - i;
    const __mmask32 present = left >= 32 ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
    const __m512i x = _mm512_maskz_loadu_epi16(present, a + i), y = _mm512_maskz_loadu_epi16(present, b + i);
    _mm512_storeu_si512(out + i, _mm512_permutex2var_epi16(x, low, y));
    if (i + 16 < width) _mm512_storeu_si512(out + i + 16, _mm512_permutex2var_epi16(x, high, y));
  }
}

#elif defined(__AVX2__)

using Words = __m256i;
TIERCEL_INLINE Words load_words(const uint32_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
TIERCEL_INLINE F32 as_floats(Words w) { return {_mm256_castsi256_ps(w)}; }
TIERCEL_INLINE F32 low_half(Words w) { return {_mm256_castsi256_ps(_mm256_slli_epi32(w, 16))}; }
TIERCEL_INLINE F32 high_half(Words w) {
  return {_mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(int(0xffff0000))))};
}

template <bool exact>
TIERCEL_INLINE F32 exp2_below(F32 x) {
  const __m256 lowest = _mm256_set1_ps(-125.f), magic = _mm256_set1_ps(12582912.f);  // adding 1.5 * 2^23 rounds
  const __m256 is_zero = _mm256_cmp_ps(x.v, lowest, _CMP_LT_OQ);
  x.v = _mm256_max_ps(lowest, x.v);  // the second operand is returned if one is NaN
  const __m256 shifted = _mm256_add_ps(x.v, magic);
  const __m256 y = exp2_fraction<exact>({_mm256_sub_ps(x.v, _mm256_sub_ps(shifted, magic))}).v;
  const __m256i power = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  const __m256 scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), power));
  return {_mm256_andnot_ps(is_zero, scaled)};
}

TIERCEL_INLINE F32 keep_lanes(F32 x, int64_t from, int64_t to) {
  const __m256i lanes = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
  const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(int(from)), lanes);
  const __m256i above = _mm256_cmpgt_epi32(lanes, _mm256_set1_epi32(int(to) - 1));
  const __m256 dropped = _mm256_castsi256_ps(_mm256_or_si256(below, above));
  return {_mm256_blendv_ps(x.v, _mm256_set1_ps(-INFINITY), dropped)};
}

TIERCEL_INLINE void transpose_rows(const char* const* rows, int64_t offset, int64_t words, uint32_t* out, int64_t stride) {
  const __m256i lanes = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
  for (int64_t w = 0; w < words; w += 8) {
    const int64_t count = words - w < 8 ? words - w : 8;
    const __m256i present = _mm256_cmpgt_epi32(_mm256_set1_epi32(int(count)), lanes);
    __m256i a[8], b[8];
    if (count == 8) {
#pragma GCC unroll 8
      for (int r = 0; r < 8; r++) a[r] = _mm256_loadu_si256((const __m256i*)(rows[r] + offset + w * 4));
    } else {
#pragma GCC unroll 8
      for (int r = 0; r < 8; r++) a[r] = _mm256_maskload_epi32((const int*)(rows[r] + offset + w * 4), present);
    }
#pragma GCC unroll 4
    for (int r = 0; r < 8; r += 2) {
      b[r] = _mm256_unpacklo_epi32(a[r], a[r + 1]);
      b[r + 1] = _mm256_unpackhi_epi32(a[r], a[r + 1]);
    }
#pragma GCC unroll 2
    for (int r = 0; r < 8; r += 4) {  // a[r + i]: words i and 4 + i of rows r to r + 3
      a[r] = _mm256_unpacklo_epi64(b[r], b[r + 2]);
      a[r + 1] = _mm256_unpackhi_epi64(b[r], b[r + 2]);
      a[r + 2] = _mm256_unpacklo_epi64(b[r + 1], b[r + 3]);
      a[r + 3] = _mm256_unpackhi_epi64(b[r + 1], b[r + 3]);
    }
    uint32_t* to = out + w * stride;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const __m256i low = _mm256_permute2x128_si256(a[i], a[4 + i], 0x20), high = _mm256_permute2x128_si256(a[i], a[4 + i], 0x31);
      if (i < count) _mm256_storeu_si256((__m256i*)(to + i * stride), low);
      if (4 + i < count) _mm256_storeu_si256((__m256i*)(to + (4 + i) * stride), high);
    }
  }
}

TIERCEL_INLINE void interleave_rows(const uint16_t* a, const uint16_t* b, int64_t count, int64_t width, uint32_t* out) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    // The quarters are put in the order 0, 2, 1, 3 because unpacking works within halves.
    const __m256i x = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i*)(a + i)), 0xd8);
    const __m256i y = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i*)(b + i)), 0xd8);
    _mm256_storeu_si256((__m256i*)(out + i), _mm256_unpacklo_epi16(x, y));
    _mm256_storeu_si256((__m256i*)(out + i + 8), _mm256_unpackhi_epi16(x, y));
  }
  for (; i < count; i++) out[i] = uint32_t(a[i]) | uint32_t(b[i]) << 16;
  for (; i < width; i++) out[i] = 0;
}

#else

struct Words {
  uint32_t v[F32::N];
};
#define TIERCEL_EACH for (int i = 0; i < F32::N; i++)
TIERCEL_INLINE Words load_words(const uint32_t* p) {
  Words r;
  TIERCEL_EACH r.v[i] = p[i];
  return r;
}
TIERCEL_INLINE F32 as_floats(Words w) {
  F32 r;
  TIERCEL_EACH r.v[i] = float_of(w.v[i]);
  return r;
}
TIERCEL_INLINE F32 low_half(Words w) {
  F32 r;
  TIERCEL_EACH r.v[i] = float_of(w.v[i] << 16);
  return r;
}
TIERCEL_INLINE F32 high_half(Words w) {
  F32 r;
  TIERCEL_EACH r.v[i] = float_of(w.v[i] & 0xffff0000);
  return r;
}
template <bool exact>
TIERCEL_INLINE F32 exp2_below(F32 x) {
  TIERCEL_EACH x.v[i] = exp2f(x.v[i]);
  return x;
}
TIERCEL_INLINE F32 keep_lanes(F32 x, int64_t from, int64_t to) {
  TIERCEL_EACH x.v[i] = from <= i && i < to ? x.v[i] : -INFINITY;
  return x;
}
TIERCEL_INLINE void transpose_rows(const char* const* rows, int64_t offset, int64_t words, uint32_t* out, int64_t stride) {
  for (int r = 0; r < F32::N; r++)
    for (int64_t w = 0; w < words; w++) memcpy(out + w * stride + r, rows[r] + offset + w * 4, 4);
}
TIERCEL_INLINE void interleave_rows(const uint16_t* a, const uint16_t* b, int64_t count, int64_t width, uint32_t* out) {
  for (int64_t i = 0; i < count; i++) out[i] = uint32_t(a[i]) | uint32_t(b[i]) << 16;
  for (int64_t i = count; i < width; i++) out[i] = 0;
}
#undef TIERCEL_EACH

#endif

}  // namespace tiercel::TIERCEL_CLASS
