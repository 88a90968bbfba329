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
constexpr int64_t NUM_GROUPS = CHUNK / GROUP;

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

  struct alignas(64) Chunk {
    int8_t wholes[CHUNK];
    float sums[NUM_GROUPS], half_sums[2 * NUM_GROUPS];  // of the integers of each 32 and 16 numbers
    float scale;

    // `number` is a multiple of GROUP.
    void round(const float* x, int64_t number) {
      Floats8 largest = {}, bad = {};
      for (int64_t i = 0; i < number; i += 8) {
        const Floats8 these = loaded<Floats8>(x + i), sizes = (Floats8)((Ints8)these & 0x7fffffff);
        largest = sizes > largest ? sizes : largest;
        bad += these * 0.0f;  // no number if one is not finite
      }
      float most = 0.0f;
      for (int l = 0; l < 8; l++) most = largest[l] > most ? largest[l] : most;
      scale = most / 127.0f + sum_of(bad);
      const float inverse = most < 1e-30f ? 0.0f : 127.0f / most;
      memset(wholes, 0, sizeof wholes);
      if (scale < INFINITY) {
        for (int64_t i = 0; i < number; i++) {
          // The last bits of the sum are a whole number, to which it is rounded; to an even one in the middle.
          float shifted = x[i] * inverse + 0x1.8p23f;
          int32_t bits;
          memcpy(&bits, &shifted, sizeof bits);
          wholes[i] = static_cast<int8_t>(bits);
        }
      }
      for (int64_t h = 0; h < 2 * NUM_GROUPS; h++) {
        int32_t sum = 0;
        for (int64_t i = 0; i < GROUP / 2; i++) sum += wholes[h * GROUP / 2 + i];
        half_sums[h] = static_cast<float>(sum);
      }
      for (int64_t g = 0; g < NUM_GROUPS; g++) sums[g] = half_sums[2 * g] + half_sums[2 * g + 1];
    }
  };

  const int64_t num_chunks;
  std::vector<Chunk> chunks;  // of each row, one row after the other
};

// How blocks are multiplied: the sign of their integers, and the number of scales (and offsets) of 32 numbers.
template <typename Block>
constexpr bool HAS_SIGN = false;
template <>
constexpr bool HAS_SIGN<Q8_0> = true;
template <typename Block>
constexpr int NUM_SCALES = 1;
template <>
constexpr int NUM_SCALES<Q6_K> = 2;

// The integers of 32 numbers of 4 bits, and a fifth if `fifth` is given.
template <bool HAS_FIFTH>
INLINE Bytes small_wholes(const uint8_t* low_high, const uint8_t* fifth) {
#if VECTOR_BYTES >= 32
  // In memory, two stores of halves would have to be complete before they are loaded as one.
  const __m128i both = _mm_loadu_si128((const __m128i*)low_high), mask = _mm_set1_epi8(15);
  Bytes wholes = (Bytes)_mm256_set_m128i(_mm_and_si128(_mm_srli_epi16(both, 4), mask), _mm_and_si128(both, mask));
#else
  typedef uint8_t Half __attribute__((vector_size(16)));
  Half both = loaded<Half>(low_high), halves[2] = {both & 15, both >> 4};
  Bytes wholes = loaded<Bytes>(halves);
#endif
  if (HAS_FIFTH) {
    uint64_t eights[4];
    UNROLLED for (int i = 0; i < 4; i++) eights[i] = fifth[i] * 0x0101010101010101u;
    const uint64_t each = 0x8040201008040201u, bits[4] = {each, each, each, each};
    wholes |= (Bytes)((loaded<Bytes>(eights) & loaded<Bytes>(bits)) != 0) & 16;
  }
  return wholes;
}

// The integers of the g-th 32 numbers of these blocks.

