// Mixers with a state S of each head that mixes all earlier tokens, or that convolve the last few. Queries q, keys k and
// values v are convolved, too; a and b are numbers of a head and a token.
//
//   gated delta rule (Yang et al. 2412.06464, equation 10):  S <- a S + k d^T,  d = b (v - a S^T k);  output S^T q
//   Mamba-2 (Dao and Gu 2405.21060, section 7):              S <- a S + k d^T,  d = b v;              S^T q + skip v
//   short convolution between two gates (LFM2)
//
// A state cannot be cropped, so that of a sequence waits at an *anchor*: it has consumed the tokens before that place.
// Beside it the inputs of the last RING tokens are kept by place, as keys are. A forward starts from the anchor's state,
// consumes the kept inputs of the tokens up to its own (*replays* them: no product with a matrix), and then its own. So
// rejected tokens leave nothing behind: their inputs are overwritten.
//
// States advance token by token, by the same operations in the same order: the state after a token has the same bits
// however it was reached.
#pragma once

#include <algorithm>
#include <vector>

#include "model.h"

namespace {

constexpr int64_t RING = 64;   // WINDOW of runtime/cache_shapes.py
constexpr int64_t STRIDE = 8;  // a state that is this far behind moves on, as in runtime/cache.py
constexpr int64_t MAX_KERNEL_SIZE = 8;
constexpr int COLS = NUM_REGISTERS == 32 && LANES < 16 ? 4 : 2;  // vectors of a state's columns in one loop

// Tokens of a sequence in a block, with those before them that are replayed.
struct Span {
  int64_t row, token, number;  // token: of the block, its first
  int64_t first;               // place of that token
  int64_t begin;               // of the sequence's first token in the forward, before which all are committed
  int64_t anchor, next;        // next: where the anchor is after the block
  int64_t mixed;               // the first of its rows, from the anchor on

  int64_t end() const { return first + number; }
};

// Whether a sequence whose state is at an anchor can go on at a place.
INLINE bool is_reached(int64_t anchor, int64_t place, int64_t kernel_size) {
  return place == 0 || (anchor <= place && place - anchor + kernel_size - 1 <= RING);
}

// Where the anchor of a span goes. Inputs that are overwritten must lie before it.
INLINE int64_t next_anchor(const Span& span, int64_t kernel_size, bool has_states, bool is_final, bool is_ahead) {
  int64_t next = span.anchor;
  if (has_states && !is_ahead && span.begin - span.anchor >= STRIDE) next = span.begin;
  if (has_states && is_final) next = span.end();
  return std::max(next, span.end() - (RING - kernel_size + 1));
}

// Inputs of a sequence by place: those in the ring, then a block's own.
struct Inputs {
  const float *ring, *own;
  int64_t first, ring_width, own_width;
  const float* at(int64_t place) const {
    return place < first ? ring + place % RING * ring_width : own + (place - first) * own_width;
  }
};

// Convolution of some channels at a place; `change(i, sums)` is stored.
template <typename Change>
INLINE void convolve(const Recurrence& r, const Inputs& inputs, int64_t place, int64_t begin, int64_t number, float* to,
                     Change change) {
  const float* rows[MAX_KERNEL_SIZE];
  const int64_t skipped = std::max<int64_t>(0, r.kernel_size - 1 - place);  // before the sequence
  for (int64_t j = skipped; j < r.kernel_size; j++) rows[j] = inputs.at(place - r.kernel_size + 1 + j) + begin;
  each(to, number, [&](int64_t i, Floats) __attribute__((always_inline)) {
    Floats sum = r.conv_bias == nullptr ? Floats{} : load_to(r.conv_bias + begin, i, number);
    for (int64_t j = skipped; j < r.kernel_size; j++) {
      sum = multiply_add(load_to(rows[j], i, number), load_to(r.conv_weight + j * r.conv_width + begin, i, number), sum);
    }
    return change(i, sum);
  });
}

// One unit of the work on the inputs of a token: a head's queries, keys or values, or all a and b. A row of results is
// what is convolved, then a, then b.
INLINE void mix(const Recurrence& r, const Inputs& inputs, int64_t place, int64_t unit, float* to) {
  const int64_t G = r.num_groups, H = r.num_heads, D = r.key_width;
  if (unit == 2 * G + H) {
    float *a = to + r.conv_width, *b = a + H;
    const float* given = inputs.at(place) + r.conv_width;
    if (place < inputs.first) {
      std::copy_n(given, 2 * H, a);
      return;
    }
    const float* dts = r.kind == Recurrence::DELTA ? given + H : given;
    for (int64_t h = 0; h < H; h++) {
      const float dt = std::max(softplus(dts[h] + r.dt_bias[h]), static_cast<float>(r.dt_min));
      a[h] = exponential(-dt * exponential(broadcast(r.a_log[h])))[0];
      b[h] = r.kind == Recurrence::DELTA ? sigmoid(broadcast(given[h]))[0] : dt;
    }
    return;
  }
  const bool is_value = unit >= 2 * G, is_query = unit < G;
  const int64_t begin = is_value ? r.value_at(unit - 2 * G) : is_query ? r.query_at(unit) : r.key_at(unit - G);
  const int64_t number = is_value ? r.value_width : D;
  float* x = to + begin;
  convolve(r, inputs, place, begin, number, x, [](int64_t, Floats sums) __attribute__((always_inline)) {
    return silu(sums);
  });
  if (is_value || r.kind != Recurrence::DELTA) return;
  const float squares = sum_over(number, [=](int64_t i, Floats sum) __attribute__((always_inline)) {
    const Floats values = load_to(x, i, number);
    return multiply_add(values, values, sum);
  });
  const float inverse = 1.0f / std::sqrt(squares + 1e-6f);
  const float scale = is_query ? 1.0f / std::sqrt(static_cast<float>(D)) : 1.0f;
  each(x, number, [=](int64_t, Floats values) __attribute__((always_inline)) { return values * inverse * scale; });
}

// Some columns of a head's state, in whole vectors [num_rows, COLS * LANES].
struct Columns {
  float* numbers;
  int64_t num_rows;

