// Integers and scales of interleaved blocks (interleaved.h), as products take them.
#pragma once

#include "interleaved.h"

namespace {

constexpr int64_t GROUP = 32;  // numbers of the weights that share a scale, or two
constexpr int64_t NUM_GROUPS = CHUNK / GROUP;
constexpr int WORDS = GROUP / 4;  // of four integers each
constexpr uint32_t EACH_BYTE = 0x01010101;

// How blocks are multiplied: their largest integer, whether it has a sign, the integer that means 0 in all of them,
// whether they have offsets besides, and the number of scales of 32 numbers.
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
#ifdef HAS_BYTE_PRODUCTS
constexpr int ADDED = 128;  // to integers of 8 bits: products take bytes without a sign
#else
constexpr int ADDED = 0;
#endif
template <typename Block>
constexpr bool HAS_SIGN = std::is_same_v<Block, Q8_0> && ADDED == 0;
template <typename Block>
constexpr int ZERO = 0;
template <>
constexpr int ZERO<Q4_0> = 8;
template <>
constexpr int ZERO<Q5_0> = 16;
template <>
constexpr int ZERO<Q6_K> = 32;
template <>
constexpr int ZERO<Q8_0> = ADDED;
template <int WIDTH>
constexpr int ZERO<Group<WIDTH, false>> = Group<WIDTH, false>::zero;
template <typename Block>
constexpr bool HAS_OFFSET = ZERO<Block> == 0 && !std::is_same_v<Block, Q8_0>;
template <typename Block>
constexpr int NUM_SCALES = std::is_same_v<Block, Q6_K> ? 2 : 1;

// Numbers of 16 bits, exactly.
INLINE Floats widened_halves(const void* from) {
#if VECTOR_BYTES == 64
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif VECTOR_BYTES == 32 && defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#elif defined(__aarch64__)
  return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(static_cast<const uint16_t*>(from))));
#else
  uint16_t halves[LANES];
  memcpy(halves, from, sizeof halves);
  Floats wide;
  UNROLLED for (int l = 0; l < LANES; l++) wide[l] = widened_half(halves[l]);
  return wide;
#endif
}

// The same, in the lower halves of the lanes.
INLINE Floats widened_halves(Words words) {
#if VECTOR_BYTES == 64
  return (Floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)words));
#elif VECTOR_BYTES == 32 && defined(__F16C__)
  const __m256i halves = _mm256_packus_epi32((__m256i)(words & 0xffff), __m256i{});  // a half of them in each half
  return (Floats)_mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0x08)));
#else
  Floats wide;
  UNROLLED for (int l = 0; l < LANES; l++) wide[l] = widened_half(static_cast<uint16_t>(words[l]));
  return wide;
#endif
}

// A block of LANES rows.
template <typename Block>
struct BlockOfLanes {
  static constexpr int64_t NUM_WORDS = Interleaved<Block>::NUM_WORDS;
  const uint8_t* from;

  Words word(int64_t place) const {
    Words words;
    memcpy(&words, from + place * VECTOR_BYTES, sizeof words);
    return words;
  }
  Floats half() const { return widened_halves(from + NUM_WORDS * VECTOR_BYTES); }
  Words byte() const { return load_words(from + NUM_WORDS * VECTOR_BYTES + 2 * LANES); }
};

// A chunk of LANES rows of the weights is taken apart in groups: `take(g, wholes, scales, offset)` is called for each,
// in ascending order, with WORDS vectors of integers, NUM_SCALES scales and an offset. `number` is that of the blocks,
// which lie one after the other.

// The low four bits of the bytes of some words, and the others.
template <int NUMBER, typename Block>
INLINE void split(BlockOfLanes<Block> block, int64_t first, Words* low, Words* high) {
  UNROLLED for (int j = 0; j < NUMBER; j++) {
    const Words both = block.word(first + j);
    low[j] = both & 15 * EACH_BYTE;
    high[j] = both >> 4 & 15 * EACH_BYTE;
  }
}