INLINE Bytes wholes_of(const Q4_0* blocks, int g) { return small_wholes<false>(blocks[g].low_high, nullptr); }
INLINE Bytes wholes_of(const Q4_1* blocks, int g) { return small_wholes<false>(blocks[g].low_high, nullptr); }
INLINE Bytes wholes_of(const Q5_0* blocks, int g) { return small_wholes<true>(blocks[g].low_high, blocks[g].fifth); }
INLINE Bytes wholes_of(const Q5_1* blocks, int g) { return small_wholes<true>(blocks[g].low_high, blocks[g].fifth); }
INLINE Bytes wholes_of(const Q8_0* blocks, int g) { return loaded<Bytes>(blocks[g].whole); }

INLINE Bytes wholes_of(const Q4_K* block, int g) {
  Bytes both = loaded<Bytes>(block->low_high[g / 2]);
  return g % 2 ? both >> 4 : both & 15;
}

INLINE Bytes wholes_of(const Q5_K* block, int g) {
  Bytes both = loaded<Bytes>(block->low_high[g / 2]), fifth = loaded<Bytes>(block->fifth);
  return (g % 2 ? both >> 4 : both & 15) | (fifth >> g & 1) << 4;
}

INLINE Bytes wholes_of(const Q6_K* block, int g) {
  const int h = g / 4, j = g % 4;
  Bytes both = loaded<Bytes>(block->low_high[h] + j % 2 * 32), upper = loaded<Bytes>(block->upper[h]);
  return (j < 2 ? both & 15 : both >> 4) | (upper >> 2 * j & 3) << 4;
}

template <int WIDTH, bool HAS_ZERO>
INLINE Bytes wholes_of(const Group<WIDTH, HAS_ZERO>* groups, int g) {
  if constexpr (WIDTH == GROUP) {
    return small_wholes<false>(groups[g].low_high[0], nullptr);
  } else {
    constexpr int EACH = WIDTH / GROUP;
    Bytes both = loaded<Bytes>(groups[g / EACH].low_high[g % EACH / 2]);
    return g % 2 ? both >> 4 : both & 15;
  }
}

// Scales and offsets of CHUNK numbers of a row of weights.
template <typename Block>
struct alignas(64) Scales {
  static constexpr int NUMBER = NUM_GROUPS * NUM_SCALES<Block>;
  float scales[NUMBER], offsets[NUMBER];
};

INLINE float offset_of(const Q4_0&, float scale) { return -8 * scale; }
INLINE float offset_of(const Q5_0&, float scale) { return -16 * scale; }
INLINE float offset_of(const Q8_0&, float) { return 0.0f; }
INLINE float offset_of(const Q4_1& block, float) { return widened_half(block.offset); }
INLINE float offset_of(const Q5_1& block, float) { return widened_half(block.offset); }

// Those of `number` blocks of 32 numbers; others are zero.
template <typename Block>
INLINE void put_scales(Scales<Block>& to, const Block* blocks, int64_t number) {
  if (number < NUM_GROUPS) to = {};
  UNROLLED for (int g = 0; g < NUM_GROUPS; g++) {
    if (g == number) return;
    to.scales[g] = widened_half(blocks[g].scale);
    to.offsets[g] = offset_of(blocks[g], to.scales[g]);
  }
}

template <int WIDTH, bool HAS_ZERO>
INLINE void put_scales(Scales<Group<WIDTH, HAS_ZERO>>& to, const Group<WIDTH, HAS_ZERO>* groups, int64_t number) {
  constexpr int EACH = WIDTH / GROUP;
  if (number * EACH < NUM_GROUPS) to = {};
  UNROLLED for (int b = 0; b < NUM_GROUPS / EACH; b++) {
    if (b == number) return;
    const Affine of = made(groups[b]);
    UNROLLED for (int g = b * EACH; g < (b + 1) * EACH; g++) {
      to.scales[g] = of.scale;
      to.offsets[g] = of.offset;
    }
  }
}

template <typename Block>
INLINE void put_eight(Scales<Block>& to, const Block& block) {
  const Eight of = made(block);
  memcpy(to.scales, of.scales, sizeof of.scales);
  memcpy(to.offsets, of.offsets, sizeof of.offsets);
}

