"""Block heads: a few decoder layers that draft all tokens of a round in one forward.

The context of a head is the target's hidden states. They are fused, and projected to the keys and values of each layer:
a function of a token's place alone. A block follows, the last token and mask tokens, one in each slot; its slots
attend to the context and to each other. The output of a slot predicts the token at its own place, or the next one if
the head samples from its anchor, the last token.

DFlash draws these tokens independently of each other, so that tokens that are likely alone may not fit together. DFlash
2 adds to the logits of the most probable tokens of a slot what the token before tells, and drops the others; its layers
have convolutions along the block.

Sources: DFlash (2602.06036), DFlash 2 (inco.ai/blog/dflash2). Layouts of checkpoints: z-lab, speculators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.errors import ModelCorrupt, UnsupportedModel
from outrider.models.heads.base import (
    Head,
    complete,
    decoder_of,
    layer_config,
    own_tensors,
    plan_of_layers,
    rotation,
    set_vocabulary,
    window_of,
)
from outrider.native.plan import MAX_TOKENS, NotPlanned, Plan
from outrider.runtime.lm import LM
from outrider.runtime.modules import cache_argument
from outrider.runtime.vocabulary import UNKNOWN


@dataclass(frozen=True, slots=True)
class Reach:
    """The places that the slots of a block see in a layer: if it is causal, no later slots; of a window, as many
    tokens, the slot included; or all slots see so many tokens of the context (``before_anchor``)."""

    is_causal: bool
    window: int | None = None
    before_anchor: int | None = None

    def mask(self, positions: Tensor, view_len: int, dtype: torch.dtype) -> Tensor:
        """Additive mask of a block with slots at these positions: 0 for visible keys, the lowest number for others.
        [B, T] -> [B, 1, T, view_len]"""
        places = torch.arange(view_len, device=positions.device)
        slots = positions[..., None]
        is_hidden = places > (slots if self.is_causal else slots[:, -1:])  # [B, T or 1, view_len]
        if self.window is not None:
            is_hidden = is_hidden | (places <= slots - self.window) | (places >= slots + self.window)
        if self.before_anchor is not None:
            is_hidden = is_hidden | (places < slots[:, :1] - self.before_anchor)
        is_hidden = is_hidden.expand(*positions.shape, view_len)
        mask = torch.zeros(is_hidden.shape, dtype=dtype, device=positions.device)
        return mask.masked_fill_(is_hidden, torch.finfo(dtype).min)[:, None]


class CandidateSelector(nn.Module):
    """Keeps the most probable tokens of a slot, with a score for each pair of the token before and a candidate, which
    depends on the output of the slot, of the size H."""

    def __init__(self, tensors: Mapping[str, Tensor], size: int, num_candidates: int) -> None:
        super().__init__()
        num_tokens, rank = tensors["predecessor_codebook"].shape
        self.predecessor_codebook = nn.Parameter(torch.empty(num_tokens, rank))
        self.successor_codebook = nn.Parameter(torch.empty(num_tokens, rank))
        self.hidden_projection = nn.Linear(size, rank, bias=False)
        self.num_candidates = num_candidates

    def forward(self, logits: Tensor, output: Tensor, ids: Tensor) -> Tensor:
        """Correct the logits of a slot by its output [B, H] and the token before [B]. [B, D] -> [B, D]"""
        values, candidates = logits.topk(min(self.num_candidates, logits.shape[1]), dim=-1)  # [B, C]
        context = functional.embedding(ids, self.predecessor_codebook) * self.hidden_projection(output)  # [B, R]
        successors = functional.embedding(candidates, self.successor_codebook)  # [B, C, R]
        scores = values + (context[:, None] * successors).sum(dim=-1)
        return torch.full_like(logits, UNKNOWN).scatter(1, candidates, scores)


class DynamicConvolution(nn.Module):
    """Convolutions along a block, before and after another module. Their kernels are a sum of weights and of a function
    of each token; a slot sees itself and those before it."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        _, num_taps, size = tensors["base_kernel"].shape
        self.base_kernel = nn.Parameter(torch.empty(2, num_taps, size))
        self.kernel_projection = nn.Linear(size, len(tensors["kernel_projection.weight"]), bias=False)

    def forward(self, hidden: Tensor, inner: Callable[[Tensor], Tensor]) -> Tensor:
        """[B, T, H] -> [B, T, H]"""
        _, num_taps, size = self.base_kernel.shape
        changes = self.kernel_projection(hidden).unflatten(-1, (2, num_taps, -1))  # [B, T, 2, taps, groups]
        kernels = self.base_kernel + changes.repeat_interleave(size // changes.shape[-1], dim=-1)
        return _convolved(inner(_convolved(hidden, kernels[:, :, 0])), kernels[:, :, 1])


def _convolved(hidden: Tensor, kernels: Tensor) -> Tensor:
    """[B, T, H], and kernels [B, T, taps, H] -> [B, T, H]"""
    length, results = hidden.shape[1], torch.zeros_like(hidden)
    for tap in range(min(kernels.shape[2], length)):
        results = results + kernels[:, :, tap] * functional.pad(hidden[:, : length - tap], (0, 0, tap, 0))
    return results


class BlockHead(Head):
    """See the module.

    Attributes:
        block_size: T, the slots of a block.
        num_before: slots before the first that predicts a draft: 0 if it samples from its anchor, else 1.
        most_drafted: most tokens that it drafts in a round.
        mask_id: the token in all slots but the first.
        num_tokens: D, its tokens; others are padding of its LM head.
        candidate_selector: corrects the logits of a draft by the token before it; None if drafts are independent.
    """

    mask_id: int

    def __init__(self, config: Any, stated: Mapping[str, Any], tensors: Mapping[str, Tensor], target: LM) -> None:
        """Arguments: see ``Eagle3Head``."""
        super().__init__()
        self.features = _features(stated, config, target)
        self.reaches = _reaches(stated, config, window_of(stated.get("transformer_layer_config") or stated, target))
        self.config = layer_config(config, config.num_hidden_layers, target.model)
        self.state_size = 0
        self.block_size = int(_value(stated, "block_size", 16))
        self.num_before = 0 if _value(stated, "sample_from_anchor", False) else 1
        self.most_drafted = self.block_size - self.num_before
        self.mask_id = _value(stated, "mask_token_id")
        self.num_tokens = target.vocab_size
        self.scale = float(_value(stated, "input_embedding_scale", 1.0))
        self.multiplier = float(_value(stated, "output_multiplier", 1.0))
        self.softcap = float(_value(stated, "final_logit_softcapping", 0.0) or 0.0)
        decoder = decoder_of(self.config, target.name)
        size, eps, norm = config.hidden_size, config.rms_norm_eps, type(decoder.norm)
        with torch.device("meta"):
            self.fc = nn.Linear(tensors["fc.weight"].shape[1], size, bias="fc.bias" in tensors)
            self.hidden_norm, self.norm = norm(size, eps=eps), norm(size, eps=eps)
            self.layers = decoder.layers
            self.is_convolved = bool(_part_of(tensors, "layers.0.attention_conv."))
            if self.is_convolved:
                for layer in self.layers:
                    for part in ("attention_conv", "mlp_conv"):
                        setattr(layer, part, DynamicConvolution(_part_of(tensors, f"layers.0.{part}.")))
            self.candidate_selector = None
            if selector := _part_of(tensors, "candidate_selector."):
                self.candidate_selector = CandidateSelector(selector, size, int(_value(stated, "selector_top_k", 16)))
        self.cache_name = cache_argument(self.layers[0])
        set_vocabulary(self, tensors, target)
        self.rotary_emb = type(decoder.rotary_emb)(self.config).to(target.device)

    @property
    def token_weights(self) -> list[str]:
        own = ["candidate_selector.successor_codebook"] if self.candidate_selector is not None else []
        return super().token_weights + own

    def fuse(self, features: Tensor) -> Tensor:
        fused: Tensor = self.hidden_norm(self.fc(features))
        return fused

    def keep(self, states: Tensor, positions: Tensor, cache: Any) -> None:
        """Write the context of tokens, keys and values in each layer, of their states (``fuse``) into a cache that is
        set up for their positions. [B, T, H], [B, T]"""
        cos, sin = rotation(self.rotary_emb, states, positions.clamp_min(0))
        modules: Any = self.layers
        for layer, store in zip(modules, cache.layers, strict=True):
            attention = layer.self_attn
            shape = (*states.shape[:2], -1, attention.head_dim)
            keys = attention.k_norm(attention.k_proj(states).view(shape)).transpose(1, 2)
            values = attention.v_proj(states).view(shape).transpose(1, 2)
            first, second = keys.chunk(2, dim=-1)
            store.update(keys * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None], values)

    def forward(self, input_ids: Tensor, positions: Tensor, view_len: int, cache: Any) -> Tensor:
        """Feed blocks, and return the outputs of their slots. Positions, for which the cache is set up, are -1 in rows
        that are not fed. [B, T], [B, T] -> [B, T, H]"""
        weight = self.embed_tokens.weight  # as it is: some embeddings scale their output
        hidden = functional.embedding(input_ids.to(weight.device), weight).to(self.norm.weight) * self.scale
        masks = {reach: reach.mask(positions, view_len, hidden.dtype) for reach in set(self.reaches)}
        about = self.about(hidden, positions.clamp_min(0), None, cache)
        for layer, reach in zip(self.layers, self.reaches, strict=True):
            about["attention_mask"] = masks[reach]
            hidden = _through(layer, hidden, about) if self.is_convolved else layer(hidden, **about)
        output: Tensor = self.norm(hidden)
        return output

    def plan(self) -> Plan:
        if self.is_convolved:
            raise NotPlanned("its layers have convolutions")
        if self.block_size > MAX_TOKENS:
            raise NotPlanned(f"its block has more than {MAX_TOKENS} slots")
        attention = [
            {"window": one.window, "before_anchor": one.before_anchor, "is_bidirectional": not one.is_causal}
            for one in self.reaches
        ]
        return replace(plan_of_layers(self, attention), embedding_scale=self.scale)

    def logits(self, outputs: Tensor) -> Tensor:
        """[..., H] -> [..., D]"""
        logits: Tensor = self.lm_head(outputs)[..., : self.num_tokens].to(outputs.device) * self.multiplier
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap > 0 else logits


