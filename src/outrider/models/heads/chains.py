"""Heads that continue a sequence of entries: EAGLE-3 heads, and MTP layers in the target's own checkpoint.

Sources: EAGLE-3, Li et al. 2503.01840; EAGLE-3.1: 2605.09992; layouts of checkpoints: speculators, SafeAILab,
SpecForge, AngelSlim, vLLM. MTP: DeepSeek-V3 (2412.19437, section 2.2); layouts: Qwen's (``mtp.*``); DeepSeek's and
GLM's (a decoder layer beyond the last one).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import UnsupportedModel
from outrider.models.families.table import plan_of
from outrider.models.heads.base import (
    Head,
    complete,
    decoder_of,
    fill,
    layer_config,
    own_tensors,
    plan_of_head,
    plan_of_layers,
    set_vocabulary,
    window_of,
)
from outrider.native.plan import DraftInputPlan, MatrixPlan, NotPlanned, Plan, rename
from outrider.runtime.cache_shapes import LayerShape
from outrider.runtime.lm import LM
from outrider.runtime.modules import cache_argument

_LOG = logging.getLogger(__name__)
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"  # key of the features of an EAGLE-3 head in a config.json

# The layout of DeepSeek and GLM, in the names of Qwen's.
_NAMES = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head.norm": "norm"}
_PROMISES = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")


class Eagle3Head(Head):
    """An EAGLE-3 head: a decoder layer (or more) over hidden states of three layers of the target.

    The first layer attends to the embedding and the state side by side. Often the vocabulary is reduced. EAGLE-3.1 adds
    norms of each hidden state (``fc_norm``) and feeds back normed states (``norm_output``). Its weights, named as in
    the speculators layout, decide what there is."""

    def __init__(self, config: Any, stated: Mapping[str, Any], tensors: Mapping[str, Tensor], target: LM) -> None:
        super().__init__()
        self.config = config
        decoder = decoder_of(config, target.name)
        size, num_layers = config.hidden_size, len(target.model.get_decoder().layers)
        inner = stated.get("eagle_config") or {}
        # There SpecForge (and ModelOpt) number layers by their outputs; SGLang adds one, too.
        by_output = tuple(i + 1 for i in inner.get(LAYER_IDS) or ())
        usual = 2, num_layers // 2, num_layers - 3  # those of the inventors
        self.features = tuple(stated.get(LAYER_IDS) or by_output or usual)
        self.state_size = size
        # Files that were written for vLLM leave this key out and mean True; all others mean False.
        is_default = stated.get("speculators_model_type") == "eagle3"
        self.norm_before_residual = bool(stated.get("norm_before_residual", is_default))
        self.norm_output = bool(stated.get("norm_output", inner.get("norm_output", False)))
        norm, eps, width = type(decoder.norm), config.rms_norm_eps, tensors["fc.weight"].shape[1]
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
        about = self.about(states, positions, mask, cache)
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
        plan = plan_of_layers(self, [{"window": self.window}] * len(self.layers))
        first, *others = plan.layers
        norm = first.mixer_norm
        if norm is None or first.mixer_post_norm or first.mlp_post_norm or plan.residual_scale != 1:
            raise NotPlanned(f"a first layer of {self.config.model_type} is none of EAGLE-3's")
        state_norm = replace(norm, weight="layers.0.hidden_norm.weight")
        draft_input = DraftInputPlan(norm, state_norm, adds_normed=self.norm_before_residual)
        return replace(plan, layers=(replace(first, mixer_norm=None), *others), draft_input=draft_input)


def load_eagle3(stored: Mapping[str, Tensor], stated: Mapping[str, Any], name: str, target: LM) -> Eagle3Head:
    """Load an EAGLE-3 head for a target from all tensors of its checkpoint, and its config.json. Raises ModelCorrupt:
    its weights do not fit its configuration or the target; UnsupportedModel."""
    from transformers import CONFIG_MAPPING

    tensors, offsets = own_tensors(stored, target)
    layers = {key.split(".")[1] for key in tensors if key.startswith("layers.")}
    inner = dict(stated.get("transformer_layer_config") or stated)
    kind = inner.get("model_type", "llama")
    config = layer_config(CONFIG_MAPPING[kind].from_dict(inner), len(layers), target.model)
    head = Eagle3Head(config, stated, tensors, target)
    # As in vLLM's ``LlamaAttention``, only ``layer_types`` switches a sliding window on.
    kinds, stated_window = list(inner.get("layer_types") or ["full_attention"])[: len(layers)], None
    if set(kinds) != {"full_attention"}:
        stated_window = inner.get("sliding_window")
        if set(kinds) != {"sliding_attention"} or not stated_window:
            raise UnsupportedModel(
                f"{name} has layers of the types {', '.join(kinds)}, with the window {stated_window}"
            )
    head.window = min(filter(None, (window_of(inner, target), stated_window)), default=None)
    complete(head, tensors, offsets, name, target)
    return head


class MtpHead(Head):
    """An MTP layer: a multi-token prediction layer in the target's own checkpoint.

    A decoder layer of the target's own kind over the embedding of a token and the target's last hidden state (after its
    final norm). Embedding, final norm of the target and LM head are the target's. A drafted token is fed with the
    layer's own output (after its norm). ``index`` is that of the target's decoder layer whose kind it shares."""

    index: int
    norm_output = True

    def __init__(self, target: LM) -> None:
        super().__init__()
        model, decoder = target.model, target.model.get_decoder()
        config = model.config.get_text_config(decoder=True)
        types = list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
        # The last layer with full attention: the first ones may lack experts.
        self.index = max(i for i, kind in enumerate(types) if kind == "full_attention")
        like = decoder.layers[self.index]
        self._of_target, self.config = config, layer_config(config, 1, model)
        self.features = (len(decoder.layers),)
        self.state_size = size = config.hidden_size
        self.token_ids = None
        norm, eps = type(decoder.norm), config.rms_norm_eps
        own = layer_config(config, len(types), model)
        with torch.device("meta"):
            self.fc = nn.Linear(2 * size, size, bias=False)
            self.pre_fc_norm_embedding = norm(size, eps=eps)
            self.pre_fc_norm_hidden = norm(size, eps=eps)
            self.layers = nn.ModuleList([type(like)(own, self.index)])
            self.norm = norm(size, eps=eps)
        self.cache_name = cache_argument(like)
        for module in self.layers.modules():
            for name, value in (("layer_idx", 0), ("config", self.config)):
                if hasattr(module, name):
                    setattr(module, name, value)
        self.target_norm, self.rotary_emb = decoder.norm, decoder.rotary_emb
        self.embed_tokens, self.lm_head = model.get_input_embeddings(), model.get_output_embeddings()

    def layer_shapes(self, target: LM) -> list[LayerShape]:
        return [replace(target.layer_shapes[self.index], device=target.device, states=())]

    def forward(
        self, input_ids: Tensor, states: Tensor, positions: Tensor, mask: Tensor, cache: Any
    ) -> tuple[Tensor, Tensor]:
        embedded = self.pre_fc_norm_embedding(self.embed_tokens(input_ids).to(states.device))
        hidden = self.fc(torch.cat((embedded, self.pre_fc_norm_hidden(states)), dim=-1))
        output = self.norm(self.layers[0](hidden, **self.about(hidden, positions, mask, cache)))
        return output, output

    def plan(self) -> Plan:
        plan = plan_of(self._of_target)
        layer = rename(plan.layers[self.index], f"model.layers.{self.index}.", "layers.0.")
        norm = replace(plan.final_norm, weight="norm.weight")
        draft_input = DraftInputPlan(
            replace(norm, weight="pre_fc_norm_embedding.weight"),
            replace(norm, weight="pre_fc_norm_hidden.weight"),
            MatrixPlan("fc.weight"),
        )
        return replace(plan_of_head(plan, self), layers=(layer,), final_norm=norm, draft_input=draft_input)


def mtp_prefix(found: Iterable[str], target: LM) -> str:
    """The beginning of the names of MTP weights in a target's checkpoint. Raises UnsupportedModel: there are none."""
    config = target.weights.config.get_text_config(decoder=True)
    pattern = rf"(model\.)?mtp\.|(model\.(language_model\.)?)?layers\.{config.num_hidden_layers}\."
    prefixes = [match.group() for name in found if (match := re.match(pattern, name))]
    if not prefixes:
        promise = next((field for field in _PROMISES if getattr(config, field, None)), None)
        reason = f", although its configuration states {promise}" if promise else ""
        raise UnsupportedModel(f"the checkpoint of {target.name} has no MTP layers{reason}: choose another draft")
    return min(prefixes)


