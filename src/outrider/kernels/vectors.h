// Vectors of float32 of the processor's width, in code that GCC and Clang both compile.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#include <immintrin.h>
#define VECTOR_BYTES 64
#define NUM_REGISTERS 32
#elif defined(__AVX2__)
#include <immintrin.h>
#define VECTOR_BYTES 32
#define NUM_REGISTERS 16
#elif defined(__aarch64__)
#include <arm_neon.h>
#define VECTOR_BYTES 16
#define NUM_REGISTERS 32
#else
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#define VECTOR_BYTES 16
#define NUM_REGISTERS 16
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")

namespace {

constexpr int LANES = VECTOR_BYTES / sizeof(float);

typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef float Four __attribute__((vector_size(16)));

struct BFloat16 {
  uint16_t bits;
};

INLINE Floats load(const float* from) {
  Floats values;
  memcpy(&values, from, sizeof values);
  return values;
}

// Explicit intrinsics, since GCC 12 widens the portable forms element by element, or in halves.

INLINE Floats load(const BFloat16* from) {
#if VECTOR_BYTES == 64
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#elif VECTOR_BYTES == 32
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
#elif defined(__aarch64__)
  return (Floats)vshll_n_u16(vld1_u16(&from->bits), 16);
#elif defined(__SSE2__)
  return (Floats)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i*)from));
#else
  typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2)));
  typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));
  Halves bits;
  memcpy(&bits, from, sizeof bits);
  return (Floats)(__builtin_convertvector(bits, Words) << 16);
#endif
}

INLINE Floats load(const int8_t* from) {
#if VECTOR_BYTES == 64
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif VECTOR_BYTES == 32
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#elif defined(__aarch64__)
  int32_t four;
  memcpy(&four, from, sizeof four);
  return (Floats)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(int32x2_t{four, 0})))));
#elif defined(__SSE2__)
  int32_t four;
  memcpy(&four, from, sizeof four);
  __m128i bytes = _mm_cvtsi32_si128(four);
  bytes = _mm_unpacklo_epi8(bytes, bytes);
  return (Floats)_mm_cvtepi32_ps(_mm_srai_epi32(_mm_unpacklo_epi16(bytes, bytes), 24));
#else
  typedef int8_t Bytes __attribute__((vector_size(VECTOR_BYTES / 4)));
  typedef int16_t Shorts __attribute__((vector_size(VECTOR_BYTES / 2)));
  typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES)));
  Bytes bytes;
  memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(bytes, Shorts), Ints), Floats);
#endif
}

typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES)));

INLINE Words load_words(const uint8_t* from) {
#if VECTOR_BYTES == 64
  return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif VECTOR_BYTES == 32
  return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#elif defined(__aarch64__)
  uint32_t four;
  memcpy(&four, from, sizeof four);
  return (Words)vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(uint32x2_t{four, 0}))));
#elif defined(__SSE2__)
  int32_t four;
  memcpy(&four, from, sizeof four);
  __m128i zeros = _mm_setzero_si128();
  return (Words)_mm_unpacklo_epi16(_mm_unpacklo_epi8(_mm_cvtsi32_si128(four), zeros), zeros);
#else
  typedef uint8_t Bytes __attribute__((vector_size(VECTOR_BYTES / 4)));
  Bytes bytes;
  memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, Words);
#endif
}

// As integers with a sign.
INLINE Floats as_floats(Words words) { return __builtin_convertvector((Ints)words, Floats); }

INLINE void store(float* to, Floats values) { memcpy(to, &values, sizeof values); }

// A number of IEEE 754's 16 bits, exactly.
INLINE float widened_half(uint16_t half) {
#if defined(__F16C__)
  return _cvtsh_ss(half);
#else
  uint32_t sign = uint32_t(half & 0x8000) << 16, rest = uint32_t(half & 0x7fff) << 13;
  float size;
  memcpy(&size, &rest, sizeof size);
  size *= 0x1p112f;  // from one bias of exponents to the other
  memcpy(&rest, &size, sizeof rest);
  if ((half & 0x7c00) == 0x7c00) rest |= 0x7f800000;  // infinite, or no number
  rest |= sign;
  memcpy(&size, &rest, sizeof size);
  return size;
#endif
}

INLINE Floats all_lanes(float number) { return number - Floats{}; }  // minus zero, which keeps the sign of -0

// a * b + c, rounded once where the processor can (and twice where no processor of its level can). Explicit intrinsics,
// since compilers decide by tuning: GCC 12 avoids chains of 256-bit FMAs when it tunes for Zen, in some instances of a
// template and not in others, so that a row's sum depended on the number of rows and threads.
INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if VECTOR_BYTES == 64
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VECTOR_BYTES == 32 && defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;  // two instructions, by -ffp-contract=off
#endif
}

// Adds four products in each lane: of bytes without a sign in `a`, and those with one in `b`. AVX-VNNI is another
// encoding of the same instruction, for processors without AVX-512.
#if VECTOR_BYTES == 64 && defined(__AVX512VNNI__)
#define HAS_BYTE_PRODUCTS
INLINE Ints add_byte_products(Ints sums, Words a, int32_t b) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)a, _mm512_set1_epi32(b));
}
#elif VECTOR_BYTES == 32 && defined(__AVXVNNI__)
#define HAS_BYTE_PRODUCTS
INLINE Ints add_byte_products(Ints sums, Words a, int32_t b) {
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)a, _mm256_set1_epi32(b));
}
#elif VECTOR_BYTES == 32 && defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define HAS_BYTE_PRODUCTS
INLINE Ints add_byte_products(Ints sums, Words a, int32_t b) {
  return (Ints)_mm256_dpbusd_epi32((__m256i)sums, (__m256i)a, _mm256_set1_epi32(b));
}
#endif

// The first `number` elements, then zeros.
template <typename Number>
INLINE Floats load_first(const Number* from, int64_t number) {
  Number padded[LANES] = {};
  memcpy(padded, from, number * sizeof(Number));
  return load(padded);
}

// Sums of the lanes that are four apart.
INLINE Four folded(Floats values) {
#if VECTOR_BYTES == 64
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)values), _mm512_extractf32x8_ps((__m512)values, 1));
  return (Four)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif VECTOR_BYTES == 32
  return (Four)_mm_add_ps(_mm256_castps256_ps128((__m256)values), _mm256_extractf128_ps((__m256)values, 1));
#else
  return values;
#endif
}

// Sums of neighbours: a0 + a1, a2 + a3, b0 + b1, b2 + b3.
INLINE Four neighbours(Four a, Four b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
#else
  typedef int32_t Places __attribute__((vector_size(16)));
  return __builtin_shuffle(a, b, Places{0, 2, 4, 6}) + __builtin_shuffle(a, b, Places{1, 3, 5, 7});
#endif
}

// Sums over the lanes of CHANNELS vectors, in the first lanes; the order is the same for each number of vectors.
template <int CHANNELS>
INLINE Four across(const Floats* sums) {
  Four first = folded(sums[0]);
  Four second = CHANNELS > 1 ? folded(sums[1]) : first;
  Four ends = neighbours(first, second);
  if constexpr (CHANNELS <= 2) return neighbours(ends, ends);
  Four third = folded(sums[2]);
  return neighbours(ends, neighbours(third, CHANNELS > 3 ? folded(sums[3]) : third));
}

}  // namespace
