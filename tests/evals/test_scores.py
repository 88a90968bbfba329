"""Which numbers are held against which, and how often the claims about many of them err.

The simulations use a fixed seed; a bound fails with a probability of at most 1e-6 if the claims err as they say.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from lm_eval.api.group import Group
from lm_eval.config.group import AggMetricConfig
from scipy import stats

from harness_tasks import write_groups
from outrider.evals import scores as module
from outrider.evals.scores import ArmResult, MetricScore, TaskResult, compare, documents_json, verdict
from outrider.evals.tasks import load_tasks
from outrider.stats.intervals import PairedDifference, paired_difference

FALSE_ALARM = 1e-6


def arm(numbers: dict[int, dict[str, Any]], filter_: str = "none", **aggregates: float) -> ArmResult:
    """An arm as the harness reports it: the metrics of each document, and their mean, or what is given."""
    samples = [
        {"doc_id": i, "filter": filter_, "metrics": list(metrics), "resps": [["text"]], **metrics}
        for i, metrics in numbers.items()
    ]
    means = {}
    for name in {name: None for metrics in numbers.values() for name in metrics}:
        values = [metrics[name] for metrics in numbers.values()]
        means[f"{name},{filter_}"] = aggregates[name] if name in aggregates else float(np.mean(values))
    return ArmResult(means | {"sample_len": len(numbers)}, samples)


def task(plain: Sequence[float], speculative: Sequence[float] | None, name: str = "t", **means: float) -> TaskResult:
    first, second = (
        None if values is None else arm({i: {"em": float(value)} for i, value in enumerate(values)}, **means)
        for values in (plain, speculative)
    )
    assert first is not None
    return TaskResult(name, first, second)


def test_documents_are_paired_whatever_their_order() -> None:
    plain = arm({i: {"f1": i / 10} for i in range(5)})
    speculative = arm({i: {"f1": i / 10 + 0.1 * (i == 2)} for i in (4, 2, 0, 1, 3)})
    (score,) = compare([TaskResult("t", plain, speculative)], [], 0.05)
    want = paired_difference([0, 0.1, 0.2, 0.3, 0.4], [0, 0.1, 0.3, 0.3, 0.4], 0.05)
    assert score.paired is not None and score.paired.tost_p == pytest.approx(want.tost_p)
    assert (score.paired.only_first, score.paired.only_second, score.num_documents) == (0, 1, 5)
    with pytest.raises(AssertionError, match="different documents"):
        compare([TaskResult("t", plain, arm({i: {"f1": 0.0} for i in range(1, 6)}))], [], 0.05)


def test_metrics_of_more_than_one_are_not_overrated() -> None:
    """Scores of 0 to 100 that agree everywhere are no more certain than scores of 0 to 1."""
    percent, share = (
        compare([task(*[[unit * (i % 2) for i in range(40)]] * 2)], [], 0.05 * unit)[0].paired for unit in (100, 1)
    )
    assert percent is not None and share is not None
    assert percent.tost_p == pytest.approx(share.tost_p)
    assert percent.difference.high == pytest.approx(100 * (share.difference.high or 0))


@pytest.mark.parametrize("value", [("a", "b"), [0.5], "0.5", float("nan"), None])
def test_metrics_without_a_number_for_each_document_are_not_paired(value: Any) -> None:
    result = arm({0: {"bleu": value, "em": True}, 1: {"bleu": 0.5, "em": False}}, bleu=0.5)
    bleu, em = compare([TaskResult("t", result, result)], [], 0.05)
    assert (bleu.metric, bleu.paired, bleu.other) == ("bleu", None, 0.5)
    assert em.paired is not None and em.paired.difference.value == 0


def test_a_metric_that_the_arms_have_for_other_documents_is_not_paired() -> None:
    """A task may leave it out where it finds no answer."""
    plain, speculative = arm({0: {"f1": 1.0}, 1: {"f1": 0.0}}), arm({0: {"f1": 1.0}, 1: {"f1": 0.0}})
    del speculative.samples[1]["metrics"][0]  # type: ignore[attr-defined]
    assert compare([TaskResult("t", plain, speculative)], [], 0.05)[0].paired is None


def test_what_a_draft_cannot_change_has_one_arm() -> None:
    result = TaskResult("choice", arm({0: {"acc": 1.0}}), None)
    (score,) = compare([result], [], 0.05)
    assert (score.plain, score.other, score.paired) == (1.0, None, None)
    assert verdict([score]) is None
    assert documents_json([result]) == [
        {"task": "choice", "doc_id": 0, "texts": None, "numbers": [{"metric": "acc", "filter": "none", "plain": 1.0}]}
    ]


@pytest.fixture(name="group", scope="module")
def group_of_tasks(tmp_path_factory: pytest.TempPathFactory) -> Group:
    """A group of the harness, equally weighted: "answers" and "few", and "endings", which does not use a draft."""
    group = Group("g", aggregate_metric_list=[AggMetricConfig("em", weight_by_size=False)])
    for one in load_tasks(["all"], write_groups(tmp_path_factory.mktemp("tasks")))[0].values():
        group.add(one)
    return group


def group_score(group: Group, results: Sequence[TaskResult], margin: float, *, is_by_size: bool = False) -> MetricScore:
    assert group.aggregate_metric_list is not None
    group.aggregate_metric_list[0].weight_by_size = is_by_size
    return compare(results, [group], margin)[-1]


def test_the_difference_of_a_group_by_hand(group: Group) -> None:
    """Four documents with mean differences of 1/4, two with 1/2, and six scored once: equally weighted it is
    (1/4 + 1/2) / 3, by size (4/4 + 2/2) / 12."""
    results = [
        task([0, 0, 1, 1], [0, 1, 1, 1], "answers"),
        task([0, 0], [0, 1], "few"),
        task([0, 0, 0, 1, 1, 1], None, "endings"),
    ]
    for is_by_size, plain, difference in [(False, (1 / 2 + 0 + 1 / 2) / 3, 1 / 4), (True, 5 / 12, 1 / 6)]:
        score = group_score(group, results, 0.3, is_by_size=is_by_size)
        assert score.label == "group g: em" and score.num_documents == 12
        assert score.plain == pytest.approx(plain) and score.other == pytest.approx(plain + difference)
        assert score.paired is not None and score.paired.difference.value == pytest.approx(difference)
        assert (score.paired.only_first, score.paired.only_second) == (0, 2)
    # By size a draft has half of the documents to change, and the group half of their difference.
    want = paired_difference([0, 0, 1, 1, 0, 0], [0, 1, 1, 1, 0, 1], 0.6)
    assert score.paired.difference.low == pytest.approx((want.difference.low or 0) / 2)
    assert score.paired.tost_p == pytest.approx(want.tost_p)


def test_groups_without_a_test(group: Group) -> None:
    answers, few, endings = task([0, 1], [0, 1], "answers"), task([0, 1], [0, 0], "few"), task([1], None, "endings")
    assert group_score(group, [answers, few, endings], 0.1).paired is not None
    median = task([0, 1], [0, 1], "answers", em=1.0)
    score = group_score(group, [median, few, endings], 0.1)
    assert (score.plain, score.paired) == (pytest.approx((1 + 0.5 + 1) / 3), None), "not a mean over documents"
    assert [score.task for score in compare([answers, few], [group], 0.1)] == ["answers", "few"], (
        "cut off before the end"
    )
    once = [task([0, 1], None, name) for name in ("answers", "few", "endings")]
    score = group_score(group, once, 0.1)
    assert (score.plain, score.other, score.paired) == (0.5, None, None)


def test_a_group_is_called_equivalent_no_more_often_than_it_may(group: Group) -> None:
    """The exact level, where all faults are in the smaller of two tasks of the same weight: a third of it 0.3 * 20 is
    0.1. The control forgets the weights."""
    num, margin = 20, 0.1
    level = level_of_control = 0.0
    for failures in range(num + 1):
        second = [0.0] * failures + [1.0] * (num - failures)
        results = [
            task([1.0] * 200, [1.0] * 200, "answers"),
            task([1.0] * num, second, "few"),
            task([1.0], None, "endings"),
        ]
        paired = group_score(group, results, margin).paired
        assert paired is not None
        probability = stats.binom.pmf(failures, num, 3 * margin)
        level += probability * paired.is_equivalent
        level_of_control += probability * paired_difference([1.0] * 220, [1.0] * 200 + second, margin).is_equivalent
    assert 0 < level <= 0.05 < 0.5 < level_of_control


@cache
def counted(num_first: int, num_second: int, num_documents: int) -> tuple[ArmResult, ArmResult]:
    """Arms of which only the first succeeds in so many documents, and only the second in so many others. Which
    documents these are makes no difference."""
    num_neither = num_documents - num_first - num_second
    made = task(
        [1] * num_first + [0] * (num_second + num_neither), [0] * num_first + [1] * num_second + [0] * num_neither
    )
    assert made.other is not None
    return made.plain, made.other


@pytest.fixture
def each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the simulated tasks have numbers that others have, too: these are compared once."""

    @cache
    def compared(first: tuple[float, ...], second: tuple[float, ...], margin: float, span: float) -> PairedDifference:
        return paired_difference(first, second, margin, span=span)

    def compare_pairs(
        first: Sequence[float], second: Sequence[float], margin: float, *, span: float
    ) -> PairedDifference:
        return compared(tuple(first), tuple(second), margin, span)

    monkeypatch.setattr(module, "paired_difference", compare_pairs)


