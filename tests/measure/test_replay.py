"""Replay against the real loop: round by round where all is certain, exactly or on average where it is not."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from enumeration import outcomes
from outrider.drafters.base import NO_DRAFTER, Drafter
from outrider.drafters.draft_options import DraftOptions
from outrider.drafters.lookups import ngram_drafter
from outrider.drafters.model import model_drafter
from outrider.errors import OptionError
from outrider.measure import replay as module
from outrider.measure.log import Header, Record, token_probs
from outrider.measure.replay import MATCH, RoundDistribution, log_ratios, replay, summarise
from outrider.measure.tau import stats_of
from outrider.measure.teacher_forcing import Text
from outrider.options import Sampling
from outrider.records import Stats
from outrider.runtime.lm import LM
from outrider.sampling.rules import REJECTION, RULES
from reference import draft_paths
from round_drafters import head, parallel, two_tables
from toys import StopAt, as_lm, llama_pair, perturbed, random_table, request, run, table_lm, table_pair, tiny_llama

KS = [1, 3, 8]
PROMPTS = [[1, 2, 3], [4, 6], [2] * 7, [3, 1, 2, 3, 1, 2, 3], list(range(6, 30))]
EOS = 5


def header_of(target: LM, *, has_probs: bool = False, **options: object) -> Header:
    return Header("target", Sampling(**options), has_probs, target.vocab_size, target.context_len, (EOS,), None)


def written(
    target: LM, prompts: Sequence[Sequence[int]], *, has_probs: bool = False, **options: object
) -> tuple[Header, list[Record]]:
    """The log of what the loop writes without a draft."""
    requests = [request(ids, StopAt(EOS), i, **options) for i, ids in enumerate(prompts)]
    records = []
    for i, (ids, output) in enumerate(zip(prompts, run(target, NO_DRAFTER, requests, REJECTION, 0), strict=True)):
        text = Text((*ids, *output.token_ids), len(ids))
        probs = tuple(token_probs(target, [text], Sampling(**options))[0]) if has_probs else None
        records.append(Record(i, None, i, output.finish_reason, tuple(ids), output.token_ids, probs))
    return header_of(target, has_probs=has_probs, **options), records


@pytest.mark.parametrize(
    ("lengths", "rule", "more", "has_model"),
    [
        ({}, "gumbel", {}, False),
        ({"context_len": 40}, "block", {}, True),
        ({"draft_context_len": 12}, "rejection", {"repetition_penalty": 1.5, "frequency_penalty": 0.7}, True),
    ],
)
def test_greedy_rounds_are_equal(lengths: dict[str, int], rule: str, more: dict[str, float], has_model: bool) -> None:
    """To those of the loop, for every K, to limits and contexts. Penalties count tokens before a draft's window."""
    target, drafter = llama_pair(**lengths)
    chosen: Drafter = drafter if has_model else ngram_drafter()
    options = {"temperature": 0.0, "max_new_tokens": 30, **more}
    header, records = written(target, PROMPTS, **options)
    assert {record.finish_reason for record in records} <= {"eos", "length"}
    replayed = list(replay(records, header, chosen, rule, KS, target=target, batch_size=2))
    expected, alpha = summarise(replayed, KS)
    assert (alpha is None) != has_model
    for k in KS:
        assert expected[k] == [one.rounds(k).expected() for one in replayed]
        real = run(target, chosen, [request(ids, StopAt(EOS), **options) for ids in PROMPTS], RULES[rule], k)
        for one, output in zip(replayed, real, strict=True):
            law = one.rounds(k)
            rounds = [(row.num_drafted, row.num_accepted) for row in output.rounds if not row.is_truncated]
            assert law.draw(np.random.default_rng(0)) == (rounds, bool(output.stats.num_truncated_rounds))
            got, want = law.expected().to_json(), output.stats.to_json()
            for name in ("acceptance_histogram", "drafted_histogram"):
                got[name] = got[name][: len(want[name])]  # the rest is zeros
            assert got == want


Rounds = list[tuple[float, int, tuple[int, ...]]]
"""Ways in which a round may go: probability, accepted tokens, committed tokens."""


def _rounds(
    rule: str, draft: list[list[float]], k: int, later: list[list[float]] | None = None
) -> dict[tuple[int, int], Rounds]:
    """By (last token, number drafted), from all that can happen; under ``match`` both sample independently."""
    p, found = TARGET.softmax(-1).tolist(), defaultdict(lambda: defaultdict(float))
    if rule != MATCH:
        for one in outcomes(RULES[rule], rule, p, draft, range(k + 1), later):
            found[one.case.last, len(one.case.ids)][one.num_accepted, one.committed] += one.case.weight
    for last, n in product(range(3), range(k + 1)) if rule == MATCH else ():
        for (ids, weight), drawn in product(draft_paths(last, draft, n), product(range(3), repeat=n + 1)):
            num_accepted = next((i for i in range(n) if ids[i] != drawn[i]), n)
            chance = math.prod(p[before][x] for before, x in zip((last, *ids), drawn, strict=True))
            found[last, n][num_accepted, drawn[: num_accepted + 1]] += weight * chance
    return {
        start: [(chance, *way) for way, chance in sorted(sums.items()) if chance > 1e-12]
        for start, sums in found.items()
    }