// Blocks of 32 numbers: bytes have those of i and i + 16, and another word perhaps a fifth bit for each.
template <typename Block, typename Take>
INLINE void take_apart(const Block*, const uint8_t* from, int64_t number, Take take) {
  constexpr int64_t SIZE = sizeof(Block) * LANES;
  constexpr bool HAS_FIFTH = MOST_WHOLE<Block> > 15;
  for (int g = 0; g < number; g++) {
    const BlockOfLanes<Block> block{from + g * SIZE};
    Words wholes[WORDS];
    split<4>(block, HAS_OFFSET<Block> + HAS_FIFTH, wholes, wholes + 4);
    if constexpr (HAS_FIFTH) {
      const Words bits = block.word(HAS_OFFSET<Block>);
      // Copies of four bits, seven apart: bit b of copy b lies at 8 b.
      UNROLLED for (int j = 0; j < WORDS; j++) wholes[j] |= ((bits >> (4 * j) & 15) * 0x204081 & EACH_BYTE) << 4;
    }
    Floats scale, offset = {};
    if constexpr (HAS_OFFSET<Block>) {
      scale = widened_halves(block.word(0) & 0xffff);
      offset = widened_halves(block.word(0) >> 16);
    } else {
      scale = block.half();
    }
    take(g, wholes, &scale, offset);
  }
}

template <typename Take>
INLINE void take_apart(const Q8_0*, const uint8_t* from, int64_t number, Take take) {
  constexpr int64_t SIZE = sizeof(Q8_0) * LANES;
  for (int g = 0; g < number; g++) {
    const BlockOfLanes<Q8_0> block{from + g * SIZE};
    Words wholes[WORDS];
    UNROLLED for (int j = 0; j < WORDS; j++) wholes[j] = block.word(j) ^ ADDED * EACH_BYTE;
    const Floats scale = block.half(), offset = {};
    take(g, wholes, &scale, offset);
  }
}

template <int WIDTH, bool HAS_ZERO, typename Take>
INLINE void take_apart(const Group<WIDTH, HAS_ZERO>*, const uint8_t* from, int64_t number, Take take) {
  constexpr int64_t SIZE = sizeof(Group<WIDTH, HAS_ZERO>) * LANES;
  for (int b = 0; b < number; b++) {
    const BlockOfLanes<Group<WIDTH, HAS_ZERO>> block{from + b * SIZE};
    const Floats scale = block.half();
    Floats offset = {};
    if constexpr (HAS_ZERO) offset = -as_floats(block.byte()) * scale;
    constexpr int HALF = WIDTH == GROUP ? WORDS / 2 : WORDS;  // words
    UNROLLED for (int p = 0; p < WIDTH / (8 * HALF); p++) {
      Words wholes[2 * HALF];
      split<HALF>(block, HALF * p, wholes, wholes + HALF);
      UNROLLED for (int h = 0; h < 2 * HALF / WORDS; h++) {
        take(b * (WIDTH / GROUP) + 2 * p + h, wholes + h * WORDS, &scale, offset);
      }
    }
  }
}

// The scales and offsets of eight times 32 numbers, of 6 bits each in units of the block's: `unpacked` in blocks.h.
struct EightOfEach {
  Floats scales[8], offsets[8];
};

template <typename Block>
INLINE EightOfEach eight_of(BlockOfLanes<Block> block) {
  constexpr uint32_t SIX = 63 * EACH_BYTE, FOUR = 15 * EACH_BYTE, UPPER = 48 * EACH_BYTE;
  const Words units = block.word(0), words[3] = {block.word(1), block.word(2), block.word(3)};
  const Floats scale = widened_halves(units & 0xffff), offset = -widened_halves(units >> 16);
  const Words scales[2] = {words[0] & SIX, (words[2] & FOUR) | (words[0] >> 2 & UPPER)};
  const Words offsets[2] = {words[1] & SIX, (words[2] >> 4 & FOUR) | (words[1] >> 2 & UPPER)};
  EightOfEach of;
  UNROLLED for (int g = 0; g < 8; g++) {
    of.scales[g] = as_floats(scales[g / 4] >> (g % 4 * 8) & 63) * scale;
    of.offsets[g] = as_floats(offsets[g / 4] >> (g % 4 * 8) & 63) * offset;
  }
  return of;
}