def simulated(
    num: int, laws: Sequence[tuple[float, float]], *, num_documents: int, margin: float
) -> list[list[MetricScore]]:
    """Scores of several tasks, in each of which only plain succeeds in a share of the documents, and only the other."""
    generator = np.random.default_rng(0)
    experiments = []
    for _ in range(num):
        results = []
        for place, (only_first, only_second) in enumerate(laws):
            kind = generator.choice(3, size=num_documents, p=[only_first, only_second, 1 - only_first - only_second])
            num_first, num_second = int((kind == 0).sum()), int((kind == 1).sum())
            arms = counted(num_first, num_second, num_documents)
            results.append(TaskResult(str(place), *arms))
        experiments.append(compare(results, [], margin))
    return experiments


@pytest.mark.usefixtures("each_once")
def test_that_one_differs_is_seldom_said_of_many_that_do_not() -> None:
    """Six tasks without a difference, 400 times: 5% have a false alarm, or fewer. The control does not correct for
    their number. A difference in truth is found beside them."""
    experiments = simulated(400, [(0.1, 0.1)] * 6, num_documents=150, margin=0.1)
    limit = stats.binom.isf(FALSE_ALARM, 400, 0.05)
    verdicts = [verdict(scores) for scores in experiments]
    assert sum(bool(one and one.differing) for one in verdicts) <= limit
    uncorrected = [[score.paired and score.paired.difference_p < 0.05 for score in scores] for scores in experiments]
    assert sum(map(any, uncorrected)) > limit
    found = [verdict(scores) for scores in simulated(20, [(0.1, 0.1)] * 5 + [(0.3, 0.05)], num_documents=150, margin=1)]
    assert sum("5: em" in one.differing for one in found if one) > 15


