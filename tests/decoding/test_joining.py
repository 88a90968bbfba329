"""Rows join and leave between rounds: each is written as if it were alone."""

import hashlib
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads import write_eagle3
from hybrids import hybrid, hybrid_lm
from native_cases import CASES, VOCAB, native_lm, random_model
from native_weights import model_in
from outrider.decoding import scheduler
from outrider.decoding.engine import Engine, Load
from outrider.decoding.schedule import ConstantSchedule, Schedule
from outrider.drafters.base import NO_DRAFTER, Drafter
from outrider.drafters.draft_options import DraftOptions
from outrider.drafters.heads import head_drafter
from outrider.drafters.hybrid import hybrid_drafter
from outrider.drafters.lookups import ngram_drafter, suffix_drafter
from outrider.drafters.model import model_drafter, self_drafter
from outrider.models.executions import beside
from outrider.models.few_tokens import with_few_tokens
from outrider.models.heads.loading import load_head
from outrider.models.registry import ModelSpec
from outrider.records import Request, RowRound
from outrider.runtime.lm import LM
from outrider.sampling.rules import BLOCK, GUMBEL, REJECTION, RULES, Rule
from toys import InTurn, MadeUpTimes, StopAt, llama_pair, perturbed, request, tokens

K = 3


@dataclass
class Played:
    """The rounds of each request, and the load after each step of an engine."""

    outputs: dict[int, list[RowRound]] = field(default_factory=lambda: defaultdict(list))
    loads: list[Load] = field(default_factory=list)

    def token_ids(self, index: int) -> tuple[int, ...]:
        return tuple(i for row in self.outputs[index] for i in row.token_ids)


def play(
    engine: Engine,
    requests: Sequence[Request],
    arrivals: Sequence[int],
    cancels: dict[int, int] | None = None,
    clients: Sequence[str] | None = None,
) -> Played:
    """Step until all is done. Requests arrive before these steps, ascending; some are cancelled before a step."""
    played, submitted, step = Played(), 0, 0
    while True:
        while submitted < len(requests) and arrivals[submitted] <= step:
            assert engine.submit(requests[submitted], "" if clients is None else clients[submitted]) == submitted
            submitted += 1
        for index, at in (cancels or {}).items():
            if at == step:
                engine.cancel(index)
        round_ = engine.step()
        played.loads.append(engine.load)
        if round_ is None and submitted == len(requests):
            return played
        for row in () if round_ is None else round_.rows:
            played.outputs[row.row].append(row)
        step += 1


def _requests(rng: random.Random, num_requests: int) -> list[Request]:
    """Prompts that begin alike now and then, with options of all kinds."""
    beginnings = [[rng.randrange(60) for _ in range(30)] for _ in range(2)]
    options: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 9},
        {"top_p": 0.9, "repetition_penalty": 1.2},
        {"logit_bias": {4: 2.0}, "min_p": 0.02},
        {"presence_penalty": 1.0, "min_tokens": 6, "stop_token_ids": (1, 2, 3)},
        {"frequency_penalty": 1.0, "temperature": 0.0},
        {},
    ]
    requests = []
    for seed in range(num_requests):
        ids = [rng.randrange(60) for _ in range(rng.randint(1, 25))]
        if rng.random() < 0.6:
            ids = rng.choice(beginnings)[: rng.randint(10, 30)] + ids[: rng.randint(1, 4)]
        stop = StopAt(rng.randrange(60)) if rng.random() < 0.3 else None
        requests.append(request(ids, stop, seed=seed % 5, max_new_tokens=rng.randint(1, 24), **rng.choice(options)))
    return requests


def _at_once(target: LM, drafter: Drafter, requests: Sequence[Request], rule: Rule) -> list[tuple[int, ...]]:
    """Each in a slot of its own from the first round on. (That each is as if alone then: test_lossless.py.)"""
    stops = [None if one.stop is None else StopAt(one.stop.token_id) for one in requests]  # type: ignore[attr-defined]
    again = [Request(one.prompt_ids, one.sampling, stop) for one, stop in zip(requests, stops, strict=True)]
    return tokens(target, drafter, again, rule, K)


def _engine(target: LM, drafter: Drafter, rule: Rule, schedule: Schedule | None = None, num_slots: int = 4) -> Engine:
    schedule = schedule or ConstantSchedule(K)
    return Engine(target, drafter, rule, num_slots=num_slots, capacity=64, schedule=schedule, prefill_chunk=8)


