// Attention of few queries, which reads keys and values directly from the cache.
//
// A task takes the keys of one group of heads and of up to PLACES places, and up to MAX_QUERIES queries of the heads
// that share them: each key and value is loaded once for these queries. Results of several tasks are combined at the
// end, each by its weight.
//
// Parts begin at fixed places, and the order of each sum within a part is fixed; hidden places add zeros. So a result
// depends neither on other queries, nor on the number of places in view, nor on the number of threads.
#pragma once

#include <algorithm>

#include "functions.h"

namespace {

constexpr int COLUMNS = NUM_REGISTERS / 8;  // vectors of a value row in one loop
constexpr int64_t MAX_QUERIES = 6;
constexpr int64_t PLACES = 256;
constexpr int64_t PLACES_AHEAD = 8;  // to prefetch

INLINE void prefetch(const void* from, int64_t num_bytes) {
  for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i);
}

// Products of ROWS queries with NUMBER keys, in scores[r][0 .. NUMBER-1]. Queries are padded with zeros.
template <int ROWS, int NUMBER, typename Number>
INLINE void some_scores(const float* queries, int64_t padded, const Number* keys, int64_t stride, int64_t width,
                        float* scores) {
  Sum sums[ROWS][NUMBER];
  auto add = [&](int64_t i, int p, auto load_keys) __attribute__((always_inline)) {
    Floats column[NUMBER];
    UNROLLED for (int c = 0; c < NUMBER; c++) column[c] = load_keys(keys + c * stride, i);
    UNROLLED for (int r = 0; r < ROWS; r++) {
      Floats row = load(queries + r * padded + i);
      UNROLLED for (int c = 0; c < NUMBER; c++) sums[r][c].parts[p] = multiply_add(row, column[c], sums[r][c].parts[p]);
    }
  };
  int64_t i = 0;
  for (; i + STRIPE <= width; i += STRIPE) {
    UNROLLED for (int p = 0; p < PARTS; p++) {
      add(i + p * LANES, p, [](auto row, int64_t i) __attribute__((always_inline)) { return load(row + i); });
    }
  }
  UNROLLED for (int p = 0; p < PARTS; p++) {
    if (i + p * LANES >= width) break;
    add(i + p * LANES, p, [=](auto row, int64_t i) __attribute__((always_inline)) { return load_to(row, i, width); });
  }
  UNROLLED for (int r = 0; r < ROWS; r++) {
    Four totals = horizontal_sums<NUMBER>(sums[r]);
    UNROLLED for (int c = 0; c < NUMBER; c++) scores[r * PLACES + c] = totals[c];
  }
}

// Weighted sums of the values for ROWS rows of weights: NUMBER vectors, `num_last` numbers in the last one.
template <int ROWS, int NUMBER, typename Number>
INLINE void some_values(const float* weights, const Number* values, int64_t stride, int64_t first, int64_t end,
                        int64_t num_last, float* out, int64_t width) {
  Floats sums[ROWS][NUMBER] = {};
  for (int64_t j = first; j < end; j++) {
    const Number* row = values + j * stride;
    prefetch(row + PLACES_AHEAD * stride, NUMBER * LANES * sizeof(Number));
    Floats column[NUMBER];
    UNROLLED for (int c = 0; c < NUMBER; c++) {
      column[c] = num_last == LANES ? load(row + c * LANES) : load_first(row + c * LANES, num_last);
    }
    UNROLLED for (int r = 0; r < ROWS; r++) {
      Floats weight = broadcast(weights[r * PLACES + j]);
      UNROLLED for (int c = 0; c < NUMBER; c++) sums[r][c] = multiply_add(weight, column[c], sums[r][c]);
    }
  }
  UNROLLED for (int r = 0; r < ROWS; r++) {
    UNROLLED for (int c = 0; c < NUMBER; c++) {
      memcpy(out + r * width + c * LANES, &sums[r][c], num_last * sizeof(float));
    }
  }
}

// Queries, and the keys and values of one part of their sequence.
template <typename Number>
struct Part {
  const float* queries;  // [ROWS, padded]
  int64_t padded, width;
  const Number *keys, *values;  // at the first place of the part
  int64_t stride;               // from a place to the next
  int64_t begins[MAX_QUERIES], ends[MAX_QUERIES];  // places that a query sees, begin <= place < end
  float scale, softcap;                              // scores are softcap * tanh(score / softcap), unless softcap is 0
  float* results;  // of each query: sums of the values by the weights e^(score - largest), `largest`, and their total

