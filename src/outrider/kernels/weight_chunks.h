// Integers and scales of interleaved blocks (interleaved.h), as products take them.
#pragma once

#include "interleaved.h"

namespace {

constexpr int64_t GROUP = 32;  // numbers of the weights that share a scale, or two
constexpr int64_t NUM_GROUPS = CHUNK / GROUP;
constexpr int WORDS = GROUP / 4;  // of four integers each
constexpr uint32_t EACH_BYTE = 0x01010101;

// Numbers of 16 bits, exactly: the lower halves of the lanes.
INLINE Floats halves_to_floats(Words words) {
#if VECTOR_BYTES == 64
  return (Floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)words));
#elif VECTOR_BYTES == 32 && defined(__F16C__)
  const __m256i halves = _mm256_packus_epi32((__m256i)(words & 0xffff), __m256i{});  // a half of them in each half
  return (Floats)_mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0x08)));
#else
  Floats wide;
  UNROLLED for (int l = 0; l < LANES; l++) wide[l] = half_to_float(static_cast<uint16_t>(words[l]));
  return wide;
#endif
}

// Byte `i` of each lane.
INLINE Floats byte_of(Words words, int i) { return as_floats(words >> 8 * i & 255); }

// A block of LANES rows.
template <typename Block>
struct BlockOfLanes {
  static constexpr int64_t NUM_WORDS = Interleaved<Block>::NUM_WORDS, EXTRA = Interleaved<Block>::EXTRA;
  const uint8_t* from;

  Words word(int64_t place) const {
    Words words;
    memcpy(&words, from + place * VECTOR_BYTES, sizeof words);
    return words;
  }
  Floats half() const { return load(reinterpret_cast<const Float16*>(from + NUM_WORDS * VECTOR_BYTES)); }
  Words byte() const { return load_words(from + NUM_WORDS * VECTOR_BYTES + (EXTRA - 1) * LANES); }
};

// A chunk of LANES rows of the weights is unpacked in groups: `take(g, integers, scales, offsets)` is called for each,
// in ascending order, with WORDS vectors of integers, the SCALES scales of its numbers and as many offsets. `number` is
// that of the blocks, which lie one after the other.

// Numbers that four bits in each byte mean, without a sign if ZERO is added to integers with one.
template <typename Block>
INLINE Words decode_nibbles(Words places) {
  if constexpr (Block::VALUES == nullptr) {
    return places;
  } else {
    struct Table {
      alignas(16) uint8_t bytes[16];
      constexpr Table() : bytes() {
        for (int i = 0; i < 16; i++) bytes[i] = static_cast<uint8_t>(Block::VALUES[i] + Block::ZERO);
      }
    };
    static constexpr Table table;
    return lookup_bytes(table.bytes, places);
  }
}

// The low four bits of the bytes of some words, and the others.
template <int NUMBER, typename Block>
INLINE void split(BlockOfLanes<Block> block, int64_t first, Words* low, Words* high) {
  UNROLLED for (int j = 0; j < NUMBER; j++) {
    const Words both = block.word(first + j);
    low[j] = decode_nibbles<Block>(both & 15 * EACH_BYTE);
    high[j] = decode_nibbles<Block>(both >> 4 & 15 * EACH_BYTE);
  }
}

// Half of the powers of two with these exponents, whose bias is 127.
INLINE Floats half_powers(Words exponents) {
  const Words is_tiny = (Words)((Ints)exponents < 2);
  return (Floats)((is_tiny & (exponents + 1) << 21) | (~is_tiny & (exponents - 1) << 23));
}

// Blocks of 32 numbers: a scale (in MXFP4 a power of two, else of 16 bits) and perhaps an offset; perhaps a word with a
// fifth bit for each number; then bytes with four bits of numbers i and i + 16.
template <typename Block, typename Take>
INLINE void unpack(const Block*, const uint8_t* from, int64_t number, Take take) {
  constexpr int64_t SIZE = sizeof(Block) * LANES;
  constexpr bool HAS_FIFTH = Block::LARGEST == 31;
  for (int g = 0; g < number; g++) {
    const BlockOfLanes<Block> block{from + g * SIZE};
    Words integers[WORDS];
    split<4>(block, Block::HAS_OFFSET + HAS_FIFTH, integers, integers + 4);
    if constexpr (HAS_FIFTH) {
      const Words bits = block.word(Block::HAS_OFFSET);
      // Copies of four bits, seven apart: bit b of copy b lies at 8 b.
      UNROLLED for (int j = 0; j < WORDS; j++) integers[j] |= ((bits >> (4 * j) & 15) * 0x204081 & EACH_BYTE) << 4;
    }
    Floats scale, offset = {};
    if constexpr (Block::HAS_OFFSET) {
      scale = halves_to_floats(block.word(0) & 0xffff);
      offset = halves_to_floats(block.word(0) >> 16);
    } else if constexpr (std::is_same_v<Block, MXFP4>) {
      scale = half_powers(block.byte());
    } else {
      scale = block.half();
    }
    take(g, integers, &scale, &offset);
  }
}

