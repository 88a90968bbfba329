"""Gemma 4 assistants: heads without keys and values of their own, which read those of their target.

An assistant predicts the token at place n + 1 from the token at n, with the target's embedding, and from the target's
last hidden state of the token at n - 1 (after its final norm). Each of its layers attends to the keys and values of
the target's last layer of the same type that has any, at the places before n. A drafted token is fed with the
assistant's own output in place of that state, and stays at place n: no key is added in a round.

Of the tokens of an ordered vocabulary, which centroids divide into groups, those of the most probable groups have
logits.

Source: ``Gemma4AssistantForCausalLM`` and ``SinglePositionMultiTokenCandidateGenerator`` of Transformers. After a
rejection that generator leaves keys of rejected tokens visible; here they are hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import ModelCorrupt, UnsupportedModel
from outrider.models.heads.base import Head, decoder_of, embedding_of, fill
from outrider.native.plan import NotPlanned, Plan
from outrider.runtime.attention_mask import Visibility
from outrider.runtime.cache import SlotCache
from outrider.runtime.cache_shapes import LayerShape
from outrider.runtime.lm import LM
from outrider.runtime.vocabulary import UNKNOWN


class CentroidHead(nn.Module):
    """An LM head over the embedding [V, H] that gives logits to the tokens of some groups of equal size only, those of
    the ``num_chosen`` highest centroids; others are unknown."""

    def __init__(self, weight: Tensor, num_groups: int, num_chosen: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.num_chosen = num_chosen
        self.centroids = nn.Linear(weight.shape[1], num_groups, bias=False)
        self.register_buffer("token_ordering", torch.empty(len(weight), dtype=torch.long))

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, V]"""
        centroids = self.centroids
        chosen = centroids(hidden).topk(self.num_chosen, dim=-1).indices
        ordering: Any = self.token_ordering
        ids = ordering.long().view(centroids.out_features, -1)[chosen].flatten(2)  # [B, T, N]
        logits = (self.weight[ids] @ hidden[..., None])[..., 0]
        return logits.new_full((*ids.shape[:2], len(self.weight)), UNKNOWN).scatter(-1, ids, logits)


class AssistantHead(Head):
    """See the module. Names are those of its checkpoint, but for the LM head."""

    def __init__(self, config: Any, of_layers: Any, shared: Mapping[str, int], target: LM) -> None:
        """Take the configurations of the assistant and of its decoder, and for each type of a layer the target's layer
        whose keys and values it reads."""
        super().__init__()
        model, decoder_of_target = target.model, target.model.get_decoder()
        size, width = of_layers.hidden_size, config.backbone_hidden_size
        self.config = of_layers
        self.features = (len(decoder_of_target.layers),)
        self.state_size = width
        self.token_ids = None
        self.shared_types, self.shared_layers = tuple(shared), tuple(shared.values())
        decoder = decoder_of(of_layers, target.name)
        with torch.device("meta"):
            self.pre_projection = nn.Linear(2 * width, size, bias=False)
            self.post_projection = nn.Linear(size, width, bias=False)
            weight = torch.empty(of_layers.vocab_size, size)
            self.lm_head = nn.Linear(size, len(weight), bias=False)
            if config.use_ordered_embeddings:
                self.lm_head = CentroidHead(weight, config.num_centroids, config.centroid_intermediate_top_k)
        decoder.embed_tokens = None  # that of the target is read; its own one is the LM head
        decoder.rotary_emb = type(decoder.rotary_emb)(of_layers).to(target.device)
        self.model = decoder
        self.embed_tokens, self.target_norm = model.get_input_embeddings(), decoder_of_target.norm
        reach = Visibility.of(self)
        # Transformers counts the window from the last key that is visible, and includes both ends.
        self._reach = reach if reach.window is None else replace(reach, window=reach.window + 1)

    @property
    def layers(self) -> Any:  # type: ignore[override]
        return self.model.layers

    def layer_shapes(self, target: LM) -> list[LayerShape]:
        return []

    def forward(
        self, input_ids: Tensor, states: Tensor, positions: Tensor, shared: SlotCache, view_len: int
    ) -> tuple[Tensor, Tensor]:
        """As in ``Head``; ``shared`` holds the keys and values of the target's layers."""
        masks = self._reach.masks(positions - 1, view_len, states.dtype)
        by_type = iter(store[:, :view_len].transpose(1, 2) for store in shared.storage)
        hidden = self.model(
            inputs_embeds=self.pre_projection(torch.cat((self.embed_tokens(input_ids).to(states), states), dim=-1)),
            attention_mask=masks if isinstance(masks, dict) else dict.fromkeys(self.shared_types, masks),
            position_ids=positions.clamp_min(0),
            shared_kv_states={kind: (next(by_type), next(by_type)) for kind in self.shared_types},
            use_cache=False,
        ).last_hidden_state
        return hidden, self.post_projection(hidden)

    def plan(self) -> Plan:
        raise NotPlanned("it reads keys and values of its target")