@pytest.mark.usefixtures("each_once")
@pytest.mark.parametrize("law", [(0.06, 0.16), (0.1, 0.0)])
def test_that_all_are_equivalent_is_seldom_said_where_one_is_not(law: tuple[float, float]) -> None:
    """Five tasks that are, and one that differs by just the margin, 300 times: 5% are called equivalent altogether, or
    fewer. The control lets one of them fail its test."""
    rest = [(0.01, 0.01)] * 5
    limit = stats.binom.isf(FALSE_ALARM, 300, 0.05)
    verdicts = [verdict(scores) for scores in simulated(300, [*rest, law], num_documents=200, margin=0.1)]
    assert sum(one.is_equivalent for one in verdicts if one) <= limit
    assert sum(one.num_equivalent >= one.num_compared - 1 for one in verdicts if one) > 250 > limit
    found = [verdict(scores) for scores in simulated(20, [*rest, (0.01, 0.01)], num_documents=200, margin=0.1)]
    assert sum(one.is_equivalent for one in found if one) > 15, "and not by refusing everything"


def test_a_verdict_may_say_both() -> None:
    """A difference that is there, and small."""
    paired = PairedDifference(0, 20, paired_difference([0.0], [0.0], 0.05).difference, 0.05, 1e-4, 1e-6)
    scores = [
        MetricScore("t", "em", name, 400, 0.5, 0.5, paired, is_different=name == "strict")
        for name in ("strict", "none")
    ]
    overall = verdict(scores)
    assert overall is not None and overall.is_equivalent and overall.differing == ("t: em, strict",)
    assert overall.to_json() == {
        "num_compared": 2,
        "num_equivalent": 2,
        "num_different": 1,
        "is_equivalent": True,
        "is_different": True,
    }
