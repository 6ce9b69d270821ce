// Paged attention: decodes, slices and mixed steps in one call. A part of every class: include it after a simd header.
//
// A row is one query of one head. Contexts are computed in parts of kPartKeys, and parts in tiles of kTileKeys, always cut at
// the same positions, with an online softmax (FlashAttention-2, arXiv 2307.08691, section 3.1) inside a part and a merge of
// parts in order. So a row's result depends on its own query and context alone: not on the slice it is computed in, not on
// other sequences and not on the number of threads.
#pragma once
#include "attention_plan.h"
#include "attention_tiles.h"

namespace tiercel::TIERCEL_CLASS {

// Running results of rows: the maximum of the scores, the sums of exp(score - maximum), and the weighted values.
struct RowState {
  float* maxima;   // [rows]
  float* sums;     // [rows, N] within a part, [rows] of merged parts
  float* outputs;  // [rows, width]
};

// Where the keys of a thread's current tile and of its next tile lie.
struct TileRows {
  const char* rows[2][kTileKeys];
  const bf16* scales[2][kTileKeys];  // of the keys and values of all heads, if the cache has 8 bits
  int now;
  bool is_located;
  const char* zeros;  // a row of the cache for keys that must not be read
};

struct TaskScratch {
  void* queries;                   // [rows, Math::Row of a query]
  uint32_t *keys, *values;         // packed tiles
  float* widened;                  // [kTileKeys, head_dim], for fp16, and for keys of 8 bits that are transposed
  float *key_scales, *value_scales;  // [kTileKeys] of a head, if the cache has 8 bits
  float* scores;                   // [8, kTileKeys]
  void* probabilities;             // [8, kTileKeys]
  RowState part, merged;
};

TIERCEL_INLINE void merge_row(RowState to, int64_t row, float maximum, float sum, const float* outputs, int64_t width) {
  const float before = to.maxima[row], after = before > maximum ? before : maximum;
  const float kept = expf(before - after), added = expf(maximum - after);
  to.maxima[row] = after;
  to.sums[row] = to.sums[row] * kept + sum * added;
  float* at = to.outputs + row * width;
  for (int64_t i = 0; i < width; i += F32::N)
    store(at + i, fma(load(at + i), splat(kept), load(outputs + i) * splat(added)));
}

template <class Math, class T>
struct PagedAttention {
  using Row = typename Math::Row;
  static constexpr int N = F32::N;

  const AttentionStep& step;
  const AttentionLayer& layer;
  const void* query;
  int64_t query_stride;
  const T* kv;
  void* out;
  int64_t group, width, key_words, query_size, row_floats, head_bytes;

  PagedAttention(const AttentionStep& step, const AttentionLayer& layer, const void* query, int64_t query_stride,
                 const void* kv, void* out)
      : step(step), layer(layer), query(query), query_stride(query_stride), kv((const T*)kv), out(out) {
    group = layer.heads / layer.kv_heads;
    width = (layer.head_dim + N - 1) / N * N;
    key_words = Math::kHasPairs ? layer.head_dim / 2 : layer.head_dim;
    query_size = sizeof(Row) == sizeof(float) && !is_dot() ? layer.head_dim : layer.head_dim / 2;
    row_floats = width + 2;
    head_bytes = 2 * layer.head_dim * int64_t(sizeof(T));
  }

  static constexpr bool is_dot() { return Math::kHasPairs && Math::kHalves == 1; }

  void run() const {
    const AttentionPlan plan = plan_attention(step, layer, row_floats, head_bytes);
    if (plan.count == 1 || omp_get_max_threads() == 1) {
      TileRows tile = prepare();
      for (int64_t i = 0; i < plan.count; i++)
        run_task(plan.tasks[i], i + 1 < plan.count ? plan.tasks + i + 1 : nullptr, plan.partials, tile);
      return;
    }
    int64_t claimed = 0;
#pragma omp parallel
    {
      // A thread claims its next task before it computes the current one, whose last tile fetches the next one's first.
      TileRows tile = prepare();
      int64_t i = __atomic_fetch_add(&claimed, 1, __ATOMIC_RELAXED);
      while (i < plan.count) {
        const int64_t next = __atomic_fetch_add(&claimed, 1, __ATOMIC_RELAXED);
        run_task(plan.tasks[i], next < plan.count ? plan.tasks + next : nullptr, plan.partials, tile);
        i = next;
      }
    }
  }

