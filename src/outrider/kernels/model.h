// A causal language model as data, and a batch of tokens: the structures that structures.py builds.
#pragma once

#include "functions.h"
#include "products.h"

namespace {

struct Rope {
  int64_t width, is_interleaved;  // whether the pairs are neighbours, or in the two halves
  double scale;
  const float* frequencies;  // [width / 2]
};

// Places that a token sees. The tokens of its sequence in this forward are its block.
struct AttentionMask {
  int64_t window;            // places up to its own, itself included; 0 for all
  int64_t before_anchor;     // places before the first of its block; -1 for all
  int64_t is_bidirectional;  // whether it sees later tokens of its block, too
  bool operator==(const AttentionMask&) const = default;
};

struct Attention {
  int64_t num_heads, num_kv_heads, head_dim;
  int64_t rope;              // its number; -1 for none
  int64_t store;             // number of its keys; its values are the next
  int64_t is_shared;         // whether keys and values are those of an earlier layer
  int64_t values_are_keys;   // without norm and rope
  int64_t norms_whole_rows;  // query_norm and key_norm: of all heads together
  AttentionMask mask;
  // Temperature tuning (Llama 4): queries * (1 + temperature_scale * log(1 + floor(position / temperature_floor_scale))).
  double scale, softcap, temperature_scale, temperature_floor_scale;  // softcap 0: none
  Norm query_norm, key_norm, value_norm;
  const float* sinks;  // attention sinks: scores of a place without a value, of each head; or null
  int64_t is_gated;    // the gate of a head's output follows its query
  int64_t num_inputs;
  Matrix inputs[3];  // queries, keys and values, one after the other
  Matrix out;

  int64_t q_width() const { return num_heads * head_dim; }
  int64_t query_at(int64_t head) const { return head * head_dim * (is_gated ? 2 : 1); }
  int64_t key_at(int64_t kv_head) const { return query_at(num_heads) + kv_head * head_dim; }
  int64_t inputs_width() const { return key_at(is_shared ? 0 : 2 * num_kv_heads); }
};

// Recurrence, or convolution (recurrence.h). The names are those of Mamba-2's parameters.
struct Recurrence {
  enum Kind : int64_t { NONE, CONVOLUTION, DELTA, MAMBA2 };
  int64_t kind;
  int64_t num_heads, num_groups, key_width, value_width;  // heads of values; groups of them share keys and queries
  int64_t kernel_size, conv_width;
  const float *conv_weight, *conv_bias;  // [kernel_size, conv_width], [conv_width] or null
  const float *a_log, *dt_bias;          // of heads
  const float* skips;                    // D, of heads, or null: factors of the values that are added to the output
  double dt_min;                         // of softplus(dt + dt_bias)
  Norm out_norm;
  int64_t ring, states;  // numbers of their stores
  int64_t num_inputs;
  Matrix inputs[4];
  Matrix out;

  // Places in the row of a token's inputs: of what is convolved, of the numbers of heads, and of the output's gate.
  int64_t conv_at() const { return kind == MAMBA2 ? out.width : 0; }
  int64_t heads_at() const { return conv_at() + conv_width; }
  int64_t gate_at() const { return kind == MAMBA2 ? 0 : heads_at() + 2 * num_heads; }
  int64_t inputs_width() const {
    if (kind == CONVOLUTION) return 3 * conv_width;
    return kind == MAMBA2 ? heads_at() + num_heads : gate_at() + out.width;
  }
  int64_t kept_width() const { return conv_width + 2 * num_heads; }  // of a token in the ring
  int64_t num_units() const { return 2 * num_groups + num_heads + 1; }  // of the work on a token's inputs

  // Places in what is convolved.
  int64_t value_at(int64_t head) const { return (kind == MAMBA2 ? 0 : 2 * num_groups * key_width) + head * value_width; }
  int64_t key_at(int64_t group) const {
    return (kind == MAMBA2 ? num_heads * value_width : num_groups * key_width) + group * key_width;
  }
  int64_t query_at(int64_t group) const { return kind == MAMBA2 ? key_at(num_groups + group) : group * key_width; }
};

// Activation of an MLP's input projections: (up,) or (gate, up). A limit is that of gpt-oss's SwiGLU.
struct Gating {
  int64_t activation;
  double alpha, limit;  // limit 0: none. Else gate * sigmoid(alpha * gate) * (up + 1), both within the limit
};

struct Mlp {
  int64_t num_ups;
  Gating gating;
  Matrix ups[2];  // input projections: (up,) or (gate, up)
  Matrix down;
  Norm post_norm;
  Matrix output_gate;  // of a shared expert: its sigmoid multiplies the output; no data: none
};

// Matrices of all experts, one after the other.
struct ExpertMatrices {
  Matrix first;
  int64_t rows_per_expert, bytes_per_expert;

