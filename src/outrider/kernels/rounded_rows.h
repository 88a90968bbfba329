// Rows of 8 bits, for products with weights in blocks (block_matmul.h).
//
// CHUNK numbers of a row become integers between -127 and 127 with one scale, so a row's result depends on that row
// alone. Products of integers are summed exactly over the numbers that share a scale, and then in float32, one after
// the other.
#pragma once

#include <cmath>
#include <memory>

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

#if !defined(HAS_BYTE_PRODUCTS) && VECTOR_BYTES == 64 && defined(__AVX512BW__)
#define WIDE(name) _mm512_##name
typedef __m512i Wide;
#elif !defined(HAS_BYTE_PRODUCTS) && VECTOR_BYTES == 32
#define WIDE(name) _mm256_##name
typedef __m256i Wide;
#else
// Adds four products in each lane: of the integers of blocks in `a`, and bytes with a sign in `b`.
template <typename Block>
INLINE Ints add_products(Ints sums, Words a, int32_t b) {
#if defined(HAS_BYTE_PRODUCTS)
  return add_byte_products(sums, a, b);
#elif defined(__ARM_FEATURE_DOTPROD)
  return (Ints)vdotq_s32((int32x4_t)sums, (int8x16_t)a, vreinterpretq_s8_s32(vdupq_n_s32(b)));
#elif defined(__aarch64__)
  const int8x16_t c = (int8x16_t)a, d = vreinterpretq_s8_s32(vdupq_n_s32(b));
  const int16x8_t low = vmull_s8(vget_low_s8(c), vget_low_s8(d)), high = vmull_high_s8(c, d);
  return sums + (Ints)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#else
  UNROLLED for (int i = 0; i < 4; i++) {
    const Ints shifted = (Ints)(a << (24 - 8 * i));
    sums += (HAS_SIGN<Block> ? shifted >> 24 : (Ints)((Words)shifted >> 24)) * static_cast<int8_t>(b >> 8 * i);
  }
  return sums;
#endif
}
#endif

// Sums of products of integers for each channel, of all rows: of those that share the scale number `at`. `words` has
// four of each channel at a time.
template <int ROWS, typename Block, typename Chunk>
INLINE void sum_products(const Chunk* x, int64_t at, const Words* words, Ints* sums) {
  constexpr int NUMBER = WORDS / NUM_SCALES<Block>;
  UNROLLED for (int r = 0; r < ROWS; r++) sums[r] = x[r].starts[at] - Ints{};
#ifdef WIDE
  // So many sums of two products fit into 16 bits.
  constexpr int FIT = 32767 / (2 * 127 * MOST_WHOLE<Block>), TOGETHER = FIT < 1 ? 1 : FIT < NUMBER ? FIT : NUMBER;
  static_assert(NUMBER % TOGETHER == 0);
  typedef uint8_t Bytes __attribute__((vector_size(VECTOR_BYTES)));
  typedef int8_t SignedBytes __attribute__((vector_size(VECTOR_BYTES)));
  UNROLLED for (int j = 0; j < NUMBER; j += TOGETHER) {
    Wide twos[ROWS];
    UNROLLED for (int t = j; t < j + TOGETHER; t++) {
      Wide a = (Wide)words[t];
      const Bytes is_negative = (Bytes)((SignedBytes)a < 0);
      if constexpr (HAS_SIGN<Block>) a = (Wide)(((Bytes)a ^ is_negative) - is_negative);  // as bytes without a sign: 128 fits
      UNROLLED for (int r = 0; r < ROWS; r++) {
        Wide b = WIDE(set1_epi32)(x[r].words[NUMBER * at + t]);
        if constexpr (HAS_SIGN<Block>) b = (Wide)(((Bytes)b ^ is_negative) - is_negative);
        const Wide these = WIDE(maddubs_epi16)(a, b);
        twos[r] = t == j ? these : WIDE(add_epi16)(twos[r], these);
        // Keeps the order. GCC would add in pairs, which needs all products at once: more than there are registers.
        asm("" : "+v"(twos[r]));
      }
    }
    UNROLLED for (int r = 0; r < ROWS; r++) sums[r] += (Ints)WIDE(madd_epi16)(twos[r], WIDE(set1_epi16)(1));
  }
#undef WIDE
#else
  constexpr int PARTS = ROWS <= 3 ? 2 : 1;  // of few sums, so that there are enough to compute at once
  Ints parts[ROWS] = {};
  UNROLLED for (int j = 0; j < NUMBER; j++) {
    UNROLLED for (int r = 0; r < ROWS; r++) {
      Ints& part = j % PARTS == 0 ? sums[r] : parts[r];
      part = add_products<Block>(part, words[j], x[r].words[NUMBER * at + j]);
    }
  }
  if constexpr (PARTS == 2) UNROLLED for (int r = 0; r < ROWS; r++) sums[r] += parts[r];
#endif
}

