// A forward of a causal language model in one call: from token ids to logits, with its keys and values in a slot cache.
//
// The model is data (the structures below; native/engine.py builds them). The tokens are those of any number of
// sequences; all threads go through the layers together, and wait for each other between the stages. A stage is divided
// by tokens, heads or channels, none of whose results depends on how it is divided.
#include <omp.h>

#include <memory>
#include <vector>

#include "attention.h"
#include "barrier.h"
#include "products.h"

namespace {

constexpr int64_t MOST_TOKENS = 128;  // go through all layers at once: what a layer needs of them stays in the cache

typedef std::unique_ptr<float[]> Buffer;
Buffer buffer(int64_t number) { return Buffer(new float[number]); }

struct Rope {
  int64_t width, is_interleaved;  // whether the pairs are neighbours, or in the two halves
  double scale;
  const float* frequencies;  // [width / 2]
};

// Places that a token sees. Its block are the tokens of its sequence in this forward.
struct Reach {
  int64_t window;         // places up to its own, itself included; 0 for all
  int64_t before_anchor;  // places before the first of its block; -1 for all
  int64_t sees_block;     // whether it sees later tokens of its block, too
  bool operator==(const Reach&) const = default;
};

struct Attention {
  int64_t num_heads, num_groups, head_width;
  int64_t rope;              // its number; -1 for none
  int64_t store;             // number of its keys; its values are the next
  int64_t norms_whole_rows;  // query_norm and key_norm: of all heads together
  Reach reach;
  double scale, cap;  // cap 0: none
  Norm query_norm, key_norm;
  int64_t num_inputs;
  Matrix inputs[3];  // queries, keys and values, one after the other
  Matrix out;

  int64_t q_width() const { return num_heads * head_width; }
  int64_t inputs_width() const { return q_width() + 2 * num_groups * head_width; }
};

struct Mlp {
  int64_t num_ups, activation;
  Matrix ups[2];  // of the gate, if there is one, and of what it multiplies
  Matrix down;
};

// A mixer of tokens, then an MLP; what it has not has no heads, and no ups.
struct Layer {
  Norm mixer_norm, mixer_post_norm, mlp_norm, mlp_post_norm;
  Attention attention;
  Mlp mlp;
};

// Input of a head that drafts from states of its target: the norms of a token's embedding and of a state, side by side.
struct Joint {
  int64_t is_there;
  Norm embedding_norm, state_norm;
  Matrix matrix;        // gives the input of the first layer; no data: that is the state, and the layer reads both norms
  int64_t adds_normed;  // without a matrix: whether the input of the first layer is the normed state
};

struct Model {
  int64_t num_layers, hidden, num_ropes, num_digits;
  double embedding_scale, residual_scale, logit_scale, logit_cap;  // cap 0: none
  Matrix embedding, head;
  const float* place_embedding;  // [num_places, hidden], or null
  int64_t num_places;
  Norm last_norm;
  Joint joint;
  const Rope* ropes;
  const Layer* layers;
};

// Columns of tokens of several rows of a cache.
struct Batch {
  int64_t num_rows, num_columns;
  const int64_t *ids, *places;  // a place below 0 is padding; the others of a row ascend [B, T]
  const float* states;          // of a head's target [B, T, hidden], or null
  const int64_t* offsets;       // from places to positions [B], or null
  void* const* stores;          // keys and values of each attention in turn [B, L + 1, groups, head_width]
  int64_t bits, row_places;     // of a number of the stores; L + 1
  int64_t num_wanted;           // last columns whose logits are wanted; those of padding are zeros
  float* logits;                // [B, num_wanted, V]
  int64_t num_features;
  const int64_t* feature_layers;  // whose inputs are wanted; then the last output, and its norm
  float* features;                // those of padding are zeros [B, T, num_features, hidden]
  bool* broken;  // with a key or value that is not finite, for which zero is stored; or null [B, T]
};

// A token, and where its results go.
struct Token {
  int64_t id, row, place, position, column;  // row * num_columns + column
  int64_t first, last;                       // places of its block
  float* logits;                             // or null
};

void put(float* to, float number) { *to = number; }
void put(BFloat16* to, float number) {
  uint32_t bits;
  memcpy(&bits, &number, sizeof bits);
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  to->bits = is_nan ? bits >> 16 | 64 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to the nearest, ties to even
}

// Queries of a sequence and of the heads that share keys, number first .. first + number - 1 if those of a token follow
// one another; and a part of their sequence.
struct Task {
  int64_t group, first, number, part = 0, num_parts = 0;
  bool is_first = true;  // of the parts

