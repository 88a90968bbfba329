// Rows of a matrix in blocks, interleaved (interleaved.h) and taken out again: as they were, or as float32.

#include <algorithm>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "products.h"

namespace {

constexpr int64_t PIECE_BYTES = 1 << 20;

// Copies in pieces, in their order, each of which one thread takes.
class Pieces {
 public:
  Pieces(const RowCopy* copies, int64_t number) : copy(copies), end(copies + number) {}

  // Calls `run(copy, begin, end)` for rows that no other thread has, until none are left.
  template <typename Run>
  void each(Run run) {
    for (;;) {
      std::unique_lock lock(mutex);
      while (copy != end && row >= copy->num_rows) copy++, row = 0;
      if (copy == end) return;
      const RowCopy& taken = *copy;
      const int64_t begin = row, num_panels = PIECE_BYTES / (LANES * taken.row_bytes + 1) + 1;
      row = std::min(begin + num_panels * LANES, taken.num_rows);
      const int64_t end_row = row;
      lock.unlock();
      run(taken, begin, end_row);
    }
  }

 private:
  std::mutex mutex;
  const RowCopy *copy, *const end;
  int64_t row = 0;
};

void copy_rows(const RowCopy& copy, int64_t begin, int64_t end) {
  bool is_in_blocks = false;
  visit_blocks(copy.type, copy.source, [&](auto blocks) {
    typedef std::remove_const_t<std::remove_pointer_t<decltype(blocks)>> Block;
    is_in_blocks = true;
    const int64_t length = copy.row_bytes / static_cast<int64_t>(sizeof(Block));
    const Interleaved<Block> to(copy.matrix, copy.num_channels, length);
    for (int64_t first = begin; first < end; first += LANES) {  // rows that share a panel, if they are in its order
      const int64_t last = std::min(first + LANES, end);
      for (int64_t b = 0; b < length; b++) {
        for (int64_t row = first; row < last; row++) to.put(copy.place(row), b, blocks[row * length + b]);
      }
    }
  });
  for (int64_t row = begin; row < end && !is_in_blocks; row++) {
    memcpy(copy.matrix + copy.place(row) * copy.row_bytes, copy.source + row * copy.row_bytes, copy.row_bytes);
  }
}

// Numbers of some rows of one panel: [num_rows, I].
template <typename Block>
void dequantize_panel(const Interleaved<Block>& matrix, const int64_t* rows, int64_t num_rows, float* to) {
  alignas(64) float wide[CHUNK][LANES];
  const int64_t width = matrix.length * Block::NUMBERS;
  each_chunk(matrix, rows[0] / LANES, [&](int64_t b, int64_t number, const uint8_t* blocks) {
    unpack(static_cast<const Block*>(nullptr), blocks, number,
               [&](int g, const Words* integers, const Floats* scales, const Floats* offsets) {
      for (int j = 0; j < WORDS; j++) {
        UNROLLED for (int k = 0; k < 4; k++) {
          store(wide[g * GROUP + 4 * j + k], dequantize<Block>(integers, j, k, scales, offsets));
        }
      }
    });
    for (int64_t r = 0; r < num_rows; r++) {
      float* here = to + r * width + b * Block::NUMBERS;
      for (int64_t i = 0; i < number * Block::NUMBERS; i++) here[i] = wide[i][rows[r] % LANES];
    }
  });
}

bool are_all_there(const int64_t* rows, int64_t num_rows, int64_t num_channels) {
  for (int64_t i = 0; i < num_rows; i++) {
    if (rows[i] < 0 || rows[i] >= num_channels) return false;
  }
  return true;
}

}  // namespace

