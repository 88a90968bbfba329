// Products of few rows with weight matrices, which are read once.
//
// y[t, o] = sum over i of x[t, i] * weight[o, i]: T rows of float32, weights of float32, bfloat16 or int8, sums in
// float32; weights in blocks have loops of their own (block_matmul.h). Few rows are bound by reading the weights, so a
// loop takes CHANNELS rows of the weights and up to MOST_ROWS rows of x at once: each weight is loaded (and widened)
// once for all rows, each number of x once for all channels, and the sums stay in registers. The rows of the weights
// come from CHANNELS distant parts of the matrix, since memory bandwidth is higher for several streams than for one,
// and are prefetched.
//
// The order of each sum depends on the width alone: by lanes, then across the lanes in a fixed tree. So a row's result
// depends neither on other rows, nor on their number, nor on the number of threads. On processors with AMX tiles, 8-bit
// weights use them (int8_tiles.h).

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <vector>

#include "block_matmul.h"
#include "int8_tiles.h"
#include "vectors.h"

namespace {

#if NUM_REGISTERS == 32
// Channels per loop for a number of rows of x.
constexpr int channels_for(int64_t num_rows) { return num_rows <= 6 ? 4 : 3; }
constexpr int64_t MOST_ROWS = 8;  // in one loop
#else
constexpr int channels_for(int64_t num_rows) { return num_rows <= 2 ? 4 : 2; }
constexpr int64_t MOST_ROWS = 6;
#endif
constexpr int64_t TILE_ROWS = 6;  // if there are more than MOST_ROWS
constexpr int MANY_CHANNELS = channels_for(1), FEW_CHANNELS = channels_for(MOST_ROWS);  // the only two values
// Maximum rows of x in a loop over a number of channels.
constexpr int rows_for(int channels) {
  int most = MOST_ROWS;
  while (channels_for(most) != channels) most--;
  return most;
}
// Per stream, by measurement: with 2 KB one thread sometimes reads narrow weights at half its speed.
template <typename Weight>
constexpr int ahead_bytes() { return sizeof(Weight) < sizeof(float) ? 6144 : 2048; }
constexpr int LINE_BYTES = 64;

// Products of ROWS rows of x with CHANNELS rows of the weights, spaced `apart` rows.
template <int ROWS, int CHANNELS, typename Weight>
INLINE void tile(const float* x, const Weight* weights, int64_t width, int64_t apart, float* y, int64_t num_channels) {
  Floats sums[ROWS][CHANNELS] = {};
  auto add = [&](auto load_x, auto load_weights) __attribute__((always_inline)) {
    Floats column[CHANNELS];
    UNROLLED for (int c = 0; c < CHANNELS; c++) column[c] = load_weights(weights + c * apart * width);
    UNROLLED for (int r = 0; r < ROWS; r++) {
      Floats row = load_x(x + r * width);
      UNROLLED for (int c = 0; c < CHANNELS; c++) sums[r][c] = multiply_add(row, column[c], sums[r][c]);
    }
  };
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) {
    if (i * sizeof(Weight) % LINE_BYTES == 0) {
      UNROLLED for (int c = 0; c < CHANNELS; c++) {
        __builtin_prefetch(reinterpret_cast<const char*>(weights + c * apart * width + i) + ahead_bytes<Weight>());
      }
    }
    auto load_whole = [i](auto from) __attribute__((always_inline)) { return load(from + i); };
    add(load_whole, load_whole);
  }
  if (i < width) {
    auto load_rest = [i, width](auto from) __attribute__((always_inline)) { return load_first(from + i, width - i); };
    add(load_rest, load_rest);
  }
  UNROLLED for (int r = 0; r < ROWS; r++) {
    Four totals = across<CHANNELS>(sums[r]);
    UNROLLED for (int c = 0; c < CHANNELS; c++) y[r * num_channels + c * apart] = totals[c];
  }
}

// One tile of `num_rows` <= ROWS rows of x.
template <int ROWS, int CHANNELS, typename Weight>
INLINE void tile_of(int64_t num_rows, const float* x, const Weight* weights, int64_t width, int64_t apart, float* y,
                    int64_t num_channels) {
  if (num_rows == ROWS) {
    tile<ROWS, CHANNELS>(x, weights, width, apart, y, num_channels);
  } else if constexpr (ROWS > 1) {
    tile_of<ROWS - 1, CHANNELS>(num_rows, x, weights, width, apart, y, num_channels);
  }
}

// All rows of x, in tiles of at most ROWS rows, equal but for the last.
template <int ROWS, int CHANNELS, typename Weight>
INLINE void tiles(int64_t num_rows, int64_t most, const float* x, const Weight* weights, int64_t width, int64_t apart,
                  float* y, int64_t num_channels) {
  for (int64_t done = 0; done < num_rows; done += most) {
    const float* rows = x + done * width;
    float* results = y + done * num_channels;
    int64_t left = num_rows - done;
    tile_of<ROWS, CHANNELS>(left < most ? left : most, rows, weights, width, apart, results, num_channels);
  }
}

