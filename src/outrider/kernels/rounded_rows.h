// Products of few rows with weights in blocks (blocks.h), after the rows are rounded to 8 bits.
//
// CHUNK numbers of a row of x become integers between -127 and 127 with one scale, so a row's result depends on that row
// alone. Products with the integers of the weights are summed exactly, four at a time; scales and offsets of the weights
// are applied in float32. Vectors have eight lanes on every processor, and the order of each sum depends on the width
// alone.
#pragma once

#include <cmath>
#include <vector>

#include "block_matmul.h"

namespace {

typedef float Floats8 __attribute__((vector_size(32)));
typedef int32_t Ints8 __attribute__((vector_size(32)));
typedef uint8_t Bytes __attribute__((vector_size(32)));
typedef int8_t SignedBytes __attribute__((vector_size(32)));

// CHUNK numbers of a row share a scale.
constexpr int64_t GROUP = 32;  // integers of a vector
constexpr int64_t SUM = 16;    // numbers whose integers are summed: the fewest of a block that share an offset
constexpr int64_t NUM_GROUPS = CHUNK / GROUP, NUM_SUMS = CHUNK / SUM;

template <typename Vector>
INLINE Vector loaded(const void* from) {
  Vector values;
  memcpy(&values, from, sizeof values);
  return values;
}

INLINE Floats8 multiply_add8(Floats8 a, Floats8 b, Floats8 c) {
#if VECTOR_BYTES == 64
  return (Floats8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif VECTOR_BYTES == 32
  return multiply_add(a, b, c);
#else
  Floats x[2], y[2], z[2];
  memcpy(x, &a, sizeof x);
  memcpy(y, &b, sizeof y);
  memcpy(z, &c, sizeof z);
  UNROLLED for (int h = 0; h < 2; h++) z[h] = multiply_add(x[h], y[h], z[h]);
  return loaded<Floats8>(z);
#endif
}

// Sums of four products each, of bytes below 128 with signed ones.
INLINE Ints8 sums_of_four(Bytes a, SignedBytes b) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return (Ints8)_mm256_dpbusd_epi32(_mm256_setzero_si256(), (__m256i)a, (__m256i)b);
#elif VECTOR_BYTES >= 32
  return (Ints8)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)a, (__m256i)b), _mm256_set1_epi16(1));
#elif defined(__aarch64__)
  int8x16_t x[2], y[2];
  int32x4_t sums[2];
  memcpy(x, &a, sizeof x);
  memcpy(y, &b, sizeof y);
  UNROLLED for (int h = 0; h < 2; h++) {
#if defined(__ARM_FEATURE_DOTPROD)
    sums[h] = vdotq_s32(vdupq_n_s32(0), x[h], y[h]);
#else
    int16x8_t low = vmull_s8(vget_low_s8(x[h]), vget_low_s8(y[h])), high = vmull_high_s8(x[h], y[h]);
    sums[h] = vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#endif
  }
  return loaded<Ints8>(sums);
#else
  Ints8 sums;
  for (int l = 0; l < 8; l++) {
    sums[l] = 0;
    for (int i = 4 * l; i < 4 * l + 4; i++) sums[l] += a[i] * b[i];
  }
  return sums;
#endif
}

INLINE Ints8 sums_of_four(SignedBytes a, SignedBytes b) {
#if defined(__aarch64__)
  return sums_of_four((Bytes)a, b);  // which are taken as signed there
#else
  SignedBytes is_negative = a < 0;
  return sums_of_four((Bytes)((a ^ is_negative) - is_negative), (b ^ is_negative) - is_negative);
#endif
}

INLINE float sum_of(Floats8 values) {
  Four halves[2];
  memcpy(halves, &values, sizeof halves);
  Four ends = neighbours(halves[0] + halves[1], halves[0] + halves[1]);
  return ends[0] + ends[1];
}

