// Products of few rows with weights in blocks (blocks.h), after the rows are rounded to 8 bits.
//
// CHUNK numbers of a row of x become integers between -127 and 127 with one scale, so a row's result depends on that row
// alone. A lane of a vector is a row of the weights: LANES of them are rearranged in the nearest cache, four integers of
// each in a vector, once for all rows of x. Products of integers are summed exactly over the numbers that share a scale,
// and then in float32, one after the other; so all processors get the same bits.
#pragma once

#include <cmath>
#include <vector>

#include "block_matmul.h"

namespace {

// CHUNK numbers of a row share a scale.
constexpr int64_t GROUP = 32;  // numbers of the weights that share one, or two
constexpr int64_t NUM_GROUPS = CHUNK / GROUP;
constexpr int WORDS = GROUP / 4;  // of four integers each

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
    int32_t words[CHUNK / 4];         // the integers
    int32_t sums[NUM_GROUPS];         // of those of each 32 numbers
    float whole_sums[NUM_GROUPS];     // the same
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
      float most = 0.0f, finite = 0.0f;
      for (int l = 0; l < LANES; l++) {
        most = largest[l] > most ? largest[l] : most;
        finite += bad[l];
      }
      scale = most / 127.0f + finite;
      const float inverse = most < 1e-30f ? 0.0f : 127.0f / most;
      auto wholes = reinterpret_cast<int8_t*>(words);
      memset(wholes, 0, CHUNK);
      if (scale < INFINITY) {
        for (int64_t i = 0; i < number; i++) {
          // The last bits of the sum are a whole number, to which it is rounded; to an even one in the middle.
          float shifted = x[i] * inverse + 0x1.8p23f;
          int32_t bits;
          memcpy(&bits, &shifted, sizeof bits);
          wholes[i] = static_cast<int8_t>(bits);
        }
      }
      for (int64_t g = 0; g < NUM_GROUPS; g++) {
        int32_t halves[2] = {};
        for (int64_t i = 0; i < GROUP; i++) halves[i / (GROUP / 2)] += wholes[g * GROUP + i];
        sums[g] = halves[0] + halves[1];
        whole_sums[g] = static_cast<float>(sums[g]);
        for (int h = 0; h < 2; h++) half_sums[2 * g + h] = static_cast<float>(halves[h]);
      }
    }
  };

  const int64_t num_chunks;
  std::vector<Chunk> chunks;  // of each row, one row after the other
};

// How blocks are multiplied: their largest integer (that of Q8_0 has a sign), and the number of scales of 32 numbers.
template <typename Block>
constexpr int MOST_WHOLE = 15;
template <>
constexpr int MOST_WHOLE<Q5_0> = 31;
template <>
constexpr int MOST_WHOLE<Q5_1> = 31;
template <>
constexpr int MOST_WHOLE<Q5_K> = 31;
template <>
constexpr int MOST_WHOLE<Q6_K> = 63;
template <>
constexpr int MOST_WHOLE<Q8_0> = 128;
template <typename Block>
constexpr bool HAS_SIGN = MOST_WHOLE<Block> == 128;
template <typename Block>
constexpr int NUM_SCALES = MOST_WHOLE<Block> == 63 ? 2 : 1;

