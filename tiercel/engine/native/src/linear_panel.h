// Packed weights: their layout, the rows of a weight by their numbers, and what every product does with a panel.
//
// Weights are packed in panels of `kPanel` outputs. bf16 panels hold pairs of inputs, [inputs / 2][kPanel][2], for the
// instructions that multiply pairs and because widening a pair takes one instruction for each half; fp16 panels are
// [inputs][kPanel]. The number of inputs is rounded up to an even one with zeros.
#pragma once
#include "parallel.h"

namespace tiercel::TIERCEL_CLASS {

constexpr int64_t kGroup = 8;             // panels that one thread claims at most
constexpr int64_t kGroupBytes = 128 << 10;  // of weights: at least this much is claimed at once if there is enough
constexpr int64_t kPieces = 4;            // for every thread at least

TIERCEL_INLINE int64_t panel_size(int64_t inputs) { return (inputs + 1) / 2 * 2 * kPanel; }
TIERCEL_INLINE int64_t count_panels(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }

// Where a panel has the weight of one of its outputs and an input.
TIERCEL_INLINE int64_t position(const bf16*, int64_t output, int64_t input) {
  return (input / 2 * kPanel + output) * 2 + input % 2;
}
TIERCEL_INLINE int64_t position(const fp16*, int64_t output, int64_t input) { return input * kPanel + output; }

static int64_t linear_bytes(int64_t outputs, int64_t inputs) { return count_panels(outputs) * panel_size(inputs) * 2; }

template <class W>
static void pack_weight(const W* weight, W* packed, int64_t outputs, int64_t inputs) {
  const int64_t size = panel_size(inputs);
  parallel_for(count_panels(outputs), 1, [&](int64_t panel) {
    W* target = packed + panel * size;
    memset(target, 0, size * sizeof(W));
    const int64_t first = panel * kPanel, count = outputs - first < kPanel ? outputs - first : kPanel;
    for (int64_t begin = 0; begin < inputs; begin += 64) {  // so that a cache holds what is written in turn
      const int64_t end = begin + 64 < inputs ? begin + 64 : inputs;
      for (int64_t i = 0; i < count; i++) {
        const W* row = weight + (first + i) * inputs;
        for (int64_t k = begin; k < end; k++) target[position(target, i, k)] = row[k];
      }
    }
  });
}

static void linear_pack(int type, const void* weight, void* packed, int64_t outputs, int64_t inputs) {
  if (type == kBfloat16) {
    pack_weight((const bf16*)weight, (bf16*)packed, outputs, inputs);
  } else {
    pack_weight((const fp16*)weight, (fp16*)packed, outputs, inputs);
  }
}

// Panels that a thread claims at once: `wanted`, but at most kGroup, and so few that every thread gets kPieces pieces.
TIERCEL_INLINE int64_t claimed_panels(int64_t panels, int64_t blocks, int64_t wanted) {
  const int64_t most = panels * blocks / (kPieces * omp_get_max_threads());
  wanted = wanted > kGroup ? kGroup : wanted;
  wanted = wanted > most ? most : wanted;
  return wanted < 1 ? 1 : wanted;
}

// Adds the bias to the sums of a panel, [rows][size], and stores them.
template <int size = kPanel, class T>
static void store_panel(const float* sums, const float* bias, T* y, int64_t stride, int64_t rows, int64_t count) {
  for (int64_t m = 0; m < rows; m++, sums += size, y += stride) {
    for (int64_t i = 0; i < count; i += F32::N) {
      const int rest = count - i < F32::N ? int(count - i) : F32::N;
      if (rest == F32::N) {
        store(y + i, bias ? load(sums + i) + load(bias + i) : load(sums + i));
      } else {
        const F32 one = load(sums + i);
        store_first(y + i, bias ? one + load_first(bias + i, rest) : one, rest);
      }
    }
  }
}

template <class W, class T>
static void gather_rows(const int64_t* tokens, const W* packed, T* out, int64_t count, int64_t inputs) {
  const int64_t size = panel_size(inputs);
  parallel_for(count, 4, [&](int64_t i) {
    const W* panel = packed + tokens[i] / kPanel * size;
    T* row = out + i * inputs;
    for (int64_t k = 0; k < inputs; k++) from_float(to_float(panel[position(panel, tokens[i] % kPanel, k)]), row[k]);
  });
}

static int embed(int weight_type, int type, const int64_t* tokens, const void* packed, void* out, int64_t count,
                 int64_t outputs, int64_t inputs) {
  for (int64_t i = 0; i < count; i++) {
    if (tokens[i] < 0 || tokens[i] >= outputs) return 0;
  }
  with_type(type, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    if (weight_type == kBfloat16) {
      gather_rows(tokens, (const bf16*)packed, (T*)out, count, inputs);
    } else {
      gather_rows(tokens, (const fp16*)packed, (T*)out, count, inputs);
    }
  });
  return 1;
}

}  // namespace tiercel::TIERCEL_CLASS
