// Drawing from rows of tokens, and the rules of sampling/rules.py on them.

#include <cmath>
#include <vector>

#include "functions.h"
#include "status.h"
#include "token_rows.h"

namespace {

// (weight p - q)+ of a row, block by block from the start. Without q: p up to its sum.
struct Residual {
  const Row &p, &q;
  double p_scale, q_scale;
  int64_t cursor = 0;

  Residual(const Row& p, double weight, const Row& q)
      : p(p), q(q), p_scale(q.count ? weight / p.sum : 1.0), q_scale(q.count ? 1.0 / q.sum : 0.0) {}

  void fill(int64_t begin, int64_t n, double* to) {
    for (int64_t i = 0; i < n; i++) to[i] = p_scale * p.weights[begin + i];
    if (!q.count) return;
    if (!q.ids && !p.ids) {
      for (int64_t i = 0; i < n; i++) to[i] -= q_scale * q.weights[begin + i];
    } else if (!q.ids) {
      for (int64_t i = 0; i < n; i++) to[i] -= q_scale * q.weights[p.ids[begin + i]];
    } else {
      int64_t i = 0, last = p.id(begin + n - 1);
      for (; cursor < q.count && q.ids[cursor] <= last; cursor++) {
        int64_t id = q.ids[cursor];
        if (!p.ids) i = std::max(id - begin, int64_t(0));
        while (p.id(begin + i) < id) i++;
        if (p.id(begin + i) == id) to[i] -= q_scale * q.weights[cursor];
      }
    }
    for (int64_t i = 0; i < n; i++) to[i] = to[i] > 0 ? to[i] : 0;
  }

  double total() {
    if (!q.count) return p.sum;
    if (q.ids && !p.ids) {  // few tokens of many: 1 less what both have
        double both = 0;
        for (int64_t i = 0; i < q.count; i++)
          both += std::min(p_scale * p.weights[q.ids[i]], q_scale * q.weights[i]);
        return std::max(p_scale * p.sum - both, 0.0);
    }
    double sum = 0, values[BLOCK];
    cursor = 0;
    for (int64_t i = 0; i < p.count; i += BLOCK) {
      int64_t n = std::min(BLOCK, p.count - i);
      fill(i, n, values);
      sum += sum_of_block(values, n);
    }
    return sum;
  }

  // The token at which the sum goes beyond a part of the total; -1 if all tokens are at 0.
  int64_t token_at(double part, double total) {
    double threshold = part * total, sum = 0, values[BLOCK];
    int64_t begin = -1;  // of the block: the last one that is not at 0, as the sum may end a little below the threshold
    cursor = 0;
    for (int64_t i = 0; i < p.count && sum <= threshold; i += BLOCK) {
      int64_t n = std::min(BLOCK, p.count - i);
      fill(i, n, values);
      double of_block = sum_of_block(values, n);
      if (of_block > 0) begin = i;
      if (sum + of_block > threshold) break;
      sum += of_block;
    }
    if (begin < 0) return -1;
    int64_t n = std::min(BLOCK, p.count - begin), last = 0;
    cursor = 0;
    fill(begin, n, values);
    for (int64_t j = 0; j < n; j++) {
      if (values[j] > 0) last = j;
      sum += values[j];
      if (sum > threshold) break;
    }
    return p.id(begin + last);
  }
};

// Philox-4x32-10 (sampling/noise.py) of `N` counters that follow each other in the second word.
template <int N>
struct Philox {
  uint32_t words[4][N];

  Philox(uint64_t seed, uint32_t position, uint32_t first, uint32_t use) {
    for (int i = 0; i < N; i++) {
      words[0][i] = position;
      words[1][i] = first + i;
      words[2][i] = 0;
      words[3][i] = use;
    }
    uint32_t low = seed, high = seed >> 32;
    for (int round = 0; round < 10; round++) {
      for (int i = 0; i < N; i++) {
        uint64_t a = uint64_t(0xD2511F53) * words[0][i], b = uint64_t(0xCD9E8D57) * words[2][i];
        words[0][i] = uint32_t(b >> 32) ^ words[1][i] ^ low;
        words[2][i] = uint32_t(a >> 32) ^ words[3][i] ^ high;
        words[1][i] = b;
        words[3][i] = a;
      }
      low += 0x9E3779B9;
      high += 0xBB67AE85;
    }
  }

