// Functions of vectors of float32, and of single numbers: exponentials, activations, norms. They call no other library,
// and the order of each sum is fixed: so all processors and systems get the same bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "vectors.h"

namespace {

INLINE Floats select(Ints is_first, Floats first, Floats second) {
  return (Floats)((is_first & (Ints)first) | (~is_first & (Ints)second));
}

INLINE Floats abs(Floats x) { return (Floats)((Ints)x & 0x7fffffff); }
INLINE Floats copysign(Floats size, Floats x) { return (Floats)(((Ints)x & ~0x7fffffff) | (Ints)size); }

// e^x within two units in the last place; 0 below -87; e^88 above 88; NaN for NaN. Polynomial of Cephes' expf.
INLINE Floats exponential(Floats x) {
  const Floats zero = {}, least = zero - 87.0f, most = zero + 88.0f;
  Ints is_tiny = x < least;
  x = select(x > most, most, select(is_tiny, least, x));
  const Floats round = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Floats shifted = multiply_add(x, broadcast(1.44269504088896341f), round);
  Floats whole = shifted - round;
  Floats rest = multiply_add(whole, broadcast(-0.693359375f), x);
  rest = multiply_add(whole, broadcast(2.12194440e-4f), rest);
  Floats sum = broadcast(1.9875691500e-4f);
  for (float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    sum = multiply_add(sum, rest, broadcast(next));
  }
  sum = multiply_add(sum, rest * rest, rest) + 1.0f;
  Ints exponent = ((Ints)shifted - (Ints)round + 127) << 23;
  return select(is_tiny, zero, sum * (Floats)exponent);
}

INLINE Floats tanh(Floats x) {  // its error is below 2^-23, also beside 0
  const Floats twice = exponential(-2.0f * abs(x));
  return copysign((1.0f - twice) / (1.0f + twice), x);
}

INLINE Floats sigmoid(Floats x) {
  const Floats inverse = exponential(-abs(x));
  return select(x < 0.0f, inverse, broadcast(1.0f)) / (1.0f + inverse);
}

INLINE Floats silu(Floats x) {
  const Floats inverse = exponential(-abs(x));
  return x * select(x < 0.0f, inverse, broadcast(1.0f)) / (1.0f + inverse);
}

INLINE Floats gelu_tanh(Floats x) {
  const Floats inner = 0.7978845608028654f * multiply_add(0.044715f * x * x, x, x);
  return 0.5f * x * (1.0f + tanh(inner));
}

// erfc(x) for x >= 0: t Q(t) e^(-x^2) with t = 1 / (1 + x / 2). Q is a fit of ours, within 4.4e-8 of its size to x = 8, from
// where the exponential is below 1e-27.
INLINE Floats erfc(Floats x) {
  const Floats t = 1.0f / multiply_add(broadcast(0.5f), x, broadcast(1.0f));
  Floats sum = broadcast(-0.0588159747f);
  for (float next : {0.283191592f, -0.483990103f, 0.273952037f, -0.0234484039f, 0.201180026f, 0.243530586f,
                     0.282309592f, 0.282090604f}) sum = multiply_add(sum, t, broadcast(next));
  return sum * t * exponential(-x * x);
}

// 2 artanh(x), which is the logarithm of (1 + x) / (1 - x), by its series: for |x| < 0.18.
inline double twice_artanh(double x) {
  double sum = 0.0;
  for (int n = 23; n >= 1; n -= 2) sum = sum * x * x + 1.0 / n;
  return 2.0 * x * sum;
}

// Natural logarithm of a positive normal number.
inline double logarithm(double x) {
  int64_t bits;
  memcpy(&bits, &x, sizeof bits);
  int64_t exponent = (bits >> 52) - 1023;
  bits = (bits & 0xfffffffffffff) | 0x3ff0000000000000;
  memcpy(&x, &bits, sizeof x);
  if (x > 1.4142135623730951) x *= 0.5, exponent++;
  return exponent * 0.69314718055994531 + twice_artanh((x - 1.0) / (x + 1.0));
}

// log(1 + e^x)
inline float softplus(float x) {
  if (!(x <= 20.0f)) return x;
  const double power = exponential(broadcast(x))[0];
  return power < 0.4 ? twice_artanh(power / (2.0 + power)) : logarithm(1.0 + power);
}

// Cosine and sine of an angle of at most 10^7, by their series within an eighth of a turn.
struct CosSin {
  double cosine, sine;

  explicit CosSin(double angle) {
    constexpr double QUARTER = 1.5707963267948966, FIRST = 0x1.921fb54p0, SECOND = 0x1.10b4611a62633p-30;  // their sum
    const int64_t number = static_cast<int64_t>(angle / QUARTER + (angle < 0.0 ? -0.5 : 0.5));
    const double x = (angle - number * FIRST) - number * SECOND, square = -x * x;
    double even = 0.0, odd = 0.0;
    for (int n = 16; n > 0; n -= 2) {
      even = (1.0 + even) * square / (n * (n - 1));
      odd = (1.0 + odd) * square / (n * (n + 1));
    }
    even += 1.0, odd = x + x * odd;
    const double cosines[] = {even, -odd, -even, odd}, sines[] = {odd, even, -odd, -even};
    cosine = cosines[number & 3], sine = sines[number & 3];
  }
};

enum Activation : int64_t { SILU, GELU_TANH, GELU, RELU, RELU_SQUARED };

INLINE Floats apply_activation(int64_t kind, Floats x) {
  switch (kind) {
    case SILU: return silu(x);
    case GELU_TANH: return gelu_tanh(x);
    case RELU: return select(x < 0.0f, Floats{}, x);
    case RELU_SQUARED: return select(x < 0.0f, Floats{}, x * x);
  }
  const Floats part = erfc(abs(x) * 0.70710678118654752f);  // GELU
  const Floats half = select(part == 0.0f, Floats{}, 0.5f * x * part);          // infinite x have no part
  return select(x < 0.0f, half, x - half);
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

// Calls `term(i, sum)` for every vector of numbers, those from i on; it returns the sum with them.
template <typename Term>
INLINE float sum_over(int64_t number, Term term) {
  Sum sum;
  for (int64_t i = 0; i < number; i += STRIPE) {
    UNROLLED for (int p = 0; p < PARTS; p++) {
      if (i + p * LANES < number) sum.parts[p] = term(i + p * LANES, sum.parts[p]);
    }
  }
  return horizontal_sums<1>(&sum)[0];
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
