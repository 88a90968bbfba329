// Products of few float32 rows with 8-bit weights on the tiles of Intel's AMX, which multiply 8-bit integers and
// accumulate in 32 bits.
//
// A row of x becomes 32-bit integers: its numbers times a power of two such that the largest lies below 2^30. Each
// integer is four digits of base 256, between -128 and 127, and each digit is a column of its own: 4 T columns in all,
// of which a tile takes 16. Sums of digits are exact, and are combined in 64 bits. So only two things are rounded: the
// numbers of x, to 2^-31 of the power of two above the largest one of their row, and the result. A row's result depends
// on nothing else.
#pragma once

#if defined(__AMX_INT8__) && defined(__AVX512BW__) && defined(__linux__)
#define HAS_TILES 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int64_t TILE_CHANNELS = 16, TILE_WIDTH = 64, TILE_COLUMNS = 16, DIGITS = 4;
constexpr int64_t TILE_ROWS_OF_X = TILE_COLUMNS / DIGITS;
constexpr int64_t TILE_BYTES = 1024;
constexpr int64_t MOST_TILE_WIDTH = int64_t(1) << 17;  // 2^31 / 128 / 128: sums of digits fit into 32 bits
constexpr int X_BITS = 30;
constexpr int64_t AHEAD = 256;  // bytes of each row of weights to prefetch

// Whether products of this width use tiles: the system must grant them to this process.
inline bool fits_tiles(int64_t width) {
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
  static const bool is_allowed = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
  return is_allowed && width < MOST_TILE_WIDTH;
}

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t num_rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Not _tile_loadconfig, which GCC 12 declares as reading 8 bytes only.
inline void configure_tiles() {
  static const TileShapes shapes;
  asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory");
}

// Digits of rows of x, in the layout of tiles: 64 numbers of 4 rows after one another.
class Digits {
 public:
  Digits(const float* x, int64_t num_rows, int64_t width)
      : num_groups((num_rows + TILE_ROWS_OF_X - 1) / TILE_ROWS_OF_X),
        num_chunks((width + TILE_WIDTH - 1) / TILE_WIDTH),
        exponents(num_rows),
        bytes_(num_groups * num_chunks * TILE_BYTES + 64) {
    begin_ = reinterpret_cast<int8_t*>((reinterpret_cast<uintptr_t>(bytes_.data()) + 63) / 64 * 64);
    for (int64_t r = 0; r < num_rows; r++) write(x + r * width, r, width);
    asm volatile("" ::: "memory");  // GCC 12 does not know that tiles are loaded from memory
  }

  const int8_t* tile(int64_t group, int64_t chunk) const { return begin_ + (group * num_chunks + chunk) * TILE_BYTES; }

  const int64_t num_groups, num_chunks;
  std::vector<int> exponents;  // of each row; IS_BAD if it is not finite
  static constexpr int IS_BAD = std::numeric_limits<int>::max();

 private:
  void write(const float* row, int64_t r, int64_t width) {
    __m512i largest = _mm512_setzero_si512();  // as integers, which are ordered alike, with NaN and infinity above
    for (int64_t i = 0; i < width; i += 16) {
      __m512i bits = _mm512_castps_si512(_mm512_maskz_loadu_ps(first(width - i), row + i));
      largest = _mm512_max_epu32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    uint32_t most = _mm512_reduce_max_epu32(largest);
    int exponent = IS_BAD;
    float scale = 0.0f, size;
    if (most < 0x7f800000u) {
      memcpy(&size, &most, sizeof size);
      std::frexp(size, &exponent);
      exponent = std::max(exponent, -90);  // so that float32 can hold the scale
      scale = std::ldexp(1.0f, X_BITS - exponent);
    }
    exponents[r] = exponent;
    int8_t* column = begin_ + r / TILE_ROWS_OF_X * num_chunks * TILE_BYTES + r % TILE_ROWS_OF_X * DIGITS * 4;
    const __m512i halves = _mm512_set1_epi32(0x00808080);
    // Transpose: from the four digits of four numbers to four numbers' digits of each order.
    const __m512i places = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    for (int64_t i = 0; i < width; i += 16) {
      __m512 numbers = _mm512_maskz_loadu_ps(first(width - i), row + i);
      __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(numbers, _mm512_set1_ps(scale)));
      // Digits carry when they reach 128: bytes of the number plus halves, less the halves.
      __m512i digits = _mm512_xor_si512(_mm512_add_epi32(whole, halves), halves);
      digits = _mm512_shuffle_epi8(digits, places);
      int8_t* place = column + i / 4 * 64;
      _mm_store_si128((__m128i*)place, _mm512_extracti32x4_epi32(digits, 0));
      _mm_store_si128((__m128i*)(place + 64), _mm512_extracti32x4_epi32(digits, 1));
      _mm_store_si128((__m128i*)(place + 128), _mm512_extracti32x4_epi32(digits, 2));
      _mm_store_si128((__m128i*)(place + 192), _mm512_extracti32x4_epi32(digits, 3));
    }
  }

