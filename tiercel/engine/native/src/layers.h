// The layers of a decoder in one call.
#pragma once
#include "kernels.h"

namespace tiercel {

// A packed weight [outputs, inputs]; bias [outputs] or null.
struct LinearWeights {
  const void* packed;
  const float* bias;
  const QuantizedLayout* quantized;  // null: 16 bits of `type`
  int64_t outputs, inputs;
  int type;
};

// Query and key weights are null if heads have no norm. Weights of norms are of the activations' type.
struct LayerWeights {
  const void *attention_norm, *mlp_norm, *query_norm, *key_norm;
  float attention_eps, mlp_eps, query_eps, key_eps;
  LinearWeights qkv, output, gate_up, down;
  AttentionLayer attention;
};

// The memory of one forward. Activations are of `heads->type`; T tokens, hidden size H.
struct LayersRun {
  const HeadsPlan* heads;
  const AttentionStep* step;
  void* residual;  // [T, H]: at first the embeddings, at the end the sum without the last layer's output
  void* x;         // [T, H]: at the end the last layer's output
  void *qkv, *query, *attended;  // [T, qkv.outputs], twice [T, heads * head_dim]
  void *gate_up, *activated;     // [mlp_rows, gate_up.outputs], [mlp_rows, down.inputs]
  void* room;                    // of the quantised products: as much as the largest of them needs, aligned to 64
  int64_t mlp_rows;              // tokens that the MLP computes at once
  char* kv;                      // the first layer of the cache
  int64_t layer_bytes;           // from a layer of the cache to the next one
  int64_t hidden_size;
};

}  // namespace tiercel
