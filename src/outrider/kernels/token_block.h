// Tokens that go through the layers of a model together, and the memory that they need.
#pragma once

#include <memory>
#include <vector>

#include "attention.h"
#include "barrier.h"
#include "recurrence.h"

namespace {

constexpr int64_t MAX_TOKENS = 128;  // go through all layers at once: what a layer needs of them stays in the cache

constexpr int64_t MAX_PARTS = 2048;   // of tasks of attention that go together, unless a task has more

typedef std::unique_ptr<float[]> Buffer;

// Parts of a row that are rounded.
INLINE int64_t num_chunks(int64_t width) { return (width + CHUNK - 1) / CHUNK; }

// A token, and where its results go.
struct Token {
  int64_t id, row, place, position, column;  // row * num_columns + column
  int64_t first, last;                       // places of its block
  float* logits;                             // or null
};

// Queries of a sequence and of the heads that share keys, number first .. first + number - 1 if those of a token follow
// one another; and the parts of their sequence, from `part` on. Their results are kept from place `kept` on. Tasks go
// together up to the next task whose `kept` is 0.
struct Task {
  int64_t kv_head, first, number, part, num_parts, kept;

  // Head of a query, if `shared` heads share keys.
  int64_t head(int64_t query, int64_t shared) const { return kv_head * shared + (first + query) % shared; }
};

// An expert of a token.
struct Choice {
  int64_t expert;
  float weight;
};

// The first place that a token sees, and the one after the last. Both ascend along a sequence.
struct Visible {
  int64_t begin, end;
};
Visible visible(const AttentionMask& mask, const Token& token) {
  const int64_t window = mask.window;
  int64_t begin = window ? token.place + 1 - window : 0, end = mask.is_bidirectional ? token.last + 1 : token.place + 1;
  if (window) end = std::min(end, token.place + window);
  if (mask.before_anchor >= 0) begin = std::max(begin, token.first - mask.before_anchor);
  return {std::max<int64_t>(0, begin), end};
}

// Tasks of attention with one mask and numbers of heads.
struct Tasks {
  AttentionMask mask;
  int64_t num_heads, num_kv_heads;
  bool has_parts;
  int64_t num_kept;
  std::vector<Task> list;
};

// Tokens that go through the layers together, and what they need.
struct TokenBlock {
  TokenBlock(const Model& m, const Batch& batch, const Token* tokens, int64_t number, int64_t num_threads)
      : m(m), batch(batch), tokens(tokens), number(number), normed_width(m.hidden * (m.draft_input.is_there ? 2 : 1)) {
    int64_t widest = normed_width, inputs_width = 0, q_width = 0, ups_width = 0, mixed_width = 0;
    int64_t kernel_size = 0, num_experts = 0, num_active = 0, num_rounded = 0, row_width = m.hidden;
    int64_t num_kept = 0, scratch_size = m.num_layers * m.per_layer.width * sizeof(float);
    bool has_states = false;
    for (int64_t r = 0; r < m.num_ropes; r++) rope_width = std::max(rope_width, m.ropes[r].width);
    for (int64_t l = 0; l < m.num_layers; l++) {
      const Layer& layer = m.layers[l];
      const Attention& attention = layer.attention;
      const Experts& experts = layer.experts;
      const int64_t expert_width = experts.down.first.width * experts.num_active;
      ups_width = std::max({ups_width, layer.mlp.down.width * layer.mlp.num_ups, expert_width * experts.num_ups});
      ups_width = std::max(ups_width, layer.per_layer_mlp.down.width);
      widest = std::max({widest, layer.per_layer_mlp.down.width, layer.mlp.down.width, attention.q_width()});
      num_experts = std::max(num_experts, experts.num_experts), num_active = std::max(num_active, experts.num_active);
      row_width = std::max(row_width, experts.row_width());
      scratch_size = std::max(scratch_size, experts.scratch_bytes(number));
      num_rounded = std::max(num_rounded, experts.num_active * num_chunks(std::max(experts.down.first.width, row_width)));
      if (layer.recurrence.kind) {
        const Recurrence& r = layer.recurrence;
        inputs_width = std::max(inputs_width, r.inputs_width()), q_width = std::max(q_width, r.out.width);
        mixed_width = std::max(mixed_width, r.kept_width()), widest = std::max(widest, r.out.width);
        kernel_size = std::max(kernel_size, r.kernel_size), has_states = has_states || r.num_heads;
        scratch_size = std::max<int64_t>(scratch_size, r.key_width * COLS * sizeof(Floats));
      }
      if (attention.num_heads == 0) continue;
      inputs_width = std::max(inputs_width, attention.inputs_width()), q_width = std::max(q_width, attention.q_width());
      if (tasks_of(attention) == nullptr) tasks.push_back(new_tasks(attention));
      num_kept = std::max(num_kept, tasks_of(attention)->num_kept * kept_width(attention));
      scratch_size = std::max<int64_t>(scratch_size, MAX_QUERIES * padded(attention.head_dim) * sizeof(float));
    }
    scratch_bytes = (scratch_size + 127) / 128 * 128;  // so that threads share few lines of the processor's cache
    x = buffer(number * m.hidden), y = buffer(number * m.hidden), normed = buffer(number * normed_width);
    inputs = buffer(number * inputs_width), attended = buffer(number * q_width), ups = buffer(number * ups_width);
    cos_sin = buffer(number * m.num_ropes * rope_width);
    kept = buffer(num_kept * MAX_QUERIES), output_gates = buffer(number);
    if (kernel_size) find_spans(kernel_size, has_states);
    mixed = buffer(span_of.size() * mixed_width);
    per_layer_inputs = buffer(number * m.num_layers * m.per_layer.width), scores = buffer(number * num_experts);
    gathered = buffer(number * num_active * row_width), found = buffer(number * num_active * row_width);
    choices = make<Choice>(number * num_active), scratch = make<std::byte>(num_threads * scratch_bytes);
    if (m.num_digits) chunks = make<RoundedChunk>(number * std::max(num_rounded, num_chunks(widest)));
    for (int64_t t = 0; t < number; t++) {
      if (tokens[t].logits != nullptr) wanted.push_back(t);
    }
    logits = buffer(wanted.empty() || batch.num_rows == 1 ? 0 : wanted.size() * m.lm_head.num_channels);
  }

