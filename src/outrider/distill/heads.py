"""Heads in training: the parts that all kinds share."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from outrider.distill.student import Pair, Student, head_size
from outrider.drafters.base import Drafter
from outrider.errors import NumericsError
from outrider.models.heads.base import Head, embedding_of, head_lm
from outrider.models.heads.loading import check_target
from outrider.models.heads.saving import save_speculators
from outrider.models.weights import widened_weights
from outrider.runtime.lm import LM
from outrider.runtime.modules import recorded_states
from outrider.runtime.vocabulary import spread
from outrider.scoring.alpha import overlap
from outrider.scoring.teacher_forcing import Text
from outrider.stats.intervals import Interval, bounded_mean

_BATCH = 8  # sequences whose alpha is measured together
_SPREAD = 0.02  # standard deviation of initial weights, as in Llama

AnyHead = TypeVar("AnyHead", bound=Head)


def new_config(kind: Any, target: LM, num_layers: int) -> Any:
    """Configuration of a head's layers, as wide as those of its target.

    Args:
        kind: class of the configuration.
    """
    model: Any = target.model
    source = model.config.get_text_config(decoder=True)
    size, num_heads = source.hidden_size, source.num_attention_heads
    rope_theta = (getattr(source, "rope_parameters", None) or {}).get("rope_theta", 10_000.0)
    return kind(
        vocab_size=len(embedding_of(target)),
        hidden_size=size,
        intermediate_size=getattr(source, "intermediate_size", None) or 4 * size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=getattr(source, "num_key_value_heads", None) or num_heads,
        head_dim=head_size(source),
        max_position_embeddings=target.context_len,
        rms_norm_eps=getattr(source, "rms_norm_eps", 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        tie_word_embeddings=False,
    )


def num_layers_of(target: LM) -> int:
    """Number of decoder layers. Raises UnsupportedModel: no head can read them."""
    check_target(target)
    model: Any = target.model
    return len(model.get_decoder().layers)


def default_features(num_layers: int) -> tuple[int, int, int]:
    """Hidden states that a head reads: those of EAGLE-3; in a shallow target the inputs of other layers."""
    usual = (2, num_layers // 2, num_layers - 3)
    shallow = (min(1, num_layers - 1), num_layers // 2, num_layers - 1)
    return usual if usual[0] < usual[1] < usual[2] else shallow


def most_frequent(counts: Tensor, num_tokens: int) -> Tensor:
    """Ids of the most frequent tokens, ascending; of equally frequent ones the lowest. [V] -> [num_tokens]"""
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:num_tokens].sort().values


def from_target(target: LM, num_features: int, token_ids: Tensor | None) -> dict[str, Tensor]:
    """Initial weights that a head takes from its target: it passes on the deepest state, which the target's norm and LM
    head turn into logits."""
    model: Any = target.model
    output = widened_weights(nn.ModuleDict({"head": model.get_output_embeddings()}))["head.weight"]
    size = embedding_of(target).shape[1]
    # The weight of an RMS norm, however its kind stores it.
    norm = model.get_decoder().norm(torch.ones(1, 1, size, dtype=target.dtype, device=target.device)).flatten()
    return {
        "fc.weight": torch.cat((torch.zeros(size, (num_features - 1) * size), torch.eye(size)), dim=1),
        "norm.weight": norm,
        "lm_head.weight": output if token_ids is None else output[token_ids.to(output.device)],
    }


def initialise(head: AnyHead, given: Mapping[str, Tensor], token_ids: Tensor | None, seed: int) -> AnyHead:
    """Give a new head its tokens and its weights, in float32: those that are given; other norms are 1, and the rest is
    random."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in head.state_dict().items():
        if name in given:
            tensors[name] = given[name].detach().to("cpu", torch.float32).clone()
        elif weight.ndim == 1:
            tensors[name] = torch.ones(weight.shape)
        else:
            tensors[name] = _SPREAD * torch.randn(weight.shape, generator=generator)
    head.load_state_dict(tensors, assign=True)
    head.register_buffer("token_ids", token_ids, persistent=False)
    return head


def borrow(head: Head, name: str) -> None:
    """Let a head see a module that it does not have, so that it is neither trained nor stored."""
    vars(head)[name] = head._modules.pop(name)