// Sums over 4 * NUMBER products of integers, for each channel; `words` has four of each channel at a time, `x` those of
// a row, `sum` the sum of the latter.
template <typename Block, int NUMBER>
INLINE Ints sums_of_products(const Words* words, const int32_t* x, int32_t sum) {
#if VECTOR_BYTES == 64 && defined(__AVX512VNNI__)
  // Bytes without a sign: put() adds 128 to integers that have one.
  __m512i sums[2] = {_mm512_set1_epi32(HAS_SIGN<Block> ? -128 * sum : 0), _mm512_setzero_si512()};
  UNROLLED for (int j = 0; j < NUMBER; j++) {
    sums[j % 2] = _mm512_dpbusd_epi32(sums[j % 2], (__m512i)words[j], _mm512_set1_epi32(x[j]));
  }
  return (Ints)_mm512_add_epi32(sums[0], sums[1]);
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

#if VECTOR_BYTES >= 32
INLINE __m256i two_parts(const void* low, const void* high) {
  return _mm256_set_m128i(_mm_loadu_si128((const __m128i*)high), _mm_loadu_si128((const __m128i*)low));
}
#endif

constexpr int64_t ROUNDED_AHEAD = 256;  // bytes of each row of weights to prefetch: there are LANES of them

// Four words of each channel, which `at` points to: the first of all in one vector, the second in another, and so on.
// Prefetches what comes later, if the next call is not for the same cache lines.
template <typename At>
INLINE void put_words(At at, Words* to, bool prefetches = true) {
  if (prefetches) {
    UNROLLED for (int c = 0; c < LANES; c++) __builtin_prefetch(reinterpret_cast<const char*>(at(c)) + ROUNDED_AHEAD);
  }
  Words rows[4];
  UNROLLED for (int r = 0; r < 4; r++) {
    // In memory, the stores of parts would have to be complete before they are loaded as one.
#if VECTOR_BYTES == 64
    rows[r] = (Words)_mm512_inserti64x4(_mm512_castsi256_si512(two_parts(at(r), at(4 + r))),
                                        two_parts(at(8 + r), at(12 + r)), 1);
#elif VECTOR_BYTES == 32
    rows[r] = (Words)two_parts(at(r), at(4 + r));
#else
    memcpy(&rows[r], at(r), sizeof rows[r]);
#endif
  }
#if VECTOR_BYTES == 64
#define UNPACKED(half, bits, a, b) (Words)_mm512_unpack##half##_epi##bits((__m512i)(a), (__m512i)(b))
#elif VECTOR_BYTES == 32
#define UNPACKED(half, bits, a, b) (Words)_mm256_unpack##half##_epi##bits((__m256i)(a), (__m256i)(b))
#endif
#ifdef UNPACKED
  const Words low[2] = {UNPACKED(lo, 32, rows[0], rows[1]), UNPACKED(lo, 32, rows[2], rows[3])};
  const Words high[2] = {UNPACKED(hi, 32, rows[0], rows[1]), UNPACKED(hi, 32, rows[2], rows[3])};
  to[0] = UNPACKED(lo, 64, low[0], low[1]);
  to[1] = UNPACKED(hi, 64, low[0], low[1]);
  to[2] = UNPACKED(lo, 64, high[0], high[1]);
  to[3] = UNPACKED(hi, 64, high[0], high[1]);
#undef UNPACKED
#else
  UNROLLED for (int j = 0; j < 4; j++) to[j] = Words{rows[0][j], rows[1][j], rows[2][j], rows[3][j]};
#endif
}

// Numbers of 16 bits in the lower halves of the lanes.
INLINE Floats widened_halves(Words words) {
#if VECTOR_BYTES == 64
  return (Floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)words));
#else
  Floats wide;
  UNROLLED for (int l = 0; l < LANES; l++) wide[l] = widened_half(static_cast<uint16_t>(words[l]));
  return wide;
#endif
}

// The scale of a block, of each channel.
template <typename At>
INLINE Floats scales_of(At at) {
  // Put together in general registers: vectors of them are rearranged enough.
  uint64_t fours[LANES / 4];
  UNROLLED for (int i = 0; i < LANES / 4; i++) {
    fours[i] = 0;
    UNROLLED for (int c = 0; c < 4; c++) {
      uint16_t half;
      memcpy(&half, at(4 * i + c), sizeof half);
      fours[i] |= static_cast<uint64_t>(half) << (16 * c);
    }
  }
#if VECTOR_BYTES == 64
  return (Floats)_mm512_cvtph_ps(_mm256_set_epi64x(fours[3], fours[2], fours[1], fours[0]));
#elif VECTOR_BYTES == 32 && defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(_mm_set_epi64x(fours[1], fours[0]));
#elif defined(__aarch64__)
  return (Floats)vcvt_f32_f16(vreinterpret_f16_u64(vcreate_u64(fours[0])));
#else
  Floats wide;
  UNROLLED for (int l = 0; l < LANES; l++) wide[l] = widened_half(static_cast<uint16_t>(fours[l / 4] >> l % 4 * 16));
  return wide;
#endif
}

// CHUNK numbers of LANES rows of weights.
template <typename Block>
struct alignas(64) WeightChunk {
  Words wholes[NUM_GROUPS][WORDS];
  Floats scales[NUM_GROUPS * NUM_SCALES<Block>], offsets[NUM_GROUPS * NUM_SCALES<Block>];
};

