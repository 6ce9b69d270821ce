// Norm and rotate queries and keys, and write keys and values into the cache. A part of every class: include it after a
// simd header and norm.h.
#pragma once
#include <cmath>

#include "attention_plan.h"
#include "parallel.h"
#include "quantized_kv.h"

namespace tiercel::TIERCEL_CLASS {

constexpr int64_t kHeadsGrain = 8192;  // elements

// The scale of a head's root-mean-square norm.
template <class T>
static float norm_scale(const T* head, int64_t size, float eps) {
  constexpr int N = F32::N;
  F32 squares = splat(0);
  for (int64_t i = 0; i < size; i += N) {
    const int count = size - i < N ? int(size - i) : N;
    const F32 x = count == N ? load(head + i) : load_first(head + i, count);
    squares = fma(x, x, squares);
  }
  return 1.f / sqrtf(sum(squares) / float(size) + eps);
}

// One head: `weight` may be null. Each product is rounded to T before the sum, as transformers does.
template <class T, class Out>
static void rotate_head(const T* head, const T* weight, float eps, const float* cos, const float* sin, Out* out,
                        int64_t half) {
  constexpr int N = F32::N;
  const F32 scale = splat(weight ? norm_scale(head, 2 * half, eps) : 1);
  for (int64_t i = 0; i < half; i += N) {
    const int count = half - i < N ? int(half - i) : N;
    const bool is_whole = count == N;
    F32 a = is_whole ? load(head + i) : load_first(head + i, count);
    F32 b = is_whole ? load(head + half + i) : load_first(head + half + i, count);
    if (weight) {
      const F32 weight_a = is_whole ? load(weight + i) : load_first(weight + i, count);
      const F32 weight_b = is_whole ? load(weight + half + i) : load_first(weight + half + i, count);
      a = rounded(rounded(a * scale, head) * weight_a, head);
      b = rounded(rounded(b * scale, head) * weight_b, head);
    }
    const F32 c = is_whole ? load(cos + i) : load_first(cos + i, count);
    const F32 s = is_whole ? load(sin + i) : load_first(sin + i, count);
    const F32 x = rounded(rounded(a * c, head) - rounded(b * s, head), head);
    const F32 y = rounded(rounded(b * c, head) + rounded(a * s, head), head);
    if (is_whole) {
      store(out + i, x);
      store(out + half + i, y);
    } else {
      store_first(out + i, x, count);
      store_first(out + half + i, y, count);
    }
  }
}

template <class T, class Out>
static void convert_head(const T* head, Out* out, int64_t size) {
  constexpr int N = F32::N;
  int64_t i = 0;
  for (; i + N <= size; i += N) store(out + i, load(head + i));
  if (i < size) store_first(out + i, load_first(head + i, int(size - i)), int(size - i));
}

// Rotates a key, and stores it and its value in 8 bits. scales: that of the key, then that of the value.
template <class T, class K>
static void store_quantized(const HeadsPlan& p, const T* key, const T* value, const T* weight, float eps, const float* cos,
                            const float* sin, K* row, bf16* scales) {
  static thread_local Scratch memory;
  const int64_t size = p.head_dim;
  float* wide = (float*)borrow(memory, size * sizeof(float));
  rotate_head(key, weight, eps, cos, sin, wide, size / 2);
  scales[0] = quantize(wide, size, row);
  convert_head(value, wide, size);
  scales[1] = quantize(wide, size, row + size);
}

static void store_heads(const HeadsPlan* plan, const void* qkv, const void* query_weight, const void* key_weight,
                        float query_eps, float key_eps, void* query, void* kv) {
  const HeadsPlan p = *plan;
  const int64_t size = p.head_dim, half = size / 2, width = (p.heads + 2 * p.kv_heads) * size;
  with_type(p.type, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    with_cache_type(p.kv_type, [&](auto* kv_tag) {
      using K = std::remove_pointer_t<decltype(kv_tag)>;
      parallel_for(p.tokens, grain_of(width, kHeadsGrain), [&](int64_t token) {
        const T* head = (const T*)qkv + token * width;
        const float *cos = p.cos + token * half, *sin = p.sin + token * half;
        T* target = (T*)query + token * p.heads * size;
        for (int64_t i = 0; i < p.heads; i++, head += size, target += size)
          rotate_head(head, (const T*)query_weight, query_eps, cos, sin, target, half);
        K* slot = (K*)kv + p.slot_ids[token] * p.slot_stride;
        K* row = slot + p.slot_offsets[token] * p.row_stride;
        for (int64_t i = 0; i < p.kv_heads; i++, head += size, row += p.head_stride) {
          if constexpr (kIsQuantized<K>) {
            bf16* scales = (bf16*)(slot + p.scales) + (p.slot_offsets[token] * p.kv_heads + i) * 2;
            store_quantized(p, head, head + p.kv_heads * size, (const T*)key_weight, key_eps, cos, sin, row, scales);
          } else {
            rotate_head(head, (const T*)key_weight, key_eps, cos, sin, row, half);
            convert_head(head + p.kv_heads * size, row + size, size);
          }
        }
      });
    });
  });
}

}  // namespace tiercel::TIERCEL_CLASS
