"""Toys: language models small enough to know everything about, and short ways to run the loop on them. The law of a
``TableLM``, a Markov chain, is known exactly. Tiny Hugging Face models are random, but attend."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outrider.decoding.batch import Row
from outrider.decoding.engine import decode
from outrider.decoding.schedule import AdaptiveSchedule, Estimates, RoundOutcome, Schedule, favoured_ks
from outrider.drafters.base import Drafter
from outrider.drafters.model import model_drafter
from outrider.options import Sampling
from outrider.records import FinishReason, Request, RowRound, Stats
from outrider.runtime.cuda_graphs import CapturedExecution
from outrider.runtime.execution import EagerExecution
from outrider.runtime.lm import LM
from outrider.runtime.transformers_forward import TransformersForward
from outrider.sampling.rules import Rule

NUM_ROWS = 128  # of a batch, at most
EXECUTIONS = {"eager": EagerExecution, "captured": CapturedExecution}
execution: Callable[[], EagerExecution] = EagerExecution  # of the models made here; see conftest.py


class TableLM(nn.Module):
    """Logits after token i are row i of a table, wherever it stands."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table, requires_grad=False)
        # As much of a model's configuration as LM reads.
        unused: dict[str, Any] = {"sliding_window": None, "layer_types": None, "_attn_implementation": "eager"}
        self.config = SimpleNamespace(num_hidden_layers=1, get_text_config=lambda decoder: self.config, **unused)

    def set_attn_implementation(self, name: str) -> None:
        pass

    def forward(
        self,
        input_ids: Tensor,
        use_cache: bool,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: object = None,
        logits_to_keep: int = 0,
    ) -> SimpleNamespace:
        if attention_mask is not None and position_ids is not None:
            assert attention_mask.shape[-2] == input_ids.shape[1] == position_ids.shape[1]
        no_layers = SimpleNamespace(layers=[])
        return SimpleNamespace(logits=self.table[input_ids[:, -logits_to_keep:]], cache=no_layers)


def table_lm(table: Tensor, *, name: str = "target", vocab_size: int = 0, context_len: int = 512) -> LM:
    return _lm(TableLM(table), name, vocab_size or table.shape[1], context_len)


def _lm(model: nn.Module, name: str, vocab_size: int, context_len: int) -> LM:
    lm = LM(TransformersForward(model), name=name, vocab_size=vocab_size, context_len=context_len)
    lm.execution = execution()
    return lm


def random_table(vocab_size: int, seed: int, scale: float = 1.0) -> Tensor:
    """Logits of a random Markov chain in float64. [V, V]"""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(vocab_size, vocab_size, dtype=torch.float64, generator=generator)


def table_pair(vocab_size: int, seed: int = 0, *, draft_context_len: int = 512) -> tuple[LM, Drafter]:
    """A target, and a drafter with a different table that agrees with it now and then."""
    table = random_table(vocab_size, 2 * seed, 1.5)
    draft_table = 0.5 * table + random_table(vocab_size, 2 * seed + 1)
    return table_lm(table), model_drafter(table_lm(draft_table, name="draft", context_len=draft_context_len))