// Rows of x as integers.
struct RoundedRows {
  RoundedRows(const float* x, int64_t num_rows, int64_t width, int64_t num_threads)
      : num_chunks((width + CHUNK - 1) / CHUNK), chunks(num_rows * num_chunks) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows > 1)
    for (int64_t at = 0; at < num_rows * num_chunks; at++) {
      int64_t begin = at % num_chunks * CHUNK, left = width - begin;
      chunks[at].round(x + at / num_chunks * width + begin, left < CHUNK ? left : CHUNK);
    }
  }

  struct Chunk {
    int8_t wholes[CHUNK];
    float sums[NUM_SUMS];  // of the integers
    float scale;

    void round(const float* x, int64_t number) {
      float most = 0.0f, bad = 0.0f;
      for (int64_t i = 0; i < number; i++) {
        most = std::fabs(x[i]) > most ? std::fabs(x[i]) : most;
        bad += x[i] * 0.0f;  // no number if one is not finite
      }
      scale = most / 127.0f + bad;
      const float inverse = most < 1e-30f ? 0.0f : 127.0f / most;
      memset(wholes, 0, sizeof wholes);
      memset(sums, 0, sizeof sums);
      if (!(scale < INFINITY)) return;
      for (int64_t i = 0; i < number; i++) {
        // Rounds to an even number in the middle.
        float shifted = x[i] * inverse + 0x1.8p23f;
        int32_t bits;
        memcpy(&bits, &shifted, sizeof bits);
        wholes[i] = static_cast<int8_t>(bits);
      }
      for (int64_t s = 0; s < NUM_SUMS; s++) {
        int32_t sum = 0;
        for (int64_t i = 0; i < SUM; i++) sum += wholes[s * SUM + i];
        sums[s] = static_cast<float>(sum);
      }
    }
  };

  const int64_t num_chunks;
  std::vector<Chunk> chunks;  // of each row, one row after the other
};

// CHUNK numbers of a row of weights: integer * scale + offset.
struct alignas(64) WeightChunk {
  Bytes wholes[NUM_GROUPS];
  Floats8 scales[NUM_GROUPS];  // of four numbers each
  float offsets[NUM_SUMS];
};

template <typename Block>
constexpr bool HAS_SIGN = false;
template <>
constexpr bool HAS_SIGN<Q8_0> = true;

// The integers of 32 numbers of 4 bits, and a fifth if `fifth` is given.
template <bool HAS_FIFTH>
INLINE Bytes small_wholes(const uint8_t* low_high, const uint8_t* fifth) {
  typedef uint8_t Half __attribute__((vector_size(16)));
  Half both = loaded<Half>(low_high), halves[2] = {both & 15, both >> 4};
  Bytes wholes = loaded<Bytes>(halves);
  if (HAS_FIFTH) {
    uint64_t eights[4];
    UNROLLED for (int i = 0; i < 4; i++) eights[i] = fifth[i] * 0x0101010101010101u;
    const uint64_t each = 0x8040201008040201u, bits[4] = {each, each, each, each};
    wholes |= (Bytes)((loaded<Bytes>(eights) & loaded<Bytes>(bits)) != 0) & 16;
  }
  return wholes;
}

INLINE void put_group(WeightChunk& to, int64_t g, Bytes wholes, float scale, float offset) {
  to.wholes[g] = wholes;
  to.scales[g] = scale - Floats8{};
  to.offsets[2 * g] = to.offsets[2 * g + 1] = offset;
}

INLINE void put_block(WeightChunk& to, int64_t g, const Q4_0& block) {
  float scale = widened_half(block.scale);
  put_group(to, g, small_wholes<false>(block.low_high, nullptr), scale, -8 * scale);
}

INLINE void put_block(WeightChunk& to, int64_t g, const Q4_1& block) {
  put_group(to, g, small_wholes<false>(block.low_high, nullptr), widened_half(block.scale), widened_half(block.offset));
}