// A scale, then bytes with a sign.
template <typename Take>
INLINE void unpack(const Q8_0*, const uint8_t* from, int64_t number, Take take) {
  constexpr int64_t SIZE = sizeof(Q8_0) * LANES;
  for (int g = 0; g < number; g++) {
    const BlockOfLanes<Q8_0> block{from + g * SIZE};
    Words integers[WORDS];
    UNROLLED for (int j = 0; j < WORDS; j++) integers[j] = block.word(j) ^ ADDED * EACH_BYTE;
    const Floats scale = block.half(), offset = {};
    take(g, integers, &scale, &offset);
  }
}

// Perhaps a byte, the zero; a scale; then bytes with four bits of numbers i and i + 32 of each 64; or of i and i + 16.
template <int WIDTH, bool HAS_ZERO, typename Take>
INLINE void unpack(const Group<WIDTH, HAS_ZERO>*, const uint8_t* from, int64_t number, Take take) {
  constexpr int64_t SIZE = sizeof(Group<WIDTH, HAS_ZERO>) * LANES;
  for (int b = 0; b < number; b++) {
    const BlockOfLanes<Group<WIDTH, HAS_ZERO>> block{from + b * SIZE};
    const Floats scale = block.half();
    Floats offset = {};
    if constexpr (HAS_ZERO) offset = -as_floats(block.byte()) * scale;
    constexpr int HALF = WIDTH == GROUP ? WORDS / 2 : WORDS;  // words
    UNROLLED for (int p = 0; p < WIDTH / (8 * HALF); p++) {
      Words integers[2 * HALF];
      split<HALF>(block, HALF * p, integers, integers + HALF);
      UNROLLED for (int h = 0; h < 2 * HALF / WORDS; h++) {
        take(b * (WIDTH / GROUP) + 2 * p + h, integers + h * WORDS, &scale, &offset);
      }
    }
  }
}

// Scales and offsets of 256 numbers.
template <int NUMBER>
struct ScalesOfBlock {
  Floats scales[NUMBER], offsets[NUMBER];
};

// Q4_K and Q5_K: two units, then 12 bytes with eight scales and eight offsets of 6 bits.
template <typename Block>
INLINE ScalesOfBlock<8> eight_scales(BlockOfLanes<Block> block) {
  constexpr uint32_t SIX = 63 * EACH_BYTE, FOUR = 15 * EACH_BYTE, UPPER = 48 * EACH_BYTE;
  const Words units = block.word(0), words[3] = {block.word(1), block.word(2), block.word(3)};
  const Floats scale = halves_to_floats(units & 0xffff), offset = -halves_to_floats(units >> 16);
  const Words scales[2] = {words[0] & SIX, (words[2] & FOUR) | (words[0] >> 2 & UPPER)};
  const Words offsets[2] = {words[1] & SIX, (words[2] >> 4 & FOUR) | (words[1] >> 2 & UPPER)};
  ScalesOfBlock<8> of;
  UNROLLED for (int g = 0; g < 8; g++) {
    of.scales[g] = byte_of(scales[g / 4], g % 4) * scale;
    of.offsets[g] = byte_of(offsets[g / 4], g % 4) * offset;
  }
  return of;
}

// A unit, two upper bits of eight scales, and four lower ones; 32 is 0.
INLINE ScalesOfBlock<8> eight_scales(BlockOfLanes<IQ4_XS> block) {
  const Words upper = block.word(0) >> 16, lower = block.word(1);
  const Floats unit = halves_to_floats(block.word(0) & 0xffff);
  ScalesOfBlock<8> of;
  UNROLLED for (int g = 0; g < 8; g++) {
    of.scales[g] = (as_floats((lower >> 4 * g & 15) | (upper >> 2 * g & 3) << 4) - 32.0f) * unit;
  }
  return of;
}

// Blocks of 256 numbers with eight scales: these; perhaps 32 bytes, bit g of byte i is the fifth of number i of the g-th
// 32; then bytes with four bits of numbers i and i + 32 of each 64, in IQ4_XS of i and i + 16 of each 32.
template <typename Block, typename Take>
  requires(Block::NUMBERS == 256 && Block::SCALES == 1)
INLINE void unpack(const Block*, const uint8_t* from, int64_t, Take take) {
  constexpr int64_t FIRST = Interleaved<Block>::NUM_WORDS - 4 * WORDS, FIFTH = FIRST - WORDS;
  constexpr int APART = std::is_same_v<Block, IQ4_XS> ? WORDS / 2 : WORDS;
  const BlockOfLanes<Block> block{from};
  const ScalesOfBlock<8> of = eight_scales(block);
  for (int p = 0; p < 4; p++) {
    Words integers[2 * WORDS];
    UNROLLED for (int i = 0; i < WORDS; i += APART) {
      split<APART>(block, FIRST + WORDS * p + i, integers + 2 * i, integers + 2 * i + APART);
    }
    UNROLLED for (int g = 2 * p; g < 2 * p + 2; g++) {
      Words* these = integers + (g - 2 * p) * WORDS;
      if constexpr (Block::LARGEST == 31) {
        UNROLLED for (int j = 0; j < WORDS; j++) these[j] |= (block.word(FIFTH + j) >> g & EACH_BYTE) << 4;
      }
      take(g, these, of.scales + g, of.offsets + g);
    }
  }
}