def _enumerated(
    by_start: dict[tuple[int, int], Rounds], num_tokens: int, k: int
) -> dict[tuple[int, ...], tuple[float, Stats]]:
    """Every text of a three-token chain after token 1; 2 ends it: probability, and expected counts."""
    found: dict[tuple[int, ...], list[tuple[float, list[tuple[int, int]], int]]] = defaultdict(list)

    def go_on(text: tuple[int, ...], weight: float, rounds: list[tuple[int, int]]) -> None:
        n = min(k, num_tokens - len(text) - 1)
        for chance, num_accepted, committed in by_start[(1, *text)[-1], n]:
            cut = committed[: committed.index(2) + 1] if 2 in committed else committed
            is_truncated = len(cut) < len(committed)
            longer, more = (*text, *cut), weight * chance
            all_rounds = rounds if is_truncated else [*rounds, (n, num_accepted)]
            if cut[-1] == 2 or len(longer) == num_tokens:
                found[longer].append((more, all_rounds, int(is_truncated)))
            elif more > 0:
                go_on(longer, more, all_rounds)

    go_on((), 1.0, [])
    laws = {}
    for text, ways in found.items():
        mass = sum(weight for weight, *_ in ways)
        counts = Stats()
        for weight, rounds, num_truncated in ways:
            one = stats_of(rounds, num_truncated, 0)
            share = weight / mass
            counts += Stats(
                0,
                *(tuple(share * x for x in getattr(one, name)) for name in _HISTOGRAMS),
                num_truncated_rounds=share * num_truncated,
            )
        laws[text] = (mass, counts)
    return laws


TARGET = random_table(3, 2, 1.3)
DRAFT = 0.5 * TARGET + random_table(3, 3)
LATER = 0.3 * TARGET + random_table(3, 7)
BEST = torch.nn.functional.one_hot(DRAFT.argmax(-1), 3).double().log()  # certain of the draft's favourite
_HISTOGRAMS = ("acceptance_histogram", "drafted_histogram", "full_histogram")


@pytest.mark.parametrize(
    ("law", "of_rounds", "draft", "later", "has_probs"),
    [
        ("rejection", "rejection", DRAFT, None, True),
        ("block", "block", DRAFT, None, True),
        ("rejection", "rejection", DRAFT, LATER, False),
        ("block", "block", DRAFT, LATER, False),
        (MATCH, MATCH, DRAFT, None, False),
        ("rejection", MATCH, BEST, None, True),
        ("gumbel", MATCH, BEST, None, False),
    ],
)
def test_expectations_are_exact(law: str, of_rounds: str, draft: Tensor, later: Tensor | None, has_probs: bool) -> None:
    """Given a text, against all ways in which the law may have written it; of a draft with one table, or with another
    one from the second token of a round on. A certain draft stands if it is what the target samples."""
    num_tokens, k = 4, 2
    p, q, later_q = (None if table is None else table.softmax(-1).tolist() for table in (TARGET, draft, later))
    target, is_greedy = table_lm(TARGET), draft is BEST
    drafter = model_drafter(table_lm(DRAFT, name="draft"), DraftOptions(is_greedy))
    drafter = drafter if later is None else two_tables(DRAFT, later)
    header = header_of(target, has_probs=has_probs, max_new_tokens=num_tokens)
    for text, (mass, want) in _enumerated(_rounds(of_rounds, q, k, later_q), num_tokens, k).items():
        alone = math.prod(p[last][x] for last, x in zip((1, *text), text, strict=False))
        assert mass == pytest.approx(alone, abs=1e-12)
        probs = tuple(token_probs(target, [Text((1, *text))], Sampling())[0]) if has_probs else None
        record = Record(0, None, 0, "eos" if text[-1] == 2 else "length", (1,), text, probs)
        (one,) = replay([record], header, drafter, law, [k], target=target)
        got = one.rounds(k).expected()
        for name in _HISTOGRAMS:
            pair = getattr(got, name), getattr(want, name)
            a, b = ([*values, *[0.0] * (k + 1 - len(values))] for values in pair)
            assert a == pytest.approx(b, abs=1e-11), name
        assert got.num_truncated_rounds == pytest.approx(want.num_truncated_rounds, abs=1e-11)


Z = 5.1  # standard deviations; by chance in less than one of a million comparisons (two-sided, normal)
SAMPLED = {"temperature": 0.9, "top_p": 0.97, "max_new_tokens": 14}


