// Products of few rows of 8 bits with weights in blocks.

#include "block_matmul.h"
#include "rounded_rows.h"

void rounded_products(const float* x, int64_t num_rows, int64_t width, const void* const* matrices,
                      const int64_t* nums_channels, int64_t num_matrices, int64_t form, float* y, int64_t all_channels,
                      int64_t num_threads) {
  products_of_form<RoundedRows>(x, num_rows, width, matrices, nums_channels, num_matrices, form, y, all_channels,
                                num_threads);
}
