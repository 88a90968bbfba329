// Attention of few queries, over keys and values where the cache has them.
//
// out[b, t, h] = sum over j of softmax(scale * query[b, h, t] . key[b, g, j] + mask[b, h, t, j]) * value[b, g, j], where
// the heads h of one group share the keys and values g. Queries, masks and sums are float32, keys and values float32 or
// bfloat16. A task takes the keys of one g and of up to CHUNK places, and up to MOST_QUERIES rows (queries of all heads
// that share them): each key and value is loaded once for these rows. Places that are hidden from all of them at the end
// of a chunk are not read. Where a text has several chunks their results are added in the end, each by its weight.
//
// Chunks begin at fixed places, and within a chunk each sum is formed in an order of its own; what is hidden adds zeros.
// So the result of a query depends neither on the others nor on how many places are in view or on the number of threads.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

#if NUM_REGISTERS == 32
constexpr int KEYS = 4, COLUMNS = 4;  // rows of the keys, and vectors of a row of the values, in one loop
#else
constexpr int KEYS = 2, COLUMNS = 2;
#endif
constexpr int64_t MOST_QUERIES = 6;
constexpr int64_t CHUNK = 256;
constexpr int64_t AHEAD = 8;          // keys and values that are prefetched
constexpr int LINE_BYTES = 64;
constexpr float HIDDEN = -1e38f;  // what a mask is at most where it hides

struct Shape {
  int64_t rows, heads, groups, queries, places, width, value_width;
};
struct Strides {
  int64_t row, head, place;  // in numbers; those of a place are next to one another
};

typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES)));

INLINE Floats chosen(Ints is_first, Floats first, Floats second) {
  return (Floats)((is_first & (Ints)first) | (~is_first & (Ints)second));
}

// e^x for x <= 0, within two units of the last place; 0 below -87. NaN stays. The polynomial is that of Cephes' expf.
INLINE Floats exponential(Floats x) {
  const Floats zero = {}, least = zero - 87.0f;
  Ints is_tiny = x < least;
  x = chosen(is_tiny, least, x);
  const Floats round = all_lanes(12582912.0f);  // 1.5 * 2^23: what is added to it is rounded to a whole number
  Floats shifted = multiply_add(x, all_lanes(1.44269504088896341f), round);
  Floats whole = shifted - round;
  Floats rest = multiply_add(whole, all_lanes(-0.693359375f), x);
  rest = multiply_add(whole, all_lanes(2.12194440e-4f), rest);
  Floats sum = all_lanes(1.9875691500e-4f);
  for (float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    sum = multiply_add(sum, rest, all_lanes(next));
  }
  sum = multiply_add(sum, rest * rest, rest) + 1.0f;
  Ints exponent = ((Ints)shifted - (Ints)round + 127) << 23;
  return chosen(is_tiny, zero, sum * (Floats)exponent);
}

INLINE float sum_of(Floats values) { return across<1>(&values)[0]; }

INLINE float largest_of(Floats values) {
  float largest = values[0];
  for (int i = 1; i < LANES; i++) largest = values[i] > largest ? values[i] : largest;
  return largest;
}

INLINE void prefetch(const void* from, int64_t num_bytes) {
  for (int64_t i = 0; i < num_bytes; i += LINE_BYTES) __builtin_prefetch(static_cast<const char*>(from) + i);
}

// Products of ROWS queries with NUMBER keys, to scores[r][0 .. NUMBER-1]. Queries are padded with zeros.
template <int ROWS, int NUMBER, typename Number>
INLINE void some_scores(const float* queries, int64_t padded, const Number* keys, int64_t stride, int64_t width,
                        float* scores) {
  Floats sums[ROWS][NUMBER] = {};
  auto add = [&](int64_t i, auto load_keys) __attribute__((always_inline)) {
    Floats column[NUMBER];
    UNROLLED for (int c = 0; c < NUMBER; c++) column[c] = load_keys(keys + c * stride + i);
    UNROLLED for (int r = 0; r < ROWS; r++) {
      Floats row = load(queries + r * padded + i);
      UNROLLED for (int c = 0; c < NUMBER; c++) sums[r][c] = multiply_add(row, column[c], sums[r][c]);
    }
  };
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) add(i, [](auto from) __attribute__((always_inline)) { return load(from); });
  if (i < width) {
    add(i, [=](auto from) __attribute__((always_inline)) { return load_first(from, width - i); });
  }
  UNROLLED for (int r = 0; r < ROWS; r++) {
    Four totals = across<NUMBER>(sums[r]);
    UNROLLED for (int c = 0; c < NUMBER; c++) scores[r * CHUNK + c] = totals[c];
  }
}

