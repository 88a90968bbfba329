// Experts of a layer: MLPs of which a router chooses some for each token (Shazeer et al. 2017).
//
// Rows of the same expert lie one after the other, so that a thread reads its part of a matrix once for all of them. What
// the experts of a token find is added in the order of its choices, whichever other tokens chose the same experts.
#pragma once

#include "worker.h"

namespace {

// Choices of all tokens, by expert. `scratch`: 2 (num_experts + 1 + number) numbers of memory.
struct ByExpert {
  ByExpert(const Choice* choices, int64_t number, int64_t num_experts, int64_t* scratch)
      : num_experts(num_experts), begins(scratch), order(scratch + num_experts + 1), places(order + number) {
    std::fill_n(begins, num_experts + 1, 0);
    for (int64_t i = 0; i < number; i++) begins[choices[i].expert + 1]++;
    for (int64_t e = 0; e < num_experts; e++) begins[e + 1] += begins[e];
    int64_t* next = places + number;
    std::copy_n(begins, num_experts, next);
    for (int64_t i = 0; i < number; i++) order[places[i] = next[choices[i].expert]++] = i;
  }

  // Calls `run(expert, begin, end)` with the places of each expert that is chosen.
  template <typename Run>
  void each(Run run) const {
    for (int64_t e = 0; e < num_experts; e++) {
      if (begins[e] < begins[e + 1]) run(e, begins[e], begins[e + 1]);
    }
  }

  const int64_t num_experts;
  int64_t* const begins;                // of the experts, and the end
  int64_t *const order, *const places;  // the choice at each place, and the place of each choice
};

struct ExpertsLayer : Worker {
  const Experts& experts;

  // From `normed` to y; or to what is added there.
  void run(bool adds) const {
    const int64_t H = m.hidden, R = experts.row_width(), width = experts.down.first.width;
    const int64_t E = experts.num_experts, A = experts.num_active, number = b.number * A;
    const bool is_latent = experts.latent_in.data != nullptr;
    if (experts.router_norm.kind) {
      norm_and_round(experts.router_norm);
    } else if (adds) {
      round(b.normed, H);  // again, since the MLP has rounded its own rows
    }
    product(rows_of(b.normed, H, b.number), experts.router, b.scores.get(), E);
    wait();
    for (int64_t t = thread; t < b.number; t += num_threads) route(&b.scores[t * E], &b.choices[t * A]);
    if (experts.norm.kind) {
      norm_and_round(experts.norm);
    } else {
      wait();
    }
    if (is_latent) {
      product(rows_of(b.normed, H, b.number), experts.latent_in, b.found.get(), R);
      wait();
    }
    const Buffer& rows = is_latent ? b.found : b.normed;
    const ByExpert by_expert(b.choices.get(), number, E, scratch<int64_t>());
    for (int64_t i = thread; i < number; i += num_threads) {
      std::copy_n(&rows[by_expert.order[i] / A * R], R, &b.gathered[i * R]);
      round_gathered(b.gathered, R, by_expert, i);
    }
    wait();
    by_expert.each([&](int64_t expert, int64_t begin, int64_t end) {
      for (int64_t i = 0; i < experts.num_ups; i++) {
        float* to = &b.ups[(i * number + begin) * width];
        product(expert_rows(b.gathered, R, begin, end), experts.ups[i].of(expert), to, width);
      }
    });
    activate(experts.gating, number, width, experts.num_ups == 2 ? &b.ups[number * width] : nullptr, width);
    wait();
    for (int64_t i = thread; m.num_digits && i < number; i += num_threads) round_gathered(b.ups, width, by_expert, i);
    if (m.num_digits) wait();
    by_expert.each([&](int64_t expert, int64_t begin, int64_t end) {
      product(expert_rows(b.ups, width, begin, end), experts.down.of(expert), &b.found[begin * R], R);
    });
    wait();
    for (int64_t t = thread; t < b.number; t += num_threads) gather(by_expert, t, R);
    if (is_latent) {
      wait();
      round(b.gathered, R);
      product(rows_of(b.gathered, R, b.number), experts.latent_out, b.found.get(), H);
      wait();
    }
    const Buffer& sums = is_latent ? b.found : b.gathered;
    for (int64_t t = thread; t < b.number; t += num_threads) {
      for (int64_t i = t * H; i < (t + 1) * H; i++) b.y[i] = adds ? b.y[i] + sums[i] : sums[i];
    }
  }