  // Head of a query, if `shared` heads share keys.
  int64_t head(int64_t query, int64_t shared) const { return group * shared + (first + query) % shared; }
};

// The first place that a token sees, and the one after the last. Both ascend along a sequence.
struct Seen {
  int64_t begin, end;
};
Seen seen(const Reach& reach, const Token& token) {
  const int64_t window = reach.window;
  int64_t begin = window ? token.place + 1 - window : 0, end = reach.sees_block ? token.last + 1 : token.place + 1;
  if (window) end = std::min(end, token.place + window);
  if (reach.before_anchor >= 0) begin = std::max(begin, token.first - reach.before_anchor);
  return {std::max<int64_t>(0, begin), end};
}

// Tasks of attention with one reach and numbers of heads: the parts of the same queries follow one another.
struct Tasks {
  Reach reach;
  int64_t num_heads, num_groups;
  bool has_parts;
  std::vector<Task> list;
};

// Tokens that go through the layers together, and what they need.
struct Block {
  Block(const Model& m, const Batch& batch, const Token* tokens, int64_t number)
      : m(m), batch(batch), tokens(tokens), number(number), normed_width(m.joint.is_there ? 2 * m.hidden : m.hidden) {
    int64_t widest = normed_width, inputs_width = 0, q_width = 0, ups_width = 0;
    size_t num_kept = 0;
    for (int64_t r = 0; r < m.num_ropes; r++) turns_width = std::max(turns_width, m.ropes[r].width);
    for (int64_t l = 0; l < m.num_layers; l++) {
      const Layer& layer = m.layers[l];
      const Attention& attention = layer.attention;
      ups_width = std::max(ups_width, layer.mlp.down.width * layer.mlp.num_ups);
      widest = std::max({widest, layer.mlp.down.width, attention.q_width()});
      if (attention.num_heads == 0) continue;
      inputs_width = std::max(inputs_width, attention.inputs_width()), q_width = std::max(q_width, attention.q_width());
      if (tasks_of(attention) == nullptr) tasks.push_back(new_tasks(attention));
      num_kept = std::max(num_kept, tasks_of(attention)->list.size() * kept_width(attention));
    }
    x = buffer(number * m.hidden), y = buffer(number * m.hidden), normed = buffer(number * normed_width);
    inputs = buffer(number * inputs_width), attended = buffer(number * q_width), ups = buffer(number * ups_width);
    turns = buffer(number * m.num_ropes * turns_width);
    kept = buffer(num_kept * MOST_QUERIES);
    if (m.num_digits) chunks.reset(new RoundedChunk[number * ((widest + CHUNK - 1) / CHUNK)]);
    for (int64_t t = 0; t < number; t++) {
      if (tokens[t].logits != nullptr) wanted.push_back(t);
    }
    apart = buffer(wanted.empty() || batch.num_rows == 1 ? 0 : wanted.size() * m.head.num_channels);
  }

  const Tasks* tasks_of(const Attention& a) const {
    for (const Tasks& one : tasks) {
      if (one.reach == a.reach && one.num_heads == a.num_heads && one.num_groups == a.num_groups) return &one;
    }
    return nullptr;
  }
  static int64_t kept_width(const Attention& attention) { return attention.head_width + 2; }

  // Cosines and sines of a rope for a token: [width / 2] each.
  float* turns_of(int64_t t, int64_t rope) const { return &turns[(t * m.num_ropes + rope) * turns_width]; }

  const Model& m;
  const Batch& batch;
  const Token* const tokens;
  const int64_t number, normed_width;
  int64_t turns_width = 0;
  std::vector<int64_t> wanted;
  std::vector<Tasks> tasks;
  Buffer x, y, normed, inputs, attended, ups, turns, kept, apart;
  std::unique_ptr<RoundedChunk[]> chunks;
  mutable Barrier barrier;

