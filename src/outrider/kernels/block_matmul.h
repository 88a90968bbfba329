// Products of few rows with weights in blocks (blocks.h), whose rows are interleaved (interleaved.h).
//
// A lane of a vector is a row of the weights, so no sum goes across lanes. The weights are unpacked in registers,
// once for a tile of rows of x (weight_chunks.h). What these rows are, in float32 or rounded, is a type (float_rows.h;
// rounded_rows.h). A sum's order depends on the width alone: all processors with fused multiply-add get the same bits.
#pragma once

#include "products.h"

namespace {

constexpr int64_t MAX_PASS_ROWS = 32;  // for one reading of the weights: they and their sums stay in the cache
constexpr int64_t BLOCKS_AHEAD = 16384;  // bytes to prefetch, into the second cache: the nearest has too few lines

// Adds products of a chunk of ROWS rows with that of the channels, in `number` blocks each, to their sums.
template <int ROWS, typename Rows>
void add_chunk(const Rows& x, int64_t i, int64_t row, const uint8_t* blocks, int64_t number, Floats* sums) {
  typedef typename Rows::Block Block;
  typename Rows::template Tile<ROWS> tile(x, i, row);
  unpack(static_cast<const Block*>(nullptr), blocks, number,
         [&](int g, const Words* integers, const Floats* scales, const Floats* offsets) __attribute__((always_inline)) {
    constexpr int64_t EACH = sizeof(Block) * LANES * GROUP / Block::NUMBERS;
    UNROLLED for (int64_t b = 0; b < EACH; b += 64) __builtin_prefetch(blocks + BLOCKS_AHEAD + g * EACH + b, 0, 2);
    tile.add(g, integers, scales, offsets);
  });
  tile.add_to(sums);
}

// The same for up to ROWS rows.
template <int ROWS, typename Rows>
INLINE void add_chunk_of(int64_t num_rows, const Rows& x, int64_t i, int64_t row, const uint8_t* blocks, int64_t number,
                         Floats* sums) {
  if (num_rows == ROWS) return add_chunk<ROWS>(x, i, row, blocks, number, sums);
  if constexpr (ROWS > 1) add_chunk_of<ROWS - 1>(num_rows, x, i, row, blocks, number, sums);
}

// This thread's panels of one matrix.
template <typename Rows, typename Block>
void share_of_panels(const Rows& x, int64_t num_rows, const Interleaved<Block>& weights, int64_t begin, int64_t end,
                     float* y, int64_t stride) {
  for (int64_t done = 0; done < num_rows; done += MAX_PASS_ROWS) {
    const int64_t left = num_rows - done < MAX_PASS_ROWS ? num_rows - done : MAX_PASS_ROWS;
    const int64_t num_tiles = (left + Rows::TILE - 1) / Rows::TILE;
    for (int64_t panel = begin; panel < end; panel++) {
      Floats sums[MAX_PASS_ROWS];
      for (int64_t r = 0; r < left; r++) sums[r] = Floats{};
      each_chunk(weights, panel, [&](int64_t b, int64_t number, const uint8_t* blocks) {
        for (int64_t t = 0; t < num_tiles; t++) {
          const int64_t first = left * t / num_tiles, num_here = left * (t + 1) / num_tiles - first;
          const int64_t i = b * Block::NUMBERS / CHUNK;
          add_chunk_of<Rows::TILE>(num_here, x, i, done + first, blocks, number, sums + first);
        }
      });
      for (int64_t r = 0; r < left; r++) {
        memcpy(y + (done + r) * stride + panel * LANES, &sums[r], weights.num_rows_in(panel) * sizeof(float));
      }
    }
  }
}

// Calls `run(weights, begin, end)` with the matrix and the panels of a share.
template <typename Run>
INLINE void visit_panels(const Matrix& matrix, Share share, Run run) {
  visit_blocks(matrix.type, matrix.data, [&](auto blocks) {
    typedef std::remove_const_t<std::remove_pointer_t<decltype(blocks)>> Block;
    const Interleaved<Block> weights(matrix.data, matrix.num_channels, matrix.width / Block::NUMBERS);
    run(weights, share.begin / LANES, (share.end + LANES - 1) / LANES, blocks);
  });
}

}  // namespace