def _z_scores(rule: str, k: int, target: LM, drafter: Drafter, num_texts: int) -> dict[str, float]:
    """Real rounds less those expected given their text, over the standard error: the mean is 0 for each text."""
    requests = [request([1 + i % 4, 6], StopAt(EOS), i, **SAMPLED) for i in range(num_texts)]
    outputs = run(target, drafter, requests, RULES[rule], k)
    pairs = [(one.prompt_ids, output.token_ids) for one, output in zip(requests, outputs, strict=True)]
    header = header_of(target, **SAMPLED)
    records = [
        Record(i, None, i, output.finish_reason, tuple(pair[0]), pair[1])
        for i, (output, pair) in enumerate(zip(outputs, pairs, strict=True))
    ]
    differences = defaultdict(list)
    replayed = replay(records, header, drafter, rule, [k], target=target, batch_size=500)
    for one, output in zip(replayed, outputs, strict=True):
        want, stats = one.rounds(k).expected().to_json(), output.stats.to_json()
        for name in ("num_rounds", "num_truncated_rounds", "num_accepted_draft_tokens", "num_draft_tokens"):
            differences[name].append(stats[name] - want[name])
    return {
        name: float(np.mean(values) / max(np.std(values), 1e-12) * math.sqrt(len(values)))
        for name, values in differences.items()
    }


def _head_pair() -> tuple[LM, Drafter]:
    target = as_lm(tiny_llama(vocab_size=30))
    return target, head(target)


@pytest.mark.parametrize(
    ("pair", "k", "num_texts"), [(lambda: table_pair(8, draft_context_len=11), 4, 1500), (_head_pair, 3, 200)]
)
def test_sampled_rounds_are_equal_on_average(pair: Callable[[], tuple[LM, Drafter]], k: int, num_texts: int) -> None:
    """Texts end at an end token or the limit. Each of four comparisons fails by chance with under 4e-7."""
    scores = _z_scores("gumbel", k, *pair(), num_texts)
    assert all(abs(score) < Z for score in scores.values()), scores


def test_one_ratio_for_each_place_shows_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: later tokens of a parallel draft are worse than the first."""
    right, model = module.survival, tiny_llama(vocab_size=30)
    pair = as_lm(model), parallel(as_lm(perturbed(model, 0.1), "draft"))
    assert abs(_z_scores("rejection", 3, *pair, 200)["num_rounds"]) < Z
    monkeypatch.setattr(module, "survival", lambda rule, logs: right(rule, module.by_offset(logs[:, 0], logs.shape[1])))
    assert abs(_z_scores("rejection", 3, *pair, 200)["num_rounds"]) > 1.5 * Z


def test_alpha_is_estimated_without_bias() -> None:
    """min(1, q/p) of the tokens that stand there, against the exact overlap: the difference has mean 0 given what is
    before a token, so the sum over all is off by more than 5.1 standard errors in less than one of a million."""
    target, drafter = table_pair(8)
    header, records = written(target, [[1 + i % 4] for i in range(300)], has_probs=True, max_new_tokens=20)
    p, q = (lm.model.table.softmax(-1) for lm in (target, drafter.lm))
    both, differences = torch.minimum(p, q).sum(-1), []
    for one, record in zip(replay(records, header, drafter, "rejection", [1]), records, strict=True):
        before = [*record.prompt_ids, *record.token_ids][:-1][-len(record.token_ids) :]
        differences += (one.overlap - both[before].numpy()).tolist()
    assert abs(np.mean(differences)) < Z * np.std(differences) / math.sqrt(len(differences))


def test_replay_refuses_bad_arguments() -> None:
    target, drafter = table_pair(8)
    header, records = written(target, PROMPTS[:1], temperature=0.7, max_new_tokens=5)
    for one, rule, message in (
        (drafter, "rejection", "generate it again with --output --probs"),
        (NO_DRAFTER, "rejection", "name a draft to replay"),
        (drafter, "hope", "choose one of rejection, block, gumbel, match"),
        (_head_pair()[1], "rejection", "draft = 'head'.*--target"),
        (drafter, "gumbel", "acceptance = 'gumbel' is invalid: it needs all of p.*--target"),
    ):
        with pytest.raises(OptionError, match=message):
            list(replay(records, header, one, rule, [1]))


def test_log_ratios_of_tokens_with_p_zero() -> None:
    """p = 0 can only be rounding. Then q/p counts as 1, or as 0 where q is 0; a small q/p after it stays."""
    logs = log_ratios(np.array([0.5, 0.0, 0.5]), np.array([0.0, 0.0, 1.0]))
    law = RoundDistribution.of(module.survival("block", module.by_offset(logs, 2)), np.array([2, 1, 0]))
    assert law.expected().acceptance_histogram == pytest.approx((1.0, 1.0, 0.0))
    logs = log_ratios(np.array([0.5, 0.25]), np.array([0.0, 1.0]))
    for rule in ("block", "rejection"):
        assert module.survival(rule, module.by_offset(logs, 2))[0] == pytest.approx((1.0, 1.0, 0.25))
