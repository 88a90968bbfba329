// Products of few rows of float32 with weights in blocks.

#include "block_matmul.h"
#include "float_rows.h"

void float_products(const float* x, int64_t num_rows, int64_t width, const void* const* matrices,
                    const int64_t* nums_channels, int64_t num_matrices, int64_t form, float* y, int64_t all_channels,
                    int64_t num_threads) {
  products_of_form<FloatRows>(x, num_rows, width, matrices, nums_channels, num_matrices, form, y, all_channels,
                              num_threads);
}
