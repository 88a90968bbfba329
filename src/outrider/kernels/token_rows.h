// Rows of tokens that may be drawn, in the buffers of sampling/candidates.py, and their sums.
#pragma once

#include <algorithm>

#include "vectors.h"

namespace {

constexpr int64_t BLOCK = 64;
constexpr int64_t ALIGNMENT = 16;  // of a row in buffers: the most numbers of a vector

// Tokens by ascending id; the probability of one is its weight over the sum.
struct Row {
  const int32_t* ids;  // null: all tokens
  const float* weights;
  int64_t count;
  double sum;

  INLINE_MEMBER int64_t id(int64_t i) const { return ids ? ids[i] : i; }

  double probability(int64_t id) const {
    int64_t place = id;
    if (ids) {
      place = std::lower_bound(ids, ids + count, id) - ids;
      if (place < count && ids[place] != id) return 0.0;
    }
    return place < count ? weights[place] / sum : 0.0;
  }
};

// Buffers of a round. Each row has its tokens after those of the rows before it.
struct CandidateBuffers {
  int32_t* ids;
  float* weights;
  int64_t* starts;  // of each row: where its tokens start
  int64_t* counts;  // how many they are; -1: all of the vocabulary, without ids
  double* sums;
  int64_t vocab_size, num_rows, num_tokens;

  Row row(int64_t i) const {
    bool is_whole = counts[i] < 0;
    return {is_whole ? nullptr : ids + starts[i], weights + starts[i], is_whole ? vocab_size : counts[i], sums[i]};
  }

  // Add a row, whose tokens are written where the last row ends.
  void add(Row row) {
    starts[num_rows] = num_tokens;
    counts[num_rows] = row.ids ? row.count : -1;
    sums[num_rows++] = row.sum;
    num_tokens += (row.count + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  }
};

typedef double Doubles __attribute__((vector_size(32)));

INLINE void add(const float* from, Doubles& sums) {
  Four values;
  memcpy(&values, from, sizeof values);
  sums += __builtin_convertvector(values, Doubles);
}

INLINE void add(const double* from, Doubles& sums) {
  Doubles values;
  memcpy(&values, from, sizeof values);
  sums += values;
}

// The sum of at most a block, in sixteen lanes.
template <typename Number>
INLINE double sum_of_block(const Number* values, int64_t n) {
  Number padded[BLOCK] = {};
  if (n < BLOCK) {
    memcpy(padded, values, n * sizeof(Number));
    values = padded;
  }
  Doubles lanes[4] = {};
  UNROLLED for (int64_t i = 0; i < BLOCK; i += 16) {
    UNROLLED for (int j = 0; j < 4; j++) add(values + i + 4 * j, lanes[j]);
  }
  Doubles sums = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

INLINE float largest_lane(Floats values) {
  Four parts[LANES / 4];
  memcpy(parts, &values, sizeof values);
  for (int j = 1; j < LANES / 4; j++) parts[0] = parts[j] > parts[0] ? parts[j] : parts[0];
  return std::max(std::max(parts[0][0], parts[0][1]), std::max(parts[0][2], parts[0][3]));
}

}  // namespace