// Sums of the values, weighted with ROWS rows of weights: NUMBER vectors, of the last one `num_last` numbers.
template <int ROWS, int NUMBER, typename Number>
INLINE void some_values(const float* weights, const Number* values, int64_t stride, int64_t num_places,
                        int64_t num_last, float* out, int64_t value_width) {
  Floats sums[ROWS][NUMBER] = {};
  for (int64_t j = 0; j < num_places; j++) {
    const Number* row = values + j * stride;
    prefetch(row + AHEAD * stride, NUMBER * LANES * sizeof(Number));
    Floats column[NUMBER];
    UNROLLED for (int c = 0; c < NUMBER; c++) {
      column[c] = num_last == LANES ? load(row + c * LANES) : load_first(row + c * LANES, num_last);
    }
    UNROLLED for (int r = 0; r < ROWS; r++) {
      Floats weight = all_lanes(weights[r * CHUNK + j]);
      UNROLLED for (int c = 0; c < NUMBER; c++) sums[r][c] = multiply_add(weight, column[c], sums[r][c]);
    }
  }
  UNROLLED for (int r = 0; r < ROWS; r++) {
    UNROLLED for (int c = 0; c < NUMBER; c++) {
      memcpy(out + r * value_width + c * LANES, &sums[r][c], num_last * sizeof(float));
    }
  }
}

// ROWS queries and one chunk of their places.
struct Part {
  const float* queries;  // [ROWS, padded]
  int64_t padded;
  const float* masks[MOST_QUERIES];
  float scale;
  int64_t num_places;
  float largest[MOST_QUERIES], total[MOST_QUERIES];  // of the scores; of the weights e^(score - largest)
  float* sums;                                       // of the values with these weights [ROWS, value_width]
};

template <int ROWS, typename Number>
INLINE void attend(Part& part, const Number* keys, int64_t key_stride, int64_t width, const Number* values,
                   int64_t value_stride, int64_t value_width) {
  float scores[ROWS * CHUNK];
  int64_t number = part.num_places, j = 0;
  for (; j + KEYS <= number; j += KEYS) {
    UNROLLED for (int c = 0; c < KEYS; c++) prefetch(keys + (j + AHEAD + c) * key_stride, width * sizeof(Number));
    some_scores<ROWS, KEYS>(part.queries, part.padded, keys + j * key_stride, key_stride, width, scores + j);
  }
  for (; j < number; j++) {
    some_scores<ROWS, 1>(part.queries, part.padded, keys + j * key_stride, key_stride, width, scores + j);
  }
  for (int r = 0; r < ROWS; r++) {
    float* row = scores + r * CHUNK;
    const Floats zero = {}, nothing = zero - __builtin_inff();
    Floats largest = nothing, total = zero;
    for (int64_t i = 0; i < number; i += LANES) {
      bool is_whole = i + LANES <= number;
      Floats mask = is_whole ? load(part.masks[r] + i) : load_first(part.masks[r] + i, number - i);
      Floats values = multiply_add(load(row + i), all_lanes(part.scale), mask);
      if (!is_whole) {
        for (int64_t lane = number - i; lane < LANES; lane++) values[lane] = -__builtin_inff();
      }
      memcpy(row + i, &values, sizeof values);
      largest = chosen(values > largest, values, largest);
    }
    part.largest[r] = largest_of(largest);
    if (part.largest[r] <= HIDDEN) part.largest[r] = -__builtin_inff();  // nothing to see here, whatever others see
    const float base = part.largest[r] == -__builtin_inff() ? 0.0f : part.largest[r];
    for (int64_t i = 0; i < number; i += LANES) {
      Floats weights = exponential(load(row + i) - base);
      memcpy(row + i, &weights, sizeof weights);
      total += weights;
    }
    part.total[r] = sum_of(total);
  }
  int64_t e = 0;
  for (; e + COLUMNS * LANES <= value_width; e += COLUMNS * LANES) {
    some_values<ROWS, COLUMNS>(scores, values + e, value_stride, number, LANES, part.sums + e, value_width);
  }
  for (; e < value_width; e += LANES) {
    int64_t left = std::min<int64_t>(LANES, value_width - e);
    some_values<ROWS, 1>(scores, values + e, value_stride, number, left, part.sums + e, value_width);
  }
}

