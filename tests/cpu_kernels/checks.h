// What the drivers share: random numbers, comparisons, and the count and hash of what is compared.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

inline const double EPSILON = std::ldexp(1.0, -24);
inline std::mt19937 generator(0);
inline int64_t num_compared = 0;

inline uint64_t hash_of_all = 14695981039346656037u;  // FNV-1a

inline void compare(float got, double want, double bound, const char* what) {
  num_compared++;
  uint32_t bits;
  std::memcpy(&bits, &got, sizeof bits);
  hash_of_all = (hash_of_all ^ bits) * 1099511628211u;
  if (std::fabs(got - want) <= bound) return;
  std::printf("%s: %.9g, not %.9g (within %.3g)\n", what, got, want, bound);
  std::exit(1);
}

inline std::vector<float> numbers(int64_t number) {
  std::normal_distribution<float> normal;
  std::vector<float> made(number);
  for (float& one : made) one = normal(generator);
  return made;
}

// Checks a forward (forward_driver.cpp) of a model whose matrices have this type. `bits` are those of a number of its
// cache.
void check_forward(int64_t type, int64_t bits, int64_t length);

// Checks functions of numbers (functions_driver.cpp).
void check_functions();