INLINE void put_block(WeightChunk& to, int64_t g, const Q5_0& block) {
  float scale = widened_half(block.scale);
  put_group(to, g, small_wholes<true>(block.low_high, block.fifth), scale, -16 * scale);
}

INLINE void put_block(WeightChunk& to, int64_t g, const Q5_1& block) {
  put_group(to, g, small_wholes<true>(block.low_high, block.fifth), widened_half(block.scale),
            widened_half(block.offset));
}

INLINE void put_block(WeightChunk& to, int64_t g, const Q8_0& block) {
  put_group(to, g, loaded<Bytes>(block.whole), widened_half(block.scale), 0.0f);
}

INLINE void put_block(WeightChunk& to, int64_t, const Q4_K& block) {
  const Eight of = made(block);
  UNROLLED for (int g = 0; g < 8; g++) {
    Bytes both = loaded<Bytes>(block.low_high[g / 2]);
    put_group(to, g, g % 2 ? both >> 4 : both & 15, of.scales[g], of.offsets[g]);
  }
}

INLINE void put_block(WeightChunk& to, int64_t, const Q5_K& block) {
  const Eight of = made(block);
  const Bytes fifth = loaded<Bytes>(block.fifth);
  UNROLLED for (int g = 0; g < 8; g++) {
    Bytes both = loaded<Bytes>(block.low_high[g / 2]);
    put_group(to, g, (g % 2 ? both >> 4 : both & 15) | (fifth >> g & 1) << 4, of.scales[g], of.offsets[g]);
  }
}

INLINE void put_block(WeightChunk& to, int64_t, const Q6_K& block) {
  const Sixteen of = made(block);
  UNROLLED for (int g = 0; g < 8; g++) {
    const int h = g / 4, j = g % 4;
    Bytes both = loaded<Bytes>(block.low_high[h] + j % 2 * 32), upper = loaded<Bytes>(block.upper[h]);
    to.wholes[g] = (j < 2 ? both & 15 : both >> 4) | (upper >> 2 * j & 3) << 4;
    const float a = of.scales[2 * g], b = of.scales[2 * g + 1];
    to.scales[g] = Floats8{a, a, a, a, b, b, b, b};
    to.offsets[2 * g] = -32 * a;
    to.offsets[2 * g + 1] = -32 * b;
  }
}

// The numbers of these blocks, at most CHUNK; others are zero.
template <typename Block>
INLINE void put_chunk(WeightChunk& to, const Block* blocks, int64_t num_blocks) {
  constexpr int64_t GROUPS = Block::NUMBERS / GROUP;
  for (int64_t b = 0; b < num_blocks; b++) put_block(to, b * GROUPS, blocks[b]);
  for (int64_t g = num_blocks * GROUPS; g < NUM_GROUPS; g++) put_group(to, g, Bytes{}, 0.0f, 0.0f);
}

// Adds products of a chunk of ROWS rows with that of CHANNELS rows of weights to their sums.
template <bool IS_SIGNED, int ROWS, int CHANNELS>
INLINE void add_rounded(const RoundedRows::Chunk* x, int64_t apart, const WeightChunk* weights,
                        Floats8 (*sums)[BLOCK_CHANNELS]) {
  Floats8 here[ROWS][CHANNELS];
  UNROLLED for (int c = 0; c < CHANNELS; c++) {
    const Floats8 first = loaded<Floats8>(weights[c].offsets), second = loaded<Floats8>(weights[c].offsets + 8);
    UNROLLED for (int r = 0; r < ROWS; r++) {
      const float* of = x[r * apart].sums;
      here[r][c] = multiply_add8(loaded<Floats8>(of + 8), second, loaded<Floats8>(of) * first);
    }
  }
  for (int64_t g = 0; g < NUM_GROUPS; g++) {
    UNROLLED for (int c = 0; c < CHANNELS; c++) {
      const Bytes wholes = weights[c].wholes[g];
      const Floats8 scale = weights[c].scales[g];
      UNROLLED for (int r = 0; r < ROWS; r++) {
        SignedBytes row = loaded<SignedBytes>(x[r * apart].wholes + g * GROUP);
        Ints8 four = IS_SIGNED ? sums_of_four((SignedBytes)wholes, row) : sums_of_four(wholes, row);
        here[r][c] = multiply_add8(__builtin_convertvector(four, Floats8), scale, here[r][c]);
      }
    }
  }
  UNROLLED for (int r = 0; r < ROWS; r++) {
    const Floats8 scale = x[r * apart].scale - Floats8{};
    UNROLLED for (int c = 0; c < CHANNELS; c++) sums[r][c] = multiply_add8(here[r][c], scale, sums[r][c]);
  }
}

