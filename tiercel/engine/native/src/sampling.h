// Draw one token per row: temperature, min_p, top_k, top_p, Gumbel noise and maximum, without sorting the vocabulary.
// A part of every class: include it after a simd header. The noise has the same bits in every class, because its sums and
// products are not fused.
#pragma once
#include <cmath>

#include "parallel.h"

namespace tiercel::TIERCEL_CLASS {

constexpr int kBlock = 128;             // scores that share one comparison with the best one; a multiple of F32::N
constexpr int64_t kDrawGrain = 16384;   // logits; fewer are read sooner than another thread wakes up
constexpr int kMostPieces = 64;         // of one row
constexpr float kLargestNoise = 22.2f;  // engine/sampling/noise.py
constexpr int kBins = 2048;
constexpr float kBinsPerUnit = 64;  // of a score: the first bins reach 32 below the largest score

// The best token of a piece of a row.
struct Best {
  float score, peak;  // the largest perturbed score; the largest logit, +inf if one is not a number
  int64_t token;
};

// The natural logarithm of positive, normal numbers, with an error below 1 ulp. Source: FreeBSD's e_logf.c.
TIERCEL_INLINE F32 log_of(F32 x) {
  const I32 bits = as_ints(x) + splat_int(0x3f800000 - 0x3f3504f3);
  const F32 k = to_floats(shifted_signed<23>(bits) + splat_int(-0x7f));
  const F32 f = as_floats((bits & splat_int(0x007fffff)) + splat_int(0x3f3504f3)) - splat(1);
  const F32 s = f / (splat(2) + f), z = s * s, w = z * z;
  const F32 odd = z * (splat(0.66666662693f) + w * splat(0.28498786688f));
  const F32 even = w * (splat(0.40000972152f) + w * splat(0.24279078841f));
  const F32 half = splat(0.5f) * f * f;
  return k * splat(0.69313812256f) - ((half - (s * (half + (odd + even)) + k * splat(9.0580006145e-6f))) - f);
}

// Standard Gumbel noise of token ids; see `gumbel_no_sync` in engine/sampling/noise.py.
TIERCEL_INLINE F32 gumbel(I32 tokens, int32_t key_1, int32_t key_2) {
  I32 bits = tokens ^ splat_int(key_1);
  bits = bits ^ shifted<16>(bits);
  bits = bits * splat_int(0x7feb352d);
  bits = bits ^ splat_int(key_2);
  bits = bits ^ shifted<15>(bits);
  bits = bits * splat_int(int32_t(0x846ca68b));
  bits = bits ^ shifted_signed<16>(bits);  // the sign bit cancels, which leaves 31 bits
  const F32 scaled = to_floats(bits) * splat(0x1p-31f) + splat(0x1p-32f);
  const F32 uniform = min(scaled, splat(1 - 0x1p-24f));
  const F32 rest = splat(1) - uniform;
  const F32 lost = (splat(1) - rest) - uniform;  // the rounding error of `rest`, which matters where the noise is largest
  const F32 zero = splat(0);
  return zero - log_of(zero - (log_of(rest) + lost));
}

// Copies a block of logits as float32, -inf beyond the end.
template <class T>
static void load_block(const T* logits, int64_t count, float* block) {
  constexpr int N = F32::N;
  if (count >= kBlock) {
    for (int i = 0; i < kBlock; i += N) store(block + i, load(logits + i));
    return;
  }
  for (int i = 0; i < kBlock; i++) block[i] = i < count ? to_float(logits[i]) : -INFINITY;
}

// Replaces a block of logits by scores: divided by the temperature, -inf for NaN. Returns the largest score; `peak`
// becomes the largest logit so far, with +inf for NaN.
TIERCEL_INLINE float score_block(float* block, float temperature, float& peak) {
  constexpr int N = F32::N;
  const F32 lowest = splat(-INFINITY), highest = splat(INFINITY), divisor = splat(temperature);
  F32 top = lowest, most = splat(peak);
  for (int i = 0; i < kBlock; i += N) {
    const F32 raw = load(block + i);
    const Mask known = is_number(raw);
    F32 score = select(known, raw, lowest);
    if (temperature > 0) score = score / divisor;
    most = max(most, select(known, raw, highest));
    top = max(top, score);
    store(block + i, score);
  }
  peak = largest(most);
  return largest(top);
}

// Replaces the scores of tokens that may not be drawn by -inf. Returns the largest score of the others. mask: one bit for
// each of the first `count` tokens of the block.
TIERCEL_INLINE float mask_block(float* block, const uint8_t* mask, int64_t count) {
  uint8_t bits[kBlock / 8] = {};
  memcpy(bits, mask, count < kBlock ? (count + 7) / 8 : kBlock / 8);
  F32 top = splat(-INFINITY);
  for (int i = 0; i < kBlock; i += F32::N) {
    const F32 score = select(mask_of(bits, i), load(block + i), splat(-INFINITY));
    top = max(top, score);
    store(block + i, score);
  }
  return largest(top);
}

// Takes over the best score of a block, with noise if the row draws. Scores below `limit` cannot be drawn.
TIERCEL_INLINE void choose(const float* block, int64_t first, const Draw& draw, float limit, Best& best) {
  constexpr int N = F32::N;
  float scores[N];
  int32_t steps[N];
  for (int j = 0; j < N; j++) steps[j] = j;
  for (int i = 0; i < kBlock; i += N) {
    F32 score = load(block + i);
    const Mask below = is_above(splat(limit), score);
    if (draw.temperature > 0) {
      const I32 ids = load_ints(steps) + splat_int(int32_t(first + i));
      score = score + gumbel(ids, draw.key_1, draw.key_2);
    }
    score = select(below, splat(-INFINITY), score);
    if (!(largest(score) > best.score)) continue;
    store(scores, score);
    for (int j = 0; j < N; j++) {
      if (scores[j] > best.score) {
        best.score = scores[j];
        best.token = first + i + j;
      }
    }
  }
}

// The best token of [begin, end) among those that `mask` allows, if it is not null. Blocks that even the largest noise cannot lift above the best score are left out.
template <class T>
static Best best_of(const T* logits, int64_t begin, int64_t end, const Draw& draw, const uint8_t* mask) {
  Best best = {-INFINITY, -INFINITY, begin};
  const float noise = draw.temperature > 0 ? kLargestNoise : 0;
  float block[kBlock];
  for (int64_t first = begin; first < end; first += kBlock) {
    load_block(logits + first, end - first, block);
    float top = score_block(block, draw.temperature, best.peak);
    if (mask && top + noise > best.score) top = mask_block(block, mask + first / 8, end - first);
    if (top + noise > best.score) choose(block, first, draw, -INFINITY, best);
  }
  return best;
}

// The bits of a float as an integer with the order of the floats.
TIERCEL_INLINE uint32_t order_of(float x) {
  const uint32_t bits = bits_of(x);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
TIERCEL_INLINE float float_of_order(uint32_t order) {
  return float_of(order >> 31 ? order ^ 0x80000000u : ~order);
}

// Goes down the bins until the weights reach `wanted`; returns the bin, or -1. `above` becomes the sum of the bins above.
TIERCEL_INLINE int find_bin(const double* bins, bool descending, double wanted, double& above) {
  for (int i = 0; i < kBins; i++) {
    const int bin = descending ? kBins - 1 - i : i;
    if (bins[bin] > 0 && above + bins[bin] >= wanted) return bin;
    above += bins[bin];
  }
  return -1;
}

TIERCEL_INLINE int bin_of(float score, float peak) {
  const float depth = (peak - score) * kBinsPerUnit;
  return depth < kBins - 1 ? int(depth) : kBins - 1;
}

// The largest limit such that the weights of the scores above or equal to it reach `wanted`; -inf if all together do not.
// Scores below `floor` do not count. First in bins of equal width below the largest score, then by the bits of the scores in
// the bin where the sum is reached. weights: null for 1 each; some: room for 2 * count floats.
static float find_limit(const float* scores, const float* weights, int64_t count, float peak, float floor, double wanted,
                        float* some) {
  double bins[kBins] = {};
  for (int64_t i = 0; i < count; i++) {
    if (scores[i] >= floor) bins[bin_of(scores[i], peak)] += weights ? weights[i] : 1;
  }
  double above = 0;
  const int bin = find_bin(bins, false, wanted, above);
  if (bin < 0) return -INFINITY;
  float *kept = some, *kept_weights = some + count;
  int64_t left = 0;
  for (int64_t i = 0; i < count; i++) {
    if (scores[i] >= floor && bin_of(scores[i], peak) == bin) {
      kept[left] = scores[i];
      kept_weights[left++] = weights ? weights[i] : 1;
    }
  }
  uint32_t prefix = 0;
  for (int shift = 21, bits = 0; bits < 32; shift = shift > 11 ? shift - 11 : 0) {
    // Levels: the highest 11 bits, the next 11, the last 10.
    const int known = bits;
    bits = 32 - shift;
    for (double& each : bins) each = 0;
    for (int64_t i = 0; i < left; i++) {
      const uint32_t order = order_of(kept[i]);
      if (known && order >> (32 - known) != prefix) continue;
      bins[order >> shift & ((1u << (bits - known)) - 1)] += kept_weights[i];
    }
    double whole = above;  // less than before, possibly: the same sum in another order
    for (int i = kBins - 1; i >= 0; i--) whole += bins[i];
    const int digit = find_bin(bins, true, wanted < whole ? wanted : whole, above);
    prefix = prefix << (bits - known) | uint32_t(digit);
  }
  return float_of_order(prefix);
}

// Divides the row by its temperature, finds the limit of its filters among the tokens that `mask` allows, if it is not
// null, and draws. room: [4 * vocab_size].
template <class T>
static Best best_of_filtered(const T* logits, int64_t vocab_size, const Draw& draw, const uint8_t* mask, float* room) {
  constexpr int N = F32::N;
  const int64_t width = (vocab_size + kBlock - 1) / kBlock * kBlock;
  Best best = {-INFINITY, -INFINITY, 0};
  float *scores = room, *weights = room + width, *some = weights + width, top = -INFINITY;
  for (int64_t first = 0; first < vocab_size; first += kBlock) {
    load_block(logits + first, vocab_size - first, scores + first);
    float block_top = score_block(scores + first, draw.temperature, best.peak);
    if (mask) block_top = mask_block(scores + first, mask + first / 8, vocab_size - first);
    top = block_top > top ? block_top : top;
  }
  if (!(top - top == 0)) return best;  // a bad row, or no token is allowed
  float limit = top + draw.log_min_p;
  if (draw.top_k > 0 && draw.top_k < vocab_size) {
    const float kth = find_limit(scores, nullptr, width, top, limit, draw.top_k, some);
    limit = kth > limit ? kth : limit;
  }
  if (draw.top_p < 1) {
    double mass = 0;
    const F32 peak = splat(top), floor = splat(limit), zero = splat(0);
    for (int64_t first = 0; first < width; first += kBlock) {
      F32 block_mass = zero;
      for (int64_t i = first; i < first + kBlock; i += N) {
        const F32 score = load(scores + i);
        const F32 weight = select(is_above(floor, score), zero, exp(score - peak));
        store(weights + i, weight);
        block_mass = block_mass + weight;
      }
      mass += sum(block_mass);
    }
    const float last = find_limit(scores, weights, width, top, limit, double(draw.top_p) * mass, some);
    limit = last > limit ? last : limit;
  }
  for (int64_t first = 0; first < width; first += kBlock) {
    F32 most = splat(-INFINITY);
    for (int i = 0; i < kBlock; i += N) most = max(most, load(scores + first + i));
    const float block_top = largest(most);
    if (block_top >= limit && block_top + kLargestNoise > best.score) choose(scores + first, first, draw, limit, best);
  }
  return best;
}

static void draw_rows(int type, const void* logits, int64_t stride, int64_t rows, int64_t vocab_size, const Draw* draws,
                      const uint8_t* const* masks, float* room, int64_t* tokens, uint8_t* bad_rows) {
  const int64_t room_size = 4 * ((vocab_size + kBlock - 1) / kBlock * kBlock);
  with_type(type, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const auto finish = [&](int64_t row, const Best& best) {
      tokens[row] = best.token;
      bad_rows[row] = !(best.peak - best.peak == 0);
    };
    const auto is_filtered = [&](const Draw& draw) {
      const bool has_top_k = draw.top_k > 0 && draw.top_k < vocab_size;
      return draw.temperature > 0 && (draw.top_p < 1 || draw.log_min_p > -INFINITY || has_top_k);
    };
    const auto draw_row = [&](int64_t row) {
      const T* first = (const T*)logits + row * stride;
      const uint8_t* mask = masks ? masks[row] : nullptr;
      finish(row, is_filtered(draws[row])
                      ? best_of_filtered(first, vocab_size, draws[row], mask, room + omp_get_thread_num() * room_size)
                      : best_of(first, 0, vocab_size, draws[row], mask));
    };
    if (rows >= omp_get_max_threads() || vocab_size <= kDrawGrain) {
      parallel_for(rows, grain_of(vocab_size, kDrawGrain), draw_row);
      return;
    }
    for (int64_t row = 0; row < rows; row++) {  // few rows: the threads share each
      if (is_filtered(draws[row])) {
        draw_row(row);
        continue;
      }
      const T* first = (const T*)logits + row * stride;
      Best found[kMostPieces];
      const int64_t least = (vocab_size + kMostPieces - 1) / kMostPieces;
      const int64_t size = ((least > kDrawGrain / 2 ? least : kDrawGrain / 2) + kBlock - 1) / kBlock * kBlock;
      const int64_t pieces = (vocab_size + size - 1) / size;
      parallel_for(pieces, 1, [&](int64_t piece) {
        const int64_t begin = piece * size, end = begin + size;
        found[piece] = best_of(first, begin, end < vocab_size ? end : vocab_size, draws[row], masks ? masks[row] : nullptr);
      });
      Best best = found[0];
      for (int64_t piece = 1; piece < pieces; piece++) {
        const Best& other = found[piece];
        best.peak = other.peak > best.peak ? other.peak : best.peak;
        if (other.score > best.score) {
          best.score = other.score;
          best.token = other.token;
        }
      }
      finish(row, best);
    }
  });
}

}  // namespace tiercel::TIERCEL_CLASS
