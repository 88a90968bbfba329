// Functions (kernels/functions.h) against those of the standard library in double.

#include "../../src/outrider/kernels/functions.h"
#include "checks.h"

namespace {

// Bounds are relative, but for what is near zero.
template <typename Function>
void check(Function function, double (*want)(double), double least, double most, double relative, double absolute,
           const char* what) {
  for (int i = 0; i <= 4000; i++) {
    const float x = static_cast<float>(least + (most - least) * i / 4000), twin = want(x);
    compare(function(x), twin, relative * std::fabs(twin) + absolute, what);
  }
}

template <Floats (*FUNCTION)(Floats)>
float lane(float x) {
  return FUNCTION(broadcast(x))[LANES - 1];
}

double sigmoid_twin(double x) { return 1 / (1 + std::exp(-x)); }
double gelu_twin(double x) { return x / 2 * std::erfc(-x * std::sqrt(0.5)); }
double softplus_twin(double x) { return std::log1p(std::exp(x)); }

}  // namespace

void check_functions() {
  check([](float x) { return lane<exponential>(x); }, std::exp, -86, 88, 3 * EPSILON, 0, "an exponential");
  check([](float x) { return lane<tanh>(x); }, std::tanh, -9, 9, 0, 2 * EPSILON, "a tanh");
  check([](float x) { return lane<sigmoid>(x); }, sigmoid_twin, -80, 80, 5 * EPSILON, 0, "a sigmoid");
  check([](float x) { return apply_activation(GELU, broadcast(x))[0]; }, gelu_twin, -12, 12, 5 * EPSILON, 3 * EPSILON, "a GELU");
  check([](float x) { return softplus(x); }, softplus_twin, -80, 30, 5 * EPSILON, 0, "a softplus");
  check([](float x) { return float(logarithm(x)); }, std::log, 1e-30, 9, EPSILON, 0, "a logarithm");
  check([](float x) { return float(logarithm(x)); }, std::log, 1e-30, 1e-20, EPSILON, 0, "a logarithm");
  for (double most : {4.0, 1e4, 1e7}) {
    check([](float x) { return float(CosSin(x).cosine); }, std::cos, -most, most, EPSILON, 1e-12, "a cosine");
    check([](float x) { return float(CosSin(x).sine); }, std::sin, -most, most, EPSILON, 1e-12, "a sine");
  }
}
