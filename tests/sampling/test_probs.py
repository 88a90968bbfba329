"""From logits to probabilities as Hugging Face does it, row by row, and drawing from them."""

import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider.options import Sampling
from outrider.sampling.history import NO_HISTORY
from outrider.sampling.probs import Settings, draw, is_finite, to_probs
from outrider.sampling.rules import BLOCK, REJECTION, Rule
from reference import hf_probs, law_distance, rounds_law, table_law
from round_laws import round_law
from toys import random_table

V = 40
PREFIX = (3, 3, 17, 39, 0, 17, 17)
NUM_PROMPT = 3

# Values that float32 holds exactly, so that both sides compare with the same numbers.
EDGES = {"temperature": [0.0, 0.625, 2.0], "top_k": [1, 7, V, 10 * V], "top_p": [0.875, 0.25, 0.0009765625, 1e-9]}
EDGES |= {"min_p": [0.125, 1.0], "repetition_penalty": [1.5, 0.75], "presence_penalty": [1.5]}
EDGES |= {"frequency_penalty": [-0.75], "min_tokens": [4, 5, 2**70], "logit_bias": [{0: 2.5, 17: -math.inf, 5: -0.5}]}
TOGETHER = {"temperature": [0.0, 0.625, 2.0], "top_k": [0, 5], "top_p": [1.0, 0.75], "min_p": [0.0, 0.125]}
TOGETHER |= {"repetition_penalty": [1.0, 1.5], "presence_penalty": [0.0, 0.5], "frequency_penalty": [0.0, 1.25]}
TOGETHER |= {"min_tokens": [0, 7], "logit_bias": [None, {0: 2.5, 17: -math.inf}]}


def _settings(rows: list[Sampling], vocab_size: int = V) -> Settings:
    return Settings.of(rows, vocab_size, torch.device("cpu"))


def _ours(logits: Tensor, rows: list[Sampling]) -> Tensor:
    """After PREFIX. [B, V] -> [B, V]"""
    settings = _settings(rows)
    history = settings.with_room(NO_HISTORY, len(rows), V)
    for row in range(len(rows)):
        history.begin(row, torch.tensor(PREFIX), NUM_PROMPT)
    return to_probs(logits[:, None], settings, history.map(lambda values: values[:, None]))[:, 0]


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_options_are_hugging_faces_processors_in_order(dtype: torch.dtype, rtol: float) -> None:
    """Each alone on ten rows, and all combinations, in one mixed batch. A row is bit for bit as alone."""
    rows = [Sampling(**{name: value}, stop_token_ids=(7, 9)) for name, values in EDGES.items() for value in values] * 10
    combined = (zip(TOGETHER, values, strict=True) for values in itertools.product(*TOGETHER.values()))
    rows += [Sampling(**dict(pairs), stop_token_ids=(3, 5)) for pairs in combined]
    generator = torch.Generator().manual_seed(1)
    logits = 3.0 * torch.randn(len(rows), V, dtype=torch.float64, generator=generator).to(dtype)
    narrow, ours = logits.bfloat16(), _ours(logits, rows)
    assert torch.equal(_ours(narrow, rows), _ours(narrow.float(), rows))
    theirs = torch.stack([hf_probs(x, PREFIX, row, NUM_PROMPT) for x, row in zip(logits, rows, strict=True)])
    assert ours.dtype == dtype and torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=0.0)
    for b, row in enumerate(rows):
        assert torch.equal(ours[b : b + 1], _ours(logits[b : b + 1], [row])), row


def test_ties_are_kept_or_go_to_the_lowest_id() -> None:
    """Greedy ones to the lowest id. Those with the k-th all stay; top_p cuts a tail as in Hugging Face's processors."""
    logits = torch.tensor([[[1.0, 5.0, 5.0, 5.0]]]).expand(2, 1, 4)
    for rows in ([Sampling(temperature=0.0)] * 2, [Sampling(temperature=0.0), Sampling()]):
        assert to_probs(logits, _settings(rows, 4))[0, 0].tolist() == [0.0, 1.0, 0.0, 0.0]
    for options, values, num_kept in (
        ({"top_k": 1}, (2.0, 1.0, 3.0, 2.0, 2.0, 0.0), 1),
        ({"top_k": 2}, (2.0, 1.0, 3.0, 2.0, 2.0, 0.0), 4),
        ({"top_k": 5}, (2.0, 1.0, 3.0, 2.0, 2.0, 0.0), 5),
        ({"top_p": 0.75}, (0.0,) * 4, 3),
    ):
        one = torch.tensor(values, dtype=torch.float64)
        probs = to_probs(one[None, None], _settings([Sampling(**options)], len(one)))[0, 0]
        assert int((probs > 0).sum()) == num_kept
        torch.testing.assert_close(probs, hf_probs(one, (0,), Sampling(**options)))


def test_tiny_temperatures_are_greedy_and_finite() -> None:
    """Down to the least number that the option takes, alone and beside a greedy row."""
    for temperature, (least, most) in itertools.product((1e-3, 1e-30, 1e-44, 5e-324), ((-1.0, 40.0), (-1e30, 1e30))):
        rows = [Sampling(temperature=temperature), Sampling(temperature=0.0)]
        logits = torch.tensor([[[least, most, 39.0, -torch.inf]]], dtype=torch.float64)
        for some in (rows[:1], rows):
            probs = to_probs(logits.expand(len(some), 1, 4), _settings(some, 4))
            assert probs[0, 0].tolist() == [0.0, 1.0, 0.0, 0.0]


