// Products of rows with matrices, of any type and in any arithmetic.
#pragma once

#include "rounded_rows.h"

// Matrix [O, I]. In blocks, its rows are interleaved (interleaved.h).
struct Matrix {
  const void* data;
  int64_t type, num_channels, width;
  const float* scales;  // of the rows, if these are integers; or null
  const float* bias;    // or null
};

// Rows of a matrix as files have them, and the matrix to which they are copied.
struct RowCopy {
  const uint8_t* source;
  uint8_t* matrix;
  const int64_t* places;  // of the rows in the matrix; or null: the same
  int64_t type, num_rows, num_channels, row_bytes;

  int64_t place(int64_t row) const { return places == nullptr ? row : places[row]; }
};

// Rows [T, I] as all matrices take them.
struct Rows {
  const float* x;
  const RoundedChunk* chunks;  // the first of all rows, then the second of all, and so on; used if there are digits
  int64_t number, width;
  int64_t num_digits;  // of integers (rounded_rows.h); 0 for float32
};

// Channels of a matrix that a thread computes, in whole vectors.
struct Share {
  int64_t begin, end;
};
INLINE Share share_of(int64_t num_channels, int64_t thread, int64_t num_threads) {
  const int64_t number = (num_channels + LANES - 1) / LANES, end = number * (thread + 1) / num_threads * LANES;
  return {number * thread / num_threads * LANES, end < num_channels ? end : num_channels};
}

// Writes a share of y[t, o] = sum over i of x[t, i] * matrix[o, i], without scales and bias. `stride` is that of y.
void products(const Rows& x, const Matrix& matrix, Share share, float* y, int64_t stride);

// The same for matrices in blocks, in files of their own, which are compiled in parallel: each takes many seconds.
void float_products(const Rows& x, const Matrix& matrix, Share share, float* y, int64_t stride);
void one_digit_products(const Rows& x, const Matrix& matrix, Share share, float* y, int64_t stride);
void two_digit_products(const Rows& x, const Matrix& matrix, Share share, float* y, int64_t stride);

// Numbers of a row of a matrix in float32.
void dequantize_row(const Matrix& matrix, int64_t row, float* to);
