// The kernels of few_row_matmul.cpp and attention.cpp against sums in double. A program without torch, so that it
// runs where torch does not: for other processors, emulated (test_other_processors.py). Bounds are those of the tests
// in Python, and results with one row or query and with another number of threads must be equal to the bit. It prints how
// many results it has compared, with a hash of their bits, or the first one that is off, and then ends with 1. Its
// argument is a number: one of so many shapes is tried.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

struct Shape {
  int64_t rows, heads, groups, queries, places, width, value_width;
};
struct Strides {
  int64_t row, head, place;
};

extern "C" {
void outrider_few_row_matmul(const float* x, int64_t num_rows, int64_t width, const void* const* matrices,
                            const int64_t* nums_channels, int64_t num_matrices, int64_t bits, float* y,
                            int64_t num_threads);
void outrider_few_query_attention(const Shape* shape, const void* query, const Strides* query_strides, const void* key,
                             const Strides* key_strides, const void* value, const Strides* value_strides,
                             const void* mask, const Strides* mask_strides, int64_t bits, float scale, float* out,
                             int64_t num_threads);
}

namespace {

const double EPSILON = std::ldexp(1.0, -24);
std::mt19937 generator(0);
int64_t num_compared = 0;
uint64_t hash_of_bits = 14695981039346656037u;  // FNV-1a

void compare(float got, double want, double bound, const char* what) {
  num_compared++;
  uint32_t bits;
  std::memcpy(&bits, &got, sizeof bits);
  hash_of_bits = (hash_of_bits ^ bits) * 1099511628211u;
  if (std::fabs(got - want) <= bound) return;
  std::printf("%s: %.9g, not %.9g (within %.3g)\n", what, got, want, bound);
  std::exit(1);
}

std::vector<float> numbers(int64_t number) {
  std::normal_distribution<float> normal;
  std::vector<float> made(number);
  for (float& one : made) one = normal(generator);
  return made;
}

// Numbers as they are stored in so many bits, with what they mean.
struct Stored {
  std::vector<char> data;
  std::vector<double> wide;
};

Stored stored(int64_t number, int64_t bits) {
  Stored made{std::vector<char>(number * bits / 8), std::vector<double>(number)};
  std::vector<float> from = numbers(number);
  for (int64_t i = 0; i < number; i++) {
    char* to = made.data.data() + i * bits / 8;
    if (bits == 8) {
      int8_t whole = static_cast<int8_t>(i == 0 ? -128 : std::lrint(std::fmin(std::fmax(40 * from[i], -128), 127)));
      std::memcpy(to, &whole, 1);
      made.wide[i] = whole;
    } else {
      uint32_t word;
      std::memcpy(&word, &from[i], 4);
      if (bits == 16) word &= 0xffff0000;
      float kept;
      std::memcpy(&kept, &word, 4);
      uint16_t half = word >> 16;
      bits == 16 ? std::memcpy(to, &half, 2) : std::memcpy(to, &word, 4);
      made.wide[i] = kept;
    }
  }
  return made;
}

void products(int64_t num_rows, int64_t width, std::vector<int64_t> nums_channels, int64_t bits) {
  std::vector<float> x = numbers(num_rows * width);
  std::vector<Stored> matrices;
  std::vector<const void*> data;
  int64_t all = 0;
  for (int64_t number : nums_channels) {
    matrices.push_back(stored(number * width, bits));
    all += number;
  }
  for (const Stored& matrix : matrices) data.push_back(matrix.data.data());
  std::vector<float> y(num_rows * all, NAN), again(num_rows * all, NAN), alone(all);
  const int64_t number = nums_channels.size();
  outrider_few_row_matmul(x.data(), num_rows, width, data.data(), nums_channels.data(), number, bits, y.data(), 2);
  outrider_few_row_matmul(x.data(), num_rows, width, data.data(), nums_channels.data(), number, bits, again.data(), 3);
  for (int64_t t = 0; t < num_rows; t++) {
    const float* row = x.data() + t * width;
    outrider_few_row_matmul(row, 1, width, data.data(), nums_channels.data(), number, bits, alone.data(), 1);
    int64_t place = t * all;
    for (int64_t m = 0; m < number; m++) {
      for (int64_t o = 0; o < nums_channels[m]; o++, place++) {
        double want = 0, size = 0;
        for (int64_t i = 0; i < width; i++) {
          double term = double(row[i]) * matrices[m].wide[o * width + i];
          want += term;
          size += std::fabs(term);
        }
        compare(y[place], want, 1.01 * width * EPSILON * size, "a product");
        compare(y[place], alone[place - t * all], 0.0, "a product alone");
        compare(y[place], again[place], 0.0, "a product by three threads");
      }
    }
  }
}

void attention(Shape s, int64_t bits) {
  const float scale = 1 / std::sqrt(float(s.width));
  std::vector<float> query = numbers(s.rows * s.heads * s.queries * s.width);
  Stored key = stored(s.rows * s.groups * s.places * s.width, bits);
  Stored value = stored(s.rows * s.groups * s.places * s.value_width, bits);
  std::vector<float> mask(s.rows * s.queries * s.places);
  for (int64_t t = 0; t < s.rows * s.queries; t++) {
    int64_t last = std::uniform_int_distribution<int64_t>(0, s.places - 1)(generator);
    for (int64_t j = 0; j < s.places; j++) mask[t * s.places + j] = j > last ? -INFINITY : j % 3;
  }
  std::vector<float> out(s.rows * s.queries * s.heads * s.value_width, NAN);
  std::vector<float> alone(s.rows * s.heads * s.value_width);
  const Strides of_query{s.heads * s.queries * s.width, s.queries * s.width, s.width};
  const Strides of_key{s.groups * s.places * s.width, s.places * s.width, s.width};
  const Strides of_value{s.groups * s.places * s.value_width, s.places * s.value_width, s.value_width};
  const Strides of_mask{s.queries * s.places, 0, s.places};
  outrider_few_query_attention(&s, query.data(), &of_query, key.data.data(), &of_key, value.data.data(), &of_value,
                          mask.data(), &of_mask, bits, scale, out.data(), 2);
  Shape of_one = s;
  of_one.queries = 1;
  for (int64_t t = 0; t < s.queries; t++) {
    outrider_few_query_attention(&of_one, query.data() + t * of_query.place, &of_query, key.data.data(), &of_key,
                            value.data.data(), &of_value, mask.data() + t * of_mask.place, &of_mask, bits, scale,
                            alone.data(), 1);
    for (int64_t b = 0; b < s.rows; b++) {
      for (int64_t i = 0; i < s.heads * s.value_width; i++) {
        compare(out[(b * s.queries + t) * s.heads * s.value_width + i], alone[b * s.heads * s.value_width + i], 0.0,
                "an attention alone");
      }
    }
  }
  for (int64_t b = 0; b < s.rows; b++) {
    for (int64_t h = 0; h < s.heads; h++) {
      for (int64_t t = 0; t < s.queries; t++) {
        const float* from = query.data() + b * of_query.row + h * of_query.head + t * of_query.place;
        const float* added = mask.data() + b * of_mask.row + t * of_mask.place;
        const int64_t g = h / (s.heads / s.groups);
        std::vector<double> scores(s.places);
        double largest = -INFINITY, size = 0, total = 0;
        for (int64_t j = 0; j < s.places && added[j] > -INFINITY; j++) {
          double sum = 0, terms = 0;
          for (int64_t i = 0; i < s.width; i++) {
            double term = scale * double(from[i]) * key.wide[b * of_key.row + g * of_key.head + j * s.width + i];
            sum += term;
            terms += std::fabs(term);
          }
          scores[j] = sum + added[j];
          largest = std::fmax(largest, scores[j]);
          size = std::fmax(size, (s.width + 2) * terms + std::fabs(added[j]));
        }
        for (int64_t j = 0; j < s.places; j++) {
          scores[j] = added[j] > -INFINITY ? std::exp(scores[j] - largest) : 0;
          total += scores[j];
        }
        const double error = 1.1 * EPSILON * (2 * size + 2 * s.places + 10);  // as in test_attention.py
        for (int64_t e = 0; e < s.value_width; e++) {
          double want = 0, absolute = 0;
          for (int64_t j = 0; j < s.places; j++) {
            double one = value.wide[b * of_value.row + g * of_value.head + j * s.value_width + e];
            want += scores[j] / total * one;
            absolute += scores[j] / total * std::fabs(one);
          }
          compare(out[((b * s.queries + t) * s.heads + h) * s.value_width + e], want, error * absolute + 1e-30,
                  "an attention");
        }
      }
    }
  }
}

}  // namespace

int main(int, char** arguments) {
  const int64_t every = std::atoll(arguments[1]);
  int64_t number = 0;
  auto is_tried = [&] { return number++ % every == 0; };
  for (int64_t bits : {8, 16, 32}) {
    for (int64_t num_rows = 1; num_rows <= 51; num_rows++) {
      if (is_tried()) products(num_rows, 16 + num_rows, {7, 1, 9}, bits);
    }
    for (int64_t width = 1; width <= 70; width++) {
      if (is_tried()) products(1 + width % 7, width, {5, 12}, bits);
    }
  }
  for (int64_t bits : {16, 32}) {
    for (int64_t shared = 1; shared <= 3; shared++) {
      for (int64_t queries = 1; queries <= 6; queries++) {
        for (int64_t places : {1, 3, 40, 257}) {
          const int64_t width = 1 + (11 * queries + 7 * shared + places) % 67;
          if (is_tried()) attention({2, 2 * shared, 2, queries, places, width, 70 - width}, bits);
        }
      }
    }
  }
  std::printf("%lld results are as they should be (%016llx)\n", static_cast<long long>(num_compared),
              static_cast<unsigned long long>(hash_of_bits));
}