constexpr uint32_t EACH_BYTE = 0x01010101;

// The `number` blocks of a chunk of each channel.
//
// Blocks of 32 numbers: `low_high` has the integers of i and i + 16, `fifth` another bit for each.

template <typename Block>
INLINE void put_small(WeightChunk<Block>& to, const Block* const* blocks, int g) {
  Words* wholes = to.wholes[g];
  put_words([=](int c) { return blocks[c][g].low_high; }, wholes);
  UNROLLED for (int j = 0; j < 4; j++) {
    wholes[4 + j] = wholes[j] >> 4 & 15 * EACH_BYTE;
    wholes[j] &= 15 * EACH_BYTE;
  }
  to.scales[g] = scales_of([=](int c) { return &blocks[c][g].scale; });
}

template <typename Block>
INLINE void put_fifth(WeightChunk<Block>& to, const Block* const* blocks, int g) {
  Words bits;
  UNROLLED for (int c = 0; c < LANES; c++) memcpy(reinterpret_cast<char*>(&bits) + 4 * c, blocks[c][g].fifth, 4);
  // Copies of four bits, seven apart: bit b of copy b lies at 8 b.
  UNROLLED for (int j = 0; j < WORDS; j++) to.wholes[g][j] |= ((bits >> (4 * j) & 15) * 0x204081 & EACH_BYTE) << 4;
}

template <typename Block>
INLINE void put_offsets(WeightChunk<Block>& to, const Block* const* blocks, int g) {
  to.offsets[g] = scales_of([=](int c) { return &blocks[c][g].offset; });
}

INLINE void put(WeightChunk<Q4_0>& to, const Q4_0* const* blocks, int64_t number) {
  for (int g = 0; g < number; g++) {
    put_small(to, blocks, g);
    to.offsets[g] = -8 * to.scales[g];
  }
}

INLINE void put(WeightChunk<Q4_1>& to, const Q4_1* const* blocks, int64_t number) {
  for (int g = 0; g < number; g++) {
    put_small(to, blocks, g);
    put_offsets(to, blocks, g);
  }
}

INLINE void put(WeightChunk<Q5_0>& to, const Q5_0* const* blocks, int64_t number) {
  for (int g = 0; g < number; g++) {
    put_small(to, blocks, g);
    put_fifth(to, blocks, g);
    to.offsets[g] = -16 * to.scales[g];
  }
}

INLINE void put(WeightChunk<Q5_1>& to, const Q5_1* const* blocks, int64_t number) {
  for (int g = 0; g < number; g++) {
    put_small(to, blocks, g);
    put_fifth(to, blocks, g);
    put_offsets(to, blocks, g);
  }
}

INLINE void put(WeightChunk<Q8_0>& to, const Q8_0* const* blocks, int64_t number) {
  for (int g = 0; g < number; g++) {
    UNROLLED for (int h = 0; h < 2; h++) {
      put_words([=](int c) { return blocks[c][g].whole + 16 * h; }, to.wholes[g] + 4 * h, h == 0);
    }
#if VECTOR_BYTES == 64 && defined(__AVX512VNNI__)
    UNROLLED for (int j = 0; j < WORDS; j++) to.wholes[g][j] ^= 128 * EACH_BYTE;
#endif
    to.scales[g] = scales_of([=](int c) { return &blocks[c][g].scale; });
  }
}

// 64 integers of 4 bits: bytes have those of i and i + 32.
template <typename Block, typename At>
INLINE void put_pair(WeightChunk<Block>& to, int g, At at) {
  UNROLLED for (int h = 0; h < 2; h++) {
    Words* wholes = to.wholes[g] + 4 * h;
    put_words([=](int c) { return at(c) + 16 * h; }, wholes, h == 0);
    UNROLLED for (int j = 0; j < 4; j++) {
      wholes[WORDS + j] = wholes[j] >> 4 & 15 * EACH_BYTE;
      wholes[j] &= 15 * EACH_BYTE;
    }
  }
}

