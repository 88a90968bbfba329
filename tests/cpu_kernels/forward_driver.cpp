// The forward (kernels/forward.cpp) of a small random model: with weights of float32 against a forward in double; and
// with any weights, tokens together and one by one, by one thread and by three, give equal bits.

#include "../../src/outrider/kernels/model.h"
#include "checks.h"

extern "C" {
int32_t outrider_forward(const void* model, const void* batch, int64_t num_threads);
bool outrider_copy_rows(const RowCopy* copies, int64_t number, int64_t num_threads);
}

namespace {

typedef std::vector<double> Doubles;

constexpr int64_t NUM_LAYERS = 2, NUM_ROWS = 2, V = 53;
constexpr int64_t OFFSETS[NUM_ROWS] = {0, 5};  // from places to positions

// A model like Llama; its second layer has a window and norms of queries and keys. Its matrices are of float32, of Q4_0
// with rows of one digit, or of Q6_K with rows of two.
class Toy {
 public:
  Toy(int64_t type, int64_t window) : type_(type) {
    // Rows of whole blocks; or of no whole vectors.
    const int64_t H = type == 14 ? 256 : type == 2 ? 64 : 44, D = type == 14 ? 32 : type == 2 ? 16 : 10;
    const int64_t heads = type == 14 ? 8 : 4, groups = 2, wide = type == 14 ? 256 : type == 2 ? 96 : 70;
    for (Layer& layer : layers_) {
      const bool is_second = &layer == &layers_[1];
      const Norm none{}, of_heads = is_second ? norm(D) : none, of_keys = is_second ? norm(D) : none;
      Attention& attention = layer.attention;
      layer = {norm(H), none, norm(H), none, none};
      layer.scale = 1;
      attention = {heads, groups, D, 0, is_second ? 2 : 0};
      attention.mask = {is_second ? window : 0, -1, 0}, attention.scale = 1 / std::sqrt(double(D));
      attention.query_norm = of_heads, attention.key_norm = of_keys, attention.num_inputs = 3;
      attention.inputs[0] = matrix(heads * D, H);
      for (int i : {1, 2}) attention.inputs[i] = matrix(groups * D, H);
      attention.out = matrix(H, heads * D), layer.mlp = {2, {}}, layer.mlp.down = matrix(H, wide);
      for (Matrix& up : layer.mlp.ups) up = matrix(wide, H);
    }
    std::vector<float> frequencies(D / 2);
    for (int64_t i = 0; i < D / 2; i++) frequencies[i] = std::pow(10000.0, -2.0 * i / D);
    rope_ = {D, 0, 1.0, keep(frequencies)};
    const int64_t num_digits = type == 14 ? 2 : type == 2 ? 1 : 0;
    model = {NUM_LAYERS, H, 1, num_digits, 1, 1, 1, 0, matrix(V, H), matrix(V, H), nullptr, 0, norm(H), {}, {}, &rope_, layers_};
  }
  Toy(const Toy&) = delete;

  Model model;

 private:
  const float* keep(std::vector<float> made) {
    floats_.push_back(std::move(made));
    return floats_.back().data();
  }
  Norm norm(int64_t number) {
    std::vector<float> made = numbers(number);
    for (float& one : made) one = 1 + one / 8;
    return {1, 1e-5, keep(made), nullptr};
  }
  Matrix matrix(int64_t num_channels, int64_t width) {
    const void* data;
    if (type_ == 0) {
      std::vector<float> made = numbers(num_channels * width);
      for (float& one : made) one /= std::sqrt(float(width));
      data = keep(made);
    } else {
      const int64_t size = type_ == 14 ? 210 : 18, exponent = type_ == 14 ? 209 : 1;
      std::vector<uint8_t> blocks(num_channels * width / (type_ == 14 ? 256 : 32) * size);
      for (uint8_t& one : blocks) one = static_cast<uint8_t>(generator());
      for (size_t b = 0; b < blocks.size(); b += size) blocks[b + exponent] = type_ == 14 ? 4 : 36;  // 2^-14, 2^-6
      std::vector<uint8_t> interleaved(blocks.size());
      const int64_t row_bytes = static_cast<int64_t>(blocks.size()) / num_channels;
      const RowCopy copy{blocks.data(), interleaved.data(), nullptr, type_, num_channels, num_channels, row_bytes};
      outrider_copy_rows(&copy, 1, 1);
      blocks_.push_back(std::move(interleaved));
      data = blocks_.back().data();
    }
    return {data, type_, num_channels, width, nullptr, nullptr};
  }

