// Products of few rows with weights in blocks (blocks.h).
//
// Blocks of CHANNELS rows of the weights are widened into a buffer in the nearest cache, once for all rows of x, and
// multiplied from there; for a single row they are multiplied in registers. The sums are those of float32 weights, in the
// same order: the results have the same bits.
#pragma once

#include "blocks.h"

namespace {

constexpr int BLOCK_CHANNELS = 4;
constexpr int64_t MOST_BLOCK_ROWS = 32;  // of x, for one reading of the weights: their sums stay in the cache
constexpr int64_t BLOCK_AHEAD = 4096;    // bytes of each row of weights to prefetch

// Adds products of ROWS rows of x with CHANNELS rows of widened weights to their sums.
template <int ROWS, int CHANNELS>
INLINE void add_products(const float* x, int64_t width, const float (*weights)[CHUNK], int64_t number,
                         Floats (*sums)[BLOCK_CHANNELS]) {
  Floats here[ROWS][CHANNELS];
  UNROLLED for (int r = 0; r < ROWS; r++) UNROLLED for (int c = 0; c < CHANNELS; c++) here[r][c] = sums[r][c];
  for (int64_t i = 0; i < number; i += LANES) {
    Floats column[CHANNELS];
    UNROLLED for (int c = 0; c < CHANNELS; c++) column[c] = load(weights[c] + i);
    UNROLLED for (int r = 0; r < ROWS; r++) {
      Floats row = load(x + r * width + i);
      UNROLLED for (int c = 0; c < CHANNELS; c++) here[r][c] = multiply_add(row, column[c], here[r][c]);
    }
  }
  UNROLLED for (int r = 0; r < ROWS; r++) UNROLLED for (int c = 0; c < CHANNELS; c++) sums[r][c] = here[r][c];
}

// The same for `num_rows` rows, in tiles whose sums fit into registers.
template <int ROWS>
void add_all_products(int64_t num_rows, const float* x, int64_t width, const float (*weights)[CHUNK], int64_t number,
                      Floats (*sums)[BLOCK_CHANNELS]) {
  constexpr int CHANNELS = NUM_REGISTERS == 32 || ROWS <= 2 ? BLOCK_CHANNELS : BLOCK_CHANNELS / 2;
  for (; num_rows >= ROWS; num_rows -= ROWS, x += ROWS * width, sums += ROWS) {
    for (int c = 0; c < BLOCK_CHANNELS; c += CHANNELS) {
      add_products<ROWS, CHANNELS>(x, width, weights + c, number,
                                   reinterpret_cast<Floats(*)[BLOCK_CHANNELS]>(&sums[0][c]));
    }
  }
  if constexpr (ROWS > 1) {
    if (num_rows > 0) add_all_products<ROWS - 1>(num_rows, x, width, weights, number, sums);
  }
}

// Prefetches bytes that many blocks ahead in a row of the weights.
template <int64_t BYTES>
INLINE void prefetch(const void* from) {
  UNROLLED for (int64_t line = 0; line < BYTES; line += 64) {
    __builtin_prefetch(static_cast<const char*>(from) + BLOCK_AHEAD + line);
  }
}

// Sums of the products of one row of x with rows of weights.
template <typename Block>
INLINE void sums_of_one(const float* x, const Block* const* rows, int64_t width, Floats* sums) {
  for (int64_t b = 0; b < width / Block::NUMBERS; b++) {
    decltype(made(rows[0][b])) of[BLOCK_CHANNELS];
    UNROLLED for (int c = 0; c < BLOCK_CHANNELS; c++) {
      if (b * sizeof(Block) / 64 != (b + 1) * sizeof(Block) / 64) prefetch<sizeof(Block)>(rows[c] + b);
      of[c] = made(rows[c][b]);
    }
    for (int p = 0; p < Block::NUMBERS / Block::PART; p++, x += Block::PART) {
      UNROLLED for (int c = 0; c < BLOCK_CHANNELS; c++) {
        widen_part(rows[c][b], of[c], p, [&](int i, Floats numbers) __attribute__((always_inline)) {
          sums[c] = multiply_add(load(x + i), numbers, sums[c]);
        });
      }
    }
  }
}

// Products of up to MOST_BLOCK_ROWS rows of x with rows of weights; the first `num_channels` of them are written.
template <typename Block>
void block_channels(int64_t num_rows, const float* x, const Block* const* rows, int64_t num_here, int64_t width,
                    int64_t apart, float* y, int64_t num_channels) {
  alignas(64) float wide[BLOCK_CHANNELS][CHUNK];
  Floats sums[MOST_BLOCK_ROWS][BLOCK_CHANNELS];
  for (int64_t r = 0; r < num_rows; r++) UNROLLED for (int c = 0; c < BLOCK_CHANNELS; c++) sums[r][c] = Floats{};
  if (num_rows == 1) {
    Floats here[BLOCK_CHANNELS] = {};
    sums_of_one(x, rows, width, here);
    UNROLLED for (int c = 0; c < BLOCK_CHANNELS; c++) sums[0][c] = here[c];
  } else {
    for (int64_t i = 0; i < width; i += CHUNK) {
      int64_t number = width - i < CHUNK ? width - i : CHUNK;
      for (int c = 0; c < BLOCK_CHANNELS; c++) {
        const Block* blocks = rows[c] + i / Block::NUMBERS;
        prefetch<CHUNK / Block::NUMBERS * sizeof(Block)>(blocks);
        widen(blocks, number, wide[c]);
      }
      add_all_products<6>(num_rows, x + i, width, wide, number, sums);
    }
  }
  for (int64_t r = 0; r < num_rows; r++) {
    Four totals = across<BLOCK_CHANNELS>(sums[r]);
    for (int64_t c = 0; c < num_here; c++) y[r * num_channels + c * apart] = totals[c];
  }
}

// This thread's channels of one matrix, in BLOCK_CHANNELS parts that are read concurrently, and the remainder; for up to
// MOST_BLOCK_ROWS of the rows of x at a time, which stay in the cache. `length` is the number of blocks of a row.
template <typename Block>
void block_share(int64_t num_rows, const float* x, const Block* weights, int64_t length, int64_t begin, int64_t end,
                 float* y, int64_t num_channels) {
  const int64_t width = length * Block::NUMBERS, apart = (end - begin) / BLOCK_CHANNELS;
  const int64_t rest = begin + BLOCK_CHANNELS * apart;
  for (int64_t done = 0; done < num_rows; done += MOST_BLOCK_ROWS) {
    const int64_t left = num_rows - done < MOST_BLOCK_ROWS ? num_rows - done : MOST_BLOCK_ROWS;
    auto run = [&](int64_t first, int64_t between, int64_t num_here) {
      const Block* rows[BLOCK_CHANNELS];
      for (int64_t c = 0; c < BLOCK_CHANNELS; c++) {
        rows[c] = weights + (first + (c < num_here ? c : num_here - 1) * between) * length;
      }
      block_channels(left, x + done * width, rows, num_here, width, between, y + done * num_channels + first, num_channels);
    };
    for (int64_t o = begin; o < begin + apart; o++) run(o, apart, BLOCK_CHANNELS);
    for (int64_t o = rest; o < end; o += BLOCK_CHANNELS) run(o, 1, end - o < BLOCK_CHANNELS ? end - o : BLOCK_CHANNELS);
  }
}

}  // namespace