@given(st.lists(st.integers(0, 5), max_size=6), st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(0, 5))
def test_a_history_is_what_came_before_each_place(ids: list[int], before: list[int], num_prompt: int) -> None:
    """Along drafts, token by token, and after a round in which some of them were committed."""
    num_prompt = min(num_prompt, len(before))
    asked = Sampling(repetition_penalty=1.5, presence_penalty=1.0, min_tokens=1, stop_token_ids=(0,))
    history = _settings([asked], 6).with_room(NO_HISTORY, 1, 6)
    history.begin(0, torch.tensor(before), num_prompt)
    along, then = history.along(torch.tensor([ids], dtype=torch.long)), history
    for i in range(len(ids) + 1):
        text = before + ids[:i]
        output = text[num_prompt:]
        want = [[v in text for v in range(6)], [output.count(v) for v in range(6)], len(output)]
        assert [values[0, i].tolist() for values in along.tensors] == want
        assert [values[0].tolist() for values in then.tensors] == want
        again = history.map(torch.clone)
        committed = [*ids[:i], *[ids[i - 1]] * (len(ids) - i)] if i else []
        length = torch.tensor([len(before)])
        again.append(torch.tensor([committed], dtype=torch.long), length, length + i)
        assert [values[0].tolist() for values in again.tensors] == want
        if i < len(ids):
            then = then.then(torch.tensor(ids[i : i + 1]))


def test_is_finite_refuses_what_cannot_be_sampled_from() -> None:
    inf, nan = math.inf, math.nan
    rows = torch.tensor([[0.0, 1.0], [0.0, -inf], [-inf, -inf], [0.0, inf], [nan, 0.0], [-inf, nan]])
    assert is_finite(rows).tolist() == [True, True, False, False, False, False]


LEAST, MOST = 2.0**-53, 1.0 - 2.0**-53  # the extremes of noise.py


@given(
    st.lists(st.sampled_from([0.0, 1e-30, 1e-8, 0.1, 0.25, 1 / 3, 1.0, 7.0]), min_size=1, max_size=12).filter(any),
    st.one_of(st.sampled_from([LEAST, MOST]), st.floats(LEAST, MOST)),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_draw_never_returns_a_token_of_weight_zero(weights: list[float], u: float, dtype: torch.dtype) -> None:
    """For any weights and any number that the noise can be, the extremes too."""
    token = int(draw(torch.tensor([weights], dtype=dtype), torch.tensor([u], dtype=torch.float64)))
    assert weights[token] > 0
    heavy = [v for v, weight in enumerate(weights) if weight >= 0.1]
    if heavy and u == LEAST:
        assert token <= heavy[0]
    if heavy and u == MOST:
        assert token >= heavy[-1]


def test_draw_inverts_the_cumulative_sum_exactly() -> None:
    """Weights in sixteenths, so that every boundary is a float: just below it the token before, at it the next."""
    for boundary, scale in itertools.product((4, 7, 15), (1.0, 8.0)):
        weights = scale * torch.tensor([[4, 0, 3, 0, 0, 8, 1, 0]], dtype=torch.float64).expand(2, -1) / 16
        numbers = torch.tensor([math.nextafter(boundary / 16, 0.0), boundary / 16], dtype=torch.float64)
        assert draw(weights, numbers).tolist() == {4: [0, 2], 7: [2, 5], 15: [5, 6]}[boundary]


_PROMPT = (0, 2, 0)
_TABLES = random_table(3, 0, 1.5), random_table(3, 1)
_FREQUENCY = Sampling(frequency_penalty=0.75)
_ALL = Sampling(
    temperature=0.75,
    repetition_penalty=1.25,
    presence_penalty=0.5,
    frequency_penalty=-0.25,
    min_tokens=3,
    stop_token_ids=(0, 1),
    logit_bias={0: 0.5},
)


@pytest.mark.parametrize("k", [0, 1, 2])
@pytest.mark.parametrize("sampling", [_FREQUENCY, _ALL], ids=["frequency", "all"])
@pytest.mark.parametrize("rule", [REJECTION, BLOCK], ids=lambda rule: rule.name)
def test_the_law_is_the_targets(rule: Rule, sampling: Sampling, k: int) -> None:
    """To 1e-12, of the target alone by reference.py. (Tokens of ``gumbel``: tests/drafters/test_contract.py.)"""
    law = rounds_law(partial(round_law, rule, k, _TABLES, _PROMPT, sampling), 3)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert law_distance(law, table_law(_TABLES[0], _PROMPT, sampling, 3)) < 1e-12


def test_a_history_that_forgets_the_drafts_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slip of engines whose penalties do not see the tokens of the same round."""
    along = type(NO_HISTORY).along
    monkeypatch.setattr(
        type(NO_HISTORY),
        "along",
        lambda self, ids: along(self, ids).map(lambda values: values[:, :1].expand_as(values)),
    )
    law = rounds_law(partial(round_law, BLOCK, 2, _TABLES, _PROMPT, _FREQUENCY), 3)
    assert law_distance(law, table_law(_TABLES[0], _PROMPT, _FREQUENCY, 3)) > 0.01