  const int64_t type_;
  std::vector<std::vector<float>> floats_;
  std::vector<std::vector<uint8_t>> blocks_;
  Layer layers_[NUM_LAYERS];
  Rope rope_;
};

// Tokens of two rows, of which the second is shorter: before it is padding.
struct Tokens {
  explicit Tokens(int64_t length) : length(length) {
    for (int64_t row = 0; row < NUM_ROWS; row++) {
      for (int64_t t = 0; t < length; t++) {
        ids.push_back(generator() % V);
        places.push_back(t - num_padding(row));
      }
    }
  }
  int64_t num_padding(int64_t row) const { return row * (length / 3); }

  int64_t length;
  std::vector<int64_t> ids, places;  // [B, T]
};

struct Results {
  std::vector<float> logits;               // [B, T, V]
  std::vector<std::vector<char>> stores;  // keys and values of each layer in turn [B, T + 1, groups, head_dim]
};

// Results of forwards over so many columns each.
Results run(const Model& m, const Tokens& tokens, int64_t bits, int64_t step, int64_t num_threads) {
  const int64_t T = tokens.length, row_places = T + 1;
  Results found{std::vector<float>(NUM_ROWS * T * V, NAN), {}};
  std::vector<void*> stores;
  found.stores.resize(2 * NUM_LAYERS);
  for (std::vector<char>& store : found.stores) {
    store.resize(NUM_ROWS * row_places * m.layers[0].attention.num_kv_heads * m.layers[0].attention.head_dim * bits / 8);
    stores.push_back(store.data());
  }
  for (int64_t first = 0; first < T; first += step) {
    std::vector<int64_t> ids, places;
    for (int64_t row = 0; row < NUM_ROWS; row++) {
      for (int64_t t = first; t < first + step; t++) {
        ids.push_back(tokens.ids[row * T + t]);
        places.push_back(tokens.places[row * T + t]);
      }
    }
    std::vector<float> logits(NUM_ROWS * step * V, NAN);
    const Batch batch{NUM_ROWS, step, ids.data(), places.data(), nullptr, OFFSETS, stores.data(), nullptr, 0, 0, bits, row_places, step,
                      logits.data(), 0, nullptr, nullptr, nullptr};
    compare(outrider_forward(&m, &batch, num_threads), 1.0, 0.0, "ids and places that are there");
    for (int64_t row = 0; row < NUM_ROWS; row++) {
      std::copy_n(&logits[row * step * V], step * V, &found.logits[(row * T + first) * V]);
    }
  }
  return found;
}

// A forward of one row in double.
class Twin {
 public:
  Twin(const Model& m, const Tokens& tokens, int64_t bits, const Results& results, int64_t row)
      : m(m), tokens(tokens), bits(bits), results(results), row(row) {}

  void check() const {
    const int64_t first = tokens.num_padding(row), number = tokens.length - first;
    std::vector<Doubles> x;
    for (int64_t t = 0; t < number; t++) {
      const float* from = static_cast<const float*>(m.embedding.data);
      from += tokens.ids[row * tokens.length + first + t] * m.hidden;
      x.emplace_back(from, from + m.hidden);
    }
    for (int64_t l = 0; l < NUM_LAYERS; l++) {
      const Layer& layer = m.layers[l];
      const Attention& attention = layer.attention;
      for (int64_t t = 0; t < number; t++) {
        const Doubles inputs = normed(layer.mixer_norm, x[t]);
        check_stored(2 * l, t, heads(times(attention.inputs[1], inputs), attention.key_norm, t));
        check_stored(2 * l + 1, t, times(attention.inputs[2], inputs));
        add(x[t], times(attention.out, attended(l, t, heads(times(attention.inputs[0], inputs), attention.query_norm, t))));
        const Doubles normal = normed(layer.mlp_norm, x[t]), factors = times(layer.mlp.ups[1], normal);
        Doubles ups = times(layer.mlp.ups[0], normal);
        for (size_t i = 0; i < ups.size(); i++) ups[i] *= factors[i] / (1 + std::exp(-ups[i]));
        add(x[t], times(layer.mlp.down, ups));
      }
    }
    for (int64_t t = 0; t < first; t++) {
      for (int64_t v = 0; v < V; v++) compare(logits(t)[v], 0.0, 0.0, "a logit of padding");
    }
    for (int64_t t = 0; t < number; t++) {
      compare_all(logits(first + t), times(m.lm_head, normed(m.final_norm, x[t])), 0.0, "a logit");
    }
  }

