"""LiLiCorr's part of a block head: the most probable tokens of all slots, correlated with each other.

Each slot keeps a few candidates. All of them, a lattice, attend to each other in a small transformer, which gives each
candidate two vectors; the score of two neighbours is the cosine of one's outgoing and the other's incoming vector. The
first slot's neighbour is the anchor, the target's fused state of the token before the last one. So q of a slot depends
on the token drawn before, among the slot's candidates alone.

Source: 2608.20530; names of weights: Model-Optimizer's ``modeling_lilicorr``, which SGLang and vLLM load, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.models.heads.block_parts import part_of
from outrider.runtime.vocabulary import UNKNOWN

_NUM_FACTS = 5  # about a candidate: log q, q, log q less the largest one's, its rank, whether it is the first


class LatticeLayer(nn.Module):
    """Attention of all candidates to all others, with a bias, and an MLP."""

    def __init__(self, tensors: Mapping[str, Tensor], num_heads: int, eps: float) -> None:
        super().__init__()
        width, inner = len(tensors["attn_norm.weight"]), len(tensors["mlp.0.weight"])
        self.attn_norm, self.mlp_norm = nn.RMSNorm(width, eps=eps), nn.RMSNorm(width, eps=eps)
        self.attn = nn.MultiheadAttention(width, num_heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, width))

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        """[B, N, W], and the bias [heads, N, N] -> [B, N, W]"""
        attention = self.attn
        joint = functional.linear(self.attn_norm(hidden), attention.in_proj_weight, attention.in_proj_bias)
        q, k, v = (part.unflatten(-1, (len(bias), -1)).transpose(1, 2) for part in joint.chunk(3, dim=-1))
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        hidden = hidden + attention.out_proj(attended.transpose(1, 2).flatten(2))
        result: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return result


class Lattice(nn.Module):
    """Scores the candidates of each slot by the token before.

    Args:
        tensors: its weights; they decide its sizes.
        size: H, of the outputs of slots.
        num_candidates: C, tokens that each slot keeps.
        eps: of its norms.
        vector_eps: the least norm of a vector in a cosine.
        logit_scale: factor of cosines.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        size: int,
        num_candidates: int,
        *,
        eps: float,
        vector_eps: float,
        logit_scale: float,
    ) -> None:
        super().__init__()
        width, rank = len(tensors["output_norm.weight"]), len(tensors["out_head.weight"])
        biases = tensors["relative_slot_bias"]
        self.num_candidates, self.vector_eps, self.logit_scale = num_candidates, vector_eps, logit_scale
        self.token_proj = nn.Linear(size, width) if "token_proj.weight" in tensors else nn.Identity()
        self.pass_hidden_proj, self.context_proj = nn.Linear(size, width), nn.Linear(size, width)
        first, last = nn.Linear(_NUM_FACTS, width), nn.Linear(width, width)
        self.feature_mlp = nn.Sequential(nn.LayerNorm(_NUM_FACTS), first, nn.SiLU(), last)
        self.slot_embedding = nn.Parameter(torch.empty(tensors["slot_embedding"].shape))  # [1, 1, S, 1, W]
        self.rank_embedding = nn.Parameter(torch.empty(tensors["rank_embedding"].shape))  # [1, 1, 1, most C, W]
        self.relative_slot_bias = nn.Parameter(torch.empty(biases.shape))  # [heads, 2 S + 1]
        self.same_slot_bias = nn.Parameter(torch.empty(len(biases)))
        numbers = sorted({int(name.split(".")[1]) for name in tensors if name.startswith("layers.")})
        layers = [LatticeLayer(part_of(tensors, f"layers.{i}."), len(biases), eps) for i in numbers]
        self.layers = nn.ModuleList(layers)
        self.output_norm, self.anchor_norm = nn.RMSNorm(width, eps=eps), nn.RMSNorm(width, eps=eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head, self.in_head = nn.Linear(width, rank), nn.Linear(width, rank)
        self.anchor_out_head = nn.Linear(width, rank)

    @property
    def num_slots(self) -> int:
        return self.slot_embedding.shape[2]

    def start(
        self, logits: Tensor, outputs: Tensor, embed_tokens: Any, anchors: Tensor, has_anchor: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """State before the first draft.

        Args:
            logits: of the slots. [B, S, D]
            outputs: of the slots. [B, S, H]
            embed_tokens: the target's embedding.
            anchors: states. [B, H]
            has_anchor: [B]

        Returns:
            candidates of the slot before, any of them before the first one [B, C]; of all slots [B, S, C]; and scores
            of each after each of the slot before [B, S, C, C]
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        values, ids = logits.topk(self.num_candidates, dim=-1)
        values = values - logits.logsumexp(dim=-1, keepdim=True)
        ranks = torch.arange(self.num_candidates, device=ids.device)
        shares = ranks / max(1, self.num_candidates - 1)
        facts = values, values.exp(), values - values[..., :1], shares.expand_as(values), (ranks == 0).expand_as(values)
        features = torch.stack([fact.to(outputs.dtype) for fact in facts], dim=-1)
        hidden = self.token_proj(embed_tokens(ids).to(outputs)) + self.pass_hidden_proj(outputs)[:, :, None]
        hidden = hidden + self.feature_mlp(features)
        hidden = hidden + self.slot_embedding[0] + self.rank_embedding[0, :, :, : self.num_candidates]
        hidden = hidden.flatten(1, 2)  # [B, S * C, W]
        slots = torch.arange(self.num_slots, device=ids.device).repeat_interleave(self.num_candidates)
        distances = slots[:, None] - slots
        bias = self.relative_slot_bias[:, distances + self.num_slots]
        bias = bias + (distances == 0) * self.same_slot_bias[:, None, None]
        for layer in self.layers:
            hidden = layer(hidden, bias)
        hidden = self.output_norm(hidden).unflatten(1, (self.num_slots, -1))
        anchor = self.anchor_norm(self.context_proj(anchors) * has_anchor[:, None])
        beside = anchor[:, None, None].expand_as(hidden)
        factors = functional.silu(self.factor_input_proj(torch.cat((hidden, beside, hidden * beside), dim=-1)))
        outgoing, incoming, first = (
            functional.normalize(head(inputs), dim=-1, eps=self.vector_eps)
            for head, inputs in ((self.out_head, factors), (self.in_head, factors), (self.anchor_out_head, anchor))
        )
        before = torch.cat((first[:, None, None].expand_as(outgoing[:, :1]), outgoing[:, :-1]), dim=1)
        return ids[:, 0], ids, self.logit_scale * (before @ incoming.transpose(-1, -2))

    def forward(
        self, logits: Tensor, output: Tensor, ids: Tensor, before: Tensor, candidates: Tensor, scores: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits of a slot after a token; see ``MarkovHead``. A token that is none of the candidates counts as the
        first of them."""
        which = (before == ids[:, None]).long().argmax(dim=1)  # [B]
        values = scores[:, 0].gather(1, which[:, None, None].expand(-1, 1, scores.shape[-1]))[:, 0]
        here = torch.full_like(logits, UNKNOWN).scatter(1, candidates[:, 0], values.to(logits.dtype))
        return here, candidates[:, 0], candidates[:, 1:], scores[:, 1:]
