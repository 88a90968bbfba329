// Products of few rows with weight matrices, which are read once.
//
// y[t, o] = sum over i of x[t, i] * weight[o, i]: T rows of float32, weights of float32, float16, bfloat16 or int8, sums
// in float32; weights in blocks have loops of their own (block_matmul.h). Few rows are bound by reading the weights, so a
// loop takes CHANNELS rows of the weights and up to MAX_ROWS rows of x at once: each weight is loaded (and widened)
// once for all rows, each number of x once for all channels, and the sums stay in registers. The rows of the weights
// come from CHANNELS distant parts of the matrix, since memory bandwidth is higher for several streams than for one,
// and are prefetched.
//
// The order of each sum depends on the width alone: by lanes, then across the lanes in a fixed tree. So a row's result
// depends neither on other rows, nor on their number, nor on the number of threads.

#include <memory>

#include "products.h"
#include "status.h"

namespace {

constexpr int MAX_ROWS = PARTS == 1 ? 8 : 6;  // in one loop
constexpr int TILE_ROWS = PARTS == 1 ? 6 : 3;  // if there are more: each weight loaded is used for two sums at least
// Maximum rows of x in a loop over a number of channels.
constexpr int rows_for(int channels) {
  int most = MAX_ROWS;
  while (most > 1 && sums_beside(most) < channels) most--;
  return most;
}
// Per stream, by measurement: with 2 KB one thread sometimes reads narrow weights at half its speed.
template <typename Weight>
constexpr int ahead_bytes() { return sizeof(Weight) < sizeof(float) ? 6144 : 2048; }
constexpr int LINE_BYTES = 64;

// Products of ROWS rows of x with CHANNELS rows of the weights, `spacing` rows from each to the next.
template <int ROWS, int CHANNELS, typename Weight>
INLINE void tile(const float* x, const Weight* weights, int64_t width, int64_t spacing, float* y, int64_t num_channels) {
  Sum sums[ROWS][CHANNELS];
  auto add = [&](int p, auto load_from) __attribute__((always_inline)) {
    Floats column[CHANNELS];
    UNROLLED for (int c = 0; c < CHANNELS; c++) column[c] = load_from(weights + c * spacing * width);
    UNROLLED for (int r = 0; r < ROWS; r++) {
      Floats row = load_from(x + r * width);
      UNROLLED for (int c = 0; c < CHANNELS; c++) sums[r][c].parts[p] = multiply_add(row, column[c], sums[r][c].parts[p]);
    }
  };
  int64_t i = 0;
  for (; i + STRIPE <= width; i += STRIPE) {
    if (i * sizeof(Weight) % LINE_BYTES == 0) {
      UNROLLED for (int c = 0; c < CHANNELS; c++) {
        __builtin_prefetch(reinterpret_cast<const char*>(weights + c * spacing * width + i) + ahead_bytes<Weight>());
      }
    }
    UNROLLED for (int p = 0; p < PARTS; p++) {
      add(p, [=](auto from) __attribute__((always_inline)) { return load(from + i + p * LANES); });
    }
  }
  UNROLLED for (int p = 0; p < PARTS; p++) {
    const int64_t at = i + p * LANES;
    if (at >= width) break;
    add(p, [=](auto from) __attribute__((always_inline)) { return load_to(from, at, width); });
  }
  UNROLLED for (int r = 0; r < ROWS; r++) {
    Four totals = horizontal_sums<CHANNELS>(sums[r]);
    UNROLLED for (int c = 0; c < CHANNELS; c++) y[r * num_channels + c * spacing] = totals[c];
  }
}

// One tile of `num_rows` <= ROWS rows of x.
template <int ROWS, int CHANNELS, typename Weight>
INLINE void tile_of(int64_t num_rows, const float* x, const Weight* weights, int64_t width, int64_t spacing, float* y,
                    int64_t num_channels) {
  if (num_rows == ROWS) {
    tile<ROWS, CHANNELS>(x, weights, width, spacing, y, num_channels);
  } else if constexpr (ROWS > 1) {
    tile_of<ROWS - 1, CHANNELS>(num_rows, x, weights, width, spacing, y, num_channels);
  }
}

// All rows of x, in tiles of at most ROWS rows, equal but for the last.
template <int ROWS, int CHANNELS, typename Weight>
INLINE void tiles(int64_t num_rows, int64_t most, const float* x, const Weight* weights, int64_t width, int64_t spacing,
                  float* y, int64_t num_channels) {
  for (int64_t done = 0; done < num_rows; done += most) {
    const float* rows = x + done * width;
    float* results = y + done * num_channels;
    int64_t left = num_rows - done;
    tile_of<ROWS, CHANNELS>(left < most ? left : most, rows, weights, width, spacing, results, num_channels);
  }
}

// This thread's channels, in CHANNELS parts that are read concurrently, and the remainder.
template <int CHANNELS, typename Weight>
void share(int64_t num_rows, int64_t most, const float* x, const Weight* weights, int64_t width, int64_t begin,
           int64_t end, float* y, int64_t num_channels) {
  constexpr int ROWS = rows_for(CHANNELS);
  int64_t spacing = (end - begin) / CHANNELS, rest = begin + CHANNELS * spacing;
  for (int64_t o = begin; o < begin + spacing; o++) {
    tiles<ROWS, CHANNELS>(num_rows, most, x, weights + o * width, width, spacing, y + o, num_channels);
  }
  for (int64_t o = rest; o < end; o++) {
    tiles<ROWS, 1>(num_rows, most, x, weights + o * width, width, 1, y + o, num_channels);
  }
}

template <typename Weight>
void product(int64_t num_rows, const float* x, const Weight* weights, int64_t width, int64_t begin, int64_t end, float* y,
             int64_t stride) {
  if (num_rows == 0) return;
  int64_t num_tiles = num_rows <= MAX_ROWS ? 1 : (num_rows + TILE_ROWS - 1) / TILE_ROWS;
  int64_t most = (num_rows + num_tiles - 1) / num_tiles;
  constexpr decltype(&share<1, Weight>) shares[] = {share<1, Weight>, share<2, Weight>, share<3, Weight>, share<4, Weight>};
  shares[sums_beside(most) - 1](num_rows, most, x, weights, width, begin, end, y, stride);
}

}  // namespace

