// Products of few rows with weights in blocks (blocks.h), after the rows are rounded to 8 bits.
//
// CHUNK numbers of a row of x become integers between -127 and 127 with one scale, so a row's result depends on that row
// alone. A lane of a vector is a row of the weights: LANES of them are rearranged, four integers of each in a vector
// (weight_chunks.h), in registers for up to ROUNDED_ROWS rows of x, else in the nearest cache, once for all rows. Products
// of integers are summed exactly over the numbers that share a scale, and then in float32, one after the other; so all
// processors with fused multiply-add get the same bits.
#pragma once

#include <cmath>
#include <memory>

#include "block_matmul.h"
#include "weight_chunks.h"

namespace {

// The lowest bytes of the lanes.
INLINE void store_bytes(int8_t* to, Ints from) {
#if VECTOR_BYTES == 64
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)from));
#elif VECTOR_BYTES == 32
  const __m256i picked = _mm256_shuffle_epi8((__m256i)from, _mm256_set1_epi32(0x0c080400));
  int32_t parts[2] = {_mm256_extract_epi32(picked, 0), _mm256_extract_epi32(picked, 4)};
  memcpy(to, parts, 8);
#else
  for (int l = 0; l < LANES; l++) to[l] = static_cast<int8_t>(from[l]);
#endif
}

// Rows of x as integers: CHUNK numbers share a scale.
struct RoundedRows {
  RoundedRows(const float* x, int64_t num_rows, int64_t width, int64_t num_threads)
      : num_chunks((width + CHUNK - 1) / CHUNK), chunks(new Chunk[num_rows * num_chunks + BEYOND]) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows * num_chunks >= SHARED_CHUNKS)
    for (int64_t at = 0; at < num_rows * num_chunks; at++) {
      int64_t begin = at / num_rows * CHUNK, left = width - begin;
      chunks[at].round(x + at % num_rows * width + begin, left < CHUNK ? left : CHUNK);
    }
  }

  struct alignas(64) Chunk {
    int32_t words[CHUNK / 4];         // the integers
    int32_t sums[NUM_GROUPS];         // of those of each 32 numbers
    float whole_sums[NUM_GROUPS];     // the same, as most products need them
    float half_sums[2 * NUM_GROUPS];  // and of those of each 16
    float scale;

    // `number` is a multiple of GROUP.
    void round(const float* x, int64_t number) {
      Floats largest = {}, bad = {};
      for (int64_t i = 0; i < number; i += LANES) {
        const Floats these = load(x + i), sizes = (Floats)((Ints)these & 0x7fffffff);
        largest = sizes > largest ? sizes : largest;
        bad += these * 0.0f;  // no number if one is not finite
      }
      Four fours[2] = {};
      UNROLLED for (int l = 0; l < LANES; l += 4) {
        Four four[2];
        memcpy(&four[0], reinterpret_cast<const float*>(&largest) + l, 16);
        memcpy(&four[1], reinterpret_cast<const float*>(&bad) + l, 16);
        fours[0] = four[0] > fours[0] ? four[0] : fours[0];
        fours[1] += four[1];
      }
      float most = 0.0f;
      UNROLLED for (int l = 0; l < 4; l++) most = fours[0][l] > most ? fours[0][l] : most;
      const float finite = (fours[1][0] + fours[1][1]) + (fours[1][2] + fours[1][3]);
      scale = most / 127.0f + finite;
      const float inverse = most < 1e-30f ? 0.0f : 127.0f / most;
      auto wholes = reinterpret_cast<int8_t*>(words);
      if (scale < INFINITY) {
        for (int64_t i = 0; i < number; i += LANES) {
          // The last bits of the sum are a whole number, to which it is rounded; to an even one in the middle.
          store_bytes(wholes + i, (Ints)(load(x + i) * inverse + 0x1.8p23f));
        }
        memset(wholes + number, 0, CHUNK - number);
      } else {
        memset(wholes, 0, CHUNK);
      }
      for (int64_t g = 0; g < NUM_GROUPS; g++) {
        int32_t halves[2];
        for (int h = 0; h < 2; h++) {
          uint64_t eights[2], sum = 0;
          memcpy(eights, wholes + g * GROUP + h * 16, 16);
          for (uint64_t eight : eights) {
            eight ^= 0x8080808080808080;
            sum += (eight & 0x00ff00ff00ff00ff) + (eight >> 8 & 0x00ff00ff00ff00ff);
          }
          halves[h] = static_cast<int32_t>(sum * 0x0001000100010001 >> 48) - 16 * 128;
        }
        sums[g] = halves[0] + halves[1];
        whole_sums[g] = static_cast<float>(sums[g]);
        for (int h = 0; h < 2; h++) half_sums[2 * g + h] = static_cast<float>(halves[h]);
      }
    }
  };

  static constexpr int64_t BEYOND = 2;          // rows that a tile has and x has not
  static constexpr int64_t SHARED_CHUNKS = 128;  // fewer are rounded sooner than several threads begin
  const int64_t num_chunks;
  const std::unique_ptr<Chunk[]> chunks;  // the first of all rows, then the second of all, and so on
};

