"""Training of DFlash heads: all tokens of a round at once, in rounds that begin at random places, the anchors.

The head that runs is that of inference (models/heads), over another cache: the context of a whole sequence, and behind
it the blocks of all anchors. A block sees the context before its anchor, and itself.

Source: DFlash, Chen et al. 2602.06036.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3Config

from outrider.distill.heads import (
    HeadStudent,
    borrow,
    default_features,
    from_target,
    initialise,
    new_config,
    num_layers_of,
)
from outrider.distill.student import Pair
from outrider.models.heads.block import BlockHead, Reach
from outrider.runtime.lm import LM

_TOKENS_PER_ANCHOR = 6  # 512 anchors in 3,072 tokens, as published
_MOST_LAYERS, _LAYERS_PER_LAYER = 5, 8  # five for the published targets, which have 28 to 48


def default_layers(target: LM) -> int:
    """Layers of a head: a layer for eight of the target's, and at most five."""
    return min(_MOST_LAYERS, math.ceil(num_layers_of(target) / _LAYERS_PER_LAYER))


def mask_token(target: LM, counts: Tensor) -> int:
    """The token for the slots that are to be filled: the rarest. Its embedding is not zero, as that of padding may be:
    the slots of a block would all be alike.

    Args:
        counts: of the tokens in the training data. [V]
    """
    embed = target.model.get_input_embeddings()
    by_count = torch.sort(counts, stable=True).indices.to(target.device)
    return next(int(token_id) for token_id in by_count if bool(embed(token_id).any()))


def drafted_blocks(
    head: BlockHead, ids: Tensor, target_logits: Tensor, features: Tensor, anchors: Tensor
) -> Iterator[Pair]:
    """Draft blocks along sequences.

    Args:
        ids: [B, T]
        target_logits, features: of the target along them. [B, T, V], [B, T, F]
        anchors: places of the last tokens before the rounds. [A]

    Yields:
        For each drafted token i = 0, 1, ...: logits of the target [B, A, V] and of the head [B, A, D], for the token at
        ``anchors + 1 + i``.
    """
    states = head.fuse(features.to(next(head.parameters()).dtype))
    length = ids.shape[1]
    cache = DynamicCache(config=head.config)
    head.keep(states, torch.arange(length, device=ids.device).expand(len(ids), -1), cache)
    places = anchors[:, None] + torch.arange(head.block_size, device=ids.device)
    fed = ids.new_full((len(ids), *places.shape), head.mask_id)
    fed[..., 0] = ids[:, anchors]
    masks = _masks(head, places, length, states.dtype)
    outputs = head(fed.flatten(1), places.flatten().expand(len(ids), -1), masks, cache)
    outputs = outputs.unflatten(1, places.shape)  # [B, A, S, H]
    for i in range(head.most_drafted):
        yield target_logits[:, anchors + i], head.logits(outputs[:, :, head.num_before + i])


def _masks(head: BlockHead, places: Tensor, length: int, dtype: torch.dtype) -> Mapping[Reach, Tensor]:
    """Masks of inference, over the context of a sequence and the slots of all blocks.

    Args:
        places: of the slots. [A, S]

    Returns:
        [1, 1, A S, T + A S]
    """
    num, size = places.shape
    lowest = torch.finfo(dtype).min
    is_before = torch.arange(length, device=places.device) < places[:, :1, None]  # [A, 1, T]
    blocks = torch.arange(num, device=places.device)
    masks = {}
    for reach, mask in head.masks(places, length + size, dtype).items():
        by_place = mask[:, 0]  # [A, S, T + S]
        context = by_place[..., :length].masked_fill(~is_before, lowest)
        slots = mask.new_full((num, num, size, size), lowest)
        slots[blocks, blocks] = by_place.gather(2, places[:, None].expand(-1, size, -1))
        slots = slots.transpose(1, 2).flatten(2)  # [A, S, A S]
        masks[reach] = torch.cat((context, slots), dim=2).flatten(0, 1)[None, None]
    return masks


def new_dflash(
    target: LM, num_layers: int, num_draft_tokens: int, mask_id: int, token_ids: Tensor | None, seed: int
) -> BlockHead:
    """Create a DFlash head for a target, in float32.

    It begins with the deepest of the target's states as context; its layers are random. Embedding and LM head are the
    target's, neither trained nor stored; a head with fewer tokens has an LM head of its own.

    Args:
        num_draft_tokens: the slots of a block, less the anchor's.
        token_ids: the target's ids of its tokens, ascending; None for all. D numbers
    """
    features = default_features(num_layers_of(target))
    stated = {
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": features,
        "block_size": num_draft_tokens + 1,
        "mask_token_id": mask_id,
    }
    tensors = from_target(target, len(features), token_ids)
    head = BlockHead(new_config(Qwen3Config, target, num_layers), stated, tensors, target)
    borrow(head, "embed_tokens")
    head = initialise(head, tensors, token_ids, seed).to(target.device)
    if token_ids is None:
        borrow(head, "lm_head")  # in float32, as the head
        head.lm_head.requires_grad_(False)
    else:
        head.num_tokens = len(token_ids)
    return head


class BlockStudent(HeadStudent[BlockHead]):
    """A DFlash head, from ``new_dflash``."""

    def __init__(self, target: LM, head: BlockHead, states: Path | None = None) -> None:
        super().__init__(target, head, head.most_drafted, states)
        # Chen et al. weigh token i by exp(-i / g), g = 7, 5 and 4 for blocks of 16, 10 and 8: about half a block.
        self.later = math.exp(-2 / head.block_size)

    def rounds(
        self,
        head: BlockHead,
        ids: Tensor,
        target_logits: Tensor,
        features: Tensor,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Iterator[Pair]]:
        length = ids.shape[1]
        places = torch.randperm(length - self.depth + 1, generator=generator)
        anchors = places[: max(1, length // _TOKENS_PER_ANCHOR)].sort().values.to(ids.device)
        return anchors + 1, drafted_blocks(head, ids, target_logits, features, anchors)

    def settings(self) -> dict[str, Any]:
        return {
            "architectures": ["DFlashDraftModel"],
            "speculators_model_type": "dflash",
            "aux_hidden_state_layer_ids": list(self.head.features),
            "block_size": self.head.block_size,
            "mask_token_id": self.head.mask_id,
            "sample_from_anchor": False,
            "sliding_window_non_causal": False,
        }