  double uniform(int pair, int i) const {
    uint64_t bits = (uint64_t(words[2 * pair][i] >> 6) << 26) | (words[2 * pair + 1][i] >> 6);
    return (double(bits) + 0.5) * 0x1p-52;
  }
};

constexpr uint32_t USE_GUMBEL = 2, USE_LEAST = 3;

// The race that the token of the largest weight over its exponential noise wins: the largest log-probability plus
// Gumbel noise. A block's least exponential comes first, and leaves out tokens that cannot win.
struct GumbelRace {
  const Row& row;
  uint64_t seed;
  uint32_t position;
  double best = 0;
  int64_t winner = 0;

  // Tokens of one block.
  template <int N>
  void enter(int64_t begin, int64_t end, const Philox<N>& noise, int place) {
    Floats most = {};
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES) most = load(row.weights + i) > most ? load(row.weights + i) : most;
    float heaviest = largest_lane(most);
    for (; i < end; i++) heaviest = std::max(heaviest, row.weights[i]);
    double uniform = noise.uniform(0, place);
    if (double(heaviest) * BLOCK <= best * (1.0 - uniform)) return;  // 1 - u is at most -log u
    double least = -logarithm(uniform) / BLOCK;
    int64_t holder = row.id(begin) / BLOCK * BLOCK + noise.words[2][place] % BLOCK;
    for (i = begin; i < end; i++) {
      if (row.weights[i] <= best * least) continue;
      int64_t id = row.id(i);
      double exponential = least;
      if (id != holder)
        exponential += -logarithm(Philox<1>(seed, position, id / 2, USE_GUMBEL).uniform(id % 2, 0));
      if (row.weights[i] > best * exponential) {
        best = row.weights[i] / exponential;
        winner = id;
      }
    }
  }

  int64_t run() {
    constexpr int AHEAD = 16;
    for (int64_t begin = 0, end = 0; begin < row.count; begin = end) {
      int64_t block = row.id(begin) / BLOCK;
      if (row.ids) {
        while (end < row.count && row.ids[end] / BLOCK == block) end++;
        enter(begin, end, Philox<1>(seed, position, block, USE_LEAST), 0);
        continue;
      }
      Philox<AHEAD> noise(seed, position, block, USE_LEAST);
      for (int i = 0; i < AHEAD && begin < row.count; i++, begin = end) {
        end = std::min(row.count, begin + BLOCK);
        enter(begin, end, noise, i);
      }
    }
    return winner;
  }
};

int64_t draw(const Row& row, double uniform) {
  Row none = {};
  return Residual(row, 1.0, none).token_at(uniform, row.sum);
}

// A round of one sequence under the rules of sampling/rules.py, whose words and formulas these are.
struct Round {
  std::vector<Row> p, q;
  const int64_t* ids;
  double* probs;  // p and q of each drafted token
  int64_t num_accepted = 0, next_id = 0;
  std::vector<int32_t> own_ids;
  const float one = 1.0f;

  Round(const CandidateBuffers& buffers, const int64_t* p_rows, const int64_t* q_rows, const int64_t* ids, int64_t n,
        double* probs)
      : ids(ids), probs(probs), own_ids(ids, ids + n) {
    for (int64_t i = 0; i <= n; i++) p.push_back(buffers.row(p_rows[i]));
    for (int64_t i = 0; i < n; i++) {
      q.push_back(q_rows ? buffers.row(q_rows[i]) : Row{&own_ids[i], &one, 1, 1.0});
      probs[2 * i] = p[i].probability(ids[i]);
      probs[2 * i + 1] = q[i].probability(ids[i]);
    }
  }