template <typename Take>
INLINE void take_apart(const Q4_K*, const uint8_t* from, int64_t, Take take) {
  const BlockOfLanes<Q4_K> block{from};
  const EightOfEach of = eight_of(block);
  for (int p = 0; p < 4; p++) {
    Words wholes[2 * WORDS];
    split<WORDS>(block, 4 + WORDS * p, wholes, wholes + WORDS);
    UNROLLED for (int g = 2 * p; g < 2 * p + 2; g++) {
      take(g, wholes + (g - 2 * p) * WORDS, of.scales + g, of.offsets[g]);
    }
  }
}

template <typename Take>
INLINE void take_apart(const Q5_K*, const uint8_t* from, int64_t, Take take) {
  const BlockOfLanes<Q5_K> block{from};
  const EightOfEach of = eight_of(block);
  for (int p = 0; p < 4; p++) {
    Words wholes[2 * WORDS];
    split<WORDS>(block, 4 + WORDS + WORDS * p, wholes, wholes + WORDS);
    UNROLLED for (int g = 2 * p; g < 2 * p + 2; g++) {
      Words* these = wholes + (g - 2 * p) * WORDS;
      UNROLLED for (int j = 0; j < WORDS; j++) these[j] |= (block.word(4 + j) >> g & EACH_BYTE) << 4;
      take(g, these, of.scales + g, of.offsets[g]);
    }
  }
}

template <typename Take>
INLINE void take_apart(const Q6_K*, const uint8_t* from, int64_t, Take take) {
  constexpr int64_t UPPER = 4 * WORDS, SCALES = UPPER + 2 * WORDS;  // places of words
  const BlockOfLanes<Q6_K> block{from};
  const Floats unit = block.half();
  Floats scales[16];
  UNROLLED for (int i = 0; i < 16; i++) {
    const Ints shifted = (Ints)(block.word(SCALES + i / 4) << (24 - i % 4 * 8));
    scales[i] = __builtin_convertvector(shifted >> 24, Floats) * unit;
  }
  for (int h = 0; h < 2; h++) {
    UNROLLED for (int g = 0; g < 4; g++) {  // bytes have numbers i and i + 64; i, i + 32, i + 64 and i + 96
      Words wholes[WORDS];
      UNROLLED for (int j = 0; j < WORDS; j++) {
        const Words lower = block.word(WORDS * (2 * h + g % 2) + j) >> (g / 2 * 4) & 15 * EACH_BYTE;
        wholes[j] = lower | (block.word(UPPER + WORDS * h + j) >> 2 * g & 3 * EACH_BYTE) << 4;
      }
      take(4 * h + g, wholes, scales + 8 * h + 2 * g, Floats{});
    }
  }
}

// Calls `run(b, number, blocks)` for each chunk of a panel: `number` blocks of LANES rows, from block `b` of the rows
// on.
template <typename Block, typename Run>
INLINE void each_chunk(const Interleaved<Block>& matrix, int64_t panel, Run run) {
  constexpr int64_t NUM_BLOCKS = CHUNK / Block::NUMBERS;
  for (int64_t b = 0; b < matrix.length; b += NUM_BLOCKS) {
    const int64_t left = matrix.length - b, number = left < NUM_BLOCKS ? left : NUM_BLOCKS;
    uint8_t padded[NUM_BLOCKS * sizeof(Block) * LANES];
    run(b, number, matrix.whole(panel, b, number, padded));
  }
}

// Integers of blocks without their ZERO: byte `k` of each lane.
template <typename Block>
INLINE Floats whole_floats(Words words, int k) {
#if VECTOR_BYTES == 64
  if constexpr (MOST_WHOLE<Block> == 15) {
    Floats all;
    UNROLLED for (int l = 0; l < LANES; l++) all[l] = l - ZERO<Block>;
    return (Floats)_mm512_permutexvar_ps((__m512i)(words >> 8 * k), (__m512)all);  // the lowest four bits choose
  }
#endif
  if constexpr (HAS_SIGN<Block>) return __builtin_convertvector((Ints)(words << (24 - 8 * k)) >> 24, Floats);
  return as_floats(words >> 8 * k & 255) - ZERO<Block>;
}

// What byte `k` of each lane means: the product and the sum are rounded once.
template <typename Block>
INLINE Floats numbers_of(Words wholes, int k, Floats scale, Floats offset) {
  const Floats integers = whole_floats<Block>(wholes, k);
  return HAS_OFFSET<Block> ? multiply_add(integers, scale, offset) : integers * scale;
}

}  // namespace
