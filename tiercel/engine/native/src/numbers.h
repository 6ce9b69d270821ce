// 16-bit numbers in storage, and their scalar conversions.
#pragma once
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace tiercel {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

// `always_inline`: a copy compiled for one class must not serve another one.
#define TIERCEL_INLINE static inline __attribute__((always_inline))

TIERCEL_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
TIERCEL_INLINE float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

TIERCEL_INLINE float to_float(float x) { return x; }
TIERCEL_INLINE float to_float(bf16 x) { return float_of(uint32_t(x.bits) << 16); }
TIERCEL_INLINE float to_float(fp16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  if (rest >= 0x400) return float_of(sign | ((rest << 13) + 0x38000000));
  const float small = float(rest) * (1.f / 16777216.f);  // subnormal: multiples of 2^-24
  return float_of(sign | bits_of(small));
}

// Round to nearest, ties to even.
TIERCEL_INLINE void from_float(float x, float& out) { out = x; }
TIERCEL_INLINE void from_float(float x, bf16& out) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffff) > 0x7f800000) {
    out.bits = uint16_t(bits >> 16 | 0x40);  // NaN stays NaN
  } else {
    out.bits = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}
TIERCEL_INLINE void from_float(float x, fp16& out) {
  const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) {
    out.bits = uint16_t(sign | 0x7e00);
  } else if (rest >= 0x477ff000) {  // rounds to infinity
    out.bits = uint16_t(sign | 0x7c00);
  } else if (rest < 0x38800000) {  // below the smallest normal: add in units of 2^-24
    out.bits = uint16_t(sign | (bits_of(float_of(rest) + 0.5f) - 0x3f000000));
  } else {
    const uint32_t odd = rest >> 13 & 1;
    out.bits = uint16_t(sign | ((rest - 0x38000000 + 0xfff + odd) >> 13));
  }
}

// Calls f with a null pointer of the storage type `type`; the lambda takes `auto*`.
template <class F>
TIERCEL_INLINE void with_type(int type, F f) {
  if (type == kFloat32) {
    f((float*)nullptr);
  } else if (type == kBfloat16) {
    f((bf16*)nullptr);
  } else {
    f((fp16*)nullptr);
  }
}

}  // namespace tiercel