  static __mmask16 first(int64_t number) { return number >= 16 ? 0xffff : (1u << number) - 1; }

  std::vector<int8_t> bytes_;
  int8_t* begin_;
};

// These channels of y, for one group of rows of x.
inline void put_together(const int32_t (*sums)[TILE_COLUMNS], const Digits& digits, int64_t group, int64_t num_rows,
                         int64_t num_here, int64_t apart, float* y, int64_t num_channels) {
  for (int64_t r = group * TILE_ROWS_OF_X; r < std::min(num_rows, (group + 1) * TILE_ROWS_OF_X); r++) {
    bool is_bad = digits.exponents[r] == Digits::IS_BAD;
    float unit = is_bad ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0f, digits.exponents[r] - X_BITS);
    for (int64_t c = 0; c < num_here; c++) {
      const int32_t* sum = sums[c] + r % TILE_ROWS_OF_X * DIGITS;
      int64_t total = (int64_t(sum[3]) << 24) + (int64_t(sum[2]) << 16) + (int64_t(sum[1]) << 8) + sum[0];
      y[r * num_channels + c * apart] = static_cast<float>(total) * unit;
    }
  }
}

// All rows of x with at most TILE_CHANNELS rows of the weights, spaced `apart` rows.
template <bool IS_WHOLE>
inline void tile_block(const Digits& digits, int64_t num_rows, const int8_t* weights, int64_t width, int64_t apart,
                       int64_t num_here, float* y, int64_t num_channels) {
  constexpr int64_t GROUPS = 4;  // that share one read of the weights
  alignas(64) int8_t rest[TILE_BYTES];
  alignas(64) int32_t sums[TILE_CHANNELS][TILE_COLUMNS];
  for (int64_t first = 0; first < digits.num_groups; first += GROUPS) {
    int64_t num_groups = std::min(GROUPS, digits.num_groups - first);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t chunk = 0; chunk < digits.num_chunks; chunk++) {
      int64_t i = chunk * TILE_WIDTH, num_wide = std::min(TILE_WIDTH, width - i);
      const int8_t* from = weights + i;
      if (IS_WHOLE && num_wide == TILE_WIDTH) {
        for (int c = 0; c < TILE_CHANNELS; c++) __builtin_prefetch(from + c * apart * width + AHEAD);
        _tile_loadd(4, from, apart * width);
      } else {
        memset(rest, 0, sizeof rest);
        for (int64_t c = 0; c < num_here; c++) memcpy(rest + c * TILE_WIDTH, from + c * apart * width, num_wide);
        asm volatile("" ::: "memory");  // GCC 12 does not know that tiles are loaded from memory
        _tile_loadd(4, rest, TILE_WIDTH);
      }
      _tile_loadd(5, digits.tile(first, chunk), 64);
      _tile_dpbssd(0, 4, 5);
      if (num_groups > 1) {
        _tile_loadd(5, digits.tile(first + 1, chunk), 64);
        _tile_dpbssd(1, 4, 5);
      }
      if (num_groups > 2) {
        _tile_loadd(5, digits.tile(first + 2, chunk), 64);
        _tile_dpbssd(2, 4, 5);
      }
      if (num_groups > 3) {
        _tile_loadd(5, digits.tile(first + 3, chunk), 64);
        _tile_dpbssd(3, 4, 5);
      }
    }
    for (int64_t g = 0; g < num_groups; g++) {
      if (g == 0) _tile_stored(0, sums, 64);
      if (g == 1) _tile_stored(1, sums, 64);
      if (g == 2) _tile_stored(2, sums, 64);
      if (g == 3) _tile_stored(3, sums, 64);
      put_together(sums, digits, first + g, num_rows, num_here, apart, y, num_channels);
    }
  }
}

// Channels of one matrix, in parts that are read concurrently, and the remainder.
inline void tile_share(const Digits& digits, int64_t num_rows, const int8_t* weights, int64_t width, int64_t begin,
                       int64_t end, float* y, int64_t num_channels) {
  configure_tiles();  // of this thread
  int64_t apart = (end - begin) / TILE_CHANNELS, rest = begin + TILE_CHANNELS * apart;
  for (int64_t o = begin; o < begin + apart; o++) {
    tile_block<true>(digits, num_rows, weights + o * width, width, apart, TILE_CHANNELS, y + o, num_channels);
  }
  if (rest < end) {
    tile_block<false>(digits, num_rows, weights + rest * width, width, 1, end - rest, y + rest, num_channels);
  }
  _tile_release();
}

}  // namespace
#endif