 private:
  Tasks new_tasks(const Attention& attention) const {
    const Reach& reach = attention.reach;
    Tasks found{reach, attention.num_heads, attention.num_groups, false, {}};
    const int64_t shared = attention.num_heads / attention.num_groups;  // heads with the same keys
    for (int64_t begin = 0, end = 0; begin < number; begin = end) {
      while (end < number && tokens[end].row == tokens[begin].row) end++;
      const int64_t all = (end - begin) * shared, num_tiles = (all + MOST_QUERIES - 1) / MOST_QUERIES;
      for (int64_t g = 0; g < attention.num_groups; g++) {
        for (int64_t tile = 0; tile < num_tiles; tile++) {
          Task task{g, begin * shared + all * tile / num_tiles, all * (tile + 1) / num_tiles - all * tile / num_tiles};
          const int64_t last = task.first + task.number - 1;
          const int64_t highest = seen(reach, tokens[last / shared]).end - 1;
          const int64_t from = seen(reach, tokens[task.first / shared]).begin / PLACES;
          task.num_parts = highest / PLACES - from + 1;
          for (task.part = from; task.part <= highest / PLACES; task.part++) {
            task.is_first = task.part == from;
            found.list.push_back(task);
          }
          found.has_parts = found.has_parts || task.num_parts > 1;
        }
      }
    }
    return found;
  }
};

// One thread's share of a block.
template <typename Number>
class Worker {
 public:
  Worker(const Block& b, int64_t thread, int64_t num_threads) : b(b), m(b.m), me(thread), n(num_threads) {}

  void run() const {
    for (int64_t t = me; t < b.number; t += n) embed(t);
    if (m.joint.is_there) join();
    for (int64_t l = 0; l < m.num_layers; l++) {
      const Layer& layer = m.layers[l];
      keep_features(l);
      if (layer.attention.num_heads) {
        if (layer.attention.inputs[0].width == m.hidden) norm_and_round(layer.mixer_norm);  // else rows are joint
        run(layer.attention);
        add(layer.mixer_post_norm);
      }
      if (layer.mlp.num_ups) {
        norm_and_round(layer.mlp_norm);
        run(layer.mlp);
        add(layer.mlp_post_norm);
      }
    }
    keep_features(m.num_layers);
    keep_features(m.num_layers + 1);
    if (!b.wanted.empty()) find_logits();
  }

 private:
  void wait() const { b.barrier.wait(n); }

  // Parts of a layer, from `normed` to y.
  void run(const Attention& attention) const {
    const int64_t in_width = attention.inputs[0].width, inputs_width = attention.inputs_width();
    for (int64_t i = 0, at = 0; i < attention.num_inputs; at += attention.inputs[i].num_channels, i++) {
      product(of(b.normed, in_width, b.number), attention.inputs[i], &b.inputs[at], inputs_width);
    }
    wait();
    place(attention);
    wait();
    attend(attention);
    wait();
    round(b.attended, attention.q_width());
    product(of(b.attended, attention.q_width(), b.number), attention.out, b.y.get(), m.hidden);
    wait();
  }

  void run(const Mlp& mlp) const {
    const int64_t width = mlp.down.width;
    for (int64_t i = 0; i < mlp.num_ups; i++) {
      product(of(b.normed, m.hidden, b.number), mlp.ups[i], &b.ups[i * b.number * width], width);
    }
    activate(mlp, share_of(width, me, n), mlp.num_ups == 2 ? &b.ups[b.number * width] : nullptr);
    wait();
    round(b.ups, width);
    product(of(b.ups, width, b.number), mlp.down, b.y.get(), m.hidden);
    wait();
  }

  // The first rows of a buffer as products take them.
  Rows of(const Buffer& rows, int64_t width, int64_t number) const {
    return {rows.get(), b.chunks.get(), number, width, m.num_digits};
  }

  void product(const Rows& rows, const Matrix& matrix, float* to, int64_t stride) const {
    const Share share = share_of(matrix.num_channels, me, n);
    products(rows, matrix, share, to, stride);
    if (matrix.scales == nullptr && matrix.bias == nullptr) return;
    for (int64_t t = 0; t < rows.number; t++) {
      float* row = to + t * stride;
      if (matrix.scales != nullptr) for (int64_t o = share.begin; o < share.end; o++) row[o] *= matrix.scales[o];
      if (matrix.bias != nullptr) for (int64_t o = share.begin; o < share.end; o++) row[o] += matrix.bias[o];
    }
  }