// This thread's channels, in CHANNELS parts that are read concurrently, and the remainder.
template <int CHANNELS, typename Weight>
void share(int64_t num_rows, int64_t most, const float* x, const Weight* weights, int64_t width, int64_t begin,
           int64_t end, float* y, int64_t num_channels) {
  constexpr int ROWS = rows_for(CHANNELS);
  int64_t apart = (end - begin) / CHANNELS, rest = begin + CHANNELS * apart;
  for (int64_t o = begin; o < begin + apart; o++) {
    tiles<ROWS, CHANNELS>(num_rows, most, x, weights + o * width, width, apart, y + o, num_channels);
  }
  for (int64_t o = rest; o < end; o++) {
    tiles<ROWS, 1>(num_rows, most, x, weights + o * width, width, 1, y + o, num_channels);
  }
}

template <typename Weight>
void product(int64_t num_rows, const float* x, const Weight* weights, int64_t width, int64_t begin, int64_t end, float* y,
             int64_t num_channels) {
  int64_t num_tiles = num_rows <= MOST_ROWS ? 1 : (num_rows + TILE_ROWS - 1) / TILE_ROWS;
  int64_t most = (num_rows + num_tiles - 1) / num_tiles;
  auto run = channels_for(most) == MANY_CHANNELS ? share<MANY_CHANNELS, Weight> : share<FEW_CHANNELS, Weight>;
  run(num_rows, most, x, weights, width, begin, end, y, num_channels);
}

}  // namespace

extern "C" {

// Products of the same rows x [T, I] with several matrices [O, I] of one form (blocks.h), concatenated in y [T, sum of
// O]. All are contiguous. Matrices in blocks are interleaved (interleaved.h); with ROUNDS added to their form, rows are
// rounded to 8 bits.
void outrider_few_row_matmul(const float* x, int64_t num_rows, int64_t width, const void* const* matrices,
                            const int64_t* nums_channels, int64_t num_matrices, int64_t form, float* y,
                            int64_t num_threads) {
  int64_t all_channels = 0;
  for (int64_t m = 0; m < num_matrices; m++) all_channels += nums_channels[m];
  if (form != Form::F32 && form != Form::BF16 && form != Form::I8) {
    auto products = form & ROUNDS ? rounded_products : float_products;
    return products(x, num_rows, width, matrices, nums_channels, num_matrices, form & ~ROUNDS, y, all_channels,
                    num_threads);
  }
#pragma omp parallel for schedule(static) num_threads(num_threads)
  for (int64_t thread = 0; thread < num_threads; thread++) {
    int64_t before = 0;
#ifdef HAS_TILES
    bool by_tiles = form == Form::I8 && fits_tiles(width);
    Digits digits(x, by_tiles ? num_rows : 0, width);
#endif
    for (int64_t m = 0; m < num_matrices; m++) {
      int64_t number = nums_channels[m];
      int64_t begin = number * thread / num_threads, end = number * (thread + 1) / num_threads;
      auto run = [&](auto weights) { product(num_rows, x, weights, width, begin, end, y + before, all_channels); };
      if (form == Form::F32) run(static_cast<const float*>(matrices[m]));
      if (form == Form::BF16) run(static_cast<const BFloat16*>(matrices[m]));
      if (form == Form::I8) {
        auto weights = static_cast<const int8_t*>(matrices[m]);
#ifdef HAS_TILES
        if (by_tiles) tile_share(digits, num_rows, weights, width, begin, end, y + before, all_channels);
        else
#endif
          run(weights);
      }
      before += number;
    }
  }
}

// The operator outrider::few_row_matmul, as compiled programs call it.
AOTITorchError aoti_torch_cpu_few_row_matmul(AtenTensorHandle x, const AtenTensorHandle* weights, int64_t num_weights,
                                            int64_t form, int64_t num_threads, AtenTensorHandle* result) {
  std::vector<const void*> matrices(num_weights);
  std::vector<int64_t> nums_channels(num_weights);
  int64_t shape[2], width, stride, all_channels = 0;
  void *rows, *results;
  aoti_torch_get_size(x, 0, &shape[0]);
  aoti_torch_get_size(x, 1, &width);
  aoti_torch_get_stride(x, 0, &stride);
  aoti_torch_get_data_ptr(x, &rows);
  std::vector<float> contiguous(stride == width ? 0 : shape[0] * width);  // they may be part of another result
  if (!contiguous.empty()) {
    for (int64_t t = 0; t < shape[0]; t++) {
      memcpy(&contiguous[t * width], static_cast<float*>(rows) + t * stride, width * sizeof(float));
    }
    rows = contiguous.data();
  }
  for (int64_t m = 0; m < num_weights; m++) {
    void* matrix;
    aoti_torch_get_data_ptr(weights[m], &matrix);
    aoti_torch_get_size(weights[m], 0, &nums_channels[m]);
    matrices[m] = matrix;
    all_channels += nums_channels[m];
  }
  shape[1] = all_channels;
  const int64_t strides[2] = {all_channels, 1};
  AOTITorchError error = aoti_torch_empty_strided(2, shape, strides, aoti_torch_dtype_float32(),
                                                  aoti_torch_device_type_cpu(), 0, result);
  if (error != AOTI_TORCH_SUCCESS) return error;
  aoti_torch_get_data_ptr(*result, &results);
  outrider_few_row_matmul(static_cast<float*>(rows), shape[0], width, matrices.data(), nums_channels.data(),
                         num_weights, form, static_cast<float*>(results), num_threads);
  return AOTI_TORCH_SUCCESS;
}
}