// Q2_K: 16 bytes with four bits of a scale and four of an offset; 64 with two of numbers i, i + 32, i + 64 and i + 96 of
// each 128; two units.
INLINE ScalesOfBlock<16> sixteen_scales(BlockOfLanes<Q2_K> block) {
  const Words units = block.word(20);
  const Floats scale = halves_to_floats(units & 0xffff), offset = -halves_to_floats(units >> 16);
  ScalesOfBlock<16> of;
  UNROLLED for (int i = 0; i < 16; i++) {
    const Words both = block.word(i / 4) >> (i % 4 * 8);
    of.scales[i] = as_floats(both & 15) * scale;
    of.offsets[i] = as_floats(both >> 4 & 15) * offset;
  }
  return of;
}
INLINE Words integers_of(BlockOfLanes<Q2_K> block, int h, int g, int j) {
  return block.word(4 + WORDS * h + j) >> 2 * g & 3 * EACH_BYTE;
}

// Q3_K: 32 bytes with the third bit of numbers i, i + 32 and so on; two lower ones as in Q2_K; 12 bytes with 16 scales of
// 6 bits, 32 is 0; their unit.
INLINE ScalesOfBlock<16> sixteen_scales(BlockOfLanes<Q3_K> block) {
  const Words upper = block.word(26);
  const Floats unit = block.half();
  ScalesOfBlock<16> of;
  UNROLLED for (int w = 0; w < 4; w++) {
    const Words four = (block.word(24 + w % 2) >> w / 2 * 4 & 15 * EACH_BYTE) | (upper >> 2 * w & 3 * EACH_BYTE) << 4;
    UNROLLED for (int i = 0; i < 4; i++) of.scales[4 * w + i] = (byte_of(four, i) - 32.0f) * unit;
  }
  return of;
}
INLINE Words integers_of(BlockOfLanes<Q3_K> block, int h, int g, int j) {
  return (block.word(8 + WORDS * h + j) >> 2 * g & 3 * EACH_BYTE) | (block.word(j) >> (4 * h + g) & EACH_BYTE) << 2;
}

// Q6_K: 128 bytes with four lower bits of numbers i and i + 64 of each 128; 64 with two upper ones of i, i + 32, i + 64
// and i + 96; 16 scales, bytes with a sign; their unit.
INLINE ScalesOfBlock<16> sixteen_scales(BlockOfLanes<Q6_K> block) {
  const Floats unit = block.half();
  ScalesOfBlock<16> of;
  UNROLLED for (int i = 0; i < 16; i++) {
    const Ints shifted = (Ints)(block.word(6 * WORDS + i / 4) << (24 - i % 4 * 8));
    of.scales[i] = __builtin_convertvector(shifted >> 24, Floats) * unit;
  }
  return of;
}
INLINE Words integers_of(BlockOfLanes<Q6_K> block, int h, int g, int j) {
  const Words lower = block.word(WORDS * (2 * h + g % 2) + j) >> (g / 2 * 4) & 15 * EACH_BYTE;
  return lower | (block.word(WORDS * (4 + h) + j) >> 2 * g & 3 * EACH_BYTE) << 4;
}

// Blocks of 256 numbers with 16 scales.
template <typename Block, typename Take>
  requires(Block::SCALES == 2)
INLINE void unpack(const Block*, const uint8_t* from, int64_t, Take take) {
  const BlockOfLanes<Block> block{from};
  const ScalesOfBlock<16> of = sixteen_scales(block);
  for (int h = 0; h < 2; h++) {
    UNROLLED for (int g = 0; g < 4; g++) {
      Words integers[WORDS];
      UNROLLED for (int j = 0; j < WORDS; j++) integers[j] = integers_of(block, h, g, j);
      take(4 * h + g, integers, of.scales + 8 * h + 2 * g, of.offsets + 8 * h + 2 * g);
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
INLINE Floats integers_to_floats(Words words, int k) {
#if VECTOR_BYTES == 64
  if constexpr (Block::LARGEST <= 15) {
    Floats all;
    UNROLLED for (int l = 0; l < LANES; l++) all[l] = l - Block::ZERO;
    return (Floats)_mm512_permutexvar_ps((__m512i)(words >> 8 * k), (__m512)all);  // the lowest four bits choose
  }
#endif
  if constexpr (Block::HAS_SIGN) return __builtin_convertvector((Ints)(words << (24 - 8 * k)) >> 24, Floats);
  return byte_of(words, k) - Block::ZERO;
}

// Byte `k` of each lane of word `j` of a group, dequantized: the product and the sum are rounded once.
template <typename Block>
INLINE Floats dequantize(const Words* integers, int j, int k, const Floats* scales, const Floats* offsets) {
  const Floats whole = integers_to_floats<Block>(integers[j], k);
  const int s = j * Block::SCALES / WORDS;
  return Block::HAS_OFFSET ? multiply_add(whole, scales[s], offsets[s]) : whole * scales[s];
}

}  // namespace
