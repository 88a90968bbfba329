// Functions of vectors of float32: exponentials, activations, norms. The order of each sum is fixed.
#pragma once

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "vectors.h"

namespace {

INLINE Floats chosen(Ints is_first, Floats first, Floats second) {
  return (Floats)((is_first & (Ints)first) | (~is_first & (Ints)second));
}

INLINE Floats size_of(Floats x) { return (Floats)((Ints)x & 0x7fffffff); }
INLINE Floats with_sign_of(Floats size, Floats x) { return (Floats)(((Ints)x & ~0x7fffffff) | (Ints)size); }

// e^x for x <= 0, within two units in the last place; 0 below -87; NaN for NaN. Polynomial of Cephes' expf.
INLINE Floats exponential(Floats x) {
  const Floats zero = {}, least = zero - 87.0f;
  Ints is_tiny = x < least;
  x = chosen(is_tiny, least, x);
  const Floats round = all_lanes(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Floats shifted = multiply_add(x, all_lanes(1.44269504088896341f), round);
  Floats whole = shifted - round;
  Floats rest = multiply_add(whole, all_lanes(-0.693359375f), x);
  rest = multiply_add(whole, all_lanes(2.12194440e-4f), rest);
  Floats sum = all_lanes(1.9875691500e-4f);
  for (float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    sum = multiply_add(sum, rest, all_lanes(next));
  }
  sum = multiply_add(sum, rest * rest, rest) + 1.0f;
  Ints exponent = ((Ints)shifted - (Ints)round + 127) << 23;
  return chosen(is_tiny, zero, sum * (Floats)exponent);
}

INLINE Floats tangent(Floats x) {  // hyperbolic; its error is below 2^-23, also beside 0
  const Floats twice = exponential(-2.0f * size_of(x));
  return with_sign_of((1.0f - twice) / (1.0f + twice), x);
}

INLINE Floats logistic(Floats x) {
  const Floats inverse = exponential(-size_of(x));
  return chosen(x < 0.0f, inverse, all_lanes(1.0f)) / (1.0f + inverse);
}

INLINE Floats silu(Floats x) {
  const Floats inverse = exponential(-size_of(x));
  return x * chosen(x < 0.0f, inverse, all_lanes(1.0f)) / (1.0f + inverse);
}

INLINE Floats gelu_tanh(Floats x) {
  const Floats inner = 0.7978845608028654f * multiply_add(0.044715f * x * x, x, x);
  return 0.5f * x * (1.0f + tangent(inner));
}

enum Activation : int64_t { SILU, GELU_TANH, GELU, RELU, RELU_SQUARED };

INLINE Floats activated(int64_t kind, Floats x) {
  switch (kind) {
    case SILU: return silu(x);
    case GELU_TANH: return gelu_tanh(x);
    case RELU: return chosen(x < 0.0f, Floats{}, x);
    case RELU_SQUARED: return chosen(x < 0.0f, Floats{}, x * x);
  }
  UNROLLED for (int l = 0; l < LANES; l++) x[l] = 0.5f * x[l] * (1.0f + std::erf(x[l] * 0.70710678118654752f));  // GELU
  return x;
}

// Calls `change(i, values)` for all numbers, and stores its results: values[l] is number i + l.
template <typename Change>
INLINE void each(float* x, int64_t number, Change change) {
  int64_t i = 0;
  for (; i + LANES <= number; i += LANES) store(x + i, change(i, load(x + i)));
  if (i < number) {
    const Floats rest = change(i, load_first(x + i, number - i));
    memcpy(x + i, &rest, (number - i) * sizeof(float));
  }
}
// Numbers from i on, as many as there are, then zeros.
INLINE Floats load_to(const float* x, int64_t i, int64_t number) {
  return i + LANES <= number ? load(x + i) : load_first(x + i, number - i);
}

template <typename Term>
INLINE float sum_over(int64_t number, Term term) {
  Floats sums[2] = {};
  int64_t i = 0;
  for (; i + 2 * LANES <= number; i += 2 * LANES) {
    UNROLLED for (int k = 0; k < 2; k++) sums[k] = term(i + k * LANES, sums[k]);
  }
  for (; i < number; i += LANES) sums[0] = term(i, sums[0]);
  sums[0] += sums[1];
  return across<1>(sums)[0];
}

// Makes probabilities of numbers.
INLINE void softmax(float* x, int64_t number) {
  const float largest = *std::max_element(x, x + number);
  each(x, number, [=](int64_t, Floats values) { return exponential(values - largest); });
  const float total = sum_over(number, [=](int64_t i, Floats sum) { return sum + load_to(x, i, number); });
  each(x, number, [=](int64_t, Floats values) { return values / total; });
}

}  // namespace

struct Norm {
  enum Kind : int64_t { NONE, RMS, LAYER };
  int64_t kind;
  double epsilon;
  const float *weight, *bias;  // bias: or null

  // Writes the norm of a row (or the row) to `to`, which may be the row.
  void apply(const float* x, int64_t number, float* to) const {
    if (kind == NONE) {
      if (to != x) memcpy(to, x, number * sizeof(float));
      return;
    }
    const float length = static_cast<float>(number);
    float mean = 0.0f;
    if (kind == LAYER) {
      mean = sum_over(number, [=](int64_t i, Floats sum) __attribute__((always_inline)) {
        return sum + load_to(x, i, number);
      }) / length;
    }
    const float squares = sum_over(number, [=](int64_t i, Floats sum) __attribute__((always_inline)) {
      Floats values = load_to(x, i, number) - mean;
      if (i + LANES > number && mean != 0.0f) {
        UNROLLED for (int l = 0; l < LANES; l++) values[l] = i + l < number ? values[l] : 0.0f;
      }
      return multiply_add(values, values, sum);
    });
    const float inverse = 1.0f / std::sqrt(squares / length + static_cast<float>(epsilon));
    auto normed = [=, this](int64_t i, Floats values) __attribute__((always_inline)) {
      values = (values - mean) * inverse * load_to(weight, i, number);
      return bias == nullptr ? values : values + load_to(bias, i, number);
    };
    if (to != x) memcpy(to, x, number * sizeof(float));
    each(to, number, normed);
  }
};