 private:
  static Doubles times(const Matrix& matrix, const Doubles& x) {
    const float* weights = static_cast<const float*>(matrix.data);
    Doubles y(matrix.num_channels);
    for (size_t o = 0; o < y.size(); o++) {
      for (int64_t i = 0; i < matrix.width; i++) y[o] += weights[o * matrix.width + i] * x[i];
    }
    return y;
  }
  static void add(Doubles& x, const Doubles& more) {
    for (size_t i = 0; i < x.size(); i++) x[i] += more[i];
  }
  static Doubles normed(const Norm& norm, Doubles x) {
    double squares = 0;
    for (double one : x) squares += one * one;
    for (size_t i = 0; norm.kind && i < x.size(); i++) {
      x[i] *= norm.weight[i] / std::sqrt(squares / x.size() + norm.epsilon);
    }
    return x;
  }

  // Queries or keys, normed and turned.
  Doubles heads(const Doubles& all, const Norm& norm, int64_t t) const {
    const int64_t D = m.layers[0].attention.head_dim, half = D / 2;
    Doubles made;
    for (auto begin = all.begin(); begin != all.end(); begin += D) {
      const Doubles x = normed(norm, Doubles(begin, begin + D));
      Doubles turned(D);
      for (int64_t i = 0; i < half; i++) {
        const float angle = float(t + OFFSETS[row]) * m.ropes[0].frequencies[i];  // in float32, as models define it
        turned[i] = x[i] * std::cos(double(angle)) - x[half + i] * std::sin(double(angle));
        turned[half + i] = x[half + i] * std::cos(double(angle)) + x[i] * std::sin(double(angle));
      }
      made.insert(made.end(), turned.begin(), turned.end());
    }
    return made;
  }

  Doubles attended(int64_t l, int64_t t, const Doubles& queries) const {
    const Attention& a = m.layers[l].attention;
    const int64_t D = a.head_dim, shared = a.num_heads / a.num_kv_heads, window = a.mask.window;
    Doubles made(a.num_heads * D);
    for (int64_t h = 0; h < a.num_heads; h++) {
      double total = 0;
      for (int64_t j = window ? std::max<int64_t>(0, t + 1 - window) : 0; j <= t; j++) {
        double score = 0;
        for (int64_t i = 0; i < D; i++) score += queries[h * D + i] * stored(2 * l, j, h / shared * D + i);
        const double weight = std::exp(a.scale * score);
        total += weight;
        for (int64_t i = 0; i < D; i++) made[h * D + i] += weight * stored(2 * l + 1, j, h / shared * D + i);
      }
      for (int64_t i = 0; i < D; i++) made[h * D + i] /= total;
    }
    return made;
  }

  // What the forward has stored is what the twin reads, too: else a key rounded to the other side would spread.
  void check_stored(int64_t store, int64_t t, const Doubles& want) const {
    std::vector<float> got;
    for (size_t i = 0; i < want.size(); i++) got.push_back(stored(store, t, i));
    compare_all(got.data(), want, bits == 16 ? std::ldexp(1.0, -8) : 0.0, "a key or value");
  }
  float stored(int64_t store, int64_t place, int64_t i) const {
    const int64_t at = (row * (tokens.length + 1) + place) * m.layers[0].attention.num_kv_heads * m.layers[0].attention.head_dim + i;
    uint32_t word = 0;
    std::memcpy(reinterpret_cast<char*>(&word) + 4 - bits / 8, &results.stores[store][at * bits / 8], bits / 8);
    float number;
    std::memcpy(&number, &word, sizeof number);
    return number;
  }

  const float* logits(int64_t column) const { return &results.logits[(row * tokens.length + column) * V]; }

  static void compare_all(const float* got, const Doubles& want, double rounding, const char* what) {
    double most = 0;
    for (double one : want) most = std::fmax(most, std::fabs(one));
    for (size_t i = 0; i < want.size(); i++) compare(got[i], want[i], rounding * std::fabs(want[i]) + 1e-5 * most, what);
  }

  const Model& m;
  const Tokens& tokens;
  const int64_t bits;
  const Results& results;
  const int64_t row;
};

}  // namespace

void check_forward(int64_t type, int64_t bits, int64_t length) {
  const Toy toy(type, length / 2);
  const Tokens tokens(length);
  const Results together = run(toy.model, tokens, bits, length, 3);
  for (auto [step, num_threads] : {std::pair<int64_t, int64_t>{1, 1}, {1, 3}, {length, 1}}) {
    const Results again = run(toy.model, tokens, bits, step, num_threads);
    for (size_t i = 0; i < again.logits.size(); i++) {
      compare(again.logits[i], together.logits[i], 0.0, "a logit with tokens one by one, or by another number of threads");
    }
    compare(again.stores == together.stores, 1.0, 0.0, "keys and values that are the same");
  }
  for (int64_t row = 0; type == 0 && row < NUM_ROWS; row++) Twin(toy.model, tokens, bits, together, row).check();
}