  // Rounds rows of which each thread has written some; the threads wait before, by the caller, and after.
  void round(const Buffer& rows, int64_t width) const {
    if (m.num_digits == 0) return;
    for (int64_t i = me; i < b.number * ((width + CHUNK - 1) / CHUNK); i += n) {
      round_chunk(&rows[i % b.number * width], width, i / b.number, i % b.number, b.number);
    }
    wait();
  }
  // Norms number t of `number` rows to `normed`, and rounds what this gives.
  void norm_and_round(const Norm& norm, const float* row, int64_t t, int64_t number) const {
    float* to = &b.normed[t * m.hidden];
    norm.apply(row, m.hidden, to);
    round_row(to, m.hidden, t, number);
  }
  void round_row(const float* row, int64_t width, int64_t t, int64_t number) const {
    for (int64_t c = 0; m.num_digits && c * CHUNK < width; c++) round_chunk(row, width, c, t, number);
  }
  // Of a row that is no whole number of groups, which no matrix in blocks takes, the last numbers are left out.
  void round_chunk(const float* row, int64_t width, int64_t c, int64_t t, int64_t number) const {
    const int64_t whole = std::min(CHUNK, (width - c * CHUNK) / GROUP * GROUP);
    b.chunks[c * number + t].round(row + c * CHUNK, whole, m.num_digits);
  }

  void embed(int64_t t) const {
    float* x = &b.x[t * m.hidden];
    widen_row(m.embedding, b.tokens[t].id, x);
    const float scale = m.embedding_scale;
    const int64_t position = b.tokens[t].position;
    if (scale != 1.0f) for (int64_t i = 0; i < m.hidden; i++) x[i] *= scale;
    if (m.place_embedding != nullptr) {
      for (int64_t i = 0; i < m.hidden; i++) x[i] += m.place_embedding[position * m.hidden + i];
    }
    for (int64_t r = 0; r < m.num_ropes; r++) {
      const Rope& rope = m.ropes[r];
      float* turns = b.turns_of(t, r);
      const float scale = rope.scale;
      for (int64_t i = 0; i < rope.width / 2; i++) {
        const float angle = static_cast<float>(position) * rope.frequencies[i];
        turns[i] = std::cos(angle) * scale;
        turns[rope.width / 2 + i] = std::sin(angle) * scale;
      }
    }
  }

  // Makes the input of the first layer of embeddings and states.
  void join() const {
    const int64_t H = m.hidden;
    for (int64_t t = me; t < b.number; t += n) {
      const float* state = b.batch.states + b.tokens[t].column * H;
      float *x = &b.x[t * H], *both = &b.normed[t * 2 * H];
      m.joint.embedding_norm.apply(x, H, both);
      m.joint.state_norm.apply(state, H, both + H);
      round_row(both, 2 * H, t, b.number);
      std::copy_n(m.joint.adds_normed ? both + H : state, H, x);
    }
    wait();
    if (m.joint.matrix.data == nullptr) return;
    product(of(b.normed, 2 * H, b.number), m.joint.matrix, b.x.get(), H);
    wait();
  }

  void keep_features(int64_t l) const {
    for (int64_t f = 0; f < b.batch.num_features; f++) {
      if (b.batch.feature_layers[f] != l) continue;
      for (int64_t t = me; t < b.number; t += n) {
        float* to = b.batch.features + (b.tokens[t].column * b.batch.num_features + f) * m.hidden;
        (l > m.num_layers ? m.last_norm : Norm{}).apply(&b.x[t * m.hidden], m.hidden, to);
      }
    }
  }

  void norm_and_round(const Norm& norm) const {
    for (int64_t t = me; t < b.number; t += n) norm_and_round(norm, &b.x[t * m.hidden], t, b.number);
    wait();
  }

  // Norms and turns queries and keys; stores keys and values.
  void place(const Attention& a) const {
    const int64_t H = a.num_heads, G = a.num_groups, D = a.head_width, inputs_width = a.inputs_width();
    if (a.norms_whole_rows) {
      for (int64_t t = me; t < b.number; t += n) {
        float* q = &b.inputs[t * inputs_width];
        a.query_norm.apply(q, H * D, q);
        a.key_norm.apply(q + H * D, G * D, q + H * D);
      }
      wait();
    }
    for (int64_t i = me; i < b.number * (H + G); i += n) {
      const int64_t t = i / (H + G), h = i % (H + G);
      const Token& token = b.tokens[t];
      float* x = &b.inputs[t * inputs_width + h * D];
      if (!a.norms_whole_rows) (h < H ? a.query_norm : a.key_norm).apply(x, D, x);
      if (a.rope >= 0) turn(x, m.ropes[a.rope], b.turns_of(t, a.rope));
      if (h < H) continue;
      const int64_t at = ((token.row * b.batch.row_places + token.place) * G + h - H) * D;
      store_finite(x, D, static_cast<Number*>(b.batch.stores[a.store]) + at, token);
      store_finite(x + G * D, D, static_cast<Number*>(b.batch.stores[a.store + 1]) + at, token);
    }
  }

