"""Paired comparison of two arms' scores by document, and joint claims about many scores.

The input is the harness's results; nothing runs here. A claim about one score has its own error rate of 5%. For several
there are two claims, each with an error probability of at most 5%, however the scores depend on each other:

- All are equivalent, if each is by its own test. If one truly is not, its test alone has to err (intersection-union
  test, Berger 1982), so no correction is needed.
- Some differ, and which: by Holm's procedure over all that are compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
from lm_eval.api.group import Group

from outrider.records import Stats
from outrider.stats.evidence import Finding, holm
from outrider.stats.intervals import PairedDifference, paired_difference

LEVEL = 0.05  # of each claim, and of ``PairedDifference.is_equivalent``


@dataclass(frozen=True, slots=True)
class ArmResult:
    """Harness results of one arm for one task.

    Attributes:
        metrics: aggregates by ``metric,filter``; and ``sample_len``, the number of documents.
        samples: a record of every document, once for each filter.
        stats: of the generation; None if nothing was generated.
    """

    metrics: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]]
    stats: Stats | None = None


@dataclass(frozen=True, slots=True)
class TaskResult:
    """Results of both arms for a task.

    Attributes:
        plain: the target without a draft.
        other: the second arm; None if it could not differ, and was not run.
        arm: name of the second arm, "speculative" (the same target with a draft) or "against" (another target).
    """

    name: str
    plain: ArmResult
    other: ArmResult | None
    arm: str = "speculative"


@dataclass(frozen=True, slots=True)
class MetricScore:
    """Score of one metric of a task or group.

    Attributes:
        task: name of the task or group.
        filter: the harness's filter, which extracts the answer from the text.
        plain, other: as aggregated by the harness; None for an arm that was not run.
        paired: other minus plain, in the mean of the documents' own numbers (weighted as the group specifies);
            None for a single arm, or if the score is not a mean over documents (such as corpus BLEU).
        weighting: of the tasks in a group: "size" or "equal"; None for a task.
        is_different: whether it differs, by Holm's procedure over all scores that are compared.
    """

    task: str
    metric: str
    filter: str
    num_documents: int
    plain: float
    other: float | None
    paired: PairedDifference | None
    arm: str = "speculative"
    weighting: str | None = None
    is_different: bool = False

    @property
    def label(self) -> str:
        group = "" if self.weighting is None else "group "
        return f"{group}{self.task}: {self.metric}" + (f", {self.filter}" if self.filter != "none" else "")

    def to_json(self) -> dict[str, Any]:
        judged = {} if self.paired is None else {"is_equivalent": self.paired.is_equivalent}
        return {
            "task": self.task,
            "weighting": self.weighting,
            "metric": self.metric,
            "filter": self.filter,
            "num_documents": self.num_documents,
            "plain": self.plain,
            self.arm: self.other,
            "paired": asdict(self.paired) | judged | {"is_different": self.is_different} if self.paired else None,
        }


@dataclass(frozen=True, slots=True)
class ScoreVerdict:
    """Joint claims about all compared scores; each of the two errs with probability ``LEVEL`` at most.

    Attributes:
        differing: by label.
    """

    num_compared: int
    num_equivalent: int
    differing: tuple[str, ...]

    @property
    def is_equivalent(self) -> bool:
        """Whether all scores are."""
        return self.num_equivalent == self.num_compared

    def to_json(self) -> dict[str, Any]:
        return {
            "num_compared": self.num_compared,
            "num_equivalent": self.num_equivalent,
            "num_different": len(self.differing),
            "is_equivalent": self.is_equivalent,
            "is_different": bool(self.differing),
        }


def verdict(scores: Sequence[MetricScore]) -> ScoreVerdict | None:
    """Joint verdict on the output of ``compare``; None if no score could be compared."""
    compared = [(score, score.paired) for score in scores if score.paired is not None]
    if not compared:
        return None
    return ScoreVerdict(
        num_compared=len(compared),
        num_equivalent=sum(paired.is_equivalent for _, paired in compared),
        differing=tuple(score.label for score, _ in compared if score.is_different),
    )


def compare(results: Sequence[TaskResult], groups: Sequence[Group], margin: float) -> list[MetricScore]:
    """Compare the scores of both arms, paired by document: tasks first, then groups.

    Args:
        groups: of the harness. A group whose tasks are incomplete has no score.
        margin: means closer than this are equivalent, in the unit of each metric.
    """
    scores = [score for result in results for score in _task_scores(result, margin)]
    by_name = {result.name: result for result in results}
    for group in groups:
        names = [task.task_name for task in group.get_all_tasks()]
        if all(name in by_name for name in names):
            scores += _group_scores(group, [by_name[name] for name in names], margin)
    compared = {place: score.paired for place, score in enumerate(scores) if score.paired is not None}
    found = [Finding(scores[i].label, one.difference.value, one.difference_p) for i, one in compared.items()]
    for place, finding in zip(compared, holm(found, LEVEL), strict=True):
        scores[place] = replace(scores[place], is_different=finding.is_alarm)
    return scores


def _task_scores(result: TaskResult, margin: float) -> list[MetricScore]:
    scores = []
    for metric, filter_ in _metrics(result.plain.samples):
        key = f"{metric},{filter_}"
        pairs = _pairs(result, metric, filter_)
        scores.append(
            MetricScore(
                task=result.name,
                metric=metric,
                filter=filter_,
                num_documents=sum(sample["filter"] == filter_ for sample in result.plain.samples),
                plain=result.plain.metrics[key],
                other=result.other.metrics[key] if result.other else None,
                paired=paired_difference(*pairs, margin, span=_span(pairs)) if pairs is not None else None,
                arm=result.arm,
            )
        )
    return scores


def _group_scores(group: Group, results: Sequence[TaskResult], margin: float) -> list[MetricScore]:
    """Aggregate a group as the harness does: weighted means over its tasks, including those of subgroups.

    Args:
        results: of its tasks; a task in two subgroups occurs twice, and counts twice.
    """
    plain = {result.name: dict(result.plain.metrics) for result in results}
    # Tasks run once have the same score in both arms.
    other = {result.name: dict((result.other or result.plain).metrics) for result in results}
    first, second = group.aggregate(plain), group.aggregate(other)
    is_by_size = {one.metric: one.weight_by_size for one in group.aggregate_metric_list or ()}
    scores = []
    for key, num_documents in first.get("sample_count", {}).items():
        metric, filter_ = key.split(",", 1)
        members = [result for result in results if key in result.plain.metrics]
        weights = [result.plain.metrics["sample_len"] if is_by_size[metric] else 1 for result in members]
        scores.append(
            MetricScore(
                task=group.name,
                metric=metric,
                filter=filter_,
                num_documents=num_documents,
                plain=first[key],
                other=second[key] if any(result.other for result in members) else None,
                paired=_group_paired(members, weights, metric, filter_, margin),
                arm=results[0].arm,
                weighting="size" if is_by_size[metric] else "equal",
            )
        )
    return scores


def _group_paired(
    members: Sequence[TaskResult], weights: Sequence[float], metric: str, filter_: str, margin: float
) -> PairedDifference | None:
    """Paired difference of weighted means, over the documents of all generated tasks.

    With weights w that add to 1, n documents of a task and N of all, a document's number times N w/n makes the weighted
    mean of means a mean over documents. Their variance then includes that between tasks, which are not drawn at random:
    the interval is somewhat too wide. Tasks run once do not differ between arms; they only contribute their
    weights.

    Returns:
        None if no task generates, or if a score is not the mean of its documents' numbers.
    """
    pairs, shares = [], []
    for result, weight in zip(members, weights, strict=True):
        if result.other is None:
            continue
        pair = _pairs(result, metric, filter_)
        if pair is None:
            return None
        for arm, values in zip((result.plain, result.other), pair, strict=True):
            if not math.isclose(arm.metrics[f"{metric},{filter_}"], sum(values) / len(values), abs_tol=1e-9):
                return None
        pairs.append(pair)
        shares.append(weight / sum(weights) / len(pair[0]))
    if not pairs:
        return None
    num_documents = sum(len(first) for first, _ in pairs)
    scales = [num_documents * share for share in shares]
    first, second = (
        [scale * value for scale, pair in zip(scales, pairs, strict=True) for value in pair[arm]] for arm in (0, 1)
    )
    span = max(scale * _span(pair) for scale, pair in zip(scales, pairs, strict=True))
    return paired_difference(first, second, margin, span=span)


def _pairs(result: TaskResult, metric: str, filter_: str) -> tuple[list[float], list[float]] | None:
    """Numbers of a metric by document in both arms; None unless both have them."""
    if result.other is None:
        return None
    arms = (result.plain.samples, result.other.samples)
    ids = [{sample["doc_id"] for sample in samples} for samples in arms]
    assert ids[0] == ids[1], "the arms have run different documents"
    first, second = (_numbers(samples, metric, filter_) for samples in arms)
    if first is None or second is None or first.keys() != second.keys():
        return None
    return list(first.values()), [second[doc_id] for doc_id in first]


def _span(pairs: tuple[list[float], list[float]]) -> float:
    """Assumed largest difference between a document's numbers."""
    return max(1.0, max(map(max, pairs)) - min(map(min, pairs)))


