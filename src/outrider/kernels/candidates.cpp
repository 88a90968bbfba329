// From rows of logits to the tokens that may be drawn (sampling/candidates.py), in one pass over a row.
//
// The pass takes the largest logit of each block of 64 tokens. All filters then read those blocks alone that hold a token
// that stays. Sums are in float64 and in a written order, so that a row's result depends on nothing but the row.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "functions.h"
#include "status.h"
#include "token_rows.h"

namespace {

constexpr float INF = std::numeric_limits<float>::infinity();

// Scores and weights of logits: (x - largest) / temperature, and e to this power.
INLINE void weigh(const float* x, int64_t count, float largest, float temperature, float* scores, float* weights) {
  for (int64_t i = 0; i < count; i += LANES) {
    int64_t n = std::min<int64_t>(LANES, count - i);
    Floats score = (n == LANES ? load(x + i) : load_first(x + i, n)) - largest;
    if (temperature != 1.0f) score = score / temperature;
    Floats weight = exponential(score);
    if (n == LANES) {
      if (scores) store(scores + i, score);
      store(weights + i, weight);
    } else {
      if (scores) memcpy(scores + i, &score, n * sizeof(float));
      memcpy(weights + i, &weight, n * sizeof(float));
    }
  }
}

double sum_of(const float* values, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; i += BLOCK) sum += sum_of_block(values + i, std::min(BLOCK, count - i));
  return sum;
}

// A token with its score; in the order of sampling/probs.py: of equal scores the lower id is cut first.
struct Entry {
  float score, weight;
  int32_t id;

  INLINE_MEMBER bool operator<(const Entry& other) const {
    return score < other.score || (score == other.score && id < other.id);
  }
};

struct Scratch {
  std::vector<float> maxima, largest, logits, scores, weights;
  std::vector<int32_t> ids;
  std::vector<Entry> entries;
};

// The largest logit of each block, and of the row. Returns whether the row can be sampled from.
bool find_maxima(const float* x, int64_t count, std::vector<float>& maxima, float& largest) {
  maxima.resize((count + BLOCK - 1) / BLOCK);
  Ints is_nan = {};
  largest = -INF;
  for (int64_t i = 0; i < count; i += BLOCK) {
    float padded[BLOCK];
    const float* from = x + i;
    if (count - i < BLOCK) {
      std::fill(padded, padded + BLOCK, -INF);
      memcpy(padded, from, (count - i) * sizeof(float));
      from = padded;
    }
    Floats most = load(from);
    is_nan |= most != most;
    UNROLLED for (int64_t j = LANES; j < BLOCK; j += LANES) {
      Floats values = load(from + j);
      is_nan |= values != values;
      most = values > most ? values : most;
    }
    maxima[i / BLOCK] = largest_lane(most);
    largest = std::max(largest, maxima[i / BLOCK]);
  }
  bool has_nan = false;
  for (int j = 0; j < LANES; j++) has_nan |= is_nan[j] != 0;
  return !has_nan && std::isfinite(largest);
}

// The k-th largest of some numbers; minus infinity if there are fewer.
float kth_largest(const float* values, int64_t count, int64_t k, std::vector<float>& kept) {
  if (count < k) return -INF;
  kept.clear();
  float bound = -INF;
  auto shrink = [&] {
    std::nth_element(kept.begin(), kept.begin() + (k - 1), kept.end(), std::greater<float>());
    kept.resize(k);
    bound = kept[k - 1];
  };
  for (int64_t i = 0; i < count; i++) {
    if (values[i] < bound) continue;
    kept.push_back(values[i]);
    if (int64_t(kept.size()) >= 2 * k + 32) shrink();
  }
  shrink();
  return bound;
}

// The tokens with a logit of at least `bound`, with their logits.
void gather(const float* x, int64_t count, float bound, Scratch& scratch) {
  scratch.ids.clear();
  scratch.logits.clear();
  for (int64_t block = 0; block < int64_t(scratch.maxima.size()); block++) {
    if (!(scratch.maxima[block] >= bound)) continue;
    int64_t end = std::min(count, (block + 1) * BLOCK);
    for (int64_t i = block * BLOCK; i < end; i++) {
      if (!(x[i] >= bound)) continue;
      scratch.ids.push_back(i);
      scratch.logits.push_back(x[i]);
    }
  }
}

// The least entry that stays where the lowest ones are cut: as many as weigh `budget` at most, together with what is
// `below` them. The highest one always stays.
Entry least_kept(std::vector<Entry>& entries, double below, double budget) {
  auto begin = entries.begin(), end = entries.end();
  while (end - begin > 1) {
    auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end);
    double mass = 0;
    for (auto entry = begin; entry < middle; entry++) mass += entry->weight;
    if (below + mass > budget) {
      end = middle;
    } else {
      below += mass;
      begin = middle;
    }
  }
  return *begin;
}

// A logit below those of all scores from `score` on, whatever was rounded.
float logit_below(float score, float largest, float temperature) {
  return largest + score * temperature * 1.0001f - 1e-5f * std::fabs(largest);
}

