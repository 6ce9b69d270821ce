// Vectors for any processor: arrays of eight floats that the compiler may vectorise as it can.
#pragma once
#include <cmath>

#include "numbers.h"

namespace tiercel::TIERCEL_CLASS {

struct F32 {
  static constexpr int N = 8;
  float v[N];
};

#define TIERCEL_EACH for (int i = 0; i < F32::N; i++)
#ifdef TIERCEL_EMULATE_TILES
constexpr int kPanel = 32;  // as in the class that is emulated
#else
constexpr int kPanel = 16;     // outputs of a panel of packed weights, see linear_panel.h
#endif
constexpr int kWideRows = 4;  // rows of a tile whose sums fit in the registers
constexpr int kThinAhead = 16384;  // bytes that a product of a row or two prefetches ahead; other distances were slower

TIERCEL_INLINE F32 splat(float x) {
  F32 r;
  TIERCEL_EACH r.v[i] = x;
  return r;
}
template <class T>
TIERCEL_INLINE F32 load(const T* p) {
  F32 r;
  TIERCEL_EACH r.v[i] = to_float(p[i]);
  return r;
}
template <class T>
TIERCEL_INLINE F32 load_first(const T* p, int count) {  // the others are 0 and not read
  F32 r = splat(0);
  for (int i = 0; i < count; i++) r.v[i] = to_float(p[i]);
  return r;
}
// The first (even) or second (odd) numbers of N pairs.
TIERCEL_INLINE F32 load_even(const bf16* p) {
  F32 r;
  TIERCEL_EACH r.v[i] = to_float(p[2 * i]);
  return r;
}
TIERCEL_INLINE F32 load_odd(const bf16* p) {
  F32 r;
  TIERCEL_EACH r.v[i] = to_float(p[2 * i + 1]);
  return r;
}
template <class T>
TIERCEL_INLINE void store(T* p, F32 x) {
  TIERCEL_EACH from_float(x.v[i], p[i]);
}
template <class T>
TIERCEL_INLINE void store_first(T* p, F32 x, int count) {
  for (int i = 0; i < count; i++) from_float(x.v[i], p[i]);
}
TIERCEL_INLINE F32 operator+(F32 a, F32 b) {
  TIERCEL_EACH a.v[i] += b.v[i];
  return a;
}
TIERCEL_INLINE F32 operator-(F32 a, F32 b) {
  TIERCEL_EACH a.v[i] -= b.v[i];
  return a;
}
TIERCEL_INLINE F32 operator*(F32 a, F32 b) {
  TIERCEL_EACH a.v[i] *= b.v[i];
  return a;
}
TIERCEL_INLINE F32 operator/(F32 a, F32 b) {
  TIERCEL_EACH a.v[i] /= b.v[i];
  return a;
}
TIERCEL_INLINE F32 fma(F32 a, F32 b, F32 c) {  // a * b + c
  TIERCEL_EACH c.v[i] += a.v[i] * b.v[i];
  return c;
}
TIERCEL_INLINE void add_product(F32& c, F32 a, F32 b) { c = fma(a, b, c); }
TIERCEL_INLINE F32 max(F32 a, F32 b) {
  TIERCEL_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
TIERCEL_INLINE F32 min(F32 a, F32 b) {
  TIERCEL_EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return a;
}
TIERCEL_INLINE float sum(F32 a) {
  float r = 0;
  TIERCEL_EACH r += a.v[i];
  return r;
}
TIERCEL_INLINE float largest(F32 a) {
  float r = a.v[0];
  TIERCEL_EACH r = a.v[i] > r ? a.v[i] : r;
  return r;
}
TIERCEL_INLINE F32 exp(F32 a) {
  TIERCEL_EACH a.v[i] = expf(a.v[i]);
  return a;
}
#undef TIERCEL_EACH

// Rounds to a storage type and back.
template <class T>
TIERCEL_INLINE F32 rounded(F32 x, const T*) {
  T kept[F32::N];
  store(kept, x);
  return load(kept);
}

// As many 32-bit integers as floats; products and sums wrap around. A mask has one lane per float.
struct I32 {
  int32_t v[F32::N];
};
struct Mask {
  bool v[F32::N];
};
#define TIERCEL_EACH for (int i = 0; i < F32::N; i++)
TIERCEL_INLINE I32 splat_int(int32_t x) {
  I32 r;
  TIERCEL_EACH r.v[i] = x;
  return r;
}
TIERCEL_INLINE I32 load_ints(const int32_t* p) {
  I32 r;
  TIERCEL_EACH r.v[i] = p[i];
  return r;
}
TIERCEL_INLINE void store_ints(int32_t* p, I32 x) { TIERCEL_EACH p[i] = x.v[i]; }
TIERCEL_INLINE I32 operator^(I32 a, I32 b) {
  TIERCEL_EACH a.v[i] ^= b.v[i];
  return a;
}
TIERCEL_INLINE I32 operator&(I32 a, I32 b) {
  TIERCEL_EACH a.v[i] &= b.v[i];
  return a;
}
TIERCEL_INLINE I32 operator+(I32 a, I32 b) {
  TIERCEL_EACH a.v[i] = int32_t(uint32_t(a.v[i]) + uint32_t(b.v[i]));
  return a;
}
TIERCEL_INLINE I32 operator*(I32 a, I32 b) {
  TIERCEL_EACH a.v[i] = int32_t(uint32_t(a.v[i]) * uint32_t(b.v[i]));
  return a;
}
template <int S>
TIERCEL_INLINE I32 shifted(I32 a) {  // right, zeros enter
  TIERCEL_EACH a.v[i] = int32_t(uint32_t(a.v[i]) >> S);
  return a;
}
template <int S>
TIERCEL_INLINE I32 shifted_signed(I32 a) {  // right, the sign enters
  TIERCEL_EACH a.v[i] >>= S;
  return a;
}
template <int S>
TIERCEL_INLINE I32 shifted_left(I32 a) {
  TIERCEL_EACH a.v[i] = int32_t(uint32_t(a.v[i]) << S);
  return a;
}
TIERCEL_INLINE F32 to_floats(I32 a) {
  F32 r;
  TIERCEL_EACH r.v[i] = float(a.v[i]);
  return r;
}
TIERCEL_INLINE F32 as_floats(I32 a) {
  F32 r;
  memcpy(r.v, a.v, sizeof r);
  return r;
}
TIERCEL_INLINE I32 as_ints(F32 a) {
  I32 r;
  memcpy(r.v, a.v, sizeof r);
  return r;
}
TIERCEL_INLINE Mask is_above(F32 a, F32 b) {
  Mask r;
  TIERCEL_EACH r.v[i] = a.v[i] > b.v[i];
  return r;
}
TIERCEL_INLINE Mask mask_of(const uint8_t* bits, int first) {  // lane i: bit `first` + i
  Mask r;
  TIERCEL_EACH r.v[i] = bits[(first + i) / 8] >> (first + i) % 8 & 1;
  return r;
}
TIERCEL_INLINE Mask is_number(F32 a) {
  Mask r;
  TIERCEL_EACH r.v[i] = a.v[i] == a.v[i];
  return r;
}
TIERCEL_INLINE F32 select(Mask mask, F32 yes, F32 no) {
  TIERCEL_EACH no.v[i] = mask.v[i] ? yes.v[i] : no.v[i];
  return no;
}
TIERCEL_INLINE I32 select(Mask mask, I32 yes, I32 no) {
  TIERCEL_EACH no.v[i] = mask.v[i] ? yes.v[i] : no.v[i];
  return no;
}
#undef TIERCEL_EACH

}  // namespace tiercel::TIERCEL_CLASS