def read_target(head: Head, target: LM, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of a target along sequences, and the head's states of their tokens: [B, T] -> [B, T, V], [B, T, H]"""
    model: Any = target.model
    with torch.no_grad(), recorded_states(model, head.features) as found:
        logits = model(input_ids=ids, use_cache=False).logits[..., : target.vocab_size].to(ids.device)
    features = torch.cat([found[i].to(ids.device) for i in head.features], dim=-1)
    return logits, head.fuse(features.to(next(head.parameters()).dtype))


class _InRounds(nn.Module):
    """A head that runs along sequences with its target, which is no part of it."""

    def __init__(self, student: HeadStudent[Any]) -> None:
        super().__init__()
        self.head = student.head
        self._rounds = student.rounds

    def forward(self, input_ids: Tensor) -> list[Pair]:
        _, steps = self._rounds(self.head, input_ids, None)
        return list(steps)


class HeadStudent(Student, Generic[AnyHead]):
    """A head.

    Args:
        depth: tokens of a round that it is trained to draft.
    """

    def __init__(self, target: LM, head: AnyHead, depth: int) -> None:
        self.target, self.head, self.depth = target, head, depth
        self.module = _InRounds(self)

    @abstractmethod
    def rounds(self, head: AnyHead, ids: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Iterator[Pair]]:
        """Follow rounds along sequences.

        Args:
            ids: [B, T]
            generator: chooses where they begin, if not everywhere; None for the one whose state the trainer keeps.

        Returns:
            Places of the first drafted tokens [R], ascending; and for each drafted token logits of the target [B, R, V]
            and of the head [B, R, D], without the last rounds if these have reached the end of the sequence.
        """

    @abstractmethod
    def drafter(self, head: LM) -> Drafter:
        """Its drafter."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Its own part of a config.json in the speculators layout."""

    def pairs(self, outputs: list[Pair], ids: Tensor) -> list[Pair]:
        """The target's distribution among the head's tokens: alpha is highest where q is in proportion to it."""
        token_ids, size = self.head.token_ids, self.target.vocab_size
        if token_ids is None:
            return [(target_logits, logits[..., :size]) for target_logits, logits in outputs]
        return [(target_logits[..., token_ids], logits) for target_logits, logits in outputs]

    def as_stored(self, name: str, dtype: torch.dtype) -> Drafter:
        model: Any = self.target.model
        targets = {"embed_tokens": model.get_input_embeddings(), "lm_head": model.get_output_embeddings()}
        head = copy.deepcopy(self.head, {id(vars(self.head)[part]): targets[part] for part in self._borrowed})
        for parameter in head.parameters():  # not buffers, which are not stored
            parameter.data = parameter.to(dtype).to(self.target.dtype)
        return self.drafter(head_lm(head, name, self.target))

    @property
    def _borrowed(self) -> set[str]:
        return {"embed_tokens", "lm_head"} & vars(self.head).keys()

    @torch.inference_mode()
    def alphas(self, drafter: Drafter, texts: Sequence[Text]) -> tuple[Interval, ...]:
        head: Any = drafter.models[0].model
        sums: list[Tensor] = []  # of alpha over the tokens of each text, and their number [K, 2, B]
        for begin in range(0, len(texts), _BATCH):
            batch = texts[begin : begin + _BATCH]
            ids = torch.tensor([list(text.ids) for text in batch], device=self.target.device)
            num_given = torch.tensor([[text.num_given] for text in batch], device=ids.device)
            first_places, steps = self.rounds(head, ids, torch.Generator().manual_seed(begin))
            found = []
            for target_logits, logits in steps:
                logits = spread(logits, head.token_ids, self.target.vocab_size)
                both = overlap(target_logits.float().softmax(-1), logits.float().softmax(-1))
                is_scored = first_places[: both.shape[1]] >= num_given
                found.append(torch.stack((torch.where(is_scored, both, 0.0).sum(1), is_scored.sum(1))))
            sums.append(torch.stack(found).to("cpu", torch.float64))
        by_text = torch.cat(sums, dim=-1)
        if not bool(by_text.isfinite().all()):
            raise NumericsError(f"the head {drafter.name} gave NaN or infinite logits")
        return tuple(bounded_mean(step[0].tolist(), step[1].tolist(), (0.0, 1.0)) for step in by_text)

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        save_speculators(self.head, self.target, folder, self.settings(), num_draft_tokens=self.depth, dtype=dtype)