template <int WIDTH, bool HAS_ZERO>
INLINE void put(WeightChunk<Group<WIDTH, HAS_ZERO>>& to, const Group<WIDTH, HAS_ZERO>* const* groups, int64_t number) {
  constexpr int EACH = WIDTH / GROUP;
  for (int b = 0; b < number; b++) {
    const int g = b * EACH;
    if constexpr (EACH == 1) {
      put_words([=](int c) { return groups[c][b].low_high[0]; }, to.wholes[g]);
      UNROLLED for (int j = 0; j < 4; j++) {
        to.wholes[g][4 + j] = to.wholes[g][j] >> 4 & 15 * EACH_BYTE;
        to.wholes[g][j] &= 15 * EACH_BYTE;
      }
    } else {
      UNROLLED for (int p = 0; p < EACH / 2; p++) {
        put_pair(to, g + 2 * p, [=](int c) { return groups[c][b].low_high[p]; });
      }
    }
    Words zeros;
    UNROLLED for (int c = 0; c < LANES; c++) zeros[c] = groups[c][b].zero;
    const Floats scales = scales_of([=](int c) { return reinterpret_cast<const char*>(&groups[c][b]) + HAS_ZERO; });
    UNROLLED for (int e = 0; e < EACH; e++) {
      to.scales[g + e] = scales;
      to.offsets[g + e] = -as_floats(zeros) * scales;
    }
  }
}

// The scales and offsets of eight times 32 numbers, of 6 bits each in units of the block's: `unpacked` in blocks.h.
template <typename Block>
INLINE void put_eight(WeightChunk<Block>& to, const Block* const* blocks) {
  constexpr uint32_t SIX = 63 * EACH_BYTE, FOUR = 15 * EACH_BYTE, UPPER = 48 * EACH_BYTE;
  Words words[4];  // the units, and twelve bytes
  put_words([=](int c) { return blocks[c]; }, words);
  const Floats scale = widened_halves(words[0] & 0xffff), offset = -widened_halves(words[0] >> 16);
  const Words scales[2] = {words[1] & SIX, (words[3] & FOUR) | (words[1] >> 2 & UPPER)};
  const Words offsets[2] = {words[2] & SIX, (words[3] >> 4 & FOUR) | (words[2] >> 2 & UPPER)};
  UNROLLED for (int g = 0; g < 8; g++) {
    to.scales[g] = as_floats(scales[g / 4] >> (g % 4 * 8) & 63) * scale;
    to.offsets[g] = as_floats(offsets[g / 4] >> (g % 4 * 8) & 63) * offset;
  }
}

INLINE void put(WeightChunk<Q4_K>& to, const Q4_K* const* blocks, int64_t) {
  put_eight(to, blocks);
  for (int p = 0; p < 4; p++) put_pair(to, 2 * p, [=](int c) { return blocks[c]->low_high[p]; });
}

INLINE void put(WeightChunk<Q5_K>& to, const Q5_K* const* blocks, int64_t) {
  put_eight(to, blocks);
  Words fifth[WORDS];
  UNROLLED for (int h = 0; h < 2; h++) put_words([=](int c) { return blocks[c]->fifth + 16 * h; }, fifth + 4 * h);
  for (int p = 0; p < 4; p++) {
    put_pair(to, 2 * p, [=](int c) { return blocks[c]->low_high[p]; });
    for (int g = 2 * p; g < 2 * p + 2; g++) {
      UNROLLED for (int j = 0; j < WORDS; j++) to.wholes[g][j] |= (fifth[j] >> g & EACH_BYTE) << 4;
    }
  }
}

INLINE void put(WeightChunk<Q6_K>& to, const Q6_K* const* blocks, int64_t) {
  const Floats scale = scales_of([=](int c) { return &blocks[c]->scale; });
  Words scales[4];
  put_words([=](int c) { return blocks[c]->scales; }, scales);
  UNROLLED for (int i = 0; i < 16; i++) {
    to.scales[i] = __builtin_convertvector((Ints)(scales[i / 4] << (24 - i % 4 * 8)) >> 24, Floats) * scale;
    to.offsets[i] = -32 * to.scales[i];
  }
  for (int h = 0; h < 2; h++) {
    for (int q = 0; q < 4; q++) {  // 16 bytes of numbers i and i + 64, a word of each four numbers
      Words low_high[4], upper[4];
      put_words([=](int c) { return blocks[c]->low_high[h] + 16 * q; }, low_high);
      put_words([=](int c) { return blocks[c]->upper[h] + q % 2 * 16; }, upper);
      const int g = 4 * h + q / 2;
      UNROLLED for (int j = 0; j < 4; j++) {
        const Words bits[2] = {upper[j] >> (q / 2 * 2), upper[j] >> (q / 2 * 2 + 4)};
        to.wholes[g][q % 2 * 4 + j] = (low_high[j] & 15 * EACH_BYTE) | (bits[0] & 3 * EACH_BYTE) << 4;
        to.wholes[g + 2][q % 2 * 4 + j] = (low_high[j] >> 4 & 15 * EACH_BYTE) | (bits[1] & 3 * EACH_BYTE) << 4;
      }
    }
  }
}