def load_assistant(stored: Mapping[str, Tensor], stated: Mapping[str, Any], name: str, target: LM) -> AssistantHead:
    """Load an assistant for a target. Arguments and errors: see ``load_eagle3``."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[stated["model_type"]].from_dict(dict(stated))
    own = config.get_text_config(decoder=True)
    own._attn_implementation = target.model.config._attn_implementation
    of_target = target.model.config.get_text_config(decoder=True)
    types = list(getattr(of_target, "layer_types", None) or ())
    types = types[: len(types) - (getattr(of_target, "num_kv_shared_layers", None) or 0)]  # others have no keys
    shared = {kind: max((i for i, one in enumerate(types) if one == kind), default=-1) for kind in own.layer_types}
    if lacking := [kind for kind, i in shared.items() if i < 0]:
        raise UnsupportedModel(
            f"{name} reads keys and values of layers of the type {lacking[0]}, which {target.name} does not have"
        )
    head = AssistantHead(config, own, shared, target)
    width = embedding_of(target).shape[1]
    if config.backbone_hidden_size != width:
        raise ModelCorrupt(
            f"{name} is for another target: it reads hidden states of {config.backbone_hidden_size} numbers, and those "
            f"of {target.name} have {width}"
        )
    if own.vocab_size < target.vocab_size:
        raise ModelCorrupt(f"{name} has logits for {own.vocab_size} tokens; {target.name} has {target.vocab_size}")
    num_groups, num_chosen = config.num_centroids, config.centroid_intermediate_top_k
    if config.use_ordered_embeddings and own.vocab_size % num_groups:
        raise ModelCorrupt(f"{name} divides {own.vocab_size} tokens into {num_groups} groups")
    if config.use_ordered_embeddings and not 1 <= num_chosen <= num_groups:
        raise ModelCorrupt(
            f"{name} chooses {num_chosen} of {num_groups} groups of tokens (centroid_intermediate_top_k)"
        )
    for kind, layer in zip(own.layer_types, head.layers, strict=True):
        shape, attention = target.layer_shapes[shared[kind]], layer.self_attn
        num_heads = own.num_attention_heads // attention.num_key_value_groups
        if (num_heads, attention.head_dim) != (shape.num_heads, shape.key_dim):
            raise ModelCorrupt(
                f"{name} is for another target: in {kind} it reads {num_heads} heads of {attention.head_dim} numbers, "
                f"and {target.name} has {shape.num_heads} of {shape.key_dim}"
            )
    tensors = dict(stored)
    if (embedding := tensors.pop("model.embed_tokens.weight", None)) is not None:
        tensors.setdefault("lm_head.weight", embedding)
    tensors = {key.replace("masked_embedding.", "lm_head."): value for key, value in tensors.items()}
    fill(head, tensors, name, target, shared=("embed_tokens.", "target_norm.", "model.rotary_emb."))
    if config.use_ordered_embeddings:
        ids: Any = head.lm_head.token_ordering
        if not torch.equal(ids.long().sort().values, torch.arange(len(ids), device=ids.device)):
            raise ModelCorrupt(f"{name} has a token_ordering that does not name each of its tokens once")
    with target.lock, torch.inference_mode():  # a trial, for numbers that no weight shows
        place = torch.zeros(1, 1, dtype=torch.long, device=target.device)
        state = torch.zeros(1, 1, head.state_size, dtype=target.dtype, device=target.device)
        head(place, state, place, SlotCache.empty(target.layer_shapes, 1, 1).of_layers(head.shared_layers), 1)
    return head
