// The recurrence of a layer, or its convolution: from the rows of its inputs to its output, through the ring and the
// states of the cache (recurrence.h).
#pragma once

#include "worker.h"

namespace {

struct RecurrenceLayer : Worker {
  const Recurrence& r;

  // From `normed` to y.
  void run() const {
    for (int64_t i = 0, at = 0; i < r.num_inputs; at += r.inputs[i].num_channels, i++) {
      product(rows_of(b.normed, m.hidden, b.number), r.inputs[i], &b.inputs[at], r.inputs_width());
      finish(r.inputs[i].num_channels, at);
    }
    wait();
    if (r.num_heads) mix_tokens();
    else convolve_tokens();
    wait();
    remember();
    if (r.num_heads) {
      advance_heads();
      wait();
    }
    if (r.kind == Recurrence::MAMBA2) {
      gate_groups();
      wait();
    }
    round(b.attended, r.out.width);
    product(rows_of(b.attended, r.out.width, b.number), r.out, b.y.get(), m.hidden);
    wait();
  }

  // A thread's own channels of an input.
  void finish(int64_t num_channels, int64_t at) const {
    const Share share = share_of(num_channels, thread, num_threads);
    const int64_t number = share.end - share.begin;
    for (int64_t t = 0; t < b.number; t++) {
      float* x = &b.inputs[t * r.inputs_width() + at + share.begin];
      if (r.kind == Recurrence::CONVOLUTION && at == r.conv_width) {  // after the gate: what it lets through is convolved
        float* gate = x - r.conv_width;
        each(gate, number, [=](int64_t i, Floats values) { return values * load_to(x, i, number); });
        keep_finite(gate, number, b.tokens[t]);
      }
      keep_finite(x, number, b.tokens[t]);
    }
  }
  void keep_finite(float* x, int64_t number, const Token& token) const {
    if (b.batch.broken == nullptr) return;
    const float zeros = sum_over(number, [=](int64_t i, Floats sum) { return sum + 0.0f * load_to(x, i, number); });
    if (zeros != 0.0f) store_finite(x, number, x, token);
  }

  Inputs inputs_of(const Span& span) const {
    const float* own = &b.inputs[span.token * r.inputs_width() + r.conv_at()];
    return {ring_of(span), own, span.first, r.kept_width(), r.inputs_width()};
  }
  float* ring_of(const Span& span) const {
    return static_cast<float*>(b.batch.stores[r.ring]) + span.row * RING * r.kept_width();
  }
  float* mixed(int64_t row) const { return &b.mixed[row * r.kept_width()]; }

  void mix_tokens() const {
    const int64_t units = r.num_units(), number = b.span_of.size() * units;
    for (int64_t i = thread; i < number; i += num_threads) {
      const Span& span = b.spans[b.span_of[i / units]];
      mix(r, inputs_of(span), span.anchor + i / units - span.mixed, i % units, mixed(i / units));
    }
  }
  void convolve_tokens() const {
    const Share share = share_of(r.conv_width, thread, num_threads);
    const int64_t number = share.end - share.begin;
    for (const Span& span : b.spans) {
      for (int64_t t = span.token; t < span.token + span.number; t++) {
        const float* gate = &b.inputs[t * r.inputs_width() + 2 * r.conv_width + share.begin];
        float* to = &b.attended[t * r.conv_width + share.begin];
        convolve(r, inputs_of(span), b.tokens[t].place, share.begin, number, to,
                 [=](int64_t i, Floats sums) { return sums * load_to(gate, i, number); });
      }
    }
  }

  // Keeps the inputs of the last tokens, in place of those that no thread reads any more.
  void remember() const {
    for (const Span& span : b.spans) {
      for (int64_t i = std::max<int64_t>(0, span.number - RING); i < span.number; i++) {
        const int64_t t = span.token + i;
        if (t % num_threads != thread) continue;
        float* to = ring_of(span) + (span.first + i) % RING * r.kept_width();
        std::copy_n(&b.inputs[t * r.inputs_width() + r.conv_at()], r.conv_width, to);
        if (r.num_heads == 0) continue;
        const float* of_heads = mixed(span.mixed + span.first - span.anchor + i) + r.conv_width;
        std::copy_n(of_heads, 2 * r.num_heads, to + r.conv_width);
      }
    }
  }

  void advance_heads() const {
    const int64_t H = r.num_heads, V = r.value_width, number = b.spans.size() * H;
    const Columns columns{scratch<float>(), r.key_width};
    for (int64_t i = thread; i < number; i += num_threads) {
      const Span& span = b.spans[i / H];
      const int64_t head = i % H, state = (span.row * H + head) * r.key_width * V;
      float* outputs = &b.attended[span.token * r.out.width + head * V];
      advance_head(r, span, head, mixed(span.mixed), static_cast<float*>(b.batch.stores[r.states]) + state, outputs,
                   r.out.width, columns);
      if (r.kind == Recurrence::MAMBA2) continue;
      for (int64_t t = 0; t < span.number; t++) {
        float* output = outputs + t * r.out.width;
        const float* gate = &b.inputs[(span.token + t) * r.inputs_width() + r.gate_at() + head * V];
        r.out_norm.apply(output, V, output);
        each(output, V, [=](int64_t i, Floats values) { return values * silu(load_to(gate, i, V)); });
      }
    }
  }

  // Mamba-2: the norm of the groups of a token's output, after its gate.
  void gate_groups() const {
    const int64_t G = r.num_groups, width = r.out.width / G;
    for (int64_t i = thread; i < b.number * G; i += num_threads) {
      float* output = &b.attended[i * width];
      const float* gate = &b.inputs[i / G * r.inputs_width() + r.gate_at() + i % G * width];
      each(output, width, [=](int64_t i, Floats values) { return values * silu(load_to(gate, i, width)); });
      Norm norm = r.out_norm;
      norm.weight += i % G * width;
      norm.apply(output, width, output);
    }
  }
};

}  // namespace
