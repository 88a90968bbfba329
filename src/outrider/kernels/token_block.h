// Tokens that go through the layers of a model together, and the memory that they need.
#pragma once

#include <memory>
#include <vector>

#include "attention.h"
#include "barrier.h"
#include "recurrence.h"

namespace {

constexpr int64_t MOST_TOKENS = 128;  // go through all layers at once: what a layer needs of them stays in the cache

constexpr int64_t MOST_PARTS = 2048;   // of tasks of attention that go together, unless a task has more

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
  int64_t group, first, number, part, num_parts, kept;

  // Head of a query, if `shared` heads share keys.
  int64_t head(int64_t query, int64_t shared) const { return group * shared + (first + query) % shared; }
};

// An expert of a token.
struct Choice {
  int64_t expert;
  float weight;
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

// Tasks of attention with one reach and numbers of heads.
struct Tasks {
  Reach reach;
  int64_t num_heads, num_groups;
  bool has_parts;
  int64_t num_kept;
  std::vector<Task> list;
};

// Tokens that go through the layers together, and what they need.
struct Block {
  Block(const Model& m, const Batch& batch, const Token* tokens, int64_t number, int64_t num_threads)
      : m(m), batch(batch), tokens(tokens), number(number), normed_width(m.joint.is_there ? 2 * m.hidden : m.hidden) {
    int64_t widest = normed_width, inputs_width = 0, q_width = 0, ups_width = 0, mixed_width = 0;
    int64_t num_taps = 0, num_experts = 0, num_chosen = 0, num_rounded = 0, row_width = m.hidden;
    int64_t num_kept = 0, num_own = m.num_layers * m.sides.width * sizeof(float);
    bool has_states = false;
    for (int64_t r = 0; r < m.num_ropes; r++) turns_width = std::max(turns_width, m.ropes[r].width);
    for (int64_t l = 0; l < m.num_layers; l++) {
      const Layer& layer = m.layers[l];
      const Attention& attention = layer.attention;
      const Experts& experts = layer.experts;
      const int64_t expert_width = experts.down.first.width * experts.num_chosen;
      ups_width = std::max({ups_width, layer.mlp.down.width * layer.mlp.num_ups, expert_width * experts.num_ups});
      ups_width = std::max(ups_width, layer.side.down.width);
      widest = std::max({widest, layer.side.down.width, layer.mlp.down.width, attention.q_width()});
      num_experts = std::max(num_experts, experts.number), num_chosen = std::max(num_chosen, experts.num_chosen);
      row_width = std::max(row_width, experts.row_width());
      num_own = std::max(num_own, experts.own_bytes(number));
      num_rounded = std::max(num_rounded, experts.num_chosen * num_chunks(std::max(experts.down.first.width, row_width)));
      if (layer.recurrence.kind) {
        const Recurrence& r = layer.recurrence;
        inputs_width = std::max(inputs_width, r.inputs_width()), q_width = std::max(q_width, r.out.width);
        mixed_width = std::max(mixed_width, r.kept_width()), widest = std::max(widest, r.out.width);
        num_taps = std::max(num_taps, r.num_taps), has_states = has_states || r.num_heads;
        num_own = std::max<int64_t>(num_own, r.key_width * COLS * sizeof(Floats));
      }
      if (attention.num_heads == 0) continue;
      inputs_width = std::max(inputs_width, attention.inputs_width()), q_width = std::max(q_width, attention.q_width());
      if (tasks_of(attention) == nullptr) tasks.push_back(new_tasks(attention));
      num_kept = std::max(num_kept, tasks_of(attention)->num_kept * kept_width(attention));
      num_own = std::max<int64_t>(num_own, MOST_QUERIES * padded(attention.head_width) * sizeof(float));
    }
    own_bytes = (num_own + 127) / 128 * 128;  // so that threads share few lines of the processor's cache
    x = buffer(number * m.hidden), y = buffer(number * m.hidden), normed = buffer(number * normed_width);
    inputs = buffer(number * inputs_width), attended = buffer(number * q_width), ups = buffer(number * ups_width);
    turns = buffer(number * m.num_ropes * turns_width);
    kept = buffer(num_kept * MOST_QUERIES);
    if (num_taps) find_spans(num_taps, has_states);
    mixed = buffer(span_of.size() * mixed_width);
    sides = buffer(number * m.num_layers * m.sides.width), scores = buffer(number * num_experts), scales = buffer(number);
    gathered = buffer(number * num_chosen * row_width), found = buffer(number * num_chosen * row_width);
    choices = make<Choice>(number * num_chosen), own = make<std::byte>(num_threads * own_bytes);
    if (m.num_digits) chunks = make<RoundedChunk>(number * std::max(num_rounded, num_chunks(widest)));
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
  static int64_t padded(int64_t width) { return (width + LANES - 1) / LANES * LANES; }

  // Cosines and sines of a rope for a token: [width / 2] each.
  float* turns_of(int64_t t, int64_t rope) const { return &turns[(t * m.num_ropes + rope) * turns_width]; }

  const Model& m;
  const Batch& batch;
  const Token* const tokens;
  const int64_t number, normed_width;
  int64_t turns_width = 0, own_bytes = 0;
  int64_t num_bytes = 0;  // of memory
  std::vector<int64_t> wanted;
  std::vector<Tasks> tasks;
  std::vector<Span> spans;       // with recurrences
  std::vector<int64_t> span_of;  // of each row of `mixed`
  Buffer x, y, normed, inputs, attended, ups, turns, kept, apart, mixed, sides, scores, scales, gathered, found;
  std::unique_ptr<std::byte[]> own;  // of each thread
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

  void find_spans(int64_t num_taps, bool has_states) {
    for (int64_t begin = 0, end = 0; begin < number; begin = end) {
      const Token& token = tokens[begin];
      while (end < number && tokens[end].row == token.row) end++;
      const int64_t anchor = token.place ? batch.anchors[token.row] : 0, mixed = span_of.size();
      Span span{token.row, begin, end - begin, token.place, token.first, anchor, 0, mixed};
      span.next = next_anchor(span, num_taps, has_states, batch.is_final, batch.is_ahead);
      if (has_states) span_of.insert(span_of.end(), span.end() - anchor, spans.size());
      spans.push_back(span);
    }
  }
  Tasks new_tasks(const Attention& attention) const {
    const Reach& reach = attention.reach;
    Tasks found{reach, attention.num_heads, attention.num_groups, false, 0, {}};
    int64_t kept = 0;
    const int64_t shared = attention.num_heads / attention.num_groups;  // heads with the same keys
    for (int64_t begin = 0, end = 0; begin < number; begin = end) {
      while (end < number && tokens[end].row == tokens[begin].row) end++;
      const int64_t all = (end - begin) * shared, num_tiles = (all + MOST_QUERIES - 1) / MOST_QUERIES;
      for (int64_t g = 0; g < attention.num_groups; g++) {
        for (int64_t tile = 0; tile < num_tiles; tile++) {
          Task task{g, begin * shared + all * tile / num_tiles, all * (tile + 1) / num_tiles - all * tile / num_tiles};
          const int64_t last = task.first + task.number - 1;
          task.part = seen(reach, tokens[task.first / shared]).begin / PLACES;
          task.num_parts = (seen(reach, tokens[last / shared]).end - 1) / PLACES + 1 - task.part;
          task.kept = kept + task.num_parts > MOST_PARTS ? 0 : kept;
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
