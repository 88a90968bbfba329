// The kernels against sums in double. A program without torch, so that it runs where torch does not: for other
// processors, emulated (test_other_processors.py). Bounds are those of the tests in Python, and results with one row
// or token and with another number of threads must be equal to the bit. It prints how many results it has compared,
// with a hash of their bits, or the first one that is off, and then ends with 1. Its argument is a number: one of so
// many shapes of products is tried.

#include "checks.h"

extern "C" {
int32_t outrider_few_row_matmul(const float* x, int64_t num_rows, int64_t width, const void* const* matrices,
                            const int64_t* nums_channels, int64_t num_matrices, int64_t type, int64_t num_digits,
                            float* y, int64_t num_threads);
bool outrider_dequantize_rows(const void* matrix, int64_t type, int64_t num_channels, int64_t width, const int64_t* rows,
                         int64_t num_rows, float* to, int64_t num_threads);
struct RowCopy {  // of products.h
  const uint8_t* source;
  uint8_t* matrix;
  const int64_t* places;
  int64_t type, num_rows, num_channels, row_bytes;
};
bool outrider_copy_rows(const RowCopy* copies, int64_t number, int64_t num_threads);
bool outrider_separate_rows(const void* matrix, int64_t type, int64_t num_channels, int64_t width, const int64_t* rows,
                            int64_t num_rows, void* to, int64_t num_threads);
}

