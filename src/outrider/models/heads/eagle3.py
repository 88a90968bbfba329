"""EAGLE-3 heads: one decoder layer (or more) over hidden states of three layers of the target.

The first layer attends to the embedding and the state side by side. Often the vocabulary is reduced. EAGLE-3.1 adds
norms of each hidden state (``fc_norm``) and feeds back normed states (``norm_output``).

Sources: Li et al. 2503.01840; EAGLE-3.1: 2605.09992. Layouts of checkpoints: speculators, SafeAILab, SpecForge,
AngelSlim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import ModelCorrupt
from outrider.models.heads.base import (
    ChainHead,
    attention_shapes,
    decoder_of,
    fill_for,
    is_embedding_of,
    layer_config,
    plan_of_head,
    plan_of_layers,
    reduce_vocabulary,
    rotation,
    set_vocabulary,
)
from outrider.native.plan import JointPlan, NotPlanned, Plan
from outrider.runtime.cache_argument import cache_argument
from outrider.runtime.cache_shapes import LayerShape
from outrider.runtime.lm import LM

_RENAMED = {"midlayer.": "layers.0."}  # in the layouts of SafeAILab, SpecForge and AngelSlim
_UNUSED = ("t2d", "verifier_norm.", "verifier_lm_head.")  # for training
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
"""Key of the features in a config.json."""


class Eagle3Head(ChainHead):
    """See the module.

    Args:
        config: of its layers.
        stated: its config.json.
        tensors: its weights, named as in the speculators layout; they decide what there is.
    """

    def __init__(self, config: Any, stated: Mapping[str, Any], tensors: Mapping[str, Tensor], target: LM) -> None:
        super().__init__()
        model: Any = target.model
        self.config = config
        decoder = decoder_of(config, target.name)
        size, num_target_layers = config.hidden_size, len(model.get_decoder().layers)
        inner = stated.get("eagle_config") or {}
        self.features = stated_features(stated, num_target_layers)
        self.state_size = size
        # Files that were written for vLLM leave this key out and mean True; all others mean False.
        is_default = "speculators_model_type" in stated
        self.norm_before_residual = bool(stated.get("norm_before_residual", is_default))
        self.norm_output = bool(stated.get("norm_output", inner.get("norm_output", False)))
        norm, eps = type(decoder.norm), config.rms_norm_eps
        width = tensors["fc.weight"].shape[1]
        with torch.device("meta"):
            self.fc = nn.Linear(width, size, bias="fc.bias" in tensors)
            if "input_norm.weight" in tensors:
                self.input_norm = norm(width, eps=eps)
            if any(name.startswith("fc_norm.") for name in tensors):
                self.fc_norm = nn.ModuleList([norm(width // len(self.features), eps=eps) for _ in self.features])
            first = decoder.layers[0]
            first.hidden_norm = norm(size, eps=eps)
            for name in ("q_proj", "k_proj", "v_proj"):
                single = getattr(first.self_attn, name)
                double = nn.Linear(2 * size, single.out_features, bias=single.bias is not None)
                setattr(first.self_attn, name, double)
            self.layers = decoder.layers
            self.norm = norm(size, eps=eps)
        self.cache_name = cache_argument(self.layers[0])
        set_vocabulary(self, tensors, target)
        self.rotary_emb = type(decoder.rotary_emb)(config).to(target.device)

    def layer_shapes(self, target: LM) -> list[LayerShape]:
        return attention_shapes(self, target)

    def fuse(self, features: Tensor) -> Tensor:
        if hasattr(self, "input_norm"):
            features = self.input_norm(features)
        if hasattr(self, "fc_norm"):
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(features)
        return fused

    def forward(
        self, input_ids: Tensor, states: Tensor, positions: Tensor, mask: Tensor, cache: Any
    ) -> tuple[Tensor, Tensor]:
        first: Any = self.layers[0]
        about = {
            "attention_mask": mask,
            self.cache_name: cache,
            "position_ids": positions,
            "position_embeddings": rotation(self.rotary_emb, states, positions),
        }
        embedded = self.embed_tokens(input_ids).to(states)
        normed = first.hidden_norm(states)
        entries = torch.cat((first.input_layernorm(embedded), normed), dim=-1)  # [B, T, 2H]
        attended = first.self_attn(hidden_states=entries, **about)[0]
        hidden = (normed if self.norm_before_residual else states) + attended
        hidden = hidden + first.mlp(first.post_attention_layernorm(hidden))
        for layer in self.layers[1:]:
            hidden = layer(hidden, **about)
        output = self.norm(hidden)
        return output, output if self.norm_output else hidden

    def plan(self) -> Plan:
        plan = plan_of_layers(self.config)
        first, *others = plan.layers
        norm = first.attention_norm
        if norm is None or first.attention_post_norm or first.mlp_post_norm or plan.residual_scale != 1:
            raise NotPlanned(f"a first layer of {self.config.model_type} is none of EAGLE-3's")
        joint = JointPlan(norm, replace(norm, weight="layers.0.hidden_norm.weight"), None, self.norm_before_residual)
        layers = (replace(first, attention_norm=None), *others)
        return replace(plan_of_head(plan, self), layers=layers, joint=joint)


def stated_features(stated: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Hidden states of the target that a config.json states, or those of the inventors for a target's layers.

    In ``eagle_config`` SpecForge (and ModelOpt) number layers by their outputs; SGLang adds one, too.
    """
    inner = stated.get("eagle_config") or {}
    by_output = tuple(i + 1 for i in inner.get(LAYER_IDS) or ())
    return tuple(stated.get(LAYER_IDS) or by_output or (2, num_layers // 2, num_layers - 3))


def load_eagle3(stored: Mapping[str, Tensor], stated: Mapping[str, Any], name: str, target: LM) -> Eagle3Head:
    """Load an EAGLE-3 head for a target.

    Args:
        stored: all tensors of its checkpoint.
        stated: its config.json.
        name: for messages.

    Raises:
        ModelCorrupt: its weights do not fit its configuration or the target.
        UnsupportedModel
    """
    from transformers import CONFIG_MAPPING

    tensors = {}
    for key, value in stored.items():
        for old, new in _RENAMED.items():
            key = key.replace(old, new)
        if not key.startswith(_UNUSED):
            tensors[key] = value
    offsets = tensors.pop("d2t", None)
    if "fc.weight" not in tensors:
        raise ModelCorrupt(f"{name} lacks fc.weight, which an EAGLE-3 head needs")
    layers = {key.split(".")[1] for key in tensors if key.startswith("layers.")}
    inner = dict(stated.get("transformer_layer_config") or stated)
    kind = inner.get("model_type", "llama")
    config = layer_config(CONFIG_MAPPING[kind].from_dict(inner), len(layers), target.model)
    if is_embedding_of(target, tensors.get("embed_tokens.weight")):
        del tensors["embed_tokens.weight"]
    head = Eagle3Head(config, stated, tensors, target)
    fill_for(head, head.fc.in_features, tensors, name, target)
    reduce_vocabulary(head, offsets, [head.lm_head], name, target)
    return head