INLINE void put_scales(Scales<Q4_K>& to, const Q4_K* block, int64_t) { put_eight(to, *block); }
INLINE void put_scales(Scales<Q5_K>& to, const Q5_K* block, int64_t) { put_eight(to, *block); }

INLINE void put_scales(Scales<Q6_K>& to, const Q6_K* block, int64_t) {
  const Sixteen of = made(*block);
  memcpy(to.scales, of.scales, sizeof of.scales);
  UNROLLED for (int i = 0; i < 16; i++) to.offsets[i] = -32 * of.scales[i];
}

// The scale of each four of the g-th 32 numbers.
template <typename Block>
INLINE Floats8 scale_of(const Scales<Block>& from, int64_t g) {
  if constexpr (NUM_SCALES<Block> == 1) return from.scales[g] - Floats8{};
  const float a = from.scales[2 * g], b = from.scales[2 * g + 1];
  return Floats8{a, a, a, a, b, b, b, b};
}

// What the offsets add to the products with a chunk of a row.
template <typename Block>
INLINE Floats8 of_offsets(const Scales<Block>& from, const RoundedRows::Chunk& x) {
  if constexpr (HAS_SIGN<Block>) return Floats8{};
  if constexpr (NUM_SCALES<Block> == 1) return loaded<Floats8>(x.sums) * loaded<Floats8>(from.offsets);
  Floats8 first = loaded<Floats8>(x.half_sums) * loaded<Floats8>(from.offsets);
  return multiply_add8(loaded<Floats8>(x.half_sums + 8), loaded<Floats8>(from.offsets + 8), first);
}

template <typename Block>
INLINE Floats8 add_group(Bytes wholes, const int8_t* row, Floats8 scale, Floats8 sum) {
  const SignedBytes of_x = loaded<SignedBytes>(row);
  Ints8 four = HAS_SIGN<Block> ? sums_of_four((SignedBytes)wholes, of_x) : sums_of_four(wholes, of_x);
  return multiply_add8(__builtin_convertvector(four, Floats8), scale, sum);
}

// CHUNK numbers of a row of weights.
template <typename Block>
struct alignas(64) WeightChunk {
  Bytes wholes[NUM_GROUPS];
  Scales<Block> scales;
};

// Adds products of a chunk of ROWS rows with that of CHANNELS rows of weights to their sums.
template <int ROWS, int CHANNELS, typename Block>
INLINE void add_rounded(const RoundedRows::Chunk* x, int64_t apart, const WeightChunk<Block>* weights,
                        Floats8 (*sums)[BLOCK_CHANNELS]) {
  Floats8 here[ROWS][CHANNELS];
  UNROLLED for (int r = 0; r < ROWS; r++) {
    UNROLLED for (int c = 0; c < CHANNELS; c++) here[r][c] = of_offsets(weights[c].scales, x[r * apart]);
  }
  for (int64_t g = 0; g < NUM_GROUPS; g++) {
    UNROLLED for (int c = 0; c < CHANNELS; c++) {
      const Bytes wholes = weights[c].wholes[g];
      const Floats8 scale = scale_of(weights[c].scales, g);
      UNROLLED for (int r = 0; r < ROWS; r++) {
        here[r][c] = add_group<Block>(wholes, x[r * apart].wholes + g * GROUP, scale, here[r][c]);
      }
    }
  }
  UNROLLED for (int r = 0; r < ROWS; r++) {
    const Floats8 scale = x[r * apart].scale - Floats8{};
    UNROLLED for (int c = 0; c < CHANNELS; c++) sums[r][c] = multiply_add8(here[r][c], scale, sums[r][c]);
  }
}