  TileRows prepare() const {
    static thread_local Scratch memory;
    const size_t size = layer.kv_heads * 2 * layer.head_dim * sizeof(T);
    TileRows tile;
    tile.now = 0;
    tile.is_located = false;
    tile.zeros = (const char*)memset(borrow(memory, size), 0, size);
    return tile;
  }

  int64_t position(const AttentionTask& task, int64_t token) const {
    const int64_t length = step.query_starts[task.sequence + 1] - step.query_starts[task.sequence];
    return step.context_lengths[task.sequence] - length + task.token + token;
  }

  TaskScratch borrow_scratch(int64_t rows) const {
    static thread_local Scratch memory;
    size_t size = 0;
    size_t offsets[11];
    const auto place = [&](int index, int64_t bytes) {
      offsets[index] = size;
      size += (bytes + 127) / 64 * 64;  // a line more than needed, so that arrays do not share their sets
    };
    place(0, rows * query_size * 4);
    place(1, key_words * kTileKeys * 4);
    place(2, kTileKeys * width * 4);
    place(3, kTileKeys * layer.head_dim * 4);
    place(4, 8 * kTileKeys * 4);
    place(5, 8 * kTileKeys * 4);
    place(6, rows * 4 * 2);
    place(7, rows * N * 4);
    place(8, rows * width * 4);
    place(9, rows * (width + 1) * 4);
    place(10, 2 * kTileKeys * 4);
    char* at = (char*)borrow(memory, size);
    TaskScratch s;
    s.queries = at + offsets[0];
    s.keys = (uint32_t*)(at + offsets[1]);
    s.values = (uint32_t*)(at + offsets[2]);
    s.widened = (float*)(at + offsets[3]);
    s.key_scales = (float*)(at + offsets[10]);
    s.value_scales = s.key_scales + kTileKeys;
    s.scores = (float*)(at + offsets[4]);
    s.probabilities = at + offsets[5];
    s.part = {(float*)(at + offsets[6]), (float*)(at + offsets[7]), (float*)(at + offsets[8])};
    float* merged = (float*)(at + offsets[9]);
    s.merged = {(float*)(at + offsets[6]) + rows, merged + rows * width, merged};
    if (width > layer.head_dim) memset(s.values, 0, kTileKeys * width * 4);
    return s;
  }

  void run_task(const AttentionTask& task, const AttentionTask* next, float* partials, TileRows& tile) const {
    const int64_t rows = task.heads * task.tokens * group;
    TaskScratch s = borrow_scratch(rows);
    copy_queries(task, (Row*)s.queries);
    clear(s.merged, rows, 1);
    const int64_t last = (int64_t(task.part) + task.parts) * kPartKeys, to = position(task, task.tokens - 1) + 1;
    const int64_t end = last < to ? last : to;
    if (!tile.is_located) locate(task, first_tile(task), tile.zeros, tile.rows[tile.now], tile.scales[tile.now]);
    tile.is_located = next != nullptr;
    bool is_begun = false;
    for (int64_t first = first_tile(task); first < end; first += kTileKeys) {
      if (!is_begun) clear(s.part, rows, N);
      is_begun = true;
      const char** following = tile.rows[tile.now ^ 1];
      const bf16** following_scales = tile.scales[tile.now ^ 1];
      Ahead ahead = Ahead::of(following, 0, 0, 0);
      if (first + kTileKeys < end) {
        const int64_t left = end - first - kTileKeys;
        locate(task, first + kTileKeys, tile.zeros, following, following_scales);
        ahead = Ahead::of(following, left < kTileKeys ? left : kTileKeys, task.head * head_bytes, task.heads * head_bytes);
      } else if (next != nullptr) {
        locate(*next, first_tile(*next), tile.zeros, following, following_scales);
        ahead = Ahead::of(following, kTileKeys, next->head * head_bytes, next->heads * head_bytes);
      }
      run_tile(task, first, end, tile.rows[tile.now], tile.scales[tile.now], s, ahead);
      tile.now ^= 1;
      if ((first + kTileKeys) % kPartKeys == 0 || first + kTileKeys >= end) {
        finish_part(task, first / kPartKeys, partials, s);
        is_begun = false;
      }
    }
    if (task.partials >= 0) {
      if (__atomic_sub_fetch(task.unfinished, 1, __ATOMIC_ACQ_REL) > 0) return;
      const float* from = partials + task.partials;  // this task is the last one of its rows
      for (int64_t part = 0; part < task.all_parts; part++)
        for (int64_t row = 0; row < rows; row++, from += row_floats)
          merge_row(s.merged, row, from[width], from[width + 1], from, width);
    }
    write_rows(task, s.merged);
  }