  // Rows at the places of an expert, and where they are rounded.
  Rows expert_rows(const Buffer& rows, int64_t width, int64_t begin, int64_t end) const {
    const RoundedChunk* chunks = m.num_digits ? &b.chunks[begin * num_chunks(width)] : nullptr;
    return {&rows[begin * width], chunks, end - begin, width, m.num_digits};
  }
  void round_gathered(const Buffer& rows, int64_t width, const ByExpert& by_expert, int64_t i) const {
    const int64_t expert = b.choices[by_expert.order[i]].expert, begin = by_expert.begins[expert];
    round_row(&rows[i * width], width, i - begin, by_expert.begins[expert + 1] - begin, begin * num_chunks(width));
  }

  // Chooses experts by scores, which become probabilities. NaN is chosen first.
  void route(float* scores, Choice* choices) const {
    const int64_t E = experts.num_experts;
    if (experts.is_sigmoid) {
      each(scores, E, [](int64_t, Floats values) { return sigmoid(values); });
    } else {
      softmax(scores, E);
    }
    int64_t* order = scratch<int64_t>();
    float *sums = reinterpret_cast<float*>(order + experts.num_groups), *left = sums + experts.num_groups;
    std::copy_n(scores, E, left);
    if (experts.correction_bias != nullptr) for (int64_t e = 0; e < E; e++) left[e] += experts.correction_bias[e];
    if (experts.num_groups > 1) leave_groups(left, sums, order);
    float total = experts.sum_epsilon;
    for (int64_t c = 0; c < experts.num_active; c++) {
      int64_t best = 0;
      for (int64_t e = 1; e < E; e++) {
        if (!std::isnan(left[best]) && !(left[e] <= left[best])) best = e;
      }
      left[best] = -__builtin_inff();
      choices[c] = {best, scores[best]};
      total += scores[best];
    }
    for (int64_t c = 0; c < experts.num_active; c++) {
      float& weight = choices[c].weight;
      if (experts.is_normalized) weight /= total;
      weight *= static_cast<float>(experts.scale);
      if (experts.scales != nullptr) weight *= experts.scales[choices[c].expert];
    }
  }

  // Leaves out all groups but those whose two largest scores have the largest sums: the first ones of equal sums. A group
  // with NaN stays first, as experts with NaN do: it tells that the router is broken.
  void leave_groups(float* scores, float* sums, int64_t* order) const {
    const int64_t G = experts.num_groups, number = experts.num_experts / G;
    for (int64_t g = 0; g < G; g++) {
      float largest = -__builtin_inff(), second = largest;
      for (int64_t e = g * number; e < (g + 1) * number; e++) {
        second = std::max(second, std::min(largest, scores[e]));
        largest = std::isnan(scores[e]) ? scores[e] : std::max(largest, scores[e]);  // which keeps a NaN
      }
      sums[g] = largest + second;
      order[g] = g;
    }
    auto wins = [&](int64_t one, int64_t other) {
      return sums[one] > sums[other] || (std::isnan(sums[one]) && !std::isnan(sums[other]));
    };
    std::sort(order, order + G, [&](int64_t one, int64_t other) {  // a stable one would allocate
      return wins(one, other) || (one < other && !wins(other, one));
    });
    for (int64_t i = experts.num_active_groups; i < G; i++) {
      std::fill_n(&scores[order[i] * number], number, -__builtin_inff());
    }
  }

  // Adds what a token's experts have found, with their weights.
  void gather(const ByExpert& by_expert, int64_t t, int64_t width) const {
    float* sums = &b.gathered[t * width];
    for (int64_t c = 0; c < experts.num_active; c++) {
      const int64_t choice = t * experts.num_active + c;
      const float *found = &b.found[by_expert.places[choice] * width], weight = b.choices[choice].weight;
      each(sums, width, [=](int64_t i, Floats values) __attribute__((always_inline)) {
        const Floats more = load_to(found, i, width);
        return c == 0 ? more * weight : multiply_add(more, broadcast(weight), values);
      });
    }
    experts.post_norm.apply(sums, width, sums);
  }
};

}  // namespace
