// Products of rows of float32 with weights in blocks.

#include "block_matmul.h"
#include "float_rows.h"

void float_products(const Rows& x, const Matrix& matrix, Share share, float* y, int64_t stride) {
  visit_panels(matrix, share, [&](auto weights, int64_t begin, int64_t end, auto blocks) {
    typedef std::remove_const_t<std::remove_pointer_t<decltype(blocks)>> Block;
    share_of_panels(FloatRows<Block>{x.x, x.width}, x.number, weights, begin, end, y, stride);
  });
}
