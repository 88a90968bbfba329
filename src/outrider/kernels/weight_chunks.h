// Integers of blocks (blocks.h), rearranged: a lane of a vector is a row of the weights.
#pragma once

#include "blocks.h"

namespace {

constexpr int64_t GROUP = 32;  // numbers of the weights that share a scale, or two
constexpr int64_t NUM_GROUPS = CHUNK / GROUP;
constexpr int WORDS = GROUP / 4;  // of four integers each
constexpr uint32_t EACH_BYTE = 0x01010101;

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

}  // namespace
