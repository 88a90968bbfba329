// One thread's share of a block of tokens: products, roundings and norms, as all parts of a layer need them.
//
// All threads call the same functions in the same order, and wait for each other between the stages. A stage is divided
// by tokens, heads or channels, none of whose results depends on how it is divided.
#pragma once

#include "token_block.h"

namespace {

void put(float* to, float number) { *to = number; }
void put(BFloat16* to, float number) {
  uint32_t bits;
  memcpy(&bits, &number, sizeof bits);
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  to->bits = is_nan ? bits >> 16 | 64 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to the nearest, ties to even
}

struct Worker {
  const TokenBlock& b;
  const Model& m;
  const int64_t thread, num_threads;

  void wait() const { b.barrier.wait(num_threads); }

  // Memory of this thread, until it asks for it again.
  template <typename Item>
  Item* scratch() const {
    return reinterpret_cast<Item*>(&b.scratch[thread * b.scratch_bytes]);
  }

  // The first rows of a buffer as products take them.
  Rows rows_of(const Buffer& rows, int64_t width, int64_t number) const {
    return {rows.get(), b.chunks.get(), number, width, m.num_digits};
  }

  void product(const Rows& rows, const Matrix& matrix, float* to, int64_t stride) const {
    const Share share = share_of(matrix.num_channels, thread, num_threads);
    products(rows, matrix, share, to, stride);
    if (matrix.scales == nullptr && matrix.bias == nullptr) return;
    for (int64_t t = 0; t < rows.number; t++) {
      float* row = to + t * stride;
      if (matrix.scales != nullptr) for (int64_t o = share.begin; o < share.end; o++) row[o] *= matrix.scales[o];
      if (matrix.bias != nullptr) for (int64_t o = share.begin; o < share.end; o++) row[o] += matrix.bias[o];
    }
  }

  // Rounds rows of which each thread has written some; the threads wait before, by the caller, and after.
  void round(const Buffer& rows, int64_t width) const {
    if (m.num_digits == 0) return;
    for (int64_t i = thread; i < b.number * num_chunks(width); i += num_threads) {
      round_chunk(&rows[i % b.number * width], width, i / b.number, i % b.number, b.number);
    }
    wait();
  }
  // Norms number t of `number` rows to `normed`, and rounds what this gives.
  void norm_and_round(const Norm& norm, const float* row, int64_t t, int64_t number) const {
    float* to = &b.normed[t * m.hidden];
    norm.apply(row, m.hidden, to);
    round_row(to, m.hidden, t, number);
  }
  // The chunks begin at `first`.
  void round_row(const float* row, int64_t width, int64_t t, int64_t number, int64_t first = 0) const {
    for (int64_t c = 0; m.num_digits && c * CHUNK < width; c++) round_chunk(row, width, c, first + t, number);
  }
  // Of a row that is no whole number of groups, which no matrix in blocks takes, the last numbers are left out.
  void round_chunk(const float* row, int64_t width, int64_t c, int64_t t, int64_t number) const {
    const int64_t whole = std::min(CHUNK, (width - c * CHUNK) / GROUP * GROUP);
    b.chunks[c * number + t].round(row + c * CHUNK, whole, m.num_digits);
  }

  void norm_and_round(const Norm& norm) const {
    for (int64_t t = thread; t < b.number; t += num_threads) norm_and_round(norm, &b.x[t * m.hidden], t, b.number);
    wait();
  }

  // Keeps numbers of a token, with zeros for those that are not finite if the cache is to stay finite.
  template <typename Number>
  void store_finite(const float* from, int64_t number, Number* to, const Token& token) const {
    for (int64_t i = 0; i < number; i++) {
      float value = from[i];
      if (b.batch.broken != nullptr && !std::isfinite(value)) {
        value = 0.0f;
        __atomic_store_n(b.batch.broken + token.column, true, __ATOMIC_RELAXED);
      }
      put(to + i, value);
    }
  }

  // Activates a share of rows of `ups`, and multiplies it with factors if there are any.
  void activate(const Gating& gating, int64_t number, int64_t width, const float* factors, int64_t stride) const {
    const Share share = share_of(width, thread, num_threads);
    const int64_t length = share.end - share.begin;
    const float alpha = gating.alpha, limit = gating.limit;
    for (int64_t t = 0; t < number; t++) {
      const float* factor = factors == nullptr ? nullptr : factors + t * stride + share.begin;
      each(&b.ups[t * width + share.begin], length, [=](int64_t i, Floats values) {
        if (limit != 0.0f) {
          const Floats gate = values > limit ? broadcast(limit) : values, up = load_to(factor, i, length);
          const Floats above = up > limit ? broadcast(limit) : up, within = above < -limit ? broadcast(-limit) : above;
          return gate * sigmoid(alpha * gate) * (within + 1.0f);
        }
        values = apply_activation(gating.activation, values);
        return factor == nullptr ? values : values * load_to(factor, i, length);
      });
    }
  }

  // Adds what a part of a layer has found to the stream, and multiplies this with a factor.
  void add(const Norm& norm, float factor = 1.0f) const {
    const float scale = m.residual_scale;
    for (int64_t t = thread; t < b.number; t += num_threads) {
      float *x = &b.x[t * m.hidden], *y = &b.y[t * m.hidden];
      norm.apply(y, m.hidden, y);
      each(x, m.hidden, [=, this](int64_t i, Floats values) __attribute__((always_inline)) {
        const Floats more = load_to(y, i, m.hidden);
        values = scale == 1.0f ? values + more : multiply_add(more, broadcast(scale), values);
        return factor == 1.0f ? values : values * factor;
      });
    }
  }
};

}  // namespace
