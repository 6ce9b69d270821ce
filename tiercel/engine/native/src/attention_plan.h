// Cuts the attention of a step into pieces of work for the threads.
#pragma once
#include <cstdlib>

#include "kernels.h"
#include "parallel.h"

namespace tiercel {

constexpr int64_t kPartKeys = 512;  // contexts are computed in parts of this size, whose results are merged in order
constexpr int64_t kTileRows = 96;   // queries times heads of a group that share one packing of keys and values
constexpr int64_t kTileBytes = 128 << 10;
constexpr int64_t kPiecesPerThread = 6;
constexpr int64_t kPartialBytes = 64 << 20;  // limit of results of parts that wait to be merged

// Memory that grows and is never given back; one for each thread and use.
struct Scratch {
  void* memory;
  size_t size;
};
TIERCEL_INLINE void* borrow(Scratch& scratch, size_t size) {
  if (scratch.size < size) {
    free(scratch.memory);
    scratch.size = (size + size / 2 + 4095) / 4096 * 4096;
    scratch.memory = aligned_alloc(64, scratch.size);
    if (scratch.memory == nullptr) abort();
  }
  return scratch.memory;
}

// Tokens [token, token + tokens) of one slice and the heads that share the keys [head, head + heads).
struct AttentionTask {
  int32_t sequence, token, tokens, head, heads;
  int32_t part, parts;           // of the context, counted in kPartKeys
  int32_t all_parts, first_part; // of all tasks that compute the same rows
  int64_t partials;              // offset of the rows' partial results in floats; -1: the task computes all parts
  int32_t* unfinished;           // tasks of these rows that have not finished
};

struct AttentionPlan {
  AttentionTask* tasks;
  int64_t count;
  float* partials;
};

struct SequenceCost {
  int64_t cost;
  int64_t sequence;
};
static int by_descending_cost(const void* a, const void* b) {
  const SequenceCost &x = *(const SequenceCost*)a, &y = *(const SequenceCost*)b;
  if (x.cost != y.cost) return x.cost < y.cost ? 1 : -1;
  return x.sequence < y.sequence ? -1 : 1;
}

// The first key that the query at `position` sees.
TIERCEL_INLINE int64_t first_key(const AttentionLayer& layer, int64_t position) {
  return layer.window > 0 && position >= layer.window ? position - layer.window + 1 : 0;
}

// The time of `rows` rows for `keys` keys, in arbitrary units: packing takes as long as eight rows.
TIERCEL_INLINE int64_t cost_of(int64_t rows, int64_t heads, int64_t keys) { return (rows + 8 * heads) * (keys + 64); }

// Returns the tasks of a step, costly sequences first. `row_floats`: floats of a row's partial result; `head_bytes`: of a
// key and a value. The plan uses memory of the calling thread until its next call. How tasks are cut never changes a result.
static inline __attribute__((always_inline)) AttentionPlan plan_attention(const AttentionStep& step, const AttentionLayer& layer,
                                                                         int64_t row_floats, int64_t head_bytes) {
  static thread_local Scratch cost_memory, task_memory, counter_memory, partial_memory;
  const int64_t group = layer.heads / layer.kv_heads;
  const int64_t tile_tokens = kTileRows / group > 0 ? kTileRows / group : 1;
  SequenceCost* costs = (SequenceCost*)borrow(cost_memory, step.sequences * sizeof(SequenceCost));
  int64_t total = 0, tiles = 0;
  for (int64_t s = 0; s < step.sequences; s++) {
    const int64_t length = step.query_starts[s + 1] - step.query_starts[s], context = step.context_lengths[s];
    const int64_t keys = context - first_key(layer, context - length);
    costs[s] = {cost_of(length * layer.heads, layer.kv_heads * ((length + tile_tokens - 1) / tile_tokens), keys), s};
    total += costs[s].cost;
    tiles += (length + tile_tokens - 1) / tile_tokens;
  }
  const int64_t threads = omp_get_max_threads();
  if (threads > 1) qsort(costs, step.sequences, sizeof(SequenceCost), by_descending_cost);
  const int64_t goal = threads > 1 ? total / (threads * kPiecesPerThread) + 1 : total + 1;

  // Rows are cut into at most 2 * (cost / goal + 1) tasks, so there are at most this many of them.
  const int64_t most = 2 * (tiles * layer.kv_heads + threads * kPiecesPerThread) + 16;
  AttentionTask* tasks = (AttentionTask*)borrow(task_memory, most * sizeof(AttentionTask));
  int32_t* counters = (int32_t*)borrow(counter_memory, most * sizeof(int32_t));
  int64_t count = 0, splits = 0, floats = 0;
  for (int64_t i = 0; i < step.sequences; i++) {
    const int64_t s = costs[i].sequence, length = step.query_starts[s + 1] - step.query_starts[s];
    const int64_t before = step.context_lengths[s] - length;
    for (int64_t tile = (length + tile_tokens - 1) / tile_tokens - 1; tile >= 0; tile--) {
      const int64_t token = tile * tile_tokens, tokens = length - token < tile_tokens ? length - token : tile_tokens;
      const int64_t from = first_key(layer, before + token), to = before + token + tokens;
      const int64_t first_part = from / kPartKeys, parts = (to - 1) / kPartKeys + 1 - first_part;
      int64_t heads = 1;
      if (tokens * group <= 16) {  // few rows: read the keys of all heads as they lie, as far as a tile fits the L2 cache
        const int64_t fitting = kTileBytes / (64 * head_bytes);
        heads = fitting < 1 ? 1 : fitting < layer.kv_heads ? fitting : layer.kv_heads;
      }
      const int64_t wanted = cost_of(tokens * group * heads, heads, to - from) / goal + 1;
      const int64_t pieces = wanted < parts ? wanted : parts;
      if (pieces < wanted && heads > 1) {
        const int64_t cuts = (wanted + pieces - 1) / pieces;
        heads = (layer.kv_heads + cuts - 1) / cuts;
      }
      for (int64_t head = 0; head < layer.kv_heads; head += heads) {
        const int64_t used = layer.kv_heads - head < heads ? layer.kv_heads - head : heads;
        const int64_t needed = parts * used * group * tokens * row_floats;
        AttentionTask task = {int32_t(s), int32_t(token), int32_t(tokens), int32_t(head), int32_t(used),
                              int32_t(first_part), int32_t(parts), int32_t(parts), int32_t(first_part), -1, nullptr};
        if (pieces > 1 && (floats + needed) * 4 <= kPartialBytes) {
          task.partials = floats;
          task.unfinished = counters + splits++;
          floats += needed;
          *task.unfinished = 0;
          for (int64_t piece = 0; piece < pieces; piece++) {
            const int64_t start = parts * piece / pieces, end = parts * (piece + 1) / pieces;
            task.part = int32_t(first_part + start);
            task.parts = int32_t(end - start);
            tasks[count++] = task;
            ++*task.unfinished;
          }
        } else {
          tasks[count++] = task;
        }
      }
    }
  }
  return {tasks, count, (float*)borrow(partial_memory, floats * 4 + 64)};
}

}  // namespace tiercel
