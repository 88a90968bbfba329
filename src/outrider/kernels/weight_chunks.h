// Integers of blocks (blocks.h), rearranged: a lane of a vector is a row of the weights.
#pragma once

#include <type_traits>

#include "blocks.h"

namespace {

constexpr int64_t GROUP = 32;  // numbers of the weights that share a scale, or two
constexpr int64_t NUM_GROUPS = CHUNK / GROUP;
constexpr int WORDS = GROUP / 4;  // of four integers each
constexpr uint32_t EACH_BYTE = 0x01010101;

// How blocks are multiplied: their largest integer, whether it has a sign, and the number of scales of 32 numbers.
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
constexpr bool HAS_SIGN = std::is_same_v<Block, Q8_0>;
template <typename Block>
constexpr int NUM_SCALES = std::is_same_v<Block, Q6_K> ? 2 : 1;

#if VECTOR_BYTES >= 32
INLINE __m256i two_parts(const void* low, const void* high) {
  return _mm256_set_m128i(_mm_loadu_si128((const __m128i*)high), _mm_loadu_si128((const __m128i*)low));
}
#endif

constexpr int64_t ROUNDED_AHEAD = 512;  // bytes of each row of weights to prefetch: there are LANES of them

// Four words of each channel, which `at` points to: the first of all in one vector, the second in another, and so on.
// Prefetches later bytes, unless told not to: calls for the same cache lines need it once.
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

// A chunk of LANES rows of the weights is taken apart in groups: `take(g, wholes, scales, offsets)` is called for each, in
// ascending order, with WORDS vectors of integers, and a scale and offset for each GROUP / NUM_SCALES numbers. `number` is
// that of the blocks.
//
// Blocks of 32 numbers: `low_high` has the integers of i and i + 16, `fifth` another bit for each.

// The low four bits of each byte stay, the others go to `high`.
INLINE void split(Words* four, Words* high) {
  UNROLLED for (int j = 0; j < 4; j++) {
    high[j] = four[j] >> 4 & 15 * EACH_BYTE;
    four[j] &= 15 * EACH_BYTE;
  }
}

template <typename At>
INLINE void put_small(At low_high, Words* wholes) {
  put_words(low_high, wholes);
  split(wholes, wholes + 4);
}

template <typename At>
INLINE void put_fifth(At fifth, Words* wholes) {
  Words bits;
  UNROLLED for (int c = 0; c < LANES; c++) memcpy(reinterpret_cast<char*>(&bits) + 4 * c, fifth(c), 4);
  // Copies of four bits, seven apart: bit b of copy b lies at 8 b.
  UNROLLED for (int j = 0; j < WORDS; j++) wholes[j] |= ((bits >> (4 * j) & 15) * 0x204081 & EACH_BYTE) << 4;
}

INLINE Floats offset_of(const Q4_0* const*, int, Floats scale) { return -8 * scale; }
INLINE Floats offset_of(const Q5_0* const*, int, Floats scale) { return -16 * scale; }
INLINE Floats offset_of(const Q4_1* const* blocks, int g, Floats) {
  return scales_of([=](int c) { return &blocks[c][g].offset; });
}
INLINE Floats offset_of(const Q5_1* const* blocks, int g, Floats) {
  return scales_of([=](int c) { return &blocks[c][g].offset; });
}

template <typename Block, typename Take>
INLINE void take_apart(const Block* const* blocks, int64_t number, Take take) {
  for (int g = 0; g < number; g++) {
    Words wholes[WORDS];
    put_small([=](int c) { return blocks[c][g].low_high; }, wholes);
    if constexpr (MOST_WHOLE<Block> > 15) put_fifth([=](int c) { return blocks[c][g].fifth; }, wholes);
    const Floats scale = scales_of([=](int c) { return &blocks[c][g].scale; }), offset = offset_of(blocks, g, scale);
    take(g, wholes, &scale, &offset);
  }
}

template <typename Take>
INLINE void take_apart(const Q8_0* const* blocks, int64_t number, Take take) {
  for (int g = 0; g < number; g++) {
    Words wholes[WORDS];
    UNROLLED for (int h = 0; h < 2; h++) {
      put_words([=](int c) { return blocks[c][g].whole + 16 * h; }, wholes + 4 * h, h == 0);
    }
#ifdef HAS_BYTE_PRODUCTS
    UNROLLED for (int j = 0; j < WORDS; j++) wholes[j] ^= 128 * EACH_BYTE;
#endif
    const Floats scale = scales_of([=](int c) { return &blocks[c][g].scale; }), offset = {};
    take(g, wholes, &scale, &offset);
  }
}

// 64 integers of 4 bits, two groups: bytes have those of i and i + 32.
template <typename At>
INLINE void put_pair(At low_high, Words* wholes) {
  UNROLLED for (int h = 0; h < 2; h++) {
    put_words([=](int c) { return low_high(c) + 16 * h; }, wholes + 4 * h, h == 0);
    split(wholes + 4 * h, wholes + WORDS + 4 * h);
  }
}

template <int WIDTH, bool HAS_ZERO, typename Take>
INLINE void take_apart(const Group<WIDTH, HAS_ZERO>* const* groups, int64_t number, Take take) {
  for (int b = 0; b < number; b++) {
    Words zeros, wholes[2 * WORDS];
    UNROLLED for (int c = 0; c < LANES; c++) zeros[c] = groups[c][b].zero;
    const Floats scale = scales_of([=](int c) { return reinterpret_cast<const char*>(&groups[c][b]) + HAS_ZERO; });
    const Floats offset = -as_floats(zeros) * scale;
    if constexpr (WIDTH == GROUP) {
      put_small([=](int c) { return groups[c][b].low_high[0]; }, wholes);
      take(b, wholes, &scale, &offset);
    }
    UNROLLED for (int p = 0; p < WIDTH / (2 * GROUP); p++) {
      put_pair([=](int c) { return groups[c][b].low_high[p]; }, wholes);
      UNROLLED for (int h = 0; h < 2; h++) take(b * (WIDTH / GROUP) + 2 * p + h, wholes + h * WORDS, &scale, &offset);
    }
  }
}

// The scales and offsets of eight times 32 numbers, of 6 bits each in units of the block's: `unpacked` in blocks.h.
struct EightOfEach {
  Floats scales[8], offsets[8];
};

template <typename Block>
INLINE EightOfEach eight_of(const Block* const* blocks) {
  constexpr uint32_t SIX = 63 * EACH_BYTE, FOUR = 15 * EACH_BYTE, UPPER = 48 * EACH_BYTE;
  Words words[4];  // the units, and twelve bytes
  put_words([=](int c) { return blocks[c]; }, words);
  const Floats scale = widened_halves(words[0] & 0xffff), offset = -widened_halves(words[0] >> 16);
  const Words scales[2] = {words[1] & SIX, (words[3] & FOUR) | (words[1] >> 2 & UPPER)};
  const Words offsets[2] = {words[2] & SIX, (words[3] >> 4 & FOUR) | (words[2] >> 2 & UPPER)};
  EightOfEach of;
  UNROLLED for (int g = 0; g < 8; g++) {
    of.scales[g] = as_floats(scales[g / 4] >> (g % 4 * 8) & 63) * scale;
    of.offsets[g] = as_floats(offsets[g / 4] >> (g % 4 * 8) & 63) * offset;
  }
  return of;
}

template <typename Take>
INLINE void take_apart(const Q4_K* const* blocks, int64_t, Take take) {
  const EightOfEach of = eight_of(blocks);
  for (int p = 0; p < 4; p++) {
    Words wholes[2 * WORDS];
    put_pair([=](int c) { return blocks[c]->low_high[p]; }, wholes);
    UNROLLED for (int g = 2 * p; g < 2 * p + 2; g++) {
      take(g, wholes + (g - 2 * p) * WORDS, of.scales + g, of.offsets + g);
    }
  }
}

template <typename Take>
INLINE void take_apart(const Q5_K* const* blocks, int64_t, Take take) {
  const EightOfEach of = eight_of(blocks);
  Words fifth[WORDS];
  UNROLLED for (int h = 0; h < 2; h++) put_words([=](int c) { return blocks[c]->fifth + 16 * h; }, fifth + 4 * h);
  for (int p = 0; p < 4; p++) {
    Words wholes[2 * WORDS];
    put_pair([=](int c) { return blocks[c]->low_high[p]; }, wholes);
    UNROLLED for (int g = 2 * p; g < 2 * p + 2; g++) {
      Words* these = wholes + (g - 2 * p) * WORDS;
      UNROLLED for (int j = 0; j < WORDS; j++) these[j] |= (fifth[j] >> g & EACH_BYTE) << 4;
      take(g, these, of.scales + g, of.offsets + g);
    }
  }
}

template <typename Take>
INLINE void take_apart(const Q6_K* const* blocks, int64_t, Take take) {
  const Floats unit = scales_of([=](int c) { return &blocks[c]->scale; });
  Words packed[4];
  put_words([=](int c) { return blocks[c]->scales; }, packed);
  Floats scales[16], offsets[16];
  UNROLLED for (int i = 0; i < 16; i++) {
    scales[i] = __builtin_convertvector((Ints)(packed[i / 4] << (24 - i % 4 * 8)) >> 24, Floats) * unit;
    offsets[i] = -32 * scales[i];
  }
  for (int h = 0; h < 2; h++) {
    Words low_high[2][WORDS], upper[WORDS];  // of numbers i and i + 64; i, i + 32, i + 64 and i + 96
    UNROLLED for (int q = 0; q < 2; q++) {
      put_words([=](int c) { return blocks[c]->upper[h] + 16 * q; }, upper + 4 * q, q == 0);
      put_words([=](int c) { return blocks[c]->low_high[h] + 16 * q; }, low_high[0] + 4 * q, q == 0);
      put_words([=](int c) { return blocks[c]->low_high[h] + 32 + 16 * q; }, low_high[1] + 4 * q, q == 0);
    }
    UNROLLED for (int g = 0; g < 4; g++) {
      Words wholes[WORDS];
      UNROLLED for (int j = 0; j < WORDS; j++) {
        const Words lower = low_high[g % 2][j] >> (g / 2 * 4) & 15 * EACH_BYTE;
        wholes[j] = lower | (upper[j] >> 2 * g & 3 * EACH_BYTE) << 4;
      }
      take(4 * h + g, wholes, scales + 8 * h + 2 * g, offsets + 8 * h + 2 * g);
    }
  }
}

}  // namespace
