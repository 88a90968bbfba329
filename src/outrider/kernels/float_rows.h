// Rows of float32, for products with weights in blocks (block_matmul.h).
//
// The weights are widened in registers.
#pragma once

#include "weight_chunks.h"

namespace {

template <typename Form>
struct FloatRows {
  typedef Form Block;
  FloatRows(const float* x, int64_t, int64_t width, int64_t) : x(x), width(width) {}

  // ROWS rows, from `row` on, in chunk number `i`, and the sums of their products with the channels.
  template <int ROWS>
  struct Tile {
    Tile(const FloatRows& x, int64_t i, int64_t row) : x(x.x + row * x.width + i * CHUNK), width(x.width) {}

    // With a group of the channels (`take_apart`).
    INLINE_MEMBER void add(int64_t g, const Words* wholes, const Floats* scales, const Floats& offset) {
      for (int j = 0; j < WORDS; j++) {
        const Floats scale = scales[j * NUM_SCALES<Block> / WORDS];
        UNROLLED for (int k = 0; k < 4; k++) {
          const Floats weights = numbers_of<Block>(wholes[j], k, scale, offset);
          const float* numbers = x + g * GROUP + 4 * j + k;
          UNROLLED for (int r = 0; r < ROWS; r++) {
            sums[r][k % PARTS] = multiply_add(weights, all_lanes(numbers[r * width]), sums[r][k % PARTS]);
          }
        }
      }
    }
    INLINE_MEMBER void add_to(Floats* all) const {
      UNROLLED for (int r = 0; r < ROWS; r++) {
        Floats sum = sums[r][0];
        UNROLLED for (int p = 1; p < PARTS; p++) sum += sums[r][p];
        all[r] += sum;
      }
    }

    static constexpr int PARTS = 2;  // of a sum, so that one row alone has enough to compute at once
    const float* x;
    const int64_t width;
    Floats sums[ROWS][PARTS] = {};
  };

  const float* const x;  // [T, I]
  const int64_t width;
};

}  // namespace