// Adds products of a chunk of ROWS rows with that of the channels to their sums.
template <int ROWS, typename Block>
INLINE void add_rounded(const RoundedRows::Chunk* x, int64_t apart, const WeightChunk<Block>& weights, int64_t num_groups,
                        Floats* sums) {
  constexpr int EACH = NUM_SCALES<Block>, NUMBER = WORDS / EACH;
  Floats here[ROWS] = {};
  for (int64_t g = 0; g < num_groups; g++) {
    UNROLLED for (int s = 0; s < EACH; s++) {
      UNROLLED for (int r = 0; r < ROWS; r++) {
        const RoundedRows::Chunk& row = x[r * apart];
        const int64_t at = g * EACH + s;
        const Ints wholes =
            sums_of_products<Block, NUMBER>(weights.wholes[g] + s * NUMBER, row.words + NUMBER * at, row.sums[g]);
        here[r] = multiply_add(__builtin_convertvector(wholes, Floats), weights.scales[at], here[r]);
        if constexpr (!HAS_SIGN<Block>) {
          const float sum = EACH == 1 ? row.whole_sums[at] : row.half_sums[at];
          here[r] = multiply_add(all_lanes(sum), weights.offsets[at], here[r]);
        }
      }
    }
  }
  UNROLLED for (int r = 0; r < ROWS; r++) sums[r] = multiply_add(here[r], all_lanes(x[r * apart].scale), sums[r]);
}

// The same for `num_rows` rows, in tiles whose sums fit into registers.
template <int ROWS, typename Block>
void add_all_rounded(int64_t num_rows, const RoundedRows::Chunk* x, int64_t apart, const WeightChunk<Block>& weights,
                     int64_t num_groups, Floats* sums) {
  for (; num_rows >= ROWS; num_rows -= ROWS, x += ROWS * apart, sums += ROWS) {
    add_rounded<ROWS>(x, apart, weights, num_groups, sums);
  }
  if constexpr (ROWS > 1) {
    if (num_rows > 0) add_all_rounded<ROWS - 1>(num_rows, x, apart, weights, num_groups, sums);
  }
}

constexpr int ROUNDED_ROWS = NUM_REGISTERS == 32 ? 8 : 5;  // in a tile

// This thread's channels of one matrix.
template <typename Block>
void rounded_share(int64_t num_rows, const RoundedRows& x, const Block* weights, int64_t length, int64_t begin,
                   int64_t end, float* y, int64_t num_channels) {
  constexpr int64_t NUM_BLOCKS = CHUNK / Block::NUMBERS, GROUPS = Block::NUMBERS / GROUP;
  share_of_blocks<LANES>(num_rows, weights, length, begin, end,
                         [&](int64_t done, int64_t left, const Block* const* rows, int64_t first, int64_t apart,
                             int64_t num_here) {
    WeightChunk<Block> chunk;
    Floats sums[MOST_BLOCK_ROWS];
    for (int64_t r = 0; r < left; r++) sums[r] = Floats{};
    for (int64_t i = 0; i < x.num_chunks; i++) {
      const int64_t blocks_left = length - i * NUM_BLOCKS, number = blocks_left < NUM_BLOCKS ? blocks_left : NUM_BLOCKS;
      const Block* blocks[LANES];
      UNROLLED for (int c = 0; c < LANES; c++) blocks[c] = rows[c] + i * NUM_BLOCKS;
      put(chunk, blocks, number);
      add_all_rounded<ROUNDED_ROWS>(left, x.chunks.data() + done * x.num_chunks + i, x.num_chunks, chunk,
                                    number * GROUPS, sums);
    }
    for (int64_t r = 0; r < left; r++) {
      float* to = y + (done + r) * num_channels + first;
      for (int64_t c = 0; c < num_here; c++) to[c * apart] = sums[r][c];
    }
  });
}

}  // namespace
