"""Heads in training: the parts that all kinds share."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from outrider.distill.student import Pair, Student, head_size
from outrider.distill.teacher import Teacher
from outrider.drafters.base import Drafter
from outrider.drafters.heads import head_drafter
from outrider.errors import NumericsError
from outrider.measure.along import overlap
from outrider.measure.intervals import bounded_mean
from outrider.measure.teacher_forcing import Text
from outrider.models.heads.base import Head, embedding_of, head_lm
from outrider.models.heads.loading import check_target
from outrider.models.heads.saving import save_speculators
from outrider.models.weights import widened_weights
from outrider.records import Interval
from outrider.runtime.lm import LM
from outrider.runtime.vocabulary import spread

_BATCH = 8  # sequences whose alpha is measured together
_SPREAD = 0.02  # standard deviation of initial weights, as in Llama

AnyHead = TypeVar("AnyHead", bound=Head)


def new_config(kind: Any, target: LM, num_layers: int) -> Any:
    """Configuration of a head's layers, as wide as those of its target.

    Args:
        kind: class of the configuration.
    """
    source = target.model.config.get_text_config(decoder=True)
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
    return len(target.model.get_decoder().layers)


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
    model = target.model
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


class _InRounds(nn.Module):
    """A head that runs along sequences with its target, which is no part of it."""

    def __init__(self, student: HeadStudent[Any]) -> None:
        super().__init__()
        self.head = student.head
        self._rounds, self._teacher = student.rounds, student.teacher

    def forward(self, input_ids: Tensor) -> list[Pair]:
        _, steps = self._rounds(self.head, input_ids, *self._teacher.read(input_ids))
        return list(steps)


class HeadStudent(Student, Generic[AnyHead]):
    """A head.

    Args:
        depth: tokens of a round that it is trained to draft.
        states: folder for the target's hidden states; None to keep none.
    """

    def __init__(self, target: LM, head: AnyHead, depth: int, states: Path | None = None) -> None:
        self.target, self.head, self.depth = target, head, depth
        self.teacher = Teacher(target, head.features, head.token_ids, states)
        self._judge = Teacher(target, head.features, None, states)
        self.module = _InRounds(self)

    @abstractmethod
    def rounds(
        self,
        head: AnyHead,
        ids: Tensor,
        target_logits: Tensor,
        features: Tensor,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Iterator[Pair]]:
        """Follow rounds along sequences.

        Args:
            ids: [B, T]
            target_logits, features: of the target along them. [B, T, V], [B, T, F]
            generator: chooses where they begin, if not everywhere; None for the one whose state the trainer keeps.

        Returns:
            Places of the first drafted tokens [R], ascending; and for each drafted token logits of the target [B, R, V]
            and of the head [B, R, D], without the last rounds if these have reached the end of the sequence.
        """

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Its own part of a config.json in the speculators layout."""

    def pairs(self, outputs: list[Pair], ids: Tensor) -> list[Pair]:
        """The target's distribution among the head's tokens: alpha is highest where q is in proportion to it."""
        return [(target_logits, logits[..., : target_logits.shape[-1]]) for target_logits, logits in outputs]

    def as_stored(self, name: str, dtype: torch.dtype) -> Drafter:
        model = self.target.model
        targets = {"embed_tokens": model.get_input_embeddings(), "lm_head": model.get_output_embeddings()}
        head = copy.deepcopy(self.head, {id(vars(self.head)[part]): targets[part] for part in self._borrowed})
        for parameter in head.parameters():  # not buffers, which are not stored
            parameter.data = parameter.to(dtype).to(self.target.dtype)
        return head_drafter(head_lm(head, name, self.target))

    @property
    def _borrowed(self) -> set[str]:
        return {"embed_tokens", "lm_head"} & vars(self.head).keys()

    @torch.inference_mode()
    def alphas(self, drafter: Drafter, texts: Sequence[Text]) -> tuple[Interval, ...]:
        head = drafter.models[0].model
        sums: list[Tensor] = []  # of alpha over the tokens of each text, and their number [K, 2, B]
        for begin in range(0, len(texts), _BATCH):
            batch = texts[begin : begin + _BATCH]
            rows = [torch.tensor(text.ids) for text in batch]
            ids = pad_sequence(rows, batch_first=True).to(self.target.device)  # nothing reads what comes later
            num_given = torch.tensor([[text.num_given] for text in batch], device=ids.device)
            ends = torch.tensor([[len(row)] for row in rows], device=ids.device)
            read = self._judge.read(ids)
            first_places, steps = self.rounds(head, ids, *read, torch.Generator().manual_seed(begin))
            found = []
            for d, (target_logits, logits) in enumerate(steps):
                logits = spread(logits, head.token_ids, self.target.vocab_size)
                both = overlap(target_logits.float().softmax(-1), logits.float().softmax(-1))
                places = first_places[: both.shape[1]]
                is_scored = (places >= num_given) & (places + d <= ends)
                found.append(torch.stack((torch.where(is_scored, both, 0.0).sum(1), is_scored.sum(1))))
            sums.append(torch.stack(found).to("cpu", torch.float64))
        by_text = torch.cat(sums, dim=-1)
        if not bool(by_text.isfinite().all()):
            raise NumericsError(f"the head {drafter.name} gave NaN or infinite logits")
        return tuple(bounded_mean(step[0].tolist(), step[1].tolist(), (0.0, 1.0)) for step in by_text)

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        save_speculators(self.head, self.target, folder, self.settings(), num_draft_tokens=self.depth, dtype=dtype)
