// The attention of a layer: from the rows of its queries, keys and values to its output, through the cache.
#pragma once

#include "worker.h"

namespace {

// Number: of the cache.
template <typename Number>
struct AttentionLayer : Worker {
  const Attention& a;

  // From `normed` to y.
  void run() const {
    const int64_t in_width = a.inputs[0].width, inputs_width = a.inputs_width();
    for (int64_t i = 0, at = 0; i < a.num_inputs; at += a.inputs[i].num_channels, i++) {
      product(rows_of(b.normed, in_width, b.number), a.inputs[i], &b.inputs[at], inputs_width);
    }
    wait();
    place();
    wait();
    attend();
    wait();
    round(b.attended, a.q_width());
    product(rows_of(b.attended, a.q_width(), b.number), a.out, b.y.get(), m.hidden);
    wait();
  }

  // Norms queries and keys and applies RoPE; stores keys and values.
  void place() const {
    const int64_t H = a.num_heads, G = a.is_shared ? 0 : a.num_kv_heads, D = a.head_dim, inputs_width = a.inputs_width();
    if (a.norms_whole_rows) {
      for (int64_t t = thread; t < b.number; t += num_threads) {
        float* q = &b.inputs[t * inputs_width];
        a.query_norm.apply(q, H * D, q);
        a.key_norm.apply(q + a.key_at(0), G * D, q + a.key_at(0));
      }
      wait();
    }
    for (int64_t i = thread; i < b.number * (H + G); i += num_threads) {
      const int64_t t = i / (H + G), h = i % (H + G);
      const Token& token = b.tokens[t];
      float* x = &b.inputs[t * inputs_width + (h < H ? a.query_at(h) : a.key_at(h - H))];
      if (h >= H && a.values_are_keys) std::copy_n(x, D, x + G * D);
      if (!a.norms_whole_rows) (h < H ? a.query_norm : a.key_norm).apply(x, D, x);
      if (a.rope >= 0) apply_rope(x, m.ropes[a.rope], b.cos_sin_of(t, a.rope));
      if (h < H && a.temperature_scale != 0.0) {
        const double spans = std::floor(token.position / a.temperature_floor_scale);
        const float factor = 1.0f + static_cast<float>(a.temperature_scale) * logarithm(1.0 + spans);
        for (int64_t i = 0; i < D; i++) x[i] *= factor;
      }
      if (h < H) continue;
      a.value_norm.apply(x + G * D, D, x + G * D);
      const int64_t at = ((token.row * b.batch.row_places + token.place) * G + h - H) * D;
      store_finite(x, D, static_cast<Number*>(b.batch.stores[a.store]) + at, token);
      store_finite(x + G * D, D, static_cast<Number*>(b.batch.stores[a.store + 1]) + at, token);
    }
  }

  static void apply_rope(float* x, const Rope& rope, const float* cosines) {
    const int64_t half = rope.width / 2;
    const float* sines = cosines + half;
    const int64_t distance = rope.is_interleaved ? 1 : half, step = rope.is_interleaved ? 2 : 1;
    for (int64_t i = 0; i < half; i++) {
      float *first = x + i * step, *second = first + distance;
      const float a = *first, c = *second;
      *first = a * cosines[i] - c * sines[i];
      *second = c * cosines[i] + a * sines[i];
    }
  }

  // A group of tasks at a time, so that what is kept does not grow with the sequence.
  void attend() const {
    const Tasks& tasks = *b.tasks_of(a);
    const int64_t number = tasks.list.size();
    float* queries = scratch<float>();
    std::fill_n(queries, MAX_QUERIES * b.padded(a.head_dim), 0.0f);
    for (int64_t begin = 0, end; begin < number; begin = end) {
      if (begin && tasks.has_parts) wait();
      for (end = begin; end < number && (end == begin || tasks.list[end].kept); end++) {
        const Task& task = tasks.list[end];
        const int64_t part = (thread + num_threads - task.kept % num_threads) % num_threads;
        for (int64_t p = part; p < task.num_parts; p += num_threads) attend(task, p, queries);
      }
      if (!tasks.has_parts) continue;
      wait();
      for (int64_t i = begin + thread; i < end; i += num_threads) {
        if (tasks.list[i].num_parts > 1) gather(tasks.list[i]);
      }
    }
  }
  void attend(const Task& task, int64_t p, float* queries) const {
    const int64_t D = a.head_dim, padded = b.padded(D), shared = a.num_heads / a.num_kv_heads;
    const int64_t row = b.tokens[task.first / shared].row, begin = (task.part + p) * PLACES;
    const int64_t at = ((row * b.batch.row_places + begin) * a.num_kv_heads + task.kv_head) * D;
    Part<Number> part{queries, padded, D, static_cast<Number*>(b.batch.stores[a.store]) + at,
                      static_cast<Number*>(b.batch.stores[a.store + 1]) + at, a.num_kv_heads * D, {}, {},
                      static_cast<float>(a.scale), static_cast<float>(a.softcap), kept(task, p)};
    for (int64_t q = 0; q < task.number; q++) {
      const int64_t t = (task.first + q) / shared;
      const Visible places = visible(a.mask, b.tokens[t]);
      std::copy_n(&b.inputs[t * a.inputs_width() + a.query_at(task.head(q, shared))], D, &queries[q * padded]);
      part.ends[q] = std::clamp<int64_t>(places.end - begin, 0, PLACES);
      part.begins[q] = std::clamp<int64_t>(places.begin - begin, 0, part.ends[q]);
    }
    switch (task.number) {
      case 1: part.template attend<1>(); break;
      case 2: part.template attend<2>(); break;
      case 3: part.template attend<3>(); break;
      case 4: part.template attend<4>(); break;
      case 5: part.template attend<5>(); break;
      case 6: part.template attend<6>(); break;
    }
    if (task.num_parts == 1) gather(task);
  }
  float* kept(const Task& task, int64_t p) const { return &b.kept[(task.kept + p) * MAX_QUERIES * b.kept_width(a)]; }
  void gather(const Task& task) const {
    const int64_t shared = a.num_heads / a.num_kv_heads, kept_width = b.kept_width(a);
    for (int64_t q = 0; q < task.number; q++) {
      const float* parts = kept(task, 0) + q * kept_width;
      const int64_t t = (task.first + q) / shared, head = task.head(q, shared), D = a.head_dim;
      float* to = &b.attended[t * a.q_width() + head * D];
      const float* sink = a.sinks == nullptr ? nullptr : a.sinks + head;
      combine(parts, task.num_parts, MAX_QUERIES * kept_width, D, sink, to);
      if (!a.is_gated) continue;
      const float* gate = &b.inputs[t * a.inputs_width() + a.query_at(head) + D];
      each(to, D, [=](int64_t i, Floats values) { return values * sigmoid(load_to(gate, i, D)); });
    }
  }
};

}  // namespace
