"""MTP layers: multi-token prediction layers in the target's own checkpoint.

A decoder layer of the target's own kind over the embedding of a token and the target's last hidden state (after its
final norm). Embedding, final norm of the target and LM head are the target's. A drafted token is fed with the layer's
own output (after its norm).

Source: DeepSeek-V3 (2412.19437, section 2.2). Layouts: Qwen's (``mtp.*``); DeepSeek's and GLM's (a decoder layer beyond
the last one).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import UnsupportedModel
from outrider.models.heads.base import ChainHead, fill, layer_config, plan_of_head, rotation
from outrider.models.heads.checkpoint import open_tensors
from outrider.native.families import plan_of
from outrider.native.plan import JointPlan, MatrixPlan, Plan, rename
from outrider.runtime.cache_argument import cache_argument
from outrider.runtime.cache_shapes import LayerShape
from outrider.runtime.lm import LM

# The layout of DeepSeek and GLM, in the names of Qwen's.
_RENAMED = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
}
_OF_TARGET = ("embed_tokens.", "shared_head.head.")  # copies of the target's weights
_PROMISES = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")


class MtpHead(ChainHead):
    """See the module.

    Attributes:
        index: the target's decoder layer whose kind it shares.
    """

    index: int
    norm_output = True

    def __init__(self, target: LM) -> None:
        super().__init__()
        model: Any = target.model
        decoder = model.get_decoder()
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
        module: Any
        for module in self.layers.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = 0
            if hasattr(module, "config"):
                module.config = self.config
        self.target_norm, self.rotary_emb = decoder.norm, decoder.rotary_emb
        self.embed_tokens, self.lm_head = model.get_input_embeddings(), model.get_output_embeddings()

    def layer_shapes(self, target: LM) -> list[LayerShape]:
        return [replace(target.layer_shapes[self.index], device=target.device, states=())]

    def fuse(self, features: Tensor) -> Tensor:
        normed: Tensor = self.target_norm(features)
        return normed

    def forward(
        self, input_ids: Tensor, states: Tensor, positions: Tensor, mask: Tensor, cache: Any
    ) -> tuple[Tensor, Tensor]:
        embedded = self.pre_fc_norm_embedding(self.embed_tokens(input_ids).to(states.device))
        hidden = self.fc(torch.cat((embedded, self.pre_fc_norm_hidden(states)), dim=-1))
        hidden = self.layers[0](
            hidden,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=rotation(self.rotary_emb, hidden, positions),
            **{self.cache_name: cache},
        )
        output = self.norm(hidden)
        return output, output

    def plan(self) -> Plan:
        plan = plan_of(self._of_target)
        layer = rename(plan.layers[self.index], f"model.layers.{self.index}.", "layers.0.")
        norm = replace(plan.last_norm, weight="norm.weight")
        joint = JointPlan(
            replace(norm, weight="pre_fc_norm_embedding.weight"),
            replace(norm, weight="pre_fc_norm_hidden.weight"),
            MatrixPlan("fc.weight"),
        )
        return replace(plan_of_head(plan, self), layers=(layer,), last_norm=norm, joint=joint)


def load_mtp(location: str, target: LM, *, allow_pickle: bool = False) -> MtpHead:
    """Load the first MTP layer of a target's checkpoint.

    Args:
        location: of the target: a folder or hub id.

    Raises:
        UnsupportedModel: the checkpoint has none.
        ModelCorrupt: it is incomplete, or of another kind.
        ModelNotFound
    """
    model: Any = target.model
    config = model.config.get_text_config(decoder=True)
    num_layers = config.num_hidden_layers
    stored = open_tensors(location, allow_pickle=allow_pickle)
    prefixes = [
        match.group()
        for name in stored.names
        if (match := re.match(rf"(model\.)?mtp\.|(model\.(language_model\.)?)?layers\.{num_layers}\.", name))
    ]
    if not prefixes:
        promise = next((field for field in _PROMISES if getattr(config, field, None)), None)
        reason = f", although its configuration states {promise}" if promise else ""
        raise UnsupportedModel(f"the checkpoint of {target.name} has no MTP layers{reason}: choose another draft")
    prefix = min(prefixes)
    tensors = {}
    for key, value in stored.read(prefix).items():
        key = key.removeprefix(prefix)
        if key.startswith(_OF_TARGET):
            continue
        if "mtp." not in prefix:
            part = next((old for old in _RENAMED if key.startswith(f"{old}.")), None)
            key = f"layers.0.{key}" if part is None else _RENAMED[part] + key.removeprefix(part)
        if not re.match(r"layers\.[1-9]", key):  # further layers predict tokens further on: only the first is used
            tensors[key] = value
    head = MtpHead(target)
    shared = ("target_norm.", "rotary_emb.", "embed_tokens.", "lm_head.")
    fill(
        head, with_stacked_experts(tensors, head.state_dict()), f"the MTP layer of {target.name}", target, shared=shared
    )
    return head


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
