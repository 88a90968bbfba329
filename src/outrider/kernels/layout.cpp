// Sizes of the structures of a model and the places of their fields, to which Python compares its own
// (native/structures.py): whatever the compiler does, or a header that is newer than the library, no field is read elsewhere.
#include <cstddef>

#include "model.h"

// A structure's size and the offsets of its fields. A scan takes one field, and leaves the others to the next scan.
#define SCANS(...) SCANS_9(SCANS_9(SCANS_9(__VA_ARGS__)))
#define SCANS_9(...) SCANS_3(SCANS_3(SCANS_3(__VA_ARGS__)))
#define SCANS_3(...) SCAN(SCAN(SCAN(__VA_ARGS__)))
#define SCAN(...) __VA_ARGS__
#define NOTHING ()
#define OFFSETS(S, field, ...) , offsetof(S, field) __VA_OPT__(OTHERS NOTHING (S, __VA_ARGS__))
#define OTHERS() OFFSETS
#define LAYOUT(S, ...) sizeof(S) SCANS(OFFSETS(S, __VA_ARGS__))

namespace {

const int64_t LAYOUTS[] = {
    LAYOUT(Norm, kind, epsilon, weight, bias),
    LAYOUT(Matrix, data, form, num_channels, width, scales, bias),
    LAYOUT(Rope, width, is_interleaved, scale, frequencies),
    LAYOUT(Reach, window, before_anchor, sees_block),
    LAYOUT(Attention, num_heads, num_groups, head_width, rope, store, is_shared, values_are_keys, norms_whole_rows, reach,
           scale, cap, growth, growth_span, query_norm, key_norm, value_norm, sinks, is_gated, num_inputs, inputs, out),
    LAYOUT(Recurrence, kind, num_heads, num_groups, key_width, value_width, num_taps, conv_width, taps, conv_bias, rates,
           step_bias, skips, least_step, out_norm, ring, states, num_inputs, inputs, out),
    LAYOUT(Gating, activation, slope, limit),
    LAYOUT(Mlp, num_ups, gating, ups, down, post_norm, scale),
    LAYOUT(ExpertMatrices, first, rows_apart, bytes_apart),
    LAYOUT(Experts, number, num_chosen, num_groups, num_chosen_groups, is_sigmoid, is_normalized, added, scale,
           router_norm, norm, post_norm, router, latent_in, latent_out, correction, scales, num_ups, gating, ups, down),
    LAYOUT(Layer, mixer_norm, mixer_post_norm, mlp_norm, mlp_post_norm, side_post_norm, attention, recurrence, mlp,
           experts, side, scale, is_parallel),
    LAYOUT(Sides, width, embedding, projection, embedding_scale, projection_scale, scale, norm),
    LAYOUT(Joint, is_there, embedding_norm, state_norm, matrix, adds_normed),
    LAYOUT(Model, num_layers, hidden, num_ropes, num_digits, embedding_scale, residual_scale, logit_scale, logit_cap,
           embedding, head, place_embedding, num_places, last_norm, joint, sides, ropes, layers),
    LAYOUT(Batch, num_rows, num_columns, ids, places, states, offsets, stores, anchors, is_ahead, is_final, bits,
           row_places, num_wanted, logits, num_features, feature_layers, features, broken),
};

}  // namespace

extern "C" int64_t outrider_layouts(const int64_t** numbers) {
  *numbers = LAYOUTS;
  return sizeof LAYOUTS / sizeof *LAYOUTS;
}