// Rows as integers, to be multiplied with blocks.
template <typename Form>
struct RoundedRows {
  typedef Form Block;
  RoundedRows(const float* x, int64_t num_rows, int64_t width, int64_t num_threads)
      : num_rows(num_rows), num_chunks((width + CHUNK - 1) / CHUNK), chunks(new Chunk[num_rows * num_chunks]) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows * num_chunks >= SHARED_CHUNKS)
    for (int64_t at = 0; at < num_rows * num_chunks; at++) {
      int64_t begin = at / num_rows * CHUNK, left = width - begin;
      chunks[at].round(x + at % num_rows * width + begin, left < CHUNK ? left : CHUNK);
    }
  }

  struct alignas(64) Chunk {
    static constexpr int EACH = NUM_SCALES<Block>;
    int32_t words[CHUNK / 4];            // the integers
    int32_t starts[EACH * NUM_GROUPS];   // of sums of products: those of -ZERO with the integers
    float sums[NUM_GROUPS];              // of the integers of a group
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
        sums[g] = static_cast<float>(halves[0] + halves[1]);
        starts[EACH * g] = -ZERO<Block> * (EACH == 1 ? halves[0] + halves[1] : halves[0]);
        if constexpr (EACH == 2) starts[EACH * g + 1] = -ZERO<Block> * halves[1];
      }
    }
  };

  // ROWS rows, from `row` on, in chunk number `i`, and the sums of their products with the channels.
  template <int ROWS>
  struct Tile {
    Tile(const RoundedRows& x, int64_t i, int64_t row) : x(&x.chunks[i * x.num_rows + row]) {}

    // With a group of the channels (`take_apart`).
    INLINE_MEMBER void add(int64_t g, const Words* wholes, const Floats* scales, const Floats& offset) {
      constexpr int EACH = NUM_SCALES<Block>;
      UNROLLED for (int s = 0; s < EACH; s++) {
        Ints products[ROWS];
        sum_products<ROWS, Block>(x, g * EACH + s, wholes + s * (WORDS / EACH), products);
        UNROLLED for (int r = 0; r < ROWS; r++) {
          sums[r] = multiply_add(__builtin_convertvector(products[r], Floats), scales[s], sums[r]);
          if constexpr (HAS_OFFSET<Block>) sums[r] = multiply_add(all_lanes(x[r].sums[g]), offset, sums[r]);
        }
      }
    }
    INLINE_MEMBER void add_to(Floats* all) const {
      UNROLLED for (int r = 0; r < ROWS; r++) all[r] = multiply_add(sums[r], all_lanes(x[r].scale), all[r]);
    }

    const Chunk* x;
    Floats sums[ROWS] = {};
  };

  static constexpr int TILE = NUM_REGISTERS == 32 ? 6 : 5;  // so many rows' sums fit into registers
  static constexpr int64_t SHARED_CHUNKS = 128;  // fewer are rounded sooner than several threads begin
  const int64_t num_rows, num_chunks;
  const std::unique_ptr<Chunk[]> chunks;  // the first of all rows, then the second of all, and so on
};

}  // namespace