// How many places of a chunk to look at: up to the last one that is not hidden from all of these queries.
INLINE int64_t num_seen(const float* const* masks, int64_t num_rows, int64_t number) {
  for (; number > 0; number--) {
    for (int64_t r = 0; r < num_rows; r++) {
      if (!(masks[r][number - 1] <= HIDDEN)) return number;
    }
  }
  return 0;
}

template <typename Number>
void attention(const Shape& shape, const float* query, Strides query_strides, const Number* key, Strides key_strides,
               const Number* value, Strides value_strides, const float* mask, Strides mask_strides, float scale,
               float* out, int64_t num_threads) {
  const int64_t shared = shape.heads / shape.groups, all = shared * shape.queries;  // rows that share keys
  const int64_t num_tiles = (all + MOST_QUERIES - 1) / MOST_QUERIES, most = (all + num_tiles - 1) / num_tiles;
  const int64_t num_chunks = (shape.places + CHUNK - 1) / CHUNK, padded = (shape.width + LANES - 1) / LANES * LANES;
  const int64_t num_kept = shape.value_width + 2;  // of each row and chunk: sums, the largest score, the total
  std::vector<float> kept(num_chunks > 1 ? shape.rows * shape.groups * all * num_chunks * num_kept : 0);
  auto place_of = [&](int64_t b, int64_t g, int64_t row) {
    int64_t h = g * shared + row / shape.queries, t = row % shape.queries;
    return out + ((b * shape.queries + t) * shape.heads + h) * shape.value_width;
  };
#pragma omp parallel num_threads(num_threads)
  {
    std::vector<float> queries(MOST_QUERIES * padded), sums(MOST_QUERIES * shape.value_width);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < shape.rows * shape.groups * num_chunks * num_tiles; task++) {
      int64_t tile = task % num_tiles, chunk = task / num_tiles % num_chunks;
      int64_t g = task / num_tiles / num_chunks % shape.groups, b = task / num_tiles / num_chunks / shape.groups;
      int64_t first = tile * most, num_rows = std::min(most, all - first), begin = chunk * CHUNK;
      Part part{queries.data(), padded, {}, scale, 0, {}, {}, sums.data()};
      for (int64_t r = 0; r < num_rows; r++) {
        int64_t h = g * shared + (first + r) / shape.queries, t = (first + r) % shape.queries;
        const float* from = query + b * query_strides.row + h * query_strides.head + t * query_strides.place;
        std::copy(from, from + shape.width, queries.data() + r * padded);
        part.masks[r] = mask + b * mask_strides.row + h * mask_strides.head + t * mask_strides.place + begin;
      }
      part.num_places = num_seen(part.masks, num_rows, std::min(CHUNK, shape.places - begin));
      const Number* keys = key + b * key_strides.row + g * key_strides.head + begin * key_strides.place;
      const Number* values = value + b * value_strides.row + g * value_strides.head + begin * value_strides.place;
      auto run = [&](auto rows) __attribute__((always_inline)) {
        attend<rows.value>(part, keys, key_strides.place, shape.width, values, value_strides.place, shape.value_width);
      };
      switch (num_rows) {
        case 1: run(std::integral_constant<int, 1>()); break;
        case 2: run(std::integral_constant<int, 2>()); break;
        case 3: run(std::integral_constant<int, 3>()); break;
        case 4: run(std::integral_constant<int, 4>()); break;
        case 5: run(std::integral_constant<int, 5>()); break;
        case 6: run(std::integral_constant<int, 6>()); break;
      }
      for (int64_t r = 0; r < num_rows; r++) {
        const float* row = sums.data() + r * shape.value_width;
        if (num_chunks == 1) {
          float* to = place_of(b, g, first + r);
          for (int64_t e = 0; e < shape.value_width; e++) to[e] = part.total[r] == 0 ? 0 : row[e] / part.total[r];
        } else {
          float* to = kept.data() + (((b * shape.groups + g) * all + first + r) * num_chunks + chunk) * num_kept;
          std::copy(row, row + shape.value_width, to);
          to[shape.value_width] = part.largest[r];
          to[shape.value_width + 1] = part.total[r];
        }
      }
    }
    if (num_chunks > 1) {
#pragma omp for schedule(static)
      for (int64_t row = 0; row < shape.rows * shape.groups * all; row++) {
        const float* parts = kept.data() + row * num_chunks * num_kept;
        float largest = -__builtin_inff(), total = 0;
        for (int64_t c = 0; c < num_chunks; c++) largest = std::max(largest, parts[c * num_kept + shape.value_width]);
        float* to = place_of(row / all / shape.groups, row / all % shape.groups, row % all);
        std::fill(to, to + shape.value_width, 0.0f);
        for (int64_t c = 0; c < num_chunks; c++) {
          const float* part = parts + c * num_kept;
          // NaN has no largest score; its total is NaN.
          Floats apart = Floats{} + (part[shape.value_width] - largest);
          float weight = part[shape.value_width] == largest ? 1.0f : exponential(apart)[0];
          total += weight * part[shape.value_width + 1];
          for (int64_t e = 0; e < shape.value_width; e++) to[e] += weight * part[e];
        }
        for (int64_t e = 0; e < shape.value_width; e++) to[e] = total == 0 ? 0 : to[e] / total;
      }
    }
  }
}

}  // namespace