  // The uniform numbers: the first one draws the next token; those after it are of acceptance and of drafting, in turn.
  static double accept(const double* uniforms, int64_t i) { return uniforms[1 + 2 * i]; }

  int64_t num_drafted() const { return q.size(); }

  void draw_next(double weight, double uniform) {
    next_id = -1;
    if (num_accepted < num_drafted()) {
      Residual rest(p[num_accepted], weight, q[num_accepted]);
      double total = rest.total();
      if (total > 0) next_id = rest.token_at(uniform, total);
    }
    if (next_id < 0) next_id = draw(p[num_accepted], uniform);
  }

  void verify_rejection(const double* uniforms) {
    auto stands = [&](int64_t i) { return accept(uniforms, i) * probs[2 * i + 1] < probs[2 * i]; };
    while (num_accepted < num_drafted() && stands(num_accepted)) num_accepted++;
    draw_next(1.0, uniforms[0]);
  }

  void verify_block(const double* uniforms) {
    int64_t n = num_drafted();
    std::vector<double> w = {1.0};
    for (int64_t i = 0; i < n; i++) {
      double weight = w[i] * probs[2 * i] / probs[2 * i + 1];
      w.push_back(weight > 1.0 ? 1.0 : weight);  // 0/0 never passes
    }
    for (num_accepted = n; num_accepted > 0; num_accepted--) {
      int64_t i = num_accepted;
      double pass_prob = w[i];
      if (i < n) {
        double rest = Residual(p[i], w[i], q[i]).total();
        pass_prob = rest / (rest + 1.0 - w[i]);  // nor here
      }
      if (accept(uniforms, i - 1) < pass_prob) break;
    }
    draw_next(w[num_accepted], uniforms[0]);
  }

  void verify_gumbel(uint64_t seed, int64_t position) {
    for (;; num_accepted++) {
      next_id = GumbelRace{p[num_accepted], seed, uint32_t(position + num_accepted)}.run();
      if (num_accepted == num_drafted() || ids[num_accepted] != next_id) return;
    }
  }
};

}  // namespace

extern "C" {

// A token drawn from each row: by a uniform number, or (null) with the noise of a seed and a position.
void outrider_draw(const CandidateBuffers* buffers, const int64_t* rows, int64_t num_rows, const double* uniforms,
                   const int64_t* seeds, const int64_t* positions, int64_t* ids) {
  for (int64_t i = 0; i < num_rows; i++) {
    Row row = buffers->row(rows[i]);
    ids[i] = uniforms ? draw(row, uniforms[i]) : GumbelRace{row, uint64_t(seeds[i]), uint32_t(positions[i])}.run();
  }
}

// The verdict of a rule of sampling/rules.py. Of each sequence: K + 1 rows of p, K of q (null: all at the drafted
// token), and for `gumbel` (2) the seed and the position; for the others the uniform numbers of noise.py.
Status outrider_verify(const CandidateBuffers* buffers, int64_t rule, int64_t num_sequences, int64_t k,
                       const int64_t* p, const int64_t* q, const int64_t* ids, const int64_t* num_drafted,
                       const double* uniforms, int64_t num_uniforms, const int64_t* seeds, const int64_t* positions,
                       int64_t* num_accepted, int64_t* next_ids, double* drafted_probs) try {
  for (int64_t b = 0; b < num_sequences; b++) {
    Round round(*buffers, p + b * (k + 1), q ? q + b * k : nullptr, ids + b * k, num_drafted[b],
                drafted_probs + 2 * b * k);
    const double* own = uniforms + b * num_uniforms;
    if (rule == 0) round.verify_rejection(own);
    if (rule == 1) round.verify_block(own);
    if (rule == 2) round.verify_gumbel(seeds[b], positions[b]);
    num_accepted[b] = round.num_accepted;
    next_ids[b] = round.next_id;
  }
  return DONE;
} catch (const std::exception&) {
  return NO_MEMORY;
}
}