  static void turn(float* x, const Rope& rope, const float* cosines) {
    const int64_t half = rope.width / 2;
    const float* sines = cosines + half;
    const int64_t apart = rope.is_interleaved ? 1 : half, step = rope.is_interleaved ? 2 : 1;
    for (int64_t i = 0; i < half; i++) {
      float *first = x + i * step, *second = first + apart;
      const float a = *first, c = *second;
      *first = a * cosines[i] - c * sines[i];
      *second = c * cosines[i] + a * sines[i];
    }
  }

  void store_finite(const float* from, int64_t number, Number* to, const Token& token) const {
    for (int64_t i = 0; i < number; i++) {
      float value = from[i];
      if (b.batch.broken != nullptr && !std::isfinite(value)) {
        value = 0.0f;
        __atomic_store_n(b.batch.broken + token.column, true, __ATOMIC_RELAXED);
      }
      put(to + i, value);
    }
  }

  void attend(const Attention& a) const {
    const Tasks& tasks = *b.tasks_of(a);
    const int64_t number = tasks.list.size(), D = a.head_width, padded = (D + LANES - 1) / LANES * LANES;
    const int64_t shared = a.num_heads / a.num_groups, inputs_width = a.inputs_width();
    const Buffer queries = buffer(MOST_QUERIES * padded);
    std::fill_n(queries.get(), MOST_QUERIES * padded, 0.0f);
    for (int64_t i = me; i < number; i += n) {
      const Task& task = tasks.list[i];
      const int64_t row = b.tokens[task.first / shared].row, begin = task.part * PLACES;
      const int64_t at = ((row * b.batch.row_places + begin) * a.num_groups + task.group) * D;
      Part<Number> part{queries.get(), padded, D, static_cast<Number*>(b.batch.stores[a.store]) + at,
                        static_cast<Number*>(b.batch.stores[a.store + 1]) + at, a.num_groups * D, {}, {},
                        static_cast<float>(a.scale), static_cast<float>(a.cap),
                        &b.kept[i * MOST_QUERIES * b.kept_width(a)]};
      for (int64_t q = 0; q < task.number; q++) {
        const int64_t t = (task.first + q) / shared;
        const Seen places = seen(a.reach, b.tokens[t]);
        std::copy_n(&b.inputs[t * inputs_width + task.head(q, shared) * D], D, &queries[q * padded]);
        part.ends[q] = std::clamp<int64_t>(places.end - begin, 0, PLACES);
        part.begins[q] = std::clamp<int64_t>(places.begin - begin, 0, part.ends[q]);
      }
      switch (task.number) {
        case 1: part.template attend<1>(); break;
        case 2: part.template attend<2>(); break;
        case 3: part.template attend<3>(); break;
        case 4: part.template attend<4>(); break;
        case 5: part.template attend<5>(); break;
        case 6: part.template attend<6>(); break;
      }
      if (task.num_parts == 1) gather(a, task, i);
    }
    if (!tasks.has_parts) return;
    wait();
    for (int64_t i = me; i < number; i += n) {
      if (tasks.list[i].is_first && tasks.list[i].num_parts > 1) gather(a, tasks.list[i], i);
    }
  }
  void gather(const Attention& a, const Task& task, int64_t i) const {
    const int64_t shared = a.num_heads / a.num_groups, kept_width = b.kept_width(a);
    for (int64_t q = 0; q < task.number; q++) {
      const float* parts = &b.kept[(i * MOST_QUERIES + q) * kept_width];
      float* to = &b.attended[(task.first + q) / shared * a.q_width() + task.head(q, shared) * a.head_width];
      combine(parts, task.num_parts, MOST_QUERIES * kept_width, a.head_width, to);
    }
  }

  // Adds what a half of a layer has found.
  void add(const Norm& norm) const {
    const float scale = m.residual_scale;
    for (int64_t t = me; t < b.number; t += n) {
      float *x = &b.x[t * m.hidden], *y = &b.y[t * m.hidden];
      norm.apply(y, m.hidden, y);
      each(x, m.hidden, [=, this](int64_t i, Floats values) __attribute__((always_inline)) {
        const Floats more = load_to(y, i, m.hidden);
        return scale == 1.0f ? values + more : multiply_add(more, all_lanes(scale), values);
      });
    }
  }

