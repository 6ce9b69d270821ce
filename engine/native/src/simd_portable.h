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

}  // namespace tiercel::TIERCEL_CLASS