  // Loads `number` columns of a state [num_rows, stride], or zeros. Returns S^T k in `sums`.
  INLINE_MEMBER void load_from(const float* state, int64_t stride, int64_t number, const float* key, Floats* sums) const {
    UNROLLED for (int c = 0; c < COLS; c++) sums[c] = Floats{};
    for (int64_t i = 0; i < num_rows; i++) {
      const Floats k = broadcast(key[i]);
      UNROLLED for (int c = 0; c < COLS; c++) {
        const Floats values = state == nullptr ? Floats{} : part(state + i * stride, c, number);
        store(numbers + (i * COLS + c) * LANES, values);
        sums[c] = multiply_add(values, k, sums[c]);
      }
    }
  }
  INLINE_MEMBER void store_to(float* state, int64_t stride, int64_t number) const {
    for (int64_t i = 0; i < num_rows; i++) memcpy(state + i * stride, numbers + i * COLS * LANES, number * sizeof(float));
  }
  // S <- decay S + k d^T; the sums S^T q of the output, and S^T k' for the next key, in the same pass.
  template <bool HAS_OUTPUT, bool HAS_NEXT>
  INLINE_MEMBER void advance(float decay, const float* key, const Floats* added, const float* query, const float* next,
                             Floats* output, Floats* sums) const {
    const Floats factor = broadcast(decay);
    Floats found[COLS] = {}, of_next[COLS] = {};
    for (int64_t i = 0; i < num_rows; i++) {
      const Floats k = broadcast(key[i]);
      UNROLLED for (int c = 0; c < COLS; c++) {
        float* at = numbers + (i * COLS + c) * LANES;
        const Floats values = multiply_add(k, added[c], load(at) * factor);
        store(at, values);
        if constexpr (HAS_OUTPUT) found[c] = multiply_add(values, broadcast(query[i]), found[c]);
        if constexpr (HAS_NEXT) of_next[c] = multiply_add(values, broadcast(next[i]), of_next[c]);
      }
    }
    UNROLLED for (int c = 0; c < COLS; c++) {
      if constexpr (HAS_OUTPUT) output[c] = found[c];
      if constexpr (HAS_NEXT) sums[c] = of_next[c];
    }
  }
  // Vector c of `number` numbers, with zeros behind them.
  INLINE_MEMBER static Floats part(const float* from, int c, int64_t number) {
    const int64_t i = c * LANES;
    return i < number ? load_to(from, i, number) : Floats{};
  }
};

// A head over the tokens of a span.
//
//   rows: what `mix` has made of its tokens, from the anchor on.
//   state: of the head [key_width, value_width], at the anchor; it moves to the next.
//   outputs: of the block's tokens, `stride` apart.
//   columns: room for a state's.
INLINE void advance_head(const Recurrence& r, const Span& span, int64_t head, const float* rows, float* state,
                         float* outputs, int64_t stride, const Columns& columns) {
  const int64_t H = r.num_heads, group = head / (H / r.num_groups), width = r.kept_width();
  const int64_t at_key = r.key_at(group), at_query = r.query_at(group), at_a = r.conv_width + head;
  const bool is_delta = r.kind == Recurrence::DELTA;
  for (int64_t begin = 0; begin < r.value_width; begin += COLS * LANES) {
    const int64_t number = std::min<int64_t>(COLS * LANES, r.value_width - begin), at_value = r.value_at(head) + begin;
    Floats sums[COLS], values[COLS], added[COLS], output[COLS];
    columns.load_from(span.anchor ? state + begin : nullptr, r.value_width, number, rows + at_key, sums);
    for (int64_t place = span.anchor; place < span.end(); place++) {
      if (place == span.next && place > span.anchor) columns.store_to(state + begin, r.value_width, number);
      const float *row = rows + (place - span.anchor) * width, *key = row + at_key, *query = row + at_query;
      const float a = row[at_a], b = row[at_a + H];
      UNROLLED for (int c = 0; c < COLS; c++) {
        values[c] = Columns::part(row + at_value, c, number);
        added[c] = (is_delta ? multiply_add(broadcast(-a), sums[c], values[c]) : values[c]) * b;
      }
      const bool has_output = place >= span.first, has_next = is_delta && place + 1 < span.end();
      const float* next = key + width;
      if (has_output && has_next) columns.advance<true, true>(a, key, added, query, next, output, sums);
      else if (has_output) columns.advance<true, false>(a, key, added, query, next, output, sums);
      else if (has_next) columns.advance<false, true>(a, key, added, query, next, output, sums);
      else columns.advance<false, false>(a, key, added, query, next, output, sums);
      if (!has_output) continue;
      UNROLLED for (int c = 0; c < COLS && r.skips != nullptr; c++) {
        output[c] = multiply_add(broadcast(r.skips[head]), values[c], output[c]);
      }
      memcpy(outputs + (place - span.first) * stride + begin, output, number * sizeof(float));
    }
    if (span.next == span.end()) columns.store_to(state + begin, r.value_width, number);
  }
}

}  // namespace