def _hybrid_pair() -> tuple[LM, Drafter]:
    model = hybrid("qwen3_5_text", tie_word_embeddings=False)
    return hybrid_lm(model), model_drafter(hybrid_lm(perturbed(model, 0.03), "draft"))


@pytest.mark.each_execution
@pytest.mark.parametrize(
    ("rule", "make_pair", "drafter", "lookahead"),
    [
        (REJECTION, llama_pair, None, 0),
        (GUMBEL, llama_pair, None, 2),
        (REJECTION, llama_pair, ngram_drafter(), 1),
        (BLOCK, llama_pair, suffix_drafter(), 0),
        pytest.param(GUMBEL, _hybrid_pair, None, 0, marks=pytest.mark.slow),
    ],
    ids=["model", "model, ahead", "ngram, ahead", "suffix", "hybrid"],
)
def test_each_request_is_written_as_if_it_were_alone(
    rule: Rule, make_pair: Callable[[], tuple[LM, Drafter]], drafter: Drafter | None, lookahead: int
) -> None:
    """Random arrivals and cancellations, two seeds of 14 requests. Texts that were cancelled are the beginning of the
    text alone. Prompts wait, are fed in chunks, are found in caches, and rows are moved down."""
    target, by_model = make_pair()
    target.execution.lookahead = lookahead
    drafter = drafter or by_model
    num_cached = num_cut = 0
    for seed in range(2):
        rng = random.Random(seed)
        requests = _requests(rng, 14)
        arrivals = sorted(rng.randint(0, 30) for _ in requests)
        cancels = {rng.randrange(14): rng.randint(1, 40) for _ in range(3)}
        played = play(_engine(target, drafter, rule), requests, arrivals, cancels)
        for index, want in enumerate(_at_once(target, drafter, requests, rule)):
            got = played.token_ids(index)
            assert got == (want[: len(got)] if index in cancels else want), (seed, index)
            num_cut += len(got) < len(want)
        num_cached += sum(row.num_cached_tokens for rows in played.outputs.values() for row in rows)
        assert max(load.num_waiting for load in played.loads) > 0
        assert max(load.num_filling for load in played.loads) > 0
        assert played.loads[-1] == Load(0, 0, 0, 4)
    assert num_cached >= 16 and num_cut > 0


_DRAFTS: tuple[Callable[[LM, LM], Drafter], ...] = (  # of a target and a model that is much like it
    lambda target, draft: model_drafter(draft),
    lambda target, draft: hybrid_drafter(suffix_drafter(), model_drafter(draft), VOCAB, 0.4),
    lambda target, draft: self_drafter(target, DraftOptions(window=24)),
    lambda target, draft: suffix_drafter(),
    lambda target, draft: model_drafter(draft, DraftOptions(min_prob=0.3)),
    lambda target, draft: model_drafter(
        with_few_tokens(draft, torch.arange(0, VOCAB, 2)), DraftOptions(is_greedy=True)
    ),
    lambda target, draft: ngram_drafter(),
    lambda target, draft: NO_DRAFTER,
)
_OFTEN = "llama", "gemma3_text", "qwen3_5_text", "nemotron_h", "lfm2", "gpt_oss", "gemma4_text"
_OTHERS = "in blocks", "with a head"
_MODELS = [
    pytest.param(one, marks=[] if one in (*_OFTEN, *_OTHERS) else [pytest.mark.slow]) for one in (*CASES, *_OTHERS)
]
_MOST_K = 5


def _native_pairs(family: str, folder: Path) -> tuple[LM, list[Drafter]]:
    if family == "with a head":
        target = native_lm(random_model("qwen3", {"num_hidden_layers": 4, "head_dim": 14}))
        write_eagle3(folder, target.model)
        head = load_head(ModelSpec(name="head", path=folder), target)
        return target, [head_drafter(beside(head, target))]
    if family == "in blocks":
        forms = {"gate_proj": "Q4_1", "proj": "Q4_0", "down_proj": "Q6_K", "embed_tokens": "Q8_0"}
        target, other = (native_lm(model_in(forms, 1), name) for name in ("target", "draft"))
    else:
        model = random_model(family, next(iter(CASES[family].values())))
        target, other = native_lm(model), native_lm(perturbed(model, 0.05), "draft")
    return target, [make(target, other) for make in _DRAFTS]


