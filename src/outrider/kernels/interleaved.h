// Rows of blocks (blocks.h), interleaved: a vector's lanes are rows of the weights.
//
// Products (block_matmul.h) take the same numbers of LANES rows at a time. Such a panel of rows (the last may have
// fewer) is stored together: the first block of each, then the second, and so on; and of a block the first four bytes
// of each row, then the next four. What four bytes leave over is at its end: two bytes of each row, then one. So a
// vector is in memory as it is in a register, a panel is read from its first byte to its last, and the size is the
// same.
#pragma once

#include <type_traits>

#include "blocks.h"

namespace {

template <typename Block>
struct Interleaved {
  static constexpr int64_t NUM_WORDS = sizeof(Block) / 4, EXTRA = sizeof(Block) % 4;
  // The bytes that four leave over come first in a block; in Q6_K they come last.
  static constexpr int64_t FIRST_WORD = std::is_same_v<Block, Q6_K> ? 0 : EXTRA;
  static constexpr int64_t HALF = FIRST_WORD == 0 ? 4 * NUM_WORDS : EXTRA - 2;

  Interleaved(const void* matrix, int64_t num_rows, int64_t length) : num_rows(num_rows), length(length) {
    first = static_cast<uint8_t*>(const_cast<void*>(matrix));
  }

  int64_t num_panels() const { return (num_rows + LANES - 1) / LANES; }
  int64_t rows_of(int64_t panel) const { return panel < num_rows / LANES ? LANES : num_rows % LANES; }
  // Blocks of LANES rows of a panel, from `b` on: in place, or beside zeros if it has fewer.
  const uint8_t* whole(int64_t panel, int64_t b, int64_t number, uint8_t* padded) const {
    const int64_t num_lanes = rows_of(panel);
    if (num_lanes == LANES) return block(panel, b);
    memset(padded, 0, number * sizeof(Block) * LANES);
    const Interleaved to(padded, LANES, number);
    for (int64_t i = 0; i < number; i++) {
      for (int64_t lane = 0; lane < num_lanes; lane++) to.put(lane, i, get(panel * LANES + lane, b + i));
    }
    return padded;
  }

  void put(int64_t row, int64_t b, const Block& from) const {
    each_part(row, b, [&](int64_t in_block, uint8_t* place, auto size) {
      memcpy(place, reinterpret_cast<const uint8_t*>(&from) + in_block, size);
    });
  }

  const int64_t num_rows, length;  // of the matrix; of a row, in blocks

 private:
  template <int NUMBER>
  using Size = std::integral_constant<size_t, NUMBER>;

  uint8_t* block(int64_t panel, int64_t b) const {
    return first + (panel * LANES * length + b * rows_of(panel)) * static_cast<int64_t>(sizeof(Block));
  }

  // Calls `move(in_block, place, size)` for all parts of a row's block.
  template <typename Move>
  void each_part(int64_t row, int64_t b, Move move) const {
    const int64_t panel = row / LANES, lane = row % LANES, num_lanes = rows_of(panel);
    uint8_t* here = block(panel, b);
    for (int64_t w = 0; w < NUM_WORDS; w++) move(FIRST_WORD + 4 * w, here + 4 * (w * num_lanes + lane), Size<4>());
    here += 4 * NUM_WORDS * num_lanes;
    if constexpr (EXTRA >= 2) move(HALF, here + 2 * lane, Size<2>());
    if constexpr (EXTRA == 3) move(0, here + 2 * num_lanes + lane, Size<1>());
  }

  Block get(int64_t row, int64_t b) const {
    Block to;
    each_part(row, b, [&](int64_t in_block, const uint8_t* place, auto size) {
      memcpy(reinterpret_cast<uint8_t*>(&to) + in_block, place, size);
    });
    return to;
  }

  uint8_t* first;
};

}  // namespace