  int64_t first_tile(const AttentionTask& task) const {
    const int64_t from = first_key(layer, position(task, 0)), start = task.part * kPartKeys;
    return start > from ? start : from / kTileKeys * kTileKeys;
  }

  void finish_part(const AttentionTask& task, int64_t part, float* partials, TaskScratch& s) const {
    const int64_t rows = task.heads * task.tokens * group;
    for (int64_t row = 0; row < rows; row++) {
      const float sum = tiercel::TIERCEL_CLASS::sum(load(s.part.sums + row * N));
      const float* outputs = s.part.outputs + row * width;
      if (task.partials < 0) {
        merge_row(s.merged, row, s.part.maxima[row], sum, outputs, width);
        continue;
      }
      float* to = partials + task.partials + ((part - task.first_part) * rows + row) * row_floats;
      memcpy(to, outputs, width * 4);
      to[width] = s.part.maxima[row];
      to[width + 1] = sum;
    }
  }

  void clear(RowState state, int64_t rows, int64_t sums) const {
    for (int64_t row = 0; row < rows; row++) state.maxima[row] = kLowest;
    memset(state.sums, 0, rows * sums * 4);
    memset(state.outputs, 0, rows * width * 4);
  }

  int64_t token_index(const AttentionTask& task, int64_t token) const {
    return step.query_starts[task.sequence] + task.token + token;
  }

  void copy_queries(const AttentionTask& task, Row* to) const {
    for (int64_t head = 0; head < task.heads; head++)
      for (int64_t token = 0; token < task.tokens; token++)
        for (int64_t g = 0; g < group; g++, to += query_size) {
          const int64_t from = token_index(task, token) * query_stride + ((task.head + head) * group + g) * layer.head_dim;
          if constexpr (is_dot()) {
            memcpy(to, (const bf16*)query + from, layer.head_dim * 2);
          } else {
            with_type(int(layer.query_type), [&](auto* tag) {
              for (int64_t i = 0; i < layer.head_dim; i++) to[i] = to_float(((decltype(tag))query)[from + i]);
            });
          }
        }
  }

  // Fills in where the keys [first, first + kTileKeys) lie; a row of zeros for those that no query of the task sees.
  void locate(const AttentionTask& task, int64_t first, const char* zeros, const char** rows, const bf16** scales) const {
    const int64_t from = first_key(layer, position(task, 0)), to = position(task, task.tokens - 1) + 1;
    const int64_t size = layer.block_size, token_size = layer.kv_heads * 2 * layer.head_dim;
    const int64_t* table = step.tables + task.sequence * step.table_stride;
    for (int64_t k = 0; k < kTileKeys;) {
      const int64_t key = first + k;
      if (key < from || key >= to) {
        if constexpr (kIsQuantized<T>) scales[k] = (const bf16*)zeros;
        rows[k++] = zeros;
        continue;
      }
      const int64_t block = key / size, end = (block + 1) * size < to ? (block + 1) * size : to;
      const T* slot = kv + table[block] * layer.slot_stride;
      const T* row = slot + (key - block * size) * token_size;
      if constexpr (kIsQuantized<T>) {
        const bf16* scale = (const bf16*)(slot + size * token_size) + (key - block * size) * layer.kv_heads * 2;
        __builtin_prefetch(scale, 0, 2);
        for (int64_t i = key, at = k; i < end && at < kTileKeys; i++, at++, scale += layer.kv_heads * 2) scales[at] = scale;
      }
      for (int64_t i = key; i < end && k < kTileKeys; i++, k++, row += token_size) rows[k] = (const char*)row;
    }
  }

