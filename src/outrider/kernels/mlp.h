// The MLP of a layer.
#pragma once

#include "worker.h"

namespace {

struct MlpLayer : Worker {
  const Mlp& mlp;

  // From `normed` to y.
  void run() const {
    const int64_t width = mlp.down.width;
    for (int64_t i = 0; i < mlp.num_ups; i++) {
      product(of(b.normed, m.hidden, b.number), mlp.ups[i], &b.ups[i * b.number * width], width);
    }
    activate(share_of(width, me, n), mlp.num_ups == 2 ? &b.ups[b.number * width] : nullptr);
    wait();
    round(b.ups, width);
    product(of(b.ups, width, b.number), mlp.down, b.y.get(), m.hidden);
    wait();
  }

  void activate(Share share, const float* factors) const {
    const int64_t number = share.end - share.begin, width = mlp.down.width, activation = mlp.activation;
    for (int64_t t = 0; t < b.number; t++) {
      const float* factor = factors == nullptr ? nullptr : factors + t * width + share.begin;
      each(&b.ups[t * width + share.begin], number, [=](int64_t i, Floats values) {
        values = activated(activation, values);
        return factor == nullptr ? values : values * load_to(factor, i, number);
      });
    }
  }
};

}  // namespace
