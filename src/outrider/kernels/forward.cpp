// A forward of a causal language model in one call: from token ids to logits, with its keys and values in a slot cache.
//
// The model is data (model.h; native/model_structure.py builds it). The tokens are those of any number of sequences; all
// threads go through the layers together (worker.h).
#include "attention_layer.h"
#include "experts.h"
#include "mlp.h"
#include "recurrence_layer.h"
#include "status.h"

extern "C" {  // Apple's compiler has no omp.h
int omp_get_thread_num();
int omp_get_num_threads();
}

namespace {

// Number: of the cache.
template <typename Number>
struct Forward : Worker {
  void run() const {
    for (int64_t t = thread; t < b.number; t += num_threads) embed(t);
    if (m.draft_input.is_there) join();
    if (m.per_layer.width) embed_per_layer();
    for (int64_t l = 0; l < m.num_layers; l++) {
      const Layer& layer = m.layers[l];
      keep_features(l);
      if (layer.attention.num_heads) {
        if (layer.attention.inputs[0].width == m.hidden) norm_and_round(layer.mixer_norm);  // else rows are joined
        AttentionLayer<Number>{*this, layer.attention}.run();
        add(layer.mixer_post_norm);
      }
      if (layer.recurrence.kind) {
        if (layer.attention.num_heads) {  // beside the attention
          round(b.normed, m.hidden);
        } else {
          norm_and_round(layer.mixer_norm);
        }
        RecurrenceLayer{*this, layer.recurrence}.run();
        add(layer.mixer_post_norm);
      }
      if (layer.mlp.num_ups || layer.experts.num_experts) {
        if (layer.is_parallel) {
          round(b.normed, m.hidden);
        } else {
          norm_and_round(layer.mlp_norm);
        }
        if (layer.mlp.num_ups) MlpLayer{*this, layer.mlp}.run();
        if (layer.experts.num_experts) ExpertsLayer{*this, layer.experts}.run(layer.mlp.num_ups != 0);
        add(layer.mlp_post_norm, layer.per_layer_mlp.num_ups ? 1.0f : layer.scale);
      }
      if (layer.per_layer_mlp.num_ups) {
        norm_and_round(Norm{});
        const int64_t width = m.per_layer.width;
        MlpLayer{*this, layer.per_layer_mlp, &b.per_layer_inputs[l * width], m.num_layers * width}.run();
        add(layer.per_layer_post_norm, layer.scale);
      }
    }
    keep_features(m.num_layers);
    keep_features(m.num_layers + 1);
    if (!b.wanted.empty()) find_logits();
  }

  void embed(int64_t t) const {
    float* x = &b.x[t * m.hidden];
    dequantize_row(m.embedding, b.tokens[t].id, x);
    const float scale = m.embedding_scale;
    const int64_t position = b.tokens[t].position;
    if (scale != 1.0f) for (int64_t i = 0; i < m.hidden; i++) x[i] *= scale;
    if (m.position_embedding != nullptr) {
      for (int64_t i = 0; i < m.hidden; i++) x[i] += m.position_embedding[position * m.hidden + i];
    }
    for (int64_t r = 0; r < m.num_ropes; r++) {
      const Rope& rope = m.ropes[r];
      float* cos_sin = b.cos_sin_of(t, r);
      const float scale = rope.scale;
      for (int64_t i = 0; i < rope.width / 2; i++) {
        const float angle = static_cast<float>(position) * rope.frequencies[i];
        const CosSin rotation(angle);
        cos_sin[i] = static_cast<float>(rotation.cosine) * scale;
        cos_sin[rope.width / 2 + i] = static_cast<float>(rotation.sine) * scale;
      }
    }
  }

  // Makes the input of the first layer of embeddings and states.
  void join() const {
    const int64_t H = m.hidden;
    for (int64_t t = thread; t < b.number; t += num_threads) {
      const float* state = b.batch.states + b.tokens[t].column * H;
      float *x = &b.x[t * H], *both = &b.normed[t * 2 * H];
      m.draft_input.embedding_norm.apply(x, H, both);
      m.draft_input.state_norm.apply(state, H, both + H);
      round_row(both, 2 * H, t, b.number);
      std::copy_n(m.draft_input.adds_normed ? both + H : state, H, x);
    }
    wait();
    if (m.draft_input.projection.data == nullptr) return;
    product(rows_of(b.normed, 2 * H, b.number), m.draft_input.projection, b.x.get(), H);
    wait();
  }

  void embed_per_layer() const {
    const PerLayerEmbeddings& table = m.per_layer;
    const int64_t width = m.num_layers * table.width;
    const float scale = table.scale, embedding_scale = table.embedding_scale, projection_scale = table.projection_scale;
    norm_and_round(Norm{});
    product(rows_of(b.normed, m.hidden, b.number), table.projection, b.per_layer_inputs.get(), width);
    wait();
    float* embedded = scratch<float>();
    for (int64_t t = thread; t < b.number; t += num_threads) {
      float* row = &b.per_layer_inputs[t * width];
      dequantize_row(table.embedding, b.tokens[t].id, embedded);
      for (int64_t i = 0; i < width; i++) row[i] *= projection_scale;
      for (int64_t l = 0; l < m.num_layers; l++) {
        table.norm.apply(row + l * table.width, table.width, row + l * table.width);
      }
      for (int64_t i = 0; i < width; i++) row[i] = (row[i] + embedded[i] * embedding_scale) * scale;
    }
    wait();
  }

  void keep_features(int64_t l) const {
    for (int64_t f = 0; f < b.batch.num_features; f++) {
      if (b.batch.feature_layers[f] != l) continue;
      for (int64_t t = thread; t < b.number; t += num_threads) {
        float* to = b.batch.features + (b.tokens[t].column * b.batch.num_features + f) * m.hidden;
        (l > m.num_layers ? m.final_norm : Norm{}).apply(&b.x[t * m.hidden], m.hidden, to);
      }
    }
  }

