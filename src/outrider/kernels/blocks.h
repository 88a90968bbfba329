// Blocks of quantized weights, and the numbers that they mean: as GGUF files hold them, and groups of 4 bits.
//
// A row of a matrix is a sequence of blocks. GGUF's have 32 or 256 numbers: integers of 4 to 8 bits, with a scale, and
// perhaps an offset, for each 16 or 32 of them (ggml-common.h in ggml defines the layouts). A group has 32, 64 or 128
// integers of 4 bits with a scale and perhaps a zero; GPTQ, AWQ and compressed-tensors store the same numbers apart from
// each other. A number is integer * scale + offset.
// The products are exact in float32: integers have at most 8 bits and scales at most 19, together at most 24. So
// a number is rounded once, with a fused multiply-add and without, and all processors get the same bits.
#pragma once

#include "vectors.h"

namespace {

constexpr int64_t CHUNK = 256;  // numbers of a row that are unpacked at a time

struct Q4_0 {
  static constexpr int NUMBERS = 32, PART = 32;
  uint16_t scale;
  uint8_t low_high[16];  // of numbers i and i + 16
};

struct Q4_1 {
  static constexpr int NUMBERS = 32, PART = 32;
  uint16_t scale, offset;
  uint8_t low_high[16];
};

struct Q5_0 {
  static constexpr int NUMBERS = 32, PART = 32;
  uint16_t scale;
  uint8_t fifth[4];  // a bit for each number
  uint8_t low_high[16];
};

struct Q5_1 {
  static constexpr int NUMBERS = 32, PART = 32;
  uint16_t scale, offset;
  uint8_t fifth[4];
  uint8_t low_high[16];
};

struct Q8_0 {
  static constexpr int NUMBERS = 32, PART = 32;
  uint16_t scale;
  int8_t whole[32];
};

struct Q4_K {
  static constexpr int NUMBERS = 256, PART = 64;
  uint16_t scale, offset;   // units of those of 32 numbers
  uint8_t packed[12];       // eight of each, of 6 bits
  uint8_t low_high[4][32];  // of numbers i and i + 32 of each 64
};

struct Q5_K {
  static constexpr int NUMBERS = 256, PART = 64;
  uint16_t scale, offset;
  uint8_t packed[12];
  uint8_t fifth[32];  // bit j is that of number i of the j-th 32
  uint8_t low_high[4][32];
};

struct Q6_K {
  static constexpr int NUMBERS = 256, PART = 128;
  uint8_t low_high[2][64];  // of numbers i and i + 64 of each 128
  uint8_t upper[2][32];     // two bits of numbers i, i + 32, i + 64 and i + 96
  int8_t scales[16];        // of 16 numbers
  uint16_t scale;           // their unit
};

// The integer that means 0.
template <bool IS_STORED>
struct Zero {
  uint8_t zero;
};
template <>
struct Zero<false> {
  static constexpr uint8_t zero = 8;
};

template <int WIDTH, bool HAS_ZERO>
struct __attribute__((packed)) Group : Zero<HAS_ZERO> {
  static constexpr int NUMBERS = WIDTH, PART = WIDTH < 64 ? WIDTH : 64;
  uint16_t scale;
  uint8_t low_high[WIDTH / PART][PART / 2];  // of numbers i and i + PART / 2 of each PART
};
static_assert(sizeof(Group<64, false>) == 34 && sizeof(Group<128, true>) == 67);

INLINE Words each_lane() {
  Words lanes;
  UNROLLED for (int l = 0; l < LANES; l++) lanes[l] = l;
  return lanes;
}

// A block is widened in parts of Block::PART numbers. `put` takes each place in the part, in ascending order, with the
// vector of numbers that begins there. `made(block)` is computed once for all parts of a block.

struct Nothing {};

template <typename Block>
INLINE Nothing made(const Block&) { return {}; }

// 32 numbers of 4 bits, and a fifth if `fifth` is given.
template <bool HAS_FIFTH, typename Put>
INLINE void put_small(const uint8_t* low_high, const uint8_t* fifth, float scale, float offset, Put put) {
  const Floats scales = all_lanes(scale), offsets = all_lanes(offset);
  uint32_t bits = 0;
  if (HAS_FIFTH) memcpy(&bits, fifth, sizeof bits);
  UNROLLED for (int i = 0; i < 32; i += LANES) {
    Words both = load_words(low_high + i % 16), wholes = i < 16 ? both & 15 : both >> 4;
    if (HAS_FIFTH) wholes |= ((bits >> i) - Words{} >> each_lane() & 1) << 4;
    put(i, multiply_add(as_floats(wholes), scales, offsets));
  }
}

template <typename Put>
INLINE void widen_part(const Q4_0& block, Nothing, int, Put put) {
  float scale = widened_half(block.scale);
  put_small<false>(block.low_high, nullptr, scale, -8 * scale, put);
}

template <typename Put>
INLINE void widen_part(const Q4_1& block, Nothing, int, Put put) {
  put_small<false>(block.low_high, nullptr, widened_half(block.scale), widened_half(block.offset), put);
}

template <typename Put>
INLINE void widen_part(const Q5_0& block, Nothing, int, Put put) {
  float scale = widened_half(block.scale);
  put_small<true>(block.low_high, block.fifth, scale, -16 * scale, put);
}

template <typename Put>
INLINE void widen_part(const Q5_1& block, Nothing, int, Put put) {
  put_small<true>(block.low_high, block.fifth, widened_half(block.scale), widened_half(block.offset), put);
}

template <typename Put>
INLINE void widen_part(const Q8_0& block, Nothing, int, Put put) {
  const Floats scale = all_lanes(widened_half(block.scale));
  UNROLLED for (int i = 0; i < 32; i += LANES) put(i, load(block.whole + i) * scale);
}

// Scales and offsets of the eight times 32 numbers of a block.
struct Eight {
  float scales[8], offsets[8];
};

template <typename Block>
INLINE Eight unpacked(const Block& block) {
  constexpr uint32_t SIX = 0x3f3f3f3f, FOUR = 0x0f0f0f0f, UPPER = 0x30303030;
  uint32_t words[3];
  memcpy(words, block.packed, sizeof words);
  const uint32_t scales[2] = {words[0] & SIX, (words[2] & FOUR) | (words[0] >> 2 & UPPER)};
  const uint32_t offsets[2] = {words[1] & SIX, (words[2] >> 4 & FOUR) | (words[1] >> 2 & UPPER)};
  uint8_t each[2][8];
  memcpy(each[0], scales, 8);
  memcpy(each[1], offsets, 8);
  const Floats scale = all_lanes(widened_half(block.scale)), offset = all_lanes(-widened_half(block.offset));
  Eight of;
  constexpr int STEP = LANES < 8 ? LANES : 8;
  UNROLLED for (int i = 0; i < 8; i += STEP) {
    uint8_t from[2][LANES] = {};
    memcpy(from[0], each[0] + i, STEP);
    memcpy(from[1], each[1] + i, STEP);
    Floats products[2] = {as_floats(load_words(from[0])) * scale, as_floats(load_words(from[1])) * offset};
    memcpy(of.scales + i, &products[0], STEP * sizeof(float));
    memcpy(of.offsets + i, &products[1], STEP * sizeof(float));
  }
  return of;
}

INLINE Eight made(const Q4_K& block) { return unpacked(block); }
INLINE Eight made(const Q5_K& block) { return unpacked(block); }

template <typename Put>
INLINE void widen_part(const Q4_K& block, const Eight& of, int p, Put put) {
  UNROLLED for (int j = 0; j < 2; j++) {
    const Floats scale = all_lanes(of.scales[2 * p + j]), offset = all_lanes(of.offsets[2 * p + j]);
    UNROLLED for (int i = 0; i < 32; i += LANES) {
      Words both = load_words(block.low_high[p] + i), wholes = j == 0 ? both & 15 : both >> 4;
      put(32 * j + i, multiply_add(as_floats(wholes), scale, offset));
    }
  }
}

template <typename Put>
INLINE void widen_part(const Q5_K& block, const Eight& of, int p, Put put) {
  UNROLLED for (int j = 0; j < 2; j++) {
    const Floats scale = all_lanes(of.scales[2 * p + j]), offset = all_lanes(of.offsets[2 * p + j]);
    UNROLLED for (int i = 0; i < 32; i += LANES) {
      Words both = load_words(block.low_high[p] + i), wholes = j == 0 ? both & 15 : both >> 4;
      wholes |= (load_words(block.fifth + i) >> (2 * p + j) & 1) << 4;
      put(32 * j + i, multiply_add(as_floats(wholes), scale, offset));
    }
  }
}

struct Sixteen {
  float scales[16];
};

INLINE Sixteen made(const Q6_K& block) {
  const Floats scale = all_lanes(widened_half(block.scale));
  Sixteen of;
  UNROLLED for (int i = 0; i < 16; i += LANES) store(of.scales + i, load(block.scales + i) * scale);
  return of;
}

template <typename Put>
INLINE void widen_part(const Q6_K& block, const Sixteen& of, int h, Put put) {
  UNROLLED for (int j = 0; j < 4; j++) {
    UNROLLED for (int i = 0; i < 32; i += LANES) {
      Words both = load_words(block.low_high[h] + j % 2 * 32 + i), low = j < 2 ? both & 15 : both >> 4;
      Words wholes = low | (load_words(block.upper[h] + i) >> (2 * j) & 3) << 4;
      put(32 * j + i, as_floats(wholes - 32) * all_lanes(of.scales[8 * h + 2 * j + i / 16]));
    }
  }
}

struct Affine {
  float scale, offset;
};

template <int WIDTH, bool HAS_ZERO>
INLINE Affine made(const Group<WIDTH, HAS_ZERO>& group) {
  const float scale = widened_half(group.scale);
  return {scale, -static_cast<float>(group.zero) * scale};
}

template <int WIDTH, bool HAS_ZERO, typename Put>
INLINE void widen_part(const Group<WIDTH, HAS_ZERO>& group, const Affine& of, int p, Put put) {
  constexpr int PART = Group<WIDTH, HAS_ZERO>::PART, HALF = PART / 2;
  const Floats scale = all_lanes(of.scale), offset = all_lanes(of.offset);
  UNROLLED for (int i = 0; i < PART; i += LANES) {
    Words both = load_words(group.low_high[p] + i % HALF), wholes = i < HALF ? both & 15 : both >> 4;
    put(i, multiply_add(as_floats(wholes), scale, offset));
  }
}

// Forms of weights: by their numbers in ggml (ggml.h), groups from 192 on; and a flag (rounded_rows.h).
enum Form : int64_t { F32 = 0, I8 = 24, BF16 = 30, ROUNDS = 256 };

// Calls a function with a matrix in blocks; does nothing if the form has none.
template <typename Function>
INLINE void of_blocks(int64_t form, const void* matrix, Function function) {
  switch (form) {
    case 2: return function(static_cast<const Q4_0*>(matrix));
    case 3: return function(static_cast<const Q4_1*>(matrix));
    case 6: return function(static_cast<const Q5_0*>(matrix));
    case 7: return function(static_cast<const Q5_1*>(matrix));
    case 8: return function(static_cast<const Q8_0*>(matrix));
    case 12: return function(static_cast<const Q4_K*>(matrix));
    case 13: return function(static_cast<const Q5_K*>(matrix));
    case 14: return function(static_cast<const Q6_K*>(matrix));
    case 192: return function(static_cast<const Group<32, true>*>(matrix));
    case 193: return function(static_cast<const Group<64, false>*>(matrix));
    case 194: return function(static_cast<const Group<64, true>*>(matrix));
    case 195: return function(static_cast<const Group<128, false>*>(matrix));
    case 196: return function(static_cast<const Group<128, true>*>(matrix));
  }
}

// The first `number` numbers of these blocks.
template <typename Block>
INLINE void widen(const Block* blocks, int64_t number, float* to) {
  for (const Block* block = blocks; block < blocks + number / Block::NUMBERS; block++) {
    const auto of = made(*block);
    for (int p = 0; p < Block::NUMBERS / Block::PART; p++, to += Block::PART) {
      widen_part(*block, of, p, [=](int i, Floats numbers) __attribute__((always_inline)) { store(to + i, numbers); });
    }
  }
}

}  // namespace