// Sums over 4 * NUMBER products of integers, for each channel; `words` has four of each channel at a time, `x` those of
// a row, `sum` the sum of the latter.
template <typename Block, int NUMBER>
INLINE Ints sums_of_products(const Words* words, const int32_t* x, int32_t sum) {
#if defined(HAS_BYTE_PRODUCTS)
  // Bytes without a sign: take_apart adds 128 to integers that have one.
  Ints sums[2] = {(HAS_SIGN<Block> ? -128 * sum : 0) - Ints{}, Ints{}};
  UNROLLED for (int j = 0; j < NUMBER; j++) sums[j % 2] = add_byte_products(sums[j % 2], words[j], x[j]);
  return sums[0] + sums[1];
#elif VECTOR_BYTES == 64 && defined(__AVX512BW__)
#define WIDE(name) _mm512_##name
  typedef __m512i Wide;
#elif VECTOR_BYTES == 32
#define WIDE(name) _mm256_##name
  typedef __m256i Wide;
#elif defined(__aarch64__)
  int32x4_t sums = vdupq_n_s32(0);
  UNROLLED for (int j = 0; j < NUMBER; j++) {
    const int8x16_t a = (int8x16_t)words[j], b = vreinterpretq_s8_s32(vdupq_n_s32(x[j]));
#if defined(__ARM_FEATURE_DOTPROD)
    sums = vdotq_s32(sums, a, b);
#else
    int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
    sums = vaddq_s32(sums, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
  }
  return (Ints)sums;
#else
  Ints sums = {};
  UNROLLED for (int j = 0; j < NUMBER; j++) {
    UNROLLED for (int b = 0; b < 4; b++) {
      const Ints shifted = (Ints)(words[j] << (24 - 8 * b));
      sums += (HAS_SIGN<Block> ? shifted >> 24 : (Ints)((Words)shifted >> 24)) * static_cast<int8_t>(x[j] >> 8 * b);
    }
  }
  return sums;
#endif
#ifdef WIDE
  // So many sums of two products fit into 16 bits.
  constexpr int FIT = 32767 / (2 * 127 * MOST_WHOLE<Block>), TOGETHER = FIT < 1 ? 1 : FIT < NUMBER ? FIT : NUMBER;
  static_assert(NUMBER % TOGETHER == 0);
  Ints sums = {};
  UNROLLED for (int j = 0; j < NUMBER; j += TOGETHER) {
    Wide twos = {};
    UNROLLED for (int t = j; t < j + TOGETHER; t++) {
      Wide a = (Wide)words[t], b = WIDE(set1_epi32)(x[t]);
      if constexpr (HAS_SIGN<Block>) {
        typedef int8_t SignedBytes __attribute__((vector_size(VECTOR_BYTES)));
        const SignedBytes is_negative = (SignedBytes)a < 0;
        a = (Wide)(((SignedBytes)a ^ is_negative) - is_negative);
        b = (Wide)(((SignedBytes)b ^ is_negative) - is_negative);
      }
      const Wide these = WIDE(maddubs_epi16)(a, b);
      twos = t == j ? these : WIDE(add_epi16)(twos, these);
    }
    sums += (Ints)WIDE(madd_epi16)(twos, WIDE(set1_epi16)(1));
  }
  return sums;
#undef WIDE
#endif
}

// Adds the products of a group of a chunk of a row with that of the channels.
template <typename Block>
INLINE Floats add_group(const RoundedRows::Chunk& x, int64_t g, const Words* wholes, const Floats* scales,
                        const Floats* offsets, Floats sums) {
  constexpr int EACH = NUM_SCALES<Block>, NUMBER = WORDS / EACH;
  UNROLLED for (int s = 0; s < EACH; s++) {
    const int64_t at = g * EACH + s;
    const Ints products = sums_of_products<Block, NUMBER>(wholes + s * NUMBER, x.words + NUMBER * at, x.sums[g]);
    sums = multiply_add(__builtin_convertvector(products, Floats), scales[s], sums);
    if constexpr (!HAS_SIGN<Block>) {
      sums = multiply_add(all_lanes(EACH == 1 ? x.whole_sums[at] : x.half_sums[at]), offsets[s], sums);
    }
  }
  return sums;
}

// CHUNK numbers of LANES rows of weights.
template <typename Block>
struct alignas(64) WeightChunk {
  Words wholes[NUM_GROUPS][WORDS];
  Floats scales[NUM_GROUPS][NUM_SCALES<Block>], offsets[NUM_GROUPS][NUM_SCALES<Block>];
};

// Adds products of a chunk of ROWS rows with that of the channels to their sums.
template <int ROWS, typename Block>
INLINE void add_rounded(const RoundedRows::Chunk* x, const WeightChunk<Block>& weights, int64_t num_groups,
                        Floats* sums) {
  Floats here[ROWS] = {};
  for (int64_t g = 0; g < num_groups; g++) {
    UNROLLED for (int r = 0; r < ROWS; r++) {
      here[r] = add_group<Block>(x[r], g, weights.wholes[g], weights.scales[g], weights.offsets[g], here[r]);
    }
  }
  UNROLLED for (int r = 0; r < ROWS; r++) sums[r] = multiply_add(here[r], all_lanes(x[r].scale), sums[r]);
}

// The same for `num_rows` rows, in tiles whose sums fit into registers.
template <int ROWS, typename Block>
void add_all_rounded(int64_t num_rows, const RoundedRows::Chunk* x, const WeightChunk<Block>& weights,
                     int64_t num_groups, Floats* sums) {
  for (; num_rows >= ROWS; num_rows -= ROWS, x += ROWS, sums += ROWS) {
    add_rounded<ROWS>(x, weights, num_groups, sums);
  }
  if constexpr (ROWS > 1) {
    if (num_rows > 0) add_all_rounded<ROWS - 1>(num_rows, x, weights, num_groups, sums);
  }
}

constexpr int ROUNDED_ROWS = NUM_REGISTERS == 32 ? 8 : 5;  // in a tile

// The same with integers of the weights in registers, from `number` blocks of each channel.
template <int ROWS, typename Block>
void add_blocks(const RoundedRows::Chunk* x, const Block* const* blocks, int64_t number, Floats* sums) {
  Floats here[ROWS] = {};
  take_apart(blocks, number, [&](int g, const Words* wholes, const Floats* scales, const Floats* offsets)
                                 __attribute__((always_inline)) {
    UNROLLED for (int r = 0; r < ROWS; r++) here[r] = add_group<Block>(x[r], g, wholes, scales, offsets, here[r]);
  });
  UNROLLED for (int r = 0; r < ROWS; r++) sums[r] = multiply_add(here[r], all_lanes(x[r].scale), sums[r]);
}

// Adds products of a chunk of rows with that of the channels, in `number` blocks each. Few sizes are compiled: two rows
// are three and four are five, of which one is computed in vain.
template <typename Block>
void add_chunk(int64_t num_rows, const RoundedRows::Chunk* x, const Block* const* blocks, int64_t number, Floats* sums) {
  if (num_rows == 1) return add_blocks<1>(x, blocks, number, sums);
  if (num_rows <= 3) return add_blocks<3>(x, blocks, number, sums);
  if (num_rows <= 5) return add_blocks<5>(x, blocks, number, sums);
  if (num_rows <= ROUNDED_ROWS) return add_blocks<ROUNDED_ROWS>(x, blocks, number, sums);
  WeightChunk<Block> chunk;
  take_apart(blocks, number, [&](int g, const Words* wholes, const Floats* scales, const Floats* offsets)
                                 __attribute__((always_inline)) {
    UNROLLED for (int j = 0; j < WORDS; j++) chunk.wholes[g][j] = wholes[j];
    UNROLLED for (int s = 0; s < NUM_SCALES<Block>; s++) {
      chunk.scales[g][s] = scales[s];
      chunk.offsets[g][s] = offsets[s];
    }
  });
  add_all_rounded<ROUNDED_ROWS>(num_rows, x, chunk, number * (Block::NUMBERS / GROUP), sums);
}

// This thread's channels of one matrix.
template <typename Block>
void rounded_share(int64_t num_rows, const RoundedRows& x, const Block* weights, int64_t length, int64_t begin,
                   int64_t end, float* y, int64_t num_channels) {
  constexpr int64_t NUM_BLOCKS = CHUNK / Block::NUMBERS;
  share_of_blocks<LANES>(num_rows, weights, length, begin, end,
                         [&](int64_t done, int64_t left, const Block* const* rows, int64_t first, int64_t apart,
                             int64_t num_here) {
    Floats sums[MOST_BLOCK_ROWS];
    for (Floats& one : sums) one = Floats{};
    for (int64_t i = 0; i < x.num_chunks; i++) {
      const int64_t blocks_left = length - i * NUM_BLOCKS, number = blocks_left < NUM_BLOCKS ? blocks_left : NUM_BLOCKS;
      const Block* blocks[LANES];
      UNROLLED for (int c = 0; c < LANES; c++) blocks[c] = rows[c] + i * NUM_BLOCKS;
      add_chunk(left, &x.chunks[i * num_rows + done], blocks, number, sums);
    }
    for (int64_t r = 0; r < left; r++) {
      float* to = y + (done + r) * num_channels + first;
      for (int64_t c = 0; c < num_here; c++) to[c * apart] = sums[r][c];
    }
  });
}

}  // namespace