  void run_tile(const AttentionTask& task, int64_t tile, int64_t end, const char* const* keys, const bf16* const* scales,
                TaskScratch& s, Ahead& ahead) const {
    const int64_t count = end - tile < kTileKeys ? end - tile : kTileKeys, head_rows = task.tokens * group;
    // Three fifths of the lines are fetched in the products, the others while packing.
    const int64_t lines = (ahead.left * ahead.bytes / task.heads + 63) / 64;
    const int64_t steps = product_steps(head_rows);
    ahead.per_step = (lines * 3 / 5 + steps - 1) / steps;
    const int64_t rest = lines - ahead.per_step * steps;
    const int64_t while_packing = rest > 0 ? (rest + 2 * kTileKeys / N - 1) / (2 * kTileKeys / N) : 0;
    for (int64_t head = 0; head < task.heads; head++) {
      if constexpr (kIsQuantized<T>) read_scales(s, scales, task.head + head);
      pack(s, keys, (task.head + head) * head_bytes, count, ahead, while_packing);
      for (int64_t row = 0; row < head_rows;) {
        const int rows = next_block(head_rows - row);
        run_block(task, s, tile, row, head * head_rows + row, rows, ahead);
        row += rows;
      }
    }
  }

  int64_t product_steps(int64_t rows) const {
    int64_t steps = 0;
    while (rows > 0) {
      const int block = next_block(rows), columns = block_vectors(block) * N;
      steps += (kTileKeys + columns - 1) / columns * (query_size / Math::kHalves);
      steps += (width + columns - 1) / columns * (Math::kHasPairs ? kTileKeys / 2 : kTileKeys);
      rows -= block;
    }
    return steps;
  }

  void read_scales(TaskScratch& s, const bf16* const* scales, int64_t head) const {
    for (int64_t k = 0; k < kTileKeys; k++) {
      s.key_scales[k] = to_float(scales[k][head * 2]);
      s.value_scales[k] = to_float(scales[k][head * 2 + 1]);
    }
  }

  void pack(TaskScratch& s, const char* const* rows, int64_t offset, int64_t count, Ahead& ahead, int64_t lines) const {
    const int64_t value_offset = offset + layer.head_dim * int64_t(sizeof(T));
    if constexpr (kIsQuantized<T>) {
      pack_quantized_keys(rows, offset, layer.head_dim, count, (uint32_t*)s.widened, s.keys, kv, ahead, lines);
      pack_quantized_values(rows, value_offset, layer.head_dim, count, width, s.values, kv, ahead, lines);
    } else if constexpr (sizeof(T) == 2 && !Math::kHasPairs) {
      const char* widened[kTileKeys];
      for (int64_t k = 0; k < (count + N - 1) / N * N; k++) {
        float* to = s.widened + k * layer.head_dim;
        const T* from = (const T*)(rows[k] + offset);
        for (int64_t i = 0; i < layer.head_dim; i += N) {
          if (i + N <= layer.head_dim) {
            store(to + i, load(from + i));
          } else {
            store_first(to + i, load_first(from + i, int(layer.head_dim - i)), int(layer.head_dim - i));
          }
        }
        widened[k] = (const char*)to;
      }
      pack_keys(widened, 0, key_words, count, s.keys, ahead, lines);
      pack_values(rows, value_offset, layer.head_dim, count, width, s.values, kv, ahead, lines);
    } else {
      pack_keys(rows, offset, key_words, count, s.keys, ahead, lines);
      pack_values(rows, value_offset, layer.head_dim, count, width, s.values, kv, ahead, lines);
    }
  }