def load_mtp(stored: Mapping[str, Tensor], prefix: str, name: str, target: LM) -> MtpHead:
    """Load the first MTP layer of a target's checkpoint from its tensors, whose names begin with ``prefix``. Raises
    ModelCorrupt: it is incomplete, or of another kind."""
    tensors = {}
    for key, value in stored.items():
        key = key.removeprefix(prefix)
        if key.startswith(("embed_tokens.", "shared_head.head.")):  # copies of the target's weights
            continue
        if "mtp." not in prefix:
            part = next((old for old in _NAMES if key.startswith(f"{old}.")), None)
            key = f"layers.0.{key}" if part is None else _NAMES[part] + key.removeprefix(part)
        if not re.match(r"layers\.[1-9]", key):  # further layers predict tokens further on: only the first is used
            tensors[key] = value
    config: Any = target.model.config
    tell_of_others(name, max(int(getattr(config.get_text_config(decoder=True), key, None) or 0) for key in _PROMISES))
    head = MtpHead(target)
    shared = ("target_norm.", "rotary_emb.", "embed_tokens.", "lm_head.")
    fill(head, with_stacked_experts(tensors, head.state_dict()), name, target, shared=shared)
    return head


def tell_of_others(name: str, num_layers: int) -> None:
    if num_layers > 1:
        _LOG.warning("%s: of %d MTP layers the first drafts all tokens, the others are not used", name, num_layers)


def with_stacked_experts(tensors: Mapping[str, Tensor], expected: Mapping[str, Any]) -> dict[str, Tensor]:
    """Stack the weights of experts where the module has them in one tensor, as Transformers does."""
    stacked = dict(tensors)
    for key in expected:
        if key in tensors or not key.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            continue
        base, part = key.rsplit(".", 1)
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        num_experts = sum(name.startswith(f"{base}.") and name.endswith(f".{parts[0]}.weight") for name in tensors)
        if num_experts:
            stacked[key] = torch.stack(
                [torch.cat([stacked.pop(f"{base}.{i}.{one}.weight") for one in parts]) for i in range(num_experts)]
            )
    return stacked
