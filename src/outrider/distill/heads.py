"""Training of EAGLE-3 heads, by unrolling: as in a round, each later token is drafted from the head's own states.

The head that runs is that of inference (models/heads), over another cache. For every position of a sequence at once, a
round that begins there is followed along the sequence: step d reads the token at d places further on, attends to the
entries with the target's states up to the beginning of the round, and to the d entries of its own round since then.

Source: training-time test, Li et al. 2503.01840, section 3.2.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig

from outrider.distill.kinds import Pair, Student
from outrider.distill.student import head_size
from outrider.drafters.base import Drafter
from outrider.drafters.chain import ChainDrafter
from outrider.errors import NumericsError
from outrider.models.heads.base import ChainHead, head_lm, layer_config
from outrider.models.heads.eagle3 import LAYER_IDS, Eagle3Head
from outrider.models.heads.saving import save_speculators
from outrider.models.quantize import widened_weights
from outrider.runtime.hidden_states import recorded_states
from outrider.runtime.lm import LM
from outrider.runtime.vocabulary import spread
from outrider.scoring.alpha import overlap
from outrider.scoring.teacher_forcing import Text
from outrider.stats.intervals import Interval, bounded_mean

_BATCH = 8  # sequences whose alpha is measured together
_SPREAD = 0.02  # standard deviation of initial weights, as in Llama


def unrolled(head: ChainHead, target: LM, ids: Tensor, depth: int) -> Iterator[Pair]:
    """Follow rounds along sequences.

    Args:
        ids: [B, T]
        depth: drafted tokens.

    Yields:
        For each drafted token d = 0, 1, ...: logits of the target [B, T-1-d, V] and of the head [B, T-1-d, D], for the
        token at i + d + 2 in row i: the first token that the round can draft is at i + 2.
    """
    model: Any = target.model
    with torch.no_grad(), recorded_states(model, head.features) as found:
        target_logits = model(input_ids=ids, use_cache=False).logits[..., : target.vocab_size].to(ids.device)
    features = torch.cat([found[i].to(ids.device) for i in head.features], dim=-1)[:, :-1]
    states = head.fuse(features.to(next(head.parameters()).dtype))
    cache, seen = DynamicCache(), torch.empty(0)
    for d in range(depth):
        num = ids.shape[1] - 1 - d  # rounds that have not reached the end of the sequence
        own = torch.eye(num, dtype=torch.bool, device=ids.device)
        # A round sees the same entries of earlier steps as before, and its own of this step.
        seen = torch.ones_like(own).tril() if d == 0 else torch.cat((seen[:num], own), dim=1)
        mask = torch.zeros(seen.shape, dtype=states.dtype, device=ids.device)
        mask = mask.masked_fill_(~seen, torch.finfo(states.dtype).min)[None, None]
        positions = torch.arange(d, d + num, device=ids.device).expand(len(ids), -1)
        logits, states = head(ids[:, 1 + d :], states[:, :num], positions, mask, cache)
        yield target_logits[:, 1 + d :], logits


def new_head(target: LM, token_ids: Tensor | None, seed: int) -> Eagle3Head:
    """Create an EAGLE-3 head of one layer for a target, in float32.

    It begins with the deepest of the target's states and the target's LM head; its layer is random. Its embedding is
    the target's: seen, and not a part of it, so that it is neither trained nor stored.

    Args:
        token_ids: the target's ids of its tokens, ascending; None for all. D numbers
    """
    model: Any = target.model
    source = model.config.get_text_config(decoder=True)
    size, num_heads = source.hidden_size, source.num_attention_heads
    own = LlamaConfig(  # of the kind that the engines know as EAGLE-3
        vocab_size=model.get_input_embeddings().weight.shape[0],
        hidden_size=size,
        intermediate_size=getattr(source, "intermediate_size", None) or 4 * size,
        num_hidden_layers=1,
        num_attention_heads=num_heads,
        num_key_value_heads=getattr(source, "num_key_value_heads", None) or num_heads,
        head_dim=head_size(source),
        max_position_embeddings=target.context_len,
        rms_norm_eps=getattr(source, "rms_norm_eps", 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": _rope_theta(source)},
        tie_word_embeddings=False,
    )
    config = layer_config(own, 1, model)
    tensors = _initial(target, config, token_ids, seed)
    stated = {LAYER_IDS: default_features(len(model.get_decoder().layers))}
    head = Eagle3Head(config, stated, tensors, target)
    vars(head)["embed_tokens"] = head._modules.pop("embed_tokens")
    head.load_state_dict(tensors, assign=True)
    head.register_buffer("token_ids", token_ids, persistent=False)
    return head.to(target.device)


def default_features(num_layers: int) -> tuple[int, int, int]:
    """Hidden states that a head reads: those of EAGLE-3; in a shallow target the inputs of other layers."""
    usual = (2, num_layers // 2, num_layers - 3)
    shallow = (min(1, num_layers - 1), num_layers // 2, num_layers - 1)
    return usual if usual[0] < usual[1] < usual[2] else shallow


def most_frequent(counts: Tensor, num_tokens: int) -> Tensor:
    """Ids of the most frequent tokens, ascending; of equally frequent ones the lowest. [V] -> [num_tokens]"""
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:num_tokens].sort().values


def _initial(target: LM, config: LlamaConfig, token_ids: Tensor | None, seed: int) -> dict[str, Tensor]:
    """Initial weights, by the names of the speculators layout."""
    model: Any = target.model
    output = widened_weights(nn.ModuleDict({"head": model.get_output_embeddings()}))["head.weight"]
    size, inner = config.hidden_size, config.intermediate_size
    width, narrow = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    generator = torch.Generator().manual_seed(seed)
    layer = "layers.0."
    shapes = {
        f"{layer}self_attn.q_proj.weight": (width, 2 * size),
        f"{layer}self_attn.k_proj.weight": (narrow, 2 * size),
        f"{layer}self_attn.v_proj.weight": (narrow, 2 * size),
        f"{layer}self_attn.o_proj.weight": (size, width),
        f"{layer}mlp.gate_proj.weight": (inner, size),
        f"{layer}mlp.up_proj.weight": (inner, size),
        f"{layer}mlp.down_proj.weight": (size, inner),
    }
    tensors = {name: _SPREAD * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors |= {
        f"{layer}{name}.weight": torch.ones(size)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    }
    tensors["fc.weight"] = torch.cat((torch.zeros(size, 2 * size), torch.eye(size)), dim=1)
    norm = model.get_decoder().norm
    # The weight of an RMS norm, however its kind stores it.
    tensors["norm.weight"] = norm(torch.ones(1, 1, size, dtype=target.dtype, device=target.device)).flatten()
    tensors["lm_head.weight"] = output if token_ids is None else output[token_ids.to(output.device)]
    return {name: value.detach().to("cpu", torch.float32).clone() for name, value in tensors.items()}


def _rope_theta(config: Any) -> float:
    theta: float = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10_000.0)
    return theta


class _Unrolled(nn.Module):
    """A head that runs along sequences with its target, which is no part of it."""

    def __init__(self, head: Eagle3Head, target: LM, depth: int) -> None:
        super().__init__()
        self.head = head
        self._target, self._depth = target, depth

    def forward(self, input_ids: Tensor) -> list[Pair]:
        return list(unrolled(self.head, self._target, input_ids, self._depth))


class HeadStudent(Student):
    """An EAGLE-3 head.

    Args:
        head: from ``new_head``.
        depth: tokens of a round that it is trained to draft.
    """

    def __init__(self, target: LM, head: Eagle3Head, depth: int) -> None:
        self.target, self.module = target, _Unrolled(head, target, depth)
        self._head, self._depth = head, depth

    def pairs(self, outputs: list[Pair], ids: Tensor) -> list[Pair]:
        """The target's distribution among the head's tokens: alpha is highest where q is in proportion to it."""
        token_ids, size = self._head.token_ids, self.target.vocab_size
        if token_ids is None:
            return [(target_logits, logits[..., :size]) for target_logits, logits in outputs]
        return [(target_logits[..., token_ids], logits) for target_logits, logits in outputs]

    def as_stored(self, name: str, dtype: torch.dtype) -> ChainDrafter:
        embedding = vars(self._head)["embed_tokens"]
        head = copy.deepcopy(self._head, {id(embedding): embedding})
        for parameter in head.parameters():  # not buffers, which are not stored
            parameter.data = parameter.to(dtype).to(self.target.dtype)
        return ChainDrafter(head_lm(head, name, self.target))

    @torch.inference_mode()
    def alphas(self, drafter: Drafter, texts: Sequence[Text]) -> tuple[Interval, ...]:
        head: Any = drafter.models[0].model
        sums: list[Tensor] = []  # of alpha over the tokens of each text, and their number [K, 2, B]
        for begin in range(0, len(texts), _BATCH):
            batch = texts[begin : begin + _BATCH]
            ids = torch.tensor([list(text.ids) for text in batch], device=self.target.device)
            num_given = torch.tensor([[text.num_given] for text in batch], device=ids.device)
            steps = []
            for target_logits, logits in unrolled(head, self.target, ids, self._depth):
                logits = spread(logits, head.token_ids, self.target.vocab_size)
                both = overlap(target_logits.float().softmax(-1), logits.float().softmax(-1))
                is_scored = torch.arange(both.shape[1], device=ids.device) + 2 >= num_given
                steps.append(torch.stack((torch.where(is_scored, both, 0.0).sum(1), is_scored.sum(1))))
            sums.append(torch.stack(steps).to("cpu", torch.float64))
        by_text = torch.cat(sums, dim=-1)
        if not bool(by_text.isfinite().all()):
            raise NumericsError(f"the head {drafter.name} gave NaN or infinite logits")
        return tuple(bounded_mean(step[0].tolist(), step[1].tolist(), (0.0, 1.0)) for step in by_text)

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        save_speculators(self._head, self.target, folder, num_draft_tokens=self._depth, dtype=dtype)
