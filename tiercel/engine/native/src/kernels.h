// The table of kernels: what a processor class offers, as plain function pointers.
//
// Every class fills one table. Python reads the tables by the order of the fields, so engine/native/table.py has the same
// fields in the same order; `kAbi` is raised whenever a field or an argument changes.
#pragma once
#include <cstdint>

namespace tiercel {

constexpr int kAbi = 9;

// How numbers are stored; computing is in float32 unless a kernel says otherwise.
enum Type : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kInt8 = 3, kFp8 = 4 };  // the last two: of a cache alone

// The parts of `store_heads` that are the same in every layer of a forward. Strides count elements.
struct HeadsPlan {
  int64_t tokens, heads, kv_heads, head_dim;
  int64_t slot_stride, row_stride, head_stride;  // of the cache
  const float *cos, *sin;                        // [tokens, head_dim / 2]
  const int64_t *slot_ids, *slot_offsets;        // [tokens]
  int type, kv_type;                             // of activations and of the cache
  int64_t scales;                                // from a slot to its scales, if the cache has 8 bits; see quantized_kv.h
};

// The sequences of a step; `ForwardState` in engine/forward/state.py describes the arrays.
struct AttentionStep {
  int64_t sequences;
  const int32_t* query_starts;     // [sequences + 1]
  const int32_t* context_lengths;  // [sequences]
  const int64_t* tables;           // [sequences, table_stride]
  int64_t table_stride;
};

// The shape and the parameters of a layer's attention. Strides count numbers, not bytes.
struct AttentionLayer {
  int64_t query_type, kv_type;  // Type
  int64_t heads, kv_heads, head_dim, block_size;
  int64_t slot_stride;  // of kv [slots, block_size, kv_heads, 2 * head_dim]; the other dimensions adjoin. In 8 bits the
                        // scales [block_size, kv_heads, 2] of a slot follow its numbers; see quantized_kv.h
  int64_t window;       // a query sees itself and the window - 1 keys before it; 0: all keys before it
  const float* sinks;   // [heads], an additional logit per head in the denominator; may be null
  float scale, softcap;  // softcap 0: none
};

// How a row is drawn; see engine/sampling/native.py. Temperature 0: the largest logit. Off are a log_min_p of -inf, a top_p
// of 1 or more, and a top_k that is 0 or not below the vocabulary.
struct Draw {
  int32_t key_1, key_2;  // of the noise
  float temperature, log_min_p, top_p;
  int32_t top_k;
};

// A packed weight of 4 or 8 bits: weight[o, order[i]] = scale[o, i / group] * value[o, i] + offset[o, i / group].
struct QuantizedLayout {
  int64_t outputs, inputs;
  int64_t group;         // inputs that share a scale: a multiple of 16 that divides `inputs`, or `inputs`
  const int32_t* order;  // [inputs], or null: the inputs are in their order
  int bits;              // 4: values of -8 to 7; 8: of -128 to 127, or float8_e4m3fn
  int is_float8;
  int scale_type;        // Type of scales and offsets
  int has_offsets;
  int rounds_x;   // whether x is rounded to 8 bits; values are integers of 8 bits then
  float x_scale;  // of all rows of the rounded x; 0: of each row its largest magnitude / 127
};

struct Kernels {
  // Bytes of a packed weight [outputs, inputs] of 16 bits.
  int64_t (*linear_bytes)(int64_t outputs, int64_t inputs);
  // Packs weight [outputs, inputs] of `type` (kBfloat16 or kFloat16) for `linear` and `embed` of the same class.
  void (*linear_pack)(int type, const void* weight, void* packed, int64_t outputs, int64_t inputs);
  // y = x . weight^T + bias with sums in float32. x [rows, inputs], y [rows, outputs] of `type`; bias [outputs] or null.
  // A row of y depends on its row of x alone, not on the number of rows or of threads.
  void (*linear)(int weight_type, int type, const void* x, const void* packed, const float* bias, void* y, int64_t rows,
                 int64_t outputs, int64_t inputs);
  // Rows of a packed weight by their numbers. out [count, inputs] of `type`. Returns 0 without a result if a number is
  // not in [0, outputs), else 1.
  int (*embed)(int weight_type, int type, const int64_t* tokens, const void* packed, void* out, int64_t count,
               int64_t outputs, int64_t inputs);

  // The same for weights of 4 and 8 bits. `room`: quantized_room bytes, aligned to 64.
  int64_t (*quantized_bytes)(const QuantizedLayout* layout);
  // values [outputs, inputs] of 8 bits, scales and offsets [outputs, inputs / group]; offsets are null if there are none.
  void (*quantized_pack)(const QuantizedLayout* layout, const int8_t* values, const float* scales, const float* offsets,
                         void* packed);
  int64_t (*quantized_room)(const QuantizedLayout* layout, int type, int64_t rows);
  void (*quantized_linear)(const QuantizedLayout* layout, int type, const void* x, const void* packed, const float* bias,
                           void* y, int64_t rows, void* room);
  int (*quantized_embed)(const QuantizedLayout* layout, int type, const int64_t* tokens, const void* packed, void* out,
                         int64_t count);

  // Root-mean-square norm of x + residual. residual may be null; if not, it receives the sum, rounded to the type.
  // x, residual, out [rows, size] of `type`; weight [size] of `type`.
  void (*add_norm)(int type, const void* x, void* residual, const void* weight, void* out, int64_t rows, int64_t size,
                   float eps);

  // silu(gate) * up. gate_up [rows, 2 * size], gate first; out [rows, size], both of `type`.
  void (*silu_mul)(int type, const void* gate_up, void* out, int64_t rows, int64_t size);

  // Rotate queries and keys, after a root-mean-square norm of each head if the weights are not null, and write keys and
  // values to the cache, rounded to its type.
  // qkv [tokens, (heads + 2 * kv_heads) * head_dim], queries first; weights [head_dim]; query [tokens, heads, head_dim];
  // kv: one layer of the cache, [slots, block_size, kv_heads, 2 * head_dim].
  void (*store_heads)(const HeadsPlan* plan, const void* qkv, const void* query_weight, const void* key_weight,
                      float query_eps, float key_eps, void* query, void* kv);

  // Causal attention over the cache, which holds the keys and values of this step already. query [tokens, heads, head_dim]
  // of `query_type`, its tokens `query_stride` numbers apart; out [tokens, heads, head_dim] of `query_type`, adjoining.
  void (*attend)(const AttentionStep* step, const AttentionLayer* layer, const void* query, int64_t query_stride,
                 const void* kv, void* out);

  // Draw one token per row: the largest of logits / temperature + noise among the tokens that the filters keep; of equal
  // ones, the lowest id. A row is bad if its largest logit is not finite, or a logit is a NaN.
  // logits [rows, vocab_size] of `type`, `stride` elements from row to row; room: for every thread four floats per token,
  // with the tokens rounded up to a multiple of 128; masks: for every row one bit per token that may be drawn, or null if
  // all may; null if all may in all rows.
  void (*draw_rows)(int type, const void* logits, int64_t stride, int64_t rows, int64_t vocab_size, const Draw* draws,
                    const uint8_t* const* masks, float* room, int64_t* tokens, uint8_t* bad_rows);
};

}  // namespace tiercel