  // Adds a tile of keys to `rows` rows: those from `row` on among the rows of their head, `index` among all rows of the task.
  __attribute__((always_inline)) void run_block(const AttentionTask& task, TaskScratch& s, int64_t tile, int64_t row, int64_t index,
                                       int rows, Ahead& ahead) const {
    const int64_t first_position = position(task, row / group), last_position = position(task, (row + rows - 1) / group);
    if (tile > last_position || tile + kTileKeys <= first_key(layer, first_position)) return;
    const int64_t count = last_position + 1 - tile < kTileKeys ? last_position + 1 - tile : kTileKeys;
    const int64_t columns = (count + N - 1) / N * N;
    const Row* queries = (const Row*)s.queries + index * query_size;
    constexpr int64_t kProbabilities = is_dot() ? kTileKeys / 2 : kTileKeys;  // of a row, in numbers of Row
    Row* probabilities = (Row*)s.probabilities;
    multiply<Math>(rows, queries, query_size, s.keys, kTileKeys, columns, query_size / Math::kHalves, s.scores, kTileKeys,
                   false, ahead);
    const Softness how = {layer.scale, layer.softcap};
    for (int r = 0; r < rows; r++) {
      if constexpr (kIsQuantized<T>)
        for (int64_t c = 0; c < columns; c += N)
          store(s.scores + r * kTileKeys + c, load(s.scores + r * kTileKeys + c) * load(s.key_scales + c));
      const int64_t at = position(task, (row + r) / group);
      float scaling;
      float* maximum = s.part.maxima + index + r;
      *maximum = soften(s.scores + r * kTileKeys, columns, first_key(layer, at) - tile, at + 1 - tile, how, *maximum,
                        s.part.sums + (index + r) * N, kIsQuantized<T> ? s.value_scales : nullptr,
                        probabilities + r * kProbabilities, scaling);
      if (scaling != 1.f) {
        float* outputs = s.part.outputs + (index + r) * width;
        for (int64_t i = 0; i < width; i += N) store(outputs + i, load(outputs + i) * splat(scaling));
      }
    }
    const int64_t steps = Math::kHasPairs ? (count + 1) / 2 : count;
    multiply<Math>(rows, probabilities, kProbabilities, s.values, width, width, steps, s.part.outputs + index * width, width,
                   true, ahead);
  }

  void write_rows(const AttentionTask& task, RowState merged) const {
    int64_t row = 0;
    for (int64_t head = 0; head < task.heads; head++)
      for (int64_t token = 0; token < task.tokens; token++)
        for (int64_t g = 0; g < group; g++, row++) {
          const int64_t index = (task.head + head) * group + g;
          float sum = merged.sums[row], factor = 1.f;
          if (layer.sinks) {
            const float sink = layer.sinks[index], before = merged.maxima[row], after = before > sink ? before : sink;
            factor = expf(before - after);
            sum = sum * factor + expf(sink - after);
          }
          const F32 scaling = splat(factor / sum);
          const float* from = merged.outputs + row * width;
          with_type(int(layer.query_type), [&](auto* tag) {
            auto* to = (decltype(tag))out + (token_index(task, token) * layer.heads + index) * layer.head_dim;
            int64_t i = 0;
            for (; i + N <= layer.head_dim; i += N) store(to + i, load(from + i) * scaling);
            if (i < layer.head_dim) store_first(to + i, load(from + i) * scaling, int(layer.head_dim - i));
          });
        }
  }
};

// Attention over a cache whose numbers bfloat16 holds exactly.
template <class T>
static void attend_in_pairs(const AttentionStep& step, const AttentionLayer& layer, const void* query, int64_t query_stride,
                            const void* kv, void* out) {
#if defined(__AVX512BF16__)
  if (layer.query_type == kBfloat16) {
    PagedAttention<DotMath, T>(step, layer, query, query_stride, kv, out).run();
    return;
  }
#endif
  PagedAttention<WideningMath, T>(step, layer, query, query_stride, kv, out).run();
}

static void attend(const AttentionStep* step, const AttentionLayer* layer, const void* query, int64_t query_stride,
                   const void* kv, void* out) {
  if (layer->kv_type == kFloat32) {
    PagedAttention<FloatMath, float>(*step, *layer, query, query_stride, kv, out).run();
  } else if (layer->kv_type == kFloat16) {
    PagedAttention<FloatMath, fp16>(*step, *layer, query, query_stride, kv, out).run();
  } else if (layer->kv_type == kInt8) {
    attend_in_pairs<int8>(*step, *layer, query, query_stride, kv, out);
  } else if (layer->kv_type == kFp8) {
    attend_in_pairs<fp8>(*step, *layer, query, query_stride, kv, out);
  } else {
    attend_in_pairs<bf16>(*step, *layer, query, query_stride, kv, out);
  }
}

}  // namespace tiercel::TIERCEL_CLASS