  void find_logits() const {
    wait();  // for all rows of x
    const int64_t number = b.wanted.size(), V = m.lm_head.num_channels;
    for (int64_t w = thread; w < number; w += num_threads)
      norm_and_round(m.final_norm, &b.x[b.wanted[w] * m.hidden], w, number);
    wait();
    float* first = b.tokens[b.wanted[0]].logits;
    bool are_contiguous = true;
    for (int64_t w = 0; w < number; w++) are_contiguous &= b.tokens[b.wanted[w]].logits == first + w * V;
    float* logits = are_contiguous ? first : b.logits.get();
    product(rows_of(b.normed, m.hidden, number), m.lm_head, logits, V);
    const Share share = share_of(V, thread, num_threads);
    const float scale = m.logit_scale, softcap = m.logit_softcap;
    for (int64_t w = 0; w < number; w++) {
      float* row = logits + w * V + share.begin;
      if (scale != 1.0f || softcap != 0.0f) {
        each(row, share.end - share.begin, [=](int64_t, Floats values) {
          values *= scale;
          return softcap == 0.0f ? values : softcap * tanh(values / softcap);
        });
      }
      if (!are_contiguous) std::copy_n(row, share.end - share.begin, b.tokens[b.wanted[w]].logits + share.begin);
    }
  }
};

template <typename Number>
void run(const TokenBlock& block, int64_t num_threads) {
  if (num_threads == 1) return Forward<Number>{{block, block.m, 0, 1}}.run();
#pragma omp parallel num_threads(num_threads)
  Forward<Number>{{block, block.m, omp_get_thread_num(), omp_get_num_threads()}}.run();
}

}  // namespace

extern "C" {

// Runs a forward. Returns OUT_OF_RANGE if an id or a place is not there, if a sequence whose tokens see later ones has
// more than MAX_TOKENS, or if one with recurrences begins before its anchor or leaves out places.
Status outrider_forward(const Model* model, const Batch* batch, int64_t num_threads) try {
  const int64_t B = batch->num_rows, T = batch->num_columns, V = model->lm_head.num_channels;
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
    int64_t vocab_size = model->embedding.num_channels;
    if (model->per_layer.width) vocab_size = std::min(vocab_size, model->per_layer.embedding.num_channels);
    if (batch->ids[i] < 0 || batch->ids[i] >= vocab_size || place >= batch->row_places - 1) return OUT_OF_RANGE;
    const int64_t position = place + (batch->offsets == nullptr ? 0 : batch->offsets[row]);
    if (model->position_embedding != nullptr && (position < 0 || position >= model->num_positions)) return OUT_OF_RANGE;
    tokens.push_back({batch->ids[i], row, place, position, i, place, place, logits});
    if (tokens.size() > 1 && tokens[tokens.size() - 2].row == row) tokens.back().first = tokens[tokens.size() - 2].first;
  }
  for (size_t t = tokens.size(); t-- > 1;) {
    if (tokens[t - 1].row == tokens[t].row) tokens[t - 1].last = tokens[t].last;
  }
  bool is_bidirectional = false;
  int64_t kernel_size = 0;
  for (int64_t l = 0; l < model->num_layers; l++) {
    is_bidirectional |= model->layers[l].attention.mask.is_bidirectional != 0;
    kernel_size = std::max(kernel_size, model->layers[l].recurrence.kernel_size);
  }
  for (size_t t = 0; t < tokens.size() && kernel_size; t++) {
    const Token &token = tokens[t], &before = tokens[t ? t - 1 : 0];
    const bool follows = t && before.row == token.row;
    if (follows && token.place != before.place + 1) return OUT_OF_RANGE;
    if (!follows && !is_reached(batch->anchors[token.row], token.place, kernel_size)) return OUT_OF_RANGE;
  }
  if (batch->broken != nullptr) std::fill_n(batch->broken, B * T, false);
  for (size_t first = 0, end; first < tokens.size(); first = end) {
    end = std::min(first + MAX_TOKENS, tokens.size());
    if (is_bidirectional) {  // whose keys are there together
      while (end < tokens.size() && end > first && tokens[end - 1].row == tokens[end].row) end--;
      if (end == first) return OUT_OF_RANGE;
    }
    const TokenBlock block(*model, *batch, &tokens[first], end - first, num_threads);
    if (batch->bits == 32) run<float>(block, num_threads);
    if (batch->bits == 16) run<BFloat16>(block, num_threads);
    for (const Span& span : block.spans) batch->anchors[span.row] = span.next;
  }
  return DONE;
} catch (const std::exception&) {
  return NO_MEMORY;
}

// Bytes that a forward of MAX_TOKENS tokens needs beside its results.
Status outrider_forward_bytes(const Model* model, int64_t num_threads, int64_t* num_bytes) try {
  std::vector<Token> tokens;
  const int64_t first = MAX_PARTS * PLACES, last = first + MAX_TOKENS - 1;  // so that tasks keep most
  for (int64_t t = first; t <= last; t++) tokens.push_back({0, 0, t, t, 0, first, last, nullptr});
  int64_t anchor = last - RING;
  Batch batch{};
  batch.anchors = &anchor;
  *num_bytes = TokenBlock(*model, batch, tokens.data(), MAX_TOKENS, num_threads).num_bytes;
  *num_bytes += MAX_TOKENS * model->lm_head.num_channels * sizeof(float);  // `logits`
  return DONE;
} catch (const std::exception&) {
  return NO_MEMORY;
}
}