namespace {

// A number of 16 bits.
double half_at(const void* place) {
  uint16_t bits;
  std::memcpy(&bits, place, sizeof bits);
  int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double size = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return bits & 0x8000 ? -size : size;
}

// Numbers as they are stored in a type that has no blocks, with what they mean.
struct Stored {
  std::vector<char> data;
  std::vector<double> wide;
};

Stored stored(int64_t number, int64_t type) {
  const int64_t size = type == 24 ? 1 : type == 0 ? 4 : 2;
  Stored made{std::vector<char>(number * size), std::vector<double>(number)};
  std::vector<float> from = numbers(number);
  for (int64_t i = 0; i < number; i++) {
    char* to = made.data.data() + i * size;
    if (type == 24) {
      int8_t whole = static_cast<int8_t>(i == 0 ? -128 : std::lrint(std::fmin(std::fmax(40 * from[i], -128), 127)));
      std::memcpy(to, &whole, 1);
      made.wide[i] = whole;
    } else if (type == 1) {
      uint16_t half = static_cast<uint16_t>(generator()) & (i % 5 ? 0xbfff : 0x83ff);  // finite; some below the normal ones
      std::memcpy(to, &half, 2);
      made.wide[i] = half_at(to);
    } else {
      uint32_t word;
      std::memcpy(&word, &from[i], 4);
      if (type == 30) word &= 0xffff0000;
      float kept;
      std::memcpy(&kept, &word, 4);
      uint16_t upper = word >> 16;
      type == 30 ? std::memcpy(to, &upper, 2) : std::memcpy(to, &word, 4);
      made.wide[i] = kept;
    }
  }
  return made;
}

void products(int64_t num_rows, int64_t width, std::vector<int64_t> nums_channels, int64_t type) {
  std::vector<float> x = numbers(num_rows * width);
  std::vector<Stored> matrices;
  std::vector<const void*> data;
  int64_t all = 0;
  for (int64_t number : nums_channels) {
    matrices.push_back(stored(number * width, type));
    all += number;
  }
  for (const Stored& matrix : matrices) data.push_back(matrix.data.data());
  std::vector<float> y(num_rows * all, NAN), again(num_rows * all, NAN), alone(all);
  const int64_t number = nums_channels.size();
  outrider_few_row_matmul(x.data(), num_rows, width, data.data(), nums_channels.data(), number, type, 0, y.data(), 2);
  outrider_few_row_matmul(x.data(), num_rows, width, data.data(), nums_channels.data(), number, type, 0, again.data(), 3);
  for (int64_t t = 0; t < num_rows; t++) {
    const float* row = x.data() + t * width;
    outrider_few_row_matmul(row, 1, width, data.data(), nums_channels.data(), number, type, 0, alone.data(), 1);
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

constexpr int OF_IQ4[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int OF_FP4[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Number i of a block of this type: in ggml, as its sources define it; or in a group.
double number_of(int64_t type, const uint8_t* block, int64_t i) {
  auto half = [&](int64_t place) { return half_at(block + place); };
  auto four = [&](int64_t place, int64_t length) {  // low bits of the first numbers, high ones of the others
    return i % (2 * length) < length ? block[place + i % length] & 15 : block[place + i % length] >> 4;
  };
  auto fifth = [&](int64_t place) { return (block[place + i / 8] >> i % 8 & 1) << 4; };
  if (type >= 192) {
    const bool has_zero = type % 2 == 0;
    const int64_t half_part = type == 192 ? 16 : 32, scale = has_zero ? 1 : 0;
    const int64_t place = scale + 2 + i / (2 * half_part) * half_part;
    return half(scale) * (four(place, half_part) - (has_zero ? block[0] : 8));
  }
  if (type == 2) return half(0) * (four(2, 16) - 8);
  if (type == 3) return half(0) * four(4, 16) + half(2);
  if (type == 6) return half(0) * ((four(6, 16) | fifth(2)) - 16);
  if (type == 7) return half(0) * (four(8, 16) | fifth(4)) + half(2);
  if (type == 8) return half(0) * static_cast<int8_t>(block[2 + i]);
  if (type == 14) {
    int64_t h = i / 128, p = i % 128 / 32, l = i % 32, byte = block[64 * h + 32 * (p % 2) + l];
    int64_t low = p < 2 ? byte & 15 : byte >> 4, upper = block[128 + 32 * h + l] >> 2 * p & 3;
    return half(208) * static_cast<int8_t>(block[192 + i / 16]) * ((low | upper << 4) - 32);
  }
  if (type == 20 || type == 39) {  // IQ4_NL, MXFP4
    return type == 20 ? half(0) * OF_IQ4[four(2, 16)] : std::ldexp(OF_FP4[four(1, 16)], block[0] - 128);
  }
  const int64_t j = i / 32, sixteenth = i / 16;
  if (type == 23) {  // IQ4_XS
    const int64_t lower = block[4 + j / 2] >> j % 2 * 4 & 15, upper = block[2 + j / 4] >> j % 4 * 2 & 3;
    return half(0) * ((lower | upper << 4) - 32) * OF_IQ4[four(8 + j * 16, 16)];
  }
  auto two = [&](int64_t place) { return block[place + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3; };
  if (type == 10) return half(80) * (block[sixteenth] & 15) * two(16) - half(82) * (block[sixteenth] >> 4);
  if (type == 11) {  // Q3_K
    const int64_t lower = block[96 + sixteenth % 8] >> sixteenth / 8 * 4 & 15;
    const int64_t upper = block[104 + sixteenth % 4] >> sixteenth / 4 * 2 & 3;
    return half(108) * ((lower | upper << 4) - 32) * ((two(32) | (block[i % 32] >> j & 1) << 2) - 4);
  }
  const uint8_t* packed = block + 4;
  int64_t scale = j < 4 ? packed[j] & 63 : (packed[j + 4] & 15) | packed[j - 4] >> 6 << 4;
  int64_t offset = j < 4 ? packed[j + 4] & 63 : packed[j + 4] >> 4 | packed[j] >> 6 << 4;
  int64_t start = (type == 12 ? 16 : 48) + j / 2 * 32, byte = block[start + i % 32];
  int64_t whole = j % 2 ? byte >> 4 : byte & 15;
  if (type == 13) whole |= (block[16 + i % 32] >> j & 1) << 4;
  return half(0) * scale * whole - half(2) * offset;
}

// Products of rows that are rounded to integers of so many digits: `wide` are the numbers of the blocks.
void rounded_products(int64_t type, int64_t num_digits, const void* blocks, const std::vector<float>& wide, const std::vector<float>& x,
                      int64_t num_rows, int64_t width, int64_t num_channels) {
  const float most_integer = num_digits == 2 ? 127 * 128 : 127;
  std::vector<float> y(num_rows * num_channels), again(num_rows * num_channels), alone(num_channels);
  outrider_few_row_matmul(x.data(), num_rows, width, &blocks, &num_channels, 1, type, num_digits, y.data(), 3);
  outrider_few_row_matmul(x.data(), num_rows, width, &blocks, &num_channels, 1, type, num_digits, again.data(), 2);
  for (int64_t t = 0; t < num_rows; t++) {
    const float* row = x.data() + t * width;
    outrider_few_row_matmul(row, 1, width, &blocks, &num_channels, 1, type, num_digits, alone.data(), 1);
    for (int64_t o = 0; o < num_channels; o++) {
      double want = 0, size = 0;
      for (int64_t begin = 0; begin < width; begin += 32) {
        const int64_t end = begin + 32;
        float most = 0, largest = 0;
        for (int64_t i = begin; i < end; i++) {
          most = std::max(most, std::fabs(row[i]));
          largest = std::max(largest, std::fabs(wide[o * width + i]));
        }
        const float scale = most / most_integer, inverse = most_integer / most;
        for (int64_t i = begin; i < end; i++) {
          double rounded = std::nearbyint(row[i] * inverse) * double(scale);
          want += rounded * wide[o * width + i];
          size += 3 * std::fabs(rounded) * largest;  // offsets cancel
        }
      }
      compare(y[t * num_channels + o], want, width * EPSILON * size, "a product of rounded rows");
      compare(y[t * num_channels + o], alone[o], 0.0, "a rounded row alone");
      compare(y[t * num_channels + o], again[t * num_channels + o], 0.0, "rounded rows by two threads");
    }
  }
}

// Numbers of blocks, rounded once, and products with them.
void blocks(int64_t type, int64_t length, int64_t size, int64_t num_rows, int64_t num_blocks, int64_t num_channels) {
  const int64_t width = num_blocks * length, all = num_channels * num_blocks;
  std::vector<uint8_t> data(all * size);
  for (uint8_t& one : data) one = static_cast<uint8_t>(generator());
  // The first byte of a block's scale; an offset follows, if blocks have any.
  const bool has_zero = type >= 192 && type % 2 == 0;
  const int64_t scale = type == 14 ? 208 : type == 10 ? 80 : type == 11 ? 108 : has_zero ? 1 : 0;
  for (int64_t b = 0; b < all; b++) {
    uint8_t* block = &data[b * size];
    if (type == 39) {
      block[0] = b % 7 == 0 ? b % 2 : 110 + block[0] % 16;
      continue;
    }
    block[scale + 1] &= 0xbf;  // below 2, and finite
    if (scale + 3 < size) block[scale + 3] &= 0xbf;
    if (has_zero) block[0] &= 15;
  }
  std::vector<float> wide(num_channels * width), y(num_rows * num_channels), alone(num_channels);
  std::vector<float> x(num_rows * width);
  for (float& one : x) one = std::ldexp(static_cast<float>(static_cast<int32_t>(generator())), -31);  // the same everywhere
  std::vector<int64_t> rows(num_channels);
  for (int64_t o = 0; o < num_channels; o++) rows[o] = o;
  std::vector<uint8_t> interleaved(data.size());
  const RowCopy copy{data.data(), interleaved.data(), nullptr, type, num_channels, num_channels, width / length * size};
  outrider_copy_rows(&copy, 1, 2);
  std::vector<uint8_t> separated(data.size());
  outrider_separate_rows(interleaved.data(), type, num_channels, width, rows.data(), num_channels, separated.data(), 2);
  compare(separated == data, 1.0, 0.0, "rows that are interleaved and separated again");
  outrider_dequantize_rows(interleaved.data(), type, num_channels, width, rows.data(), num_channels, wide.data(), 2);
  for (int64_t i = 0; i < num_channels * width; i++) {
    compare(wide[i], static_cast<float>(number_of(type, data.data() + i / length * size, i % length)), 0.0, "a number");
  }
  const void* blocks = interleaved.data();
  outrider_few_row_matmul(x.data(), num_rows, width, &blocks, &num_channels, 1, type, 0, y.data(), 3);
  for (int64_t t = 0; t < num_rows; t++) {
    outrider_few_row_matmul(x.data() + t * width, 1, width, &blocks, &num_channels, 1, type, 0, alone.data(), 2);
    for (int64_t o = 0; o < num_channels; o++) {
      double want = 0, sum_of_sizes = 0;
      for (int64_t i = 0; i < width; i++) {
        const double product = double(x[t * width + i]) * wide[o * width + i];
        want += product;
        sum_of_sizes += std::fabs(product);
      }
      compare(y[t * num_channels + o], want, width * EPSILON * sum_of_sizes, "a product with blocks");
      compare(y[t * num_channels + o], alone[o], 0.0, "a product with blocks alone");
    }
  }
  for (int64_t num_digits : {1, 2}) rounded_products(type, num_digits, blocks, wide, x, num_rows, width, num_channels);
}

}  // namespace

int main(int, char** arguments) {
  const int64_t every = std::atoll(arguments[1]);
  int64_t number = 0;
  auto is_tried = [&] { return number++ % every == 0; };
  for (int64_t type : {24, 30, 1, 0}) {
    for (int64_t num_rows = 1; num_rows <= 51; num_rows++) {
      if (is_tried()) products(num_rows, 16 + num_rows, {7, 1, 9}, type);
    }
    for (int64_t width = 1; width <= 70; width++) {
      if (is_tried()) products(1 + width % 7, width, {5, 12}, type);
    }
  }
  const int64_t types[][3] = {{2, 32, 18},   {3, 32, 20},    {6, 32, 22},    {7, 32, 24},    {8, 32, 34},   {10, 256, 84},
                              {11, 256, 110}, {12, 256, 144}, {13, 256, 176}, {14, 256, 210}, {20, 32, 18},  {23, 256, 136},
                              {39, 32, 17},   {192, 32, 19},  {193, 64, 34},  {194, 64, 35},  {195, 128, 66}, {196, 128, 67}};
  for (auto [type, length, size] : types) {
    for (int64_t num_rows : {1, 2, 5, 6, 9, 35}) {
      if (is_tried()) blocks(type, length, size, num_rows, 1 + (num_rows + type) % 3, 4 + num_rows % 7 * 5);
    }
  }
  check_functions();
  for (int64_t bits : {16, 32}) {
    for (int64_t type : {0, 2, 14}) {
      for (int64_t length : {1, 9}) check_forward(type, bits, length);
    }
    check_forward(0, bits, 270);
  }
  std::printf("%lld results are as they should be (%016llx)\n", static_cast<long long>(num_compared),
              static_cast<unsigned long long>(hash_of_all));
}