  void activate(const Mlp& mlp, Share share, const float* factors) const {
    const int64_t number = share.end - share.begin, width = mlp.down.width, activation = mlp.activation;
    for (int64_t t = 0; t < b.number; t++) {
      const float* factor = factors == nullptr ? nullptr : factors + t * width + share.begin;
      each(&b.ups[t * width + share.begin], number, [=](int64_t i, Floats values) {
        values = activated(activation, values);
        return factor == nullptr ? values : values * load_to(factor, i, number);
      });
    }
  }

  void find_logits() const {
    wait();  // for all rows of x
    const int64_t number = b.wanted.size(), V = m.head.num_channels;
    for (int64_t w = me; w < number; w += n) norm_and_round(m.last_norm, &b.x[b.wanted[w] * m.hidden], w, number);
    wait();
    float* first = b.tokens[b.wanted[0]].logits;
    bool are_neighbours = true;
    for (int64_t w = 0; w < number; w++) are_neighbours &= b.tokens[b.wanted[w]].logits == first + w * V;
    float* logits = are_neighbours ? first : b.apart.get();
    product(of(b.normed, m.hidden, number), m.head, logits, V);
    const Share share = share_of(V, me, n);
    const float scale = m.logit_scale, cap = m.logit_cap;
    for (int64_t w = 0; w < number; w++) {
      float* row = logits + w * V + share.begin;
      if (scale != 1.0f || cap != 0.0f) {
        each(row, share.end - share.begin, [=](int64_t, Floats values) {
          values *= scale;
          return cap == 0.0f ? values : cap * tangent(values / cap);
        });
      }
      if (!are_neighbours) std::copy_n(row, share.end - share.begin, b.tokens[b.wanted[w]].logits + share.begin);
    }
  }

  const Block& b;
  const Model& m;
  const int64_t me, n;
};

template <typename Number>
void run(const Block& block, int64_t num_threads) {
  if (num_threads == 1) return Worker<Number>(block, 0, 1).run();
#pragma omp parallel num_threads(num_threads)
  Worker<Number>(block, omp_get_thread_num(), omp_get_num_threads()).run();
}

}  // namespace

extern "C" {

// Runs a forward. Returns false if an id or a place is not there, or if a sequence whose tokens see later ones has more
// than MOST_TOKENS.
bool outrider_forward(const Model* model, const Batch* batch, int64_t num_threads) {
  const int64_t B = batch->num_rows, T = batch->num_columns, V = model->head.num_channels;
  std::vector<Token> tokens;
  tokens.reserve(B * T);
  for (int64_t i = 0; i < B * T; i++) {
    const int64_t row = i / T, column = i % T - (T - batch->num_wanted), place = batch->places[i];
    float* logits = column < 0 ? nullptr : batch->logits + (row * batch->num_wanted + column) * V;
    if (place < 0) {
      if (logits != nullptr) std::fill_n(logits, V, 0.0f);
      const int64_t num_features = batch->num_features * model->hidden;
      if (num_features) std::fill_n(batch->features + i * num_features, num_features, 0.0f);
      continue;
    }
    if (batch->ids[i] < 0 || batch->ids[i] >= model->embedding.num_channels || place >= batch->row_places - 1) return false;
    const int64_t position = place + (batch->offsets == nullptr ? 0 : batch->offsets[row]);
    if (model->place_embedding != nullptr && (position < 0 || position >= model->num_places)) return false;
    tokens.push_back({batch->ids[i], row, place, position, i, place, place, logits});
    if (tokens.size() > 1 && tokens[tokens.size() - 2].row == row) tokens.back().first = tokens[tokens.size() - 2].first;
  }
  for (size_t t = tokens.size(); t-- > 1;) {
    if (tokens[t - 1].row == tokens[t].row) tokens[t - 1].last = tokens[t].last;
  }
  bool sees_blocks = false;
  for (int64_t l = 0; l < model->num_layers; l++) sees_blocks |= model->layers[l].attention.reach.sees_block != 0;
  if (batch->broken != nullptr) std::fill_n(batch->broken, B * T, false);
  for (size_t first = 0, end; first < tokens.size(); first = end) {
    end = std::min(first + MOST_TOKENS, tokens.size());
    if (sees_blocks) {  // whose keys are there together
      while (end < tokens.size() && end > first && tokens[end - 1].row == tokens[end].row) end--;
      if (end == first) return false;
    }
    const Block block(*model, *batch, &tokens[first], end - first);
    if (batch->bits == 32) run<float>(block, num_threads);
    if (batch->bits == 16) run<BFloat16>(block, num_threads);
  }
  return true;
}
}