// The same for `num_rows` rows, in tiles whose sums fit into registers.
template <int ROWS, typename Block>
void add_all_rounded(int64_t num_rows, const RoundedRows::Chunk* x, int64_t apart, const WeightChunk<Block>* weights,
                     Floats8 (*sums)[BLOCK_CHANNELS]) {
  constexpr int CHANNELS = ROWS <= 2 ? 4 : 2;
  for (; num_rows >= ROWS; num_rows -= ROWS, x += ROWS * apart, sums += ROWS) {
    UNROLLED for (int c = 0; c < BLOCK_CHANNELS; c += CHANNELS) {
      add_rounded<ROWS, CHANNELS>(x, apart, weights + c, reinterpret_cast<Floats8(*)[BLOCK_CHANNELS]>(&sums[0][c]));
    }
  }
  if constexpr (ROWS > 1) {
    if (num_rows > 0) add_all_rounded<ROWS - 1>(num_rows, x, apart, weights, sums);
  }
}

// Sums of the products of a chunk of one row with `number` groups of four rows of weights, in registers.
template <typename Block>
INLINE void add_rounded_one(const RoundedRows::Chunk& x, const Block* const* blocks, int64_t num_blocks, int64_t number,
                            Floats8* sums) {
  Scales<Block> scales[BLOCK_CHANNELS];
  Floats8 here[BLOCK_CHANNELS];
  UNROLLED for (int c = 0; c < BLOCK_CHANNELS; c++) {
    put_scales(scales[c], blocks[c], num_blocks);
    here[c] = of_offsets(scales[c], x);
  }
  auto add = [&](int g) __attribute__((always_inline)) {
    UNROLLED for (int c = 0; c < BLOCK_CHANNELS; c++) {
      here[c] = add_group<Block>(wholes_of(blocks[c], g), x.wholes + g * GROUP, scale_of(scales[c], g), here[c]);
    }
  };
  if (number == NUM_GROUPS) {
    UNROLLED for (int g = 0; g < NUM_GROUPS; g++) add(g);
  } else {
    for (int g = 0; g < number; g++) add(g);
  }
  UNROLLED for (int c = 0; c < BLOCK_CHANNELS; c++) sums[c] = multiply_add8(here[c], x.scale - Floats8{}, sums[c]);
}

// Products of up to MOST_BLOCK_ROWS rounded rows with rows of weights; the first `num_here` of them are written.
template <typename Block>
void rounded_channels(int64_t num_rows, const RoundedRows::Chunk* x, int64_t num_chunks, const Block* const* rows,
                      int64_t num_here, int64_t length, int64_t apart, float* y, int64_t num_channels) {
  constexpr int64_t NUM_BLOCKS = CHUNK / Block::NUMBERS, GROUPS = Block::NUMBERS / GROUP;
  WeightChunk<Block> chunks[BLOCK_CHANNELS];
  Floats8 sums[MOST_BLOCK_ROWS][BLOCK_CHANNELS];
  for (int64_t r = 0; r < num_rows; r++) UNROLLED for (int c = 0; c < BLOCK_CHANNELS; c++) sums[r][c] = Floats8{};
  for (int64_t i = 0; i < num_chunks; i++) {
    const int64_t left = length - i * NUM_BLOCKS, num_blocks = left < NUM_BLOCKS ? left : NUM_BLOCKS;
    const Block* blocks[BLOCK_CHANNELS];
    for (int c = 0; c < BLOCK_CHANNELS; c++) {
      blocks[c] = rows[c] + i * NUM_BLOCKS;
      prefetch<NUM_BLOCKS * sizeof(Block)>(blocks[c]);
    }
    if (num_rows == 1) {
      add_rounded_one(x[i], blocks, num_blocks, num_blocks * GROUPS, sums[0]);
      continue;
    }
    for (int c = 0; c < BLOCK_CHANNELS; c++) {
      put_scales(chunks[c].scales, blocks[c], num_blocks);
      UNROLLED for (int g = 0; g < NUM_GROUPS; g++) {
        chunks[c].wholes[g] = g < num_blocks * GROUPS ? wholes_of(blocks[c], g) : Bytes{};
      }
    }
    add_all_rounded<5>(num_rows, x + i, num_chunks, chunks, sums);
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
