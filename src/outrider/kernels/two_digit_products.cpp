// Products of rows of 15 bits with weights in blocks.

#include "block_matmul.h"

void two_digit_products(const Rows& x, const Matrix& matrix, Share share, float* y, int64_t stride) {
  visit_panels(matrix, share, [&](auto weights, int64_t begin, int64_t end, auto blocks) {
    typedef std::remove_const_t<std::remove_pointer_t<decltype(blocks)>> Block;
    share_of_panels(RoundedRows<Block, 2>{x.chunks, x.number}, x.number, weights, begin, end, y, stride);
  });
}