  const Tasks* tasks_of(const Attention& a) const {
    for (const Tasks& one : tasks) {
      if (one.mask == a.mask && one.num_heads == a.num_heads && one.num_kv_heads == a.num_kv_heads) return &one;
    }
    return nullptr;
  }
  static int64_t kept_width(const Attention& attention) { return attention.head_dim + 2; }
  static int64_t padded(int64_t width) { return (width + LANES - 1) / LANES * LANES; }

  // Cosines and sines of a rope for a token: [width / 2] each.
  float* cos_sin_of(int64_t t, int64_t rope) const { return &cos_sin[(t * m.num_ropes + rope) * rope_width]; }

  const Model& m;
  const Batch& batch;
  const Token* const tokens;
  const int64_t number, normed_width;
  int64_t rope_width = 0, scratch_bytes = 0;
  int64_t num_bytes = 0;  // of memory
  std::vector<int64_t> wanted;
  std::vector<Tasks> tasks;
  std::vector<Span> spans;       // with recurrences
  std::vector<int64_t> span_of;  // of each row of `mixed`
  Buffer x, y, normed, inputs, attended, ups, cos_sin, kept, logits, mixed, per_layer_inputs, scores, output_gates;
  Buffer gathered, found;
  std::unique_ptr<std::byte[]> scratch;  // of each thread
  std::unique_ptr<Choice[]> choices;
  std::unique_ptr<RoundedChunk[]> chunks;
  mutable Barrier barrier;

 private:
  template <typename Item>
  std::unique_ptr<Item[]> make(int64_t number) {
    num_bytes += number * sizeof(Item);
    return std::unique_ptr<Item[]>(new Item[number]);
  }
  Buffer buffer(int64_t number) { return make<float>(number); }

  void find_spans(int64_t kernel_size, bool has_states) {
    for (int64_t begin = 0, end = 0; begin < number; begin = end) {
      const Token& token = tokens[begin];
      while (end < number && tokens[end].row == token.row) end++;
      const int64_t anchor = token.place ? batch.anchors[token.row] : 0, mixed = span_of.size();
      Span span{token.row, begin, end - begin, token.place, token.first, anchor, 0, mixed};
      span.next = next_anchor(span, kernel_size, has_states, batch.is_final, batch.is_ahead);
      if (has_states) span_of.insert(span_of.end(), span.end() - anchor, spans.size());
      spans.push_back(span);
    }
  }
  Tasks new_tasks(const Attention& attention) const {
    const AttentionMask& mask = attention.mask;
    Tasks found{mask, attention.num_heads, attention.num_kv_heads, false, 0, {}};
    int64_t kept = 0;
    const int64_t shared = attention.num_heads / attention.num_kv_heads;  // heads with the same keys
    for (int64_t begin = 0, end = 0; begin < number; begin = end) {
      while (end < number && tokens[end].row == tokens[begin].row) end++;
      const int64_t all = (end - begin) * shared, num_tiles = (all + MAX_QUERIES - 1) / MAX_QUERIES;
      for (int64_t g = 0; g < attention.num_kv_heads; g++) {
        for (int64_t tile = 0; tile < num_tiles; tile++) {
          Task task{g, begin * shared + all * tile / num_tiles, all * (tile + 1) / num_tiles - all * tile / num_tiles};
          const int64_t last = task.first + task.number - 1;
          task.part = visible(mask, tokens[task.first / shared]).begin / PLACES;
          task.num_parts = (visible(mask, tokens[last / shared]).end - 1) / PLACES + 1 - task.part;
          task.kept = kept + task.num_parts > MAX_PARTS ? 0 : kept;
          kept = task.kept + task.num_parts;
          found.num_kept = std::max(found.num_kept, kept);
          found.list.push_back(task);
          found.has_parts = found.has_parts || task.num_parts > 1;
        }
      }
    }
    return found;
  }
};

}  // namespace