// The same for `num_rows` rows, in tiles whose sums fit into registers.
template <bool IS_SIGNED, int ROWS>
void add_all_rounded(int64_t num_rows, const RoundedRows::Chunk* x, int64_t apart, const WeightChunk* weights,
                     Floats8 (*sums)[BLOCK_CHANNELS]) {
  constexpr int CHANNELS = ROWS <= 2 ? 4 : 2;
  for (; num_rows >= ROWS; num_rows -= ROWS, x += ROWS * apart, sums += ROWS) {
    UNROLLED for (int c = 0; c < BLOCK_CHANNELS; c += CHANNELS) {
      add_rounded<IS_SIGNED, ROWS, CHANNELS>(x, apart, weights + c,
                                             reinterpret_cast<Floats8(*)[BLOCK_CHANNELS]>(&sums[0][c]));
    }
  }
  if constexpr (ROWS > 1) {
    if (num_rows > 0) add_all_rounded<IS_SIGNED, ROWS - 1>(num_rows, x, apart, weights, sums);
  }
}

// Products of up to MOST_BLOCK_ROWS rounded rows with rows of weights; the first `num_here` of them are written.
template <typename Block>
void rounded_channels(int64_t num_rows, const RoundedRows::Chunk* x, int64_t num_chunks, const Block* const* rows,
                      int64_t num_here, int64_t length, int64_t apart, float* y, int64_t num_channels) {
  constexpr int64_t NUM_BLOCKS = CHUNK / Block::NUMBERS;
  WeightChunk chunks[BLOCK_CHANNELS];
  Floats8 sums[MOST_BLOCK_ROWS][BLOCK_CHANNELS];
  for (int64_t r = 0; r < num_rows; r++) UNROLLED for (int c = 0; c < BLOCK_CHANNELS; c++) sums[r][c] = Floats8{};
  for (int64_t i = 0; i < num_chunks; i++) {
    const int64_t left = length - i * NUM_BLOCKS;
    for (int c = 0; c < BLOCK_CHANNELS; c++) {
      const Block* blocks = rows[c] + i * NUM_BLOCKS;
      prefetch<NUM_BLOCKS * sizeof(Block)>(blocks);
      put_chunk(chunks[c], blocks, left < NUM_BLOCKS ? left : NUM_BLOCKS);
    }
    add_all_rounded<HAS_SIGN<Block>, 5>(num_rows, x + i, num_chunks, chunks, sums);
  }
  for (int64_t r = 0; r < num_rows; r++) {
    for (int64_t c = 0; c < num_here; c++) y[r * num_channels + c * apart] = sum_of(sums[r][c]);
  }
}

// This thread's channels of one matrix.
template <typename Block>
void rounded_share(int64_t num_rows, const RoundedRows& x, const Block* weights, int64_t length, int64_t begin,
                   int64_t end, float* y, int64_t num_channels) {
  share_of_blocks(num_rows, weights, length, begin, end,
                  [&](int64_t done, int64_t left, const Block* const* rows, int64_t first, int64_t apart,
                      int64_t num_here) {
    rounded_channels(left, x.chunks.data() + done * x.num_chunks, x.num_chunks, rows, num_here, length, apart,
                     y + done * num_channels + first, num_channels);
  });
}

}  // namespace