void dequantize_row(const Matrix& matrix, int64_t row, float* to) {
  auto put = [&](auto matrix_of) {
    auto from = matrix_of + row * matrix.width;
    const float scale = matrix.scales == nullptr ? 1.0f : matrix.scales[row];
    for (int64_t i = 0; i < matrix.width; i += LANES) {
      const int64_t left = matrix.width - i, number = left < LANES ? left : LANES;
      const Floats wide = load_first(from + i, number) * scale;
      memcpy(to + i, &wide, number * sizeof(float));
    }
  };
  switch (matrix.type) {
    case WeightType::F32: return put(static_cast<const float*>(matrix.data));
    case WeightType::F16: return put(static_cast<const Float16*>(matrix.data));
    case WeightType::I8: return put(static_cast<const int8_t*>(matrix.data));
    case WeightType::BF16: return put(static_cast<const BFloat16*>(matrix.data));
  }
  visit_blocks(matrix.type, matrix.data, [&](auto blocks) {
    typedef std::remove_const_t<std::remove_pointer_t<decltype(blocks)>> Block;
    dequantize_panel(Interleaved<Block>(matrix.data, matrix.num_channels, matrix.width / Block::NUMBERS), &row, 1, to);
  });
}

extern "C" {

// Numbers of `num_rows` rows of a matrix [O, I] of this type: [num_rows, I]. Returns whether all rows are there.
bool outrider_dequantize_rows(const void* matrix, int64_t type, int64_t num_channels, int64_t width, const int64_t* rows,
                         int64_t num_rows, float* to, int64_t num_threads) {
  if (!are_all_there(rows, num_rows, num_channels)) return false;
  visit_blocks(type, matrix, [&](auto blocks) {
    typedef std::remove_const_t<std::remove_pointer_t<decltype(blocks)>> Block;
    const Interleaved<Block> interleaved(matrix, num_channels, width / Block::NUMBERS);
    auto is_same_panel = [&](int64_t i) { return rows[i] / LANES == rows[i - 1] / LANES; };
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t i = 0; i < num_rows; i++) {
      if (i > 0 && is_same_panel(i)) continue;  // with the first one
      int64_t end = i + 1;
      while (end < num_rows && is_same_panel(end)) end++;
      dequantize_panel(interleaved, rows + i, end - i, to + i * width);
    }
  });
  return true;
}

// Copies rows as files have them, in the order of the list, to matrices whose blocks are interleaved. Threads of its own
// take pieces: OpenMP's would spin at each matrix's end if other programs use the processors. Returns whether all rows
// have a place.
bool outrider_copy_rows(const RowCopy* copies, int64_t number, int64_t num_threads) {
  int64_t num_bytes = 0;
  for (const RowCopy* copy = copies; copy != copies + number; copy++) {
    if (copy->places != nullptr && !are_all_there(copy->places, copy->num_rows, copy->num_channels)) return false;
    num_bytes += copy->num_rows * copy->row_bytes;
  }
  Pieces pieces(copies, number);
  auto work = [&] { pieces.each(copy_rows); };
  std::vector<std::thread> others;
  try {
    for (int64_t i = 1; i < std::min(num_threads, num_bytes / PIECE_BYTES + 1); i++) others.emplace_back(work);
  } catch (const std::exception&) {  // the system has no more threads, or no memory
  }
  work();
  for (std::thread& one : others) one.join();
  return true;
}

// Some of its rows as files have them. Returns whether all rows are there.
bool outrider_separate_rows(const void* matrix, int64_t type, int64_t num_channels, int64_t width, const int64_t* rows,
                            int64_t num_rows, void* to, int64_t num_threads) {
  if (!are_all_there(rows, num_rows, num_channels)) return false;
  visit_blocks(type, to, [&](auto blocks) {
    typedef std::remove_const_t<std::remove_pointer_t<decltype(blocks)>> Block;
    const int64_t length = width / Block::NUMBERS;
    const Interleaved<Block> interleaved(matrix, num_channels, length);
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t i = 0; i < num_rows; i++) {
      for (int64_t b = 0; b < length; b++) {
        static_cast<Block*>(to)[i * length + b] = interleaved.get(rows[i], b);
      }
    }
  });
  return true;
}
}