def documents_json(results: Sequence[TaskResult]) -> list[dict[str, Any]]:
    """JSON of every document: the arms' outputs, and its numbers in each metric."""
    documents = []
    for result in results:
        arms = {"plain": result.plain.samples}
        if result.other:
            arms[result.arm] = result.other.samples
        numbers = {
            (metric, filter_): [_numbers(arm, metric, filter_) or {} for arm in arms.values()]
            for metric, filter_ in _metrics(result.plain.samples)
        }
        texts = {arm: {sample["doc_id"]: sample["resps"] for sample in arms[arm]} for arm in arms}
        for doc_id in texts["plain"]:
            documents.append(
                {
                    "task": result.name,
                    "doc_id": doc_id,
                    "texts": {arm: texts[arm][doc_id] for arm in arms} if len(arms) > 1 else None,
                    "numbers": [
                        {"metric": metric, "filter": filter_}
                        | {arm: values.get(doc_id) for arm, values in zip(arms, by_arm, strict=True)}
                        for (metric, filter_), by_arm in numbers.items()
                    ],
                }
            )
    return documents


def _metrics(samples: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of metric and filter of a task."""
    return list(dict.fromkeys((metric, sample["filter"]) for sample in samples for metric in sample["metrics"]))


def _numbers(samples: Sequence[Mapping[str, Any]], metric: str, filter_: str) -> dict[int, float] | None:
    """Numbers of a metric by document; None if any is not finite."""
    values = {
        sample["doc_id"]: sample[metric]
        for sample in samples
        if sample["filter"] == filter_ and metric in sample["metrics"]
    }
    if not all(isinstance(value, (Real, np.bool_)) and math.isfinite(value) for value in values.values()):
        return None
    return {doc_id: float(value) for doc_id, value in values.items()}