def tiny_llama(
    seed: int = 0, *, vocab_size: int = 60, num_layers: int = 2, context_len: int = 256, **options: Any
) -> PreTrainedModel:
    """A random Llama in float64. Large weights, so that logits are far apart and depend on the whole text."""
    defaults = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    defaults |= {"initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None}
    sizes = {"vocab_size": vocab_size, "num_hidden_layers": num_layers, "max_position_embeddings": context_len}
    return random_model(LlamaForCausalLM, LlamaConfig(**sizes, **defaults | options), seed)


def random_model(model_class: type, config: object, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config).to(torch.float64).eval().requires_grad_(False)


def perturbed(model: PreTrainedModel, scale: float, seed: int = 1) -> PreTrainedModel:
    """A copy whose weights are a little off: a draft that agrees often, but not always."""
    generator = torch.Generator().manual_seed(seed)
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(scale * parameter.std(correction=0) * noise)
    return model


def as_lm(model: PreTrainedModel, name: str = "target", context_len: int = 256) -> LM:
    return _lm(model, name, model.config.vocab_size, context_len)


def llama_pair(*, context_len: int = 256, draft_context_len: int = 256) -> tuple[LM, Drafter]:
    """A tiny Llama, and itself with perturbed weights as the draft."""
    model = tiny_llama()
    draft = as_lm(perturbed(model, 0.1), "draft", draft_context_len)
    return as_lm(model, context_len=context_len), model_drafter(draft)


class StopAt:
    def __init__(self, token_id: int) -> None:
        self.token_id = token_id
        self.pushed: list[int] = []

    def push(self, token_id: int) -> FinishReason | None:
        self.pushed.append(token_id)
        return "eos" if token_id == self.token_id else None


@dataclass
class Output:
    rounds: list[RowRound]
    token_ids = property(lambda self: tuple(token for row in self.rounds for token in row.token_ids))
    finish_reason = property(lambda self: self.rounds[-1].finish_reason)
    stats = property(lambda self: sum((row.stats for row in self.rounds), Stats()))


@dataclass
class MadeUpTimes:
    """A schedule whose rounds take what its costs say: K -> seconds, by the number of rows (largest not above)."""

    costs: Mapping[int, Mapping[int, float]]
    inner: AdaptiveSchedule = field(init=False)

    def __post_init__(self) -> None:
        self.inner = AdaptiveSchedule(Estimates(tuple(next(iter(self.costs.values())))))
        self.max_k = self.inner.max_k

    def next_k(self, rows: Sequence[Row], num_rows: int) -> int:
        return self.inner.next_k(rows, num_rows)

    def learn(self, outcome: RoundOutcome) -> None:
        by_k = self.costs[max(size for size in self.costs if size <= outcome.num_rows)]
        seconds = by_k[min(k for k in by_k if k >= outcome.num_columns)]
        self.inner.learn(replace(outcome, seconds=None if outcome.seconds is None else seconds))


def given_costs(target: LM, drafter: Drafter, rule: Rule) -> dict[int, float]:
    """In the place of ``measure_round_costs``: a drafted token costs a tenth of a round without drafts."""
    return {k: 0.01 + 0.001 * k for k in favoured_ks(target, drafter)}


class InTurn:
    """A schedule: K from a list, which repeats, by the number of the round."""

    def __init__(self, *ks: int) -> None:
        self._ks, self._num_rounds, self.max_k = ks, 0, max(ks)

    def next_k(self, rows: Sequence[Row], num_rows: int) -> int:
        self._num_rounds += 1
        return self._ks[self._num_rounds % len(self._ks)]

    def learn(self, outcome: RoundOutcome) -> None:
        pass


def run(target: LM, drafter: Drafter, requests: Sequence[Request], rule: Rule, k: int | Schedule) -> list[Output]:
    """The loop to its end, for NUM_ROWS requests at a time: the work of letting a row join grows with their number."""
    outputs = [Output([]) for _ in requests]
    for first in range(0, len(requests), NUM_ROWS):
        some = requests[first : first + NUM_ROWS]
        for round_ in decode(target, drafter, some, rule, num_draft_tokens=k):
            for row in round_.rows:
                outputs[first + row.row].rounds.append(row)
    return outputs


def tokens(
    target: LM, drafter: Drafter, requests: Sequence[Request], rule: Rule, k: int | Schedule
) -> list[tuple[int, ...]]:
    return [output.token_ids for output in run(target, drafter, requests, rule, k)]


def request(prompt_ids: Sequence[int], stop: StopAt | None = None, seed: int = 0, **options: object) -> Request:
    return Request(prompt_ids, Sampling(seed=seed, **options), stop)