void products(const Rows& x, const Matrix& matrix, Share share, float* y, int64_t stride) {
  auto run = [&](auto weights) {
    product(x.number, x.x, weights, x.width, share.begin, share.end, y, stride);
  };
  switch (matrix.type) {
    case WeightType::F32: return run(static_cast<const float*>(matrix.data));
    case WeightType::F16: return run(static_cast<const Float16*>(matrix.data));
    case WeightType::BF16: return run(static_cast<const BFloat16*>(matrix.data));
    case WeightType::I8: return run(static_cast<const int8_t*>(matrix.data));
  }
  auto of_digits = x.num_digits == 2 ? two_digit_products : x.num_digits ? one_digit_products : float_products;
  of_digits(x, matrix, share, y, stride);
}

extern "C" {

// Products of the same rows x [T, I] with several matrices [O, I] of one type (blocks.h), concatenated in y [T, sum of
// O]. All are contiguous. Matrices in blocks are interleaved (interleaved.h), and rows are rounded to integers of
// `num_digits` digits.
Status outrider_few_row_matmul(const float* x, int64_t num_rows, int64_t width, const void* const* matrices,
                               const int64_t* nums_channels, int64_t num_matrices, int64_t type, int64_t num_digits,
                               float* y, int64_t num_threads) try {
  constexpr int64_t SHARED_CHUNKS = 128;  // fewer are rounded sooner than several threads begin
  const int64_t num_chunks = num_digits ? (width + CHUNK - 1) / CHUNK : 0;
  const std::unique_ptr<RoundedChunk[]> chunks(new RoundedChunk[num_rows * num_chunks]);
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows * num_chunks >= SHARED_CHUNKS)
  for (int64_t at = 0; at < num_rows * num_chunks; at++) {
    const int64_t begin = at / num_rows * CHUNK, left = width - begin;
    chunks[at].round(x + at % num_rows * width + begin, left < CHUNK ? left : CHUNK, num_digits);
  }
  int64_t all_channels = 0;
  for (int64_t m = 0; m < num_matrices; m++) all_channels += nums_channels[m];
  const Rows rows{x, chunks.get(), num_rows, width, num_digits};
#pragma omp parallel for schedule(static) num_threads(num_threads)
  for (int64_t thread = 0; thread < num_threads; thread++) {
    float* to = y;
    for (int64_t m = 0; m < num_matrices; m++) {
      const Matrix matrix{matrices[m], type, nums_channels[m], width, nullptr, nullptr};
      products(rows, matrix, share_of(nums_channels[m], thread, num_threads), to, all_channels);
      to += nums_channels[m];
    }
  }
  return DONE;
} catch (const std::exception&) {
  return NO_MEMORY;
}
}