extern "C" {

// The result is [rows, queries, heads, value_width], contiguous. Keys and values have so many bits a number.
void outrider_few_query_attention(const Shape* shape, const void* query, const Strides* query_strides, const void* key,
                             const Strides* key_strides, const void* value, const Strides* value_strides,
                             const void* mask, const Strides* mask_strides, int64_t bits, float scale, float* out,
                             int64_t num_threads) {
  auto run = [&](auto number) {
    typedef decltype(number) Number;
    attention(*shape, static_cast<const float*>(query), *query_strides, static_cast<const Number*>(key), *key_strides,
              static_cast<const Number*>(value), *value_strides, static_cast<const float*>(mask), *mask_strides, scale,
              out, num_threads);
  };
  if (bits == 32) run(float());
  if (bits == 16) run(BFloat16());
}

// The operator outrider::few_query_attention, as programs compiled ahead of time call it.
AOTITorchError aoti_torch_cpu_few_query_attention(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value,
                                             AtenTensorHandle mask, double scale, int64_t num_threads,
                                             AtenTensorHandle* result) {
  const AtenTensorHandle tensors[4] = {query, key, value, mask};
  void *data[4], *out;
  int64_t* sizes[4];
  Strides strides[4];
  for (int i = 0; i < 4; i++) {
    int64_t* found;
    aoti_torch_get_data_ptr(tensors[i], &data[i]);
    aoti_torch_get_sizes(tensors[i], &sizes[i]);
    aoti_torch_get_strides(tensors[i], &found);
    if (found[3] != 1 && sizes[i][3] > 1) return AOTI_TORCH_FAILURE;
    strides[i] = {found[0], found[1], found[2]};
  }
  if (sizes[3][0] == 1) strides[3].row = 0;
  if (sizes[3][1] == 1) strides[3].head = 0;
  Shape shape = {sizes[0][0], sizes[0][1], sizes[1][1], sizes[0][2], sizes[1][2], sizes[0][3], sizes[2][3]};
  const int64_t out_sizes[4] = {shape.rows, shape.queries, shape.heads, shape.value_width};
  const int64_t out_strides[4] = {shape.queries * shape.heads * shape.value_width, shape.heads * shape.value_width,
                                  shape.value_width, 1};
  int32_t dtype;
  aoti_torch_get_dtype(key, &dtype);
  AOTITorchError error = aoti_torch_empty_strided(4, out_sizes, out_strides, aoti_torch_dtype_float32(),
                                                  aoti_torch_device_type_cpu(), 0, result);
  if (error != AOTI_TORCH_SUCCESS) return error;
  aoti_torch_get_data_ptr(*result, &out);
  outrider_few_query_attention(&shape, data[0], &strides[0], data[1], &strides[1], data[2], &strides[2], data[3],
                          &strides[3], dtype == aoti_torch_dtype_float32() ? 32 : 16, static_cast<float>(scale),
                          static_cast<float*>(out), num_threads);
  return AOTI_TORCH_SUCCESS;
}
}
