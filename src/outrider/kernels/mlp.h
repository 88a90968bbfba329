// The MLP of a layer.
#pragma once

#include "worker.h"

namespace {

struct MlpLayer : Worker {
  const Mlp& mlp;
  const float* per_layer_inputs = nullptr;  // of the first token; the gate multiplies these or the products of `ups[1]`
  int64_t stride = 0;                       // of per_layer_inputs

  // From `normed` to y.
  void run() const {
    const int64_t width = mlp.down.width, H = m.hidden;
    const Rows rows = rows_of(b.normed, H, b.number);
    for (int64_t i = 0; i < mlp.num_ups; i++) product(rows, mlp.ups[i], &b.ups[i * b.number * width], width);
    if (mlp.output_gate.data != nullptr) product(rows, mlp.output_gate, b.output_gates.get(), 1);
    const float* factors = mlp.num_ups == 2 ? &b.ups[b.number * width] : per_layer_inputs;
    activate(mlp.gating, b.number, width, factors, mlp.num_ups == 2 ? width : stride);
    wait();
    round(b.ups, width);
    product(rows_of(b.ups, width, b.number), mlp.down, b.y.get(), H);
    wait();
    for (int64_t t = thread; t < b.number; t += num_threads) finish(t, &b.y[t * H]);
  }

  void finish(int64_t t, float* y) const {
    mlp.post_norm.apply(y, m.hidden, y);
    if (mlp.output_gate.data == nullptr) return;
    const float gate = sigmoid(broadcast(b.output_gates[t]))[0];
    for (int64_t i = 0; i < m.hidden; i++) y[i] *= gate;
  }
};

}  // namespace
