// The MLP of a layer.
#pragma once

#include "worker.h"

namespace {

struct MlpLayer : Worker {
  const Mlp& mlp;
  const float* sides = nullptr;  // what the gate multiplies if it does not a matrix's products, of the first token
  int64_t stride = 0;            // of sides

  // From `normed` to y.
  void run() const {
    const int64_t width = mlp.down.width, H = m.hidden;
    for (int64_t i = 0; i < mlp.num_ups; i++) {
      product(of(b.normed, H, b.number), mlp.ups[i], &b.ups[i * b.number * width], width);
    }
    if (mlp.scale.data != nullptr) product(of(b.normed, H, b.number), mlp.scale, b.scales.get(), 1);
    const float* factors = mlp.num_ups == 2 ? &b.ups[b.number * width] : sides;
    activate(mlp.gating, b.number, width, factors, mlp.num_ups == 2 ? width : stride);
    wait();
    round(b.ups, width);
    product(of(b.ups, width, b.number), mlp.down, b.y.get(), H);
    wait();
    for (int64_t t = me; t < b.number; t += n) finish(t, &b.y[t * H]);
  }

  void finish(int64_t t, float* y) const {
    mlp.post_norm.apply(y, m.hidden, y);
    if (mlp.scale.data == nullptr) return;
    const float scale = logistic(all_lanes(b.scales[t]))[0];
    for (int64_t i = 0; i < m.hidden; i++) y[i] *= scale;
  }
};

}  // namespace