  Matrix of(int64_t expert) const {
    Matrix matrix = first;
    matrix.data = static_cast<const uint8_t*>(first.data) + expert * bytes_per_expert;
    if (first.scales != nullptr) matrix.scales += expert * rows_per_expert;
    if (first.bias != nullptr) matrix.bias += expert * rows_per_expert;
    return matrix;
  }
};

struct Experts {
  int64_t num_experts, num_active;        // active: for each token
  int64_t num_groups, num_active_groups;  // for each token: only experts of these groups are chosen
  int64_t is_sigmoid, is_normalized;      // scores are not of a softmax; weights are divided by their sum
  double sum_epsilon, scale;              // added to this sum; of weights
  Norm router_norm, norm, post_norm;      // of the rows, unless they are the MLP's, and of the output
  Matrix router;
  Matrix latent_in, latent_out;           // to the width of the experts' rows, and back; no data: that is the hidden one
  const float *correction_bias, *scales;  // of scores, for the choice alone; and of weights [num_experts]; or null
  int64_t num_ups;
  Gating gating;
  ExpertMatrices ups[2], down;

  int64_t row_width() const { return ups[0].first.width; }
  // Of each thread: for the order of choices (ByExpert), and before for a token's scores and those of groups.
  int64_t scratch_bytes(int64_t num_tokens) const {
    const int64_t order = 2 * (num_experts + 1 + num_tokens * num_active) * sizeof(int64_t);
    return std::max<int64_t>(order, num_groups * (sizeof(int64_t) + sizeof(float)) + num_experts * sizeof(float));
  }
};

// A mixer of tokens, then an MLP, experts or both; a part that is not there has no heads, no kind, no ups, or no experts.
struct Layer {
  Norm mixer_norm, mixer_post_norm, mlp_norm, mlp_post_norm, per_layer_post_norm;
  Attention attention;
  Recurrence recurrence;
  Mlp mlp;
  Experts experts;
  Mlp per_layer_mlp;    // of the stream; its gate multiplies the layer's per-layer embeddings
  double scale;         // of the stream, at the end
  int64_t is_parallel;  // whether the MLP reads what the mixer reads
};

// Per-layer embeddings (Gemma 4): of a table of their own, and of a projection of the first layer's input.
struct PerLayerEmbeddings {
  int64_t width;         // of a layer's; 0: none
  Matrix embedding;      // [V, layers * width]
  Matrix projection;     // [layers * width, hidden]
  double embedding_scale, projection_scale, scale;  // of each, and of their sum
  Norm norm;             // of a layer's projection
};

// Input of a draft head (MTP, EAGLE-3): the norms of a token's embedding and of a state of the target, side by side.
struct DraftInput {
  int64_t is_there;
  Norm embedding_norm, state_norm;
  Matrix projection;    // gives the input of the first layer; no data: that is the state, and the layer reads both norms
  int64_t adds_normed;  // without a projection: whether the input of the first layer is the normed state
};

struct Model {
  int64_t num_layers, hidden, num_ropes, num_digits;
  double embedding_scale, residual_scale, logit_scale, logit_softcap;  // softcap 0: none
  Matrix embedding, lm_head;
  const float* position_embedding;  // [num_positions, hidden], or null
  int64_t num_positions;
  Norm final_norm;
  DraftInput draft_input;
  PerLayerEmbeddings per_layer;
  const Rope* ropes;
  const Layer* layers;
};

// Columns of tokens of several rows of a cache.
struct Batch {
  int64_t num_rows, num_columns;
  const int64_t *ids, *places;  // a place below 0 is padding; the others of a row ascend [B, T]
  const float* states;          // of a head's target [B, T, hidden], or null
  const int64_t* offsets;       // from places to positions [B], or null
  void* const* stores;          // keys and values of each attention in turn [B, L + 1, KV heads, head_dim]; then of
                                // each recurrence the ring [B, RING, inputs] and the states [B, heads, keys, values]
  int64_t* anchors;             // of the rows [B]; null without recurrences
  int64_t is_ahead, is_final;   // tokens before these, or none of these, may be rejected: anchors stay, or may follow
  int64_t bits, row_places;     // of a number of the keys and values; L + 1
  int64_t num_wanted;           // last columns whose logits are wanted; those of padding are zeros
  float* logits;                // [B, num_wanted, V]
  int64_t num_features;
  const int64_t* feature_layers;  // whose inputs are wanted; then the last output, and its norm
  float* features;                // those of padding are zeros [B, T, num_features, hidden]
  bool* broken;  // with a number to keep that is not finite, for which zero is kept; or null [B, T]
};

}  // namespace