Row one_hot(int64_t id, int32_t* ids, float* weights) {
  ids[0] = id;
  weights[0] = 1.0f;
  return {ids, weights, 1, 1.0};
}

// Options of a row: those of sampling/probs.py. `least_score` is the logarithm of min-p.
struct Options {
  float temperature;
  int64_t top_k;
  float top_p, least_score;
};

Row all_tokens(const float* x, int64_t count, float largest, float temperature, float* weights) {
  double sum = 0;
  for (int64_t i = 0; i < count; i += BLOCK) {
    int64_t n = std::min(BLOCK, count - i);
    weigh(x + i, n, largest, temperature, nullptr, weights + i);
    sum += sum_of_block(weights + i, n);
  }
  return {nullptr, weights, count, sum};
}

Row make_row(const float* x, int64_t count, Options options, int32_t* ids, float* weights, uint8_t& is_finite,
             Scratch& scratch) {
  float largest;
  is_finite = find_maxima(x, count, scratch.maxima, largest);
  if (!is_finite) return one_hot(0, ids, weights);  // never used
  if (options.temperature == 0.0f) {
    auto block = std::find(scratch.maxima.begin(), scratch.maxima.end(), largest);
    const float* from = x + BLOCK * (block - scratch.maxima.begin());
    return one_hot(std::find(from, x + count, largest) - x, ids, weights);
  }
  // First a bound below which no token stays, then the filters over the tokens from there on.
  bool has_top_k = options.top_k < count, has_top_p = options.top_p < 1.0f;
  float bound = -INF;
  double sum = 0;
  if (has_top_k) {
    bound = kth_largest(scratch.maxima.data(), scratch.maxima.size(), options.top_k, scratch.largest);
    gather(x, count, bound, scratch);
    bound = kth_largest(scratch.logits.data(), scratch.logits.size(), options.top_k, scratch.largest);
  } else if (has_top_p) {
    sum = all_tokens(x, count, largest, options.temperature, weights).sum;
    // All tokens lighter than this together weigh less than 1 - top_p.
    float least = logarithm((1.0f - options.top_p) * float(sum / count) / 2);
    bound = logit_below(least, largest, options.temperature);
  } else if (options.least_score > -INF) {
    bound = logit_below(options.least_score, largest, options.temperature);
  } else {
    return all_tokens(x, count, largest, options.temperature, weights);
  }
  gather(x, count, bound, scratch);
  int64_t num = scratch.ids.size();
  scratch.scores.resize(num);
  scratch.weights.resize(num);
  weigh(scratch.logits.data(), num, largest, options.temperature, scratch.scores.data(), scratch.weights.data());
  Entry least = {options.least_score, 0, -1};
  if (has_top_p) {
    scratch.entries.resize(num);
    for (int64_t i = 0; i < num; i++) scratch.entries[i] = {scratch.scores[i], scratch.weights[i], scratch.ids[i]};
    double mass = sum_of(scratch.weights.data(), num);
    if (has_top_k) sum = mass;
    least = std::max(least, least_kept(scratch.entries, sum - mass, (1.0f - options.top_p) * sum));
  }
  int64_t kept = 0;
  for (int64_t i = 0; i < num; i++) {
    Entry entry = {scratch.scores[i], scratch.weights[i], scratch.ids[i]};
    if (entry < least || entry.weight == 0) continue;
    ids[kept] = entry.id;
    weights[kept++] = entry.weight;
  }
  return {ids, weights, kept, sum_of(weights, kept)};
}

}  // namespace

extern "C" {

// Rows of logits to new rows of the buffers, which have room for all of their tokens. An option that is null is off in
// all rows; `places` rows have the same options. The logits are those of `token_ids`, ascending; of all tokens if that is
// null.
Status outrider_candidates(CandidateBuffers* buffers, const float* logits, int64_t num_rows, int64_t stride,
                           int64_t num_tokens, int64_t places, const int64_t* token_ids, const float* temperature,
                           const int64_t* top_k, const float* top_p, const float* least_score, uint8_t* is_finite) try {
  static thread_local Scratch scratch;
  for (int64_t i = 0; i < num_rows; i++) {
    int64_t b = i / places;
    Options options = {temperature[b], top_k ? top_k[b] : num_tokens, top_p ? top_p[b] : 1.0f,
                       least_score ? least_score[b] : -INF};
    int32_t* ids = buffers->ids + buffers->num_tokens;
    float* weights = buffers->weights + buffers->num_tokens;
    Row row = make_row(logits + i * stride, num_tokens, options, ids, weights, is_finite[i], scratch);
    if (token_ids) {
      for (int64_t j = 0; j < row.count; j++) ids[j] = token_ids[row.id(j)];
      row.ids = ids;
    }
    buffers->add(row);
  }
  return DONE;
} catch (const std::exception&) {
  return NO_MEMORY;
}

// New rows of one token each.
void outrider_one_hot(CandidateBuffers* buffers, const int64_t* token_ids, int64_t num_rows) {
  for (int64_t i = 0; i < num_rows; i++) {
    int64_t start = buffers->num_tokens;
    buffers->add(one_hot(token_ids[i], buffers->ids + start, buffers->weights + start));
  }
}
}