@pytest.mark.parametrize("family", _MODELS)
def test_any_schedule_on_the_native_engine(
    family: str, tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts are those of plain decoding, each alone. At random are arrivals and cancellations, clients, whose rows are
    paused for others, prefixes that they share, numbers of slots, sizes of chunks, and K."""
    monkeypatch.setattr(scheduler, "LEAST_GENERATED", 3)
    target, drafters = _native_pairs(family, tmp_path)
    texts: list[tuple[int, ...]] = []
    num_accepted, num_schedules, first = 0, pytestconfig.getoption("schedules"), [*CASES, *_OTHERS].index(family)
    num_threads = torch.get_num_threads()
    for seed in range(num_schedules):
        rng = random.Random(seed)
        drafter = drafters[(first + seed) % len(drafters)]
        rule = rng.choice([GUMBEL, *RULES.values()])
        requests = []
        for one in _requests(rng, 10):
            sampling = one.sampling if rule is GUMBEL else replace(one.sampling, temperature=0.0)
            longer = [rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 0, 60, 260)))]
            k = rng.choice((None, rng.randint(0, _MOST_K)))
            requests.append(replace(one, prompt_ids=[*one.prompt_ids, *longer], sampling=sampling, num_draft_tokens=k))
        arrivals = sorted(rng.randint(0, 30) for _ in requests)
        cancels = {rng.randrange(len(requests)): rng.randint(1, 40) for _ in range(2)}
        clients = [rng.choice("aab") for _ in requests]
        ks = [rng.randint(0, _MOST_K) for _ in range(rng.randint(1, 9))]
        sizes: dict[str, Any] = {"num_slots": rng.randint(1, 6), "prefill_chunk": rng.choice((7, 30, 512, None))}
        engine = Engine(target, drafter, rule, capacity=400, schedule=InTurn(*ks, _MOST_K), **sizes)
        torch.set_num_threads(rng.randint(1, 3))
        played = play(engine, requests, arrivals, cancels, clients)
        torch.set_num_threads(num_threads)
        for index, one in enumerate(requests):
            stop = None if one.stop is None else StopAt(one.stop.token_id)  # type: ignore[attr-defined]
            (want,) = tokens(target, NO_DRAFTER, [Request(one.prompt_ids, one.sampling, stop)], rule, 0)
            got = played.token_ids(index)
            assert got == (want[: len(got)] if index in cancels else want), (seed, drafter.name, rule.name, index)
            texts.append(got)
            num_accepted += sum(row.num_accepted for row in played.outputs[index])
    assert num_accepted or num_schedules < len(_DRAFTS)
    digest = hashlib.sha256(repr(texts).encode()).hexdigest()
    print(f"{family}: {num_schedules} schedules, {len(texts)} texts, {num_accepted} drafted tokens accepted, {digest}")


def test_rows_with_a_constant_k_do_not_depend_on_the_load() -> None:
    """Beside rows for which a schedule chooses: 0 with several rows, 2 or more alone."""
    target, drafter = llama_pair()
    costs = {1: {0: 1.0, 2: 1.1, 4: 1.2}, 2: {0: 1.0, 2: 9.0, 4: 9.0}, 4: {0: 1.0, 2: 9.0, 4: 9.0}}
    rng = random.Random(3)
    requests = [replace(one, num_draft_tokens=None if i % 2 else K) for i, one in enumerate(_requests(rng, 16))]
    engine = _engine(target, drafter, REJECTION, MadeUpTimes(costs))
    played = play(engine, requests, sorted(rng.randint(0, 20) for _ in requests))
    chosen = set()
    wanted = _at_once(target, drafter, requests, REJECTION)
    for index, (one, want) in enumerate(zip(requests, wanted, strict=True)):
        if one.num_draft_tokens is not None or one.sampling.temperature == 0:
            assert played.token_ids(index) == want, index
        if one.num_draft_tokens is None:
            chosen |= {row.num_drafted for row in played.outputs[index]}
    assert 0 in chosen and max(chosen) >= 2


def test_a_prompt_is_found_in_the_slot_that_remembers_it() -> None:
    """Only the new part of a conversation is fed. Another text takes the slot that was used least recently."""
    target, drafter = llama_pair()
    engine = _engine(target, drafter, REJECTION, num_slots=3)

    def answer(ids: Sequence[int]) -> tuple[list[int], int]:
        index = engine.submit(request(ids, max_new_tokens=8))
        rows = [row for round_ in iter(engine.step, None) for row in round_.rows]
        assert {row.row for row in rows} == {index}
        text = [i for row in rows for i in row.token_ids]
        assert tuple(text) == _at_once(target, drafter, [request(ids, max_new_tokens=8)], REJECTION)[0]
        return text, sum(row.num_cached_tokens for row in rows)

    first = list(range(20))
    said, num_cached = answer(first)
    assert num_cached == 0
    assert answer(list(range(30, 50)))[1] == 0
    assert answer(list(range(20, 44)))[1] == 0
    _, num_cached = answer([*first, *said, 9, 9])
    assert num_cached == len(first) + len(said) - 1
    assert answer(first)[1] == len(first) - 1  # the last token is always fed
    assert answer([*first[:15], 59])[1] == 0  # fewer than 16


@pytest.mark.parametrize("make_pair", [llama_pair, _hybrid_pair], ids=["llama", "hybrid"])
def test_numbers_that_are_not_finite_end_one_row_only(make_pair: Callable[[], Any]) -> None:
    """So does the next text in its slot, where NaN was left in caches and states; no prefix is found there."""
    target, drafter = make_pair()
    bad = target.vocab_size - 1
    for lm in (target, drafter.lm):
        lm.model.get_input_embeddings().weight[bad] = torch.nan
    options = {"temperature": 0.0, "max_new_tokens": 12, "logit_bias": {bad: -1e9}}
    prompts = [(1, 2, 3), (*range(20), bad, 5), (*range(20), 7), (6, 7), (8,), (10, bad), (9, 9, 9)]
    requests = [request(ids, **options) for ids in prompts]
    played = play(_engine(target, drafter, REJECTION, num_slots=2), requests, [0] * len(requests))
    for index, one in enumerate(requests):
        if bad in one.prompt_ids:
            (row,) = played.outputs[index]
            assert row.finish_reason == "error" and row.token_ids == ()
            assert row.error is not None and "the model target gave NaN" in str(row.error)
        else:
            assert played.token_ids(index) == _at_once(target, drafter, [one], REJECTION)[0]


def test_prompts_do_not_hold_up_the_rows_that_generate() -> None:
    """At most a chunk between two rounds: while a long prompt is fed, the first row goes on."""
    target, _ = llama_pair()
    engine = _engine(target, NO_DRAFTER, REJECTION, ConstantSchedule(0))
    engine.submit(request((1, 2), max_new_tokens=30))
    engine.step()
    engine.submit(request(tuple(range(41)), max_new_tokens=5))
    alone = 0
    while engine.load.num_filling or engine.load.num_waiting:
        round_ = engine.step()
        assert round_ is not None
        alone += [row.row for row in round_.rows] == [0]
    assert alone == 4  # 40 tokens in chunks of 8; with the fifth the row takes part


@pytest.mark.parametrize("make_pair", [llama_pair, _hybrid_pair], ids=["llama", "hybrid"])
@pytest.mark.parametrize("lookahead", [0, 2])
def test_a_cancelled_row_leaves_what_it_has_read_and_no_nan(make_pair: Callable[[], Any], lookahead: int) -> None:
    """In its prompt, whose beginning stays, or while it generates, with NaN. The next text is as if alone."""
    target, drafter = make_pair()
    target.execution.lookahead = lookahead
    bad = target.vocab_size - 1
    for lm in (target, drafter.lm):
        lm.model.get_input_embeddings().weight[bad] = torch.nan
    prompt = tuple((7 * i) % 50 + 1 for i in range(60))
    engine = _engine(target, drafter, GUMBEL, num_slots=1)
    for ids, num_steps, one, least_cached in (
        (prompt, 5, prompt, 32),
        (prompt, 5, (*prompt[:20], 3), 0),
        ((1, *[bad] * 30, 2), 1, prompt[:21], 0),
        (prompt[:21], 3, prompt[:21], 0),
    ):
        cancelled = engine.submit(request(ids, max_new_tokens=3 if num_steps > 3 else 20, logit_bias={bad: -1e9}))
        for _ in range(num_steps):
            engine.step()
        engine.cancel(cancelled)
        asked = request(one, seed=2, max_new_tokens=3, logit_bias={bad: -1e9})
        engine.submit(asked)
        rows = [row for round_ in iter(engine.step, None) for row in round_.rows if row.row != cancelled]
        assert tuple(i for row in rows for i in row.token_ids) == _at_once(target, drafter, [asked], GUMBEL)[0]
        assert sum(row.num_cached_tokens for row in rows) >= least_cached