  template <int ROWS>
  INLINE_MEMBER void attend() const {
    alignas(64) float scores[ROWS * PLACES];
    constexpr int KEYS = sums_beside(ROWS);  // in one loop
    const int64_t first = *std::min_element(begins, begins + ROWS) / KEYS * KEYS;
    const int64_t end = *std::max_element(ends, ends + ROWS);
    int64_t j = first;
    for (; j + KEYS <= end; j += KEYS) {
      UNROLLED for (int c = 0; c < KEYS; c++) prefetch(keys + (j + PLACES_AHEAD + c) * stride, width * sizeof(Number));
      some_scores<ROWS, KEYS>(queries, padded, keys + j * stride, stride, width, scores + j);
    }
    for (; j < end; j++) {
      some_scores<ROWS, 1>(queries, padded, keys + j * stride, stride, width, scores + j);
    }
    for (int r = 0; r < ROWS; r++) weigh(scores + r * PLACES, begins[r], ends[r], first, end, results + r * (width + 2));
    int64_t e = 0;
    for (; e + COLUMNS * LANES <= width; e += COLUMNS * LANES) {
      some_values<ROWS, COLUMNS>(scores, values + e, stride, first, end, LANES, results + e, width + 2);
    }
    for (; e < width; e += LANES) {
      const int64_t left = std::min<int64_t>(LANES, width - e);
      some_values<ROWS, 1>(scores, values + e, stride, first, end, left, results + e, width + 2);
    }
  }

 private:
  // Turns scores of the places from `first` to `end` into weights.
  INLINE_MEMBER void weigh(float* row, int64_t seen, int64_t seen_end, int64_t first, int64_t end, float* result) const {
    constexpr float HIDDEN = -__builtin_inff();
    const int64_t lowest = first / STRIPE * STRIPE, highest = (end + STRIPE - 1) / STRIPE * STRIPE;
    std::fill(row + lowest, row + first, 0.0f);
    std::fill(row + end, row + highest, 0.0f);
    Floats largest = Floats{} + HIDDEN;
    Sum total;
    for (int64_t i = lowest; i < highest; i += LANES) {
      Floats values = load(row + i) * scale;
      if (softcap != 0.0f) values = softcap * tanh(values / softcap);
      if (i < seen || i + LANES > seen_end) {
        UNROLLED for (int l = 0; l < LANES; l++) values[l] = i + l >= seen && i + l < seen_end ? values[l] : HIDDEN;
      }
      store(row + i, values);
      largest = values > largest ? values : largest;
    }
    float most = HIDDEN;
    UNROLLED for (int l = 0; l < LANES; l++) most = largest[l] > most ? largest[l] : most;
    const float base = most == HIDDEN ? 0.0f : most;
    for (int64_t i = lowest; i < highest; i += STRIPE) {
      UNROLLED for (int p = 0; p < PARTS; p++) {
        const Floats weights = exponential(load(row + i + p * LANES) - base);
        store(row + i + p * LANES, weights);
        total.parts[p] += weights;
      }
    }
    result[width] = most;
    result[width + 1] = horizontal_sums<1>(&total)[0];
  }
};

// Result of a query over all parts, which are `stride` numbers apart, and over a sink if there is one.
INLINE void combine(const float* parts, int64_t num_parts, int64_t stride, int64_t width, const float* sink, float* to) {
  float largest = sink == nullptr ? -__builtin_inff() : *sink, total = 0.0f;
  for (int64_t p = 0; p < num_parts; p++) largest = std::max(largest, parts[p * stride + width]);
  if (sink != nullptr) total = exponential(Floats{} + (*sink - largest))[0];
  std::fill(to, to + width, 0.0f);
  for (int64_t p = 0; p < num_parts; p++) {
    const float* part = parts + p * stride;
    // A row with NaN has no largest score; its total is NaN.
    const float weight = part[width] == largest ? 1.0f : exponential(Floats{} + (part[width] - largest))[0];
    total += weight * part[width + 1];
    for (int64_t e = 0; e < width; e++) to[e] += weight * part[e];
  }
  for (int64_t e = 0; e < width; e++) to[e] = total == 0.0f ? 0.0f : to[e] / total;
}

}  // namespace
