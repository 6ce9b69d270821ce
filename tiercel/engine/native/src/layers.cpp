// The layers of a decoder in one call: engine/models/decoder.py, `Layer.forward`, without returning to Python between
// kernels. While Python prepares the next kernel the memory is idle, and a decode step is bound by reading the weights.
#include "layers.h"

namespace tiercel {

static void multiply(const Kernels& kernels, const LinearWeights& w, const LayersRun& run, const void* x, void* y,
                     int64_t rows) {
  const int type = run.heads->type;
  if (w.quantized) {
    kernels.quantized_linear(w.quantized, type, x, w.packed, w.bias, y, rows, run.room);
  } else {
    kernels.linear(w.type, type, x, w.packed, w.bias, y, rows, w.outputs, w.inputs);
  }
}

static void run_layer(const Kernels& kernels, const LayerWeights& w, const LayersRun& run, void* kv, bool is_first) {
  const HeadsPlan& heads = *run.heads;
  const int type = heads.type;
  const int64_t tokens = heads.tokens, hidden = run.hidden_size, width = heads.heads * heads.head_dim;
  // The embeddings become the residual; every other norm adds the output before it.
  kernels.add_norm(type, is_first ? run.residual : run.x, is_first ? nullptr : run.residual, w.attention_norm, run.x, tokens,
                   hidden, w.attention_eps);
  multiply(kernels, w.qkv, run, run.x, run.qkv, tokens);
  kernels.store_heads(&heads, run.qkv, w.query_norm, w.key_norm, w.query_eps, w.key_eps, run.query, kv);
  kernels.attend(run.step, &w.attention, run.query, width, kv, run.attended);
  multiply(kernels, w.output, run, run.attended, run.x, tokens);
  kernels.add_norm(type, run.x, run.residual, w.mlp_norm, run.x, tokens, hidden, w.mlp_eps);
  // In pieces, so that the wide activations of the MLP stay in a cache.
  const int64_t row_bytes = hidden * (type == kFloat32 ? 4 : 2);
  for (int64_t first = 0; first < tokens; first += run.mlp_rows) {
    const int64_t rows = tokens - first < run.mlp_rows ? tokens - first : run.mlp_rows;
    char* x = (char*)run.x + first * row_bytes;
    multiply(kernels, w.gate_up, run, x, run.gate_up, rows);
    kernels.silu_mul(type, run.gate_up, run.activated, rows, w.down.inputs);
    multiply(kernels, w.down, run, run.activated, x, rows);
  }
}

}  // namespace tiercel

// Compute layers [0, count) with the kernels of a table, which may mix those of several classes.
extern "C" __attribute__((visibility("default"))) void tiercel_run_layers(const tiercel::Kernels* kernels,
                                                                         const tiercel::LayerWeights* layers, int64_t count,
                                                                         const tiercel::LayersRun* run) {
  for (int64_t i = 0; i < count; i++) tiercel::run_layer(*kernels, layers[i], *run, run->kv + i * run->layer_bytes, i == 0);
}