def _through(layer: Any, hidden: Tensor, about: Mapping[str, Any]) -> Any:
    normed = layer.input_layernorm(hidden)
    hidden = hidden + layer.attention_conv(normed, lambda inputs: layer.self_attn(hidden_states=inputs, **about)[0])
    return hidden + layer.mlp_conv(layer.post_attention_layernorm(hidden), layer.mlp)


def _part_of(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _value(stated: Mapping[str, Any], key: str, default: Any = None) -> Any:
    inner = stated.get("dflash_config") or {}
    return inner.get(key, stated.get(key, default))


def _features(stated: Mapping[str, Any], config: Any, target: LM) -> tuple[int, ...]:
    """Hidden states that a head reads. Layer i of z-lab is the output of that layer, so feature i + 1."""
    if (ids := _value(stated, "aux_hidden_state_layer_ids")) is not None:
        return tuple(ids)
    if (ids := _value(stated, "target_layer_ids")) is None:  # in the first checkpoints: spread evenly
        last, num = len(target.model.get_decoder().layers) - 3, config.num_hidden_layers
        ids = [round(1 + i * (last - 1) / (num - 1)) for i in range(num)] if num > 1 else [(last + 3) // 2]
    return tuple(i + 1 for i in ids)


def _reaches(stated: Mapping[str, Any], config: Any, context_len: int | None) -> list[Reach]:
    """Reach of the slots, by layer, which see at most ``context_len`` tokens of the context; None for all."""
    windows = [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]
    if "speculators_model_type" in stated:
        is_causal = not stated.get("sliding_window_non_causal", stated["speculators_model_type"] == "dflash2")
        reaches = [Reach(is_causal and window is not None, before_anchor=window) for window in windows]
    else:
        is_causal = _value(stated, "is_causal")
        reaches = [Reach(window is not None if is_causal is None else bool(is_causal), window) for window in windows]
    return [one if one.window or one.before_anchor else replace(one, before_anchor=context_len) for one in reaches]


def load_block(stored: Mapping[str, Tensor], stated: Mapping[str, Any], name: str, target: LM) -> BlockHead:
    """Load a block head for a target. Arguments and errors: see ``load_eagle3``."""
    from transformers import Qwen3Config

    kind = stated.get("speculators_model_type", "dflash")
    if kind not in ("dflash", "dflash2"):  # others have the same tensors, and more
        raise UnsupportedModel(f"{name} is a head of the kind {kind}, which is not known here")
    tensors, offsets = own_tensors(stored, target)
    tensors = {key.replace("_codebook.weight", "_codebook"): value for key, value in tensors.items()}
    if offsets is not None and _part_of(tensors, "candidate_selector."):
        raise UnsupportedModel(f"{name} has a reduced vocabulary, which DFlash 2 heads do not have")
    # Of DSpark, LiLiCorr, and DeepSpec's windows.
    for setting in ("markov_rank", "enable_confidence_head", "lilicorr_candidate_topk", "use_swa"):
        if _value(stated, setting):
            raise UnsupportedModel(f"{name} states {setting}, which is not run here: take a plain DFlash head")
    promises = {"selector_rank": "candidate_selector.", "conv_kernel_size": "layers.0.attention_conv."}
    for setting, beginning in promises.items():
        if _value(stated, setting) and not _part_of(tensors, beginning):
            raise ModelCorrupt(f"{name} has no weights {beginning}*, although its configuration states {setting}")
    own = dict(stated.get("transformer_layer_config") or stated)
    own.pop("model_type", None)  # the layers are Qwen3's, whatever it says
    config = Qwen3Config.from_dict(own)
    for kind in config.layer_types:
        if kind != "full_attention" and (kind != "sliding_attention" or not config.sliding_window):
            raise UnsupportedModel(f"{name} has layers of type {kind} with the window {config.sliding_window}")
    try:
        head = BlockHead(config, stated, tensors, target)
    except KeyError as error:
        raise ModelCorrupt(f"{name} lacks weights of the head, {error.args[0]} among them") from None
    if head.most_drafted < 1:
        raise ModelCorrupt(f"{name} drafts nothing: its block_size is {head.block_size}")
    complete(head, tensors, offsets, name, target)
    if head.token_ids is not None:
        head.num_tokens = len(head.token_ids)
    if (selector := head.candidate_selector) is not None:
        if selector.num_candidates < 1:
            raise ModelCorrupt(f"{name} chooses among {selector.num_candidates} candidates (selector_top_k)")
        if (num_known := len(selector.predecessor_codebook)) < target.vocab_size:
            raise ModelCorrupt(f"{name} knows {num_known} tokens; {target.name} has {target.vocab_size}")
    if head.mask_id is None or not 0 <= head.mask_id < len(head.embed_tokens.weight):
        raise ModelCorrupt(f"{name} states no mask token that it has an embedding for: {head.mask_id}")
    return head
