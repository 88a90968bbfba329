"""HTML reports of ``certify`` and ``certify-samples``: one file with embedded figures, without scripts or requests.

A page depends only on the document that the command writes with ``--json`` (docs/reference/json.md). Its text is in the
templates ``certificate.html``, ``samples.html`` and, for both, ``page.html``; outrider.pages has the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from outrider.certify.certificate import NEGLIGIBLE_TV, reuse_limits
from outrider.certify.exact import comparisons
from outrider.pages.figures import svg_of_acceptance, svg_of_bins, svg_of_excess, svg_of_z
from outrider.pages.templates import gap_text, number_text, render, share_text, value_text, whole_text
from outrider.stats.intervals import normal_limit, uniform_bins, uniform_distance, wilson

# Test -> the deviation that it detects, and the symbol of its statistic.
TESTS = {
    "score": ("pushed towards {towards}", "z"),
    "likelihood": ("too sharp or too flat", "z"),
    "rank": ("pushed towards high or low token ids", "z"),
    "pit-ks": ("not uniform along q − p, by Kolmogorov-Smirnov", "D"),
    "pit-chi2": ("not uniform along q − p, by chi-square", "χ²"),
    "score-by-place": ("pushed towards {towards} at some place in the round", "log W"),
    "score-by-position": ("pushed towards {towards} in some part of the sequence", "log W"),
    "score-by-prompt": ("pushed towards {towards} after some prompt", "log W"),
    "likelihood-by-place": ("too sharp or too flat at some place in the round", "log W"),
    "rank-by-place": ("pushed towards high or low token ids at some place in the round", "log W"),
    "score-by-round-before": ("pushed towards {towards} after some number of accepted tokens", "log W"),
    "rank-by-distance": ("correlated with the random numbers of tokens a few places before", "log W"),
    "rank-by-round-before": ("correlated with the random numbers of the previous round", "log W"),
    "rank-by-sequence": ("correlated with the random numbers of another sequence", "log W"),
}
# Options that the distribution of a token depends on, with their neutral values.
_SAMPLING: dict[str, Any] = {
    "temperature": None,
    "top_k": 0,
    "top_p": 1,
    "min_p": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "min_tokens": 0,
    "logit_bias": None,
}
_CONSTRAINTS = {"json_schema": "a JSON schema", "regex": "a regular expression", "grammar": "a grammar"}


def render_certificate(document: Mapping[str, Any]) -> str:
    """Render the page of a certificate.

    Args:
        document: with the schema outrider/certify/1, as read from JSON.
    """
    statistical, options = document["statistical"], document["options"]
    reasons, doubts = list(_reasons(document)), list(_doubts(document))
    assert document["is_certified"] == (not reasons and not doubts)
    figures = statistical and _figures(statistical) | _round_figures(statistical["places"], options["num_draft_tokens"])
    return _render(
        "certificate.html",
        document,
        towards="the draft",
        reasons=reasons,
        doubts=doubts,
        figures=figures,
        exact_rows=list(comparisons(document["exact"])),
        sampling=list(_sampling(options)),
    )


def render_samples(document: Mapping[str, Any]) -> str:
    """Render the page of samples from another system.

    Args:
        document: with the schema outrider/certify-samples/1, as read from JSON.
    """
    statistical, shared = document["statistical"], document["shared_options"]
    towards = "a sharper distribution" if document["options"]["draft"] == ["none"] else "the draft"
    reasons = [*_statistical_reasons(statistical, towards), *_greedy_reasons(document["greedy"])]
    doubts = list(_statistical_doubts(statistical, towards))
    assert document["is_consistent"] == (not reasons and not doubts)
    # The other system's rule is unknown, and does not matter.
    options = {name: value for name, value in document["options"].items() if name != "acceptance"}
    return _render(
        "samples.html",
        {**document, "options": options},
        towards=towards,
        reasons=reasons,
        doubts=doubts,
        figures=statistical and _figures(statistical),
        sampling=list(_sampling(shared)),
        own_options=[_dashed(name) for name in _SAMPLING if name not in shared],
    )


def _render(template: str, document: Mapping[str, Any], *, towards: str, **more: Any) -> str:
    """Render a page from its template.

    Args:
        towards: direction of the tests.
        more: further template variables.
    """
    return render(
        "outrider.certify",
        template,
        document,
        towards=towards,
        reuse=list(reuse_limits(document["statistical"].get("dependence", ()))) if document["statistical"] else [],
        words={name: (found.format(towards=towards), symbol) for name, (found, symbol) in TESTS.items()},
        **more,
    )


def _reasons(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons for a failed verdict."""
    for name, gap, tolerance, is_ok in comparisons(document["exact"]):
        if not is_ok:
            yield f"The exact layer failed: {name} is off by {gap_text(gap)}, and {gap_text(tolerance)} is allowed."
    yield from _statistical_reasons(document["statistical"], "the draft")
    yield from _greedy_reasons(document["greedy"])


def _doubts(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons for an inconclusive verdict."""
    yield from _statistical_doubts(document["statistical"], "the draft")
    if document["is_idle"]:
        yield "No drafted token was accepted, or no control is effective: there is nothing to certify."
    for control in document["controls"]:
        if control["excuse"] is None and not control["is_caught"]:
            yield (
                f"A deliberate mistake was not detected ({control['name']}: {control['about']}), so the tests "
                f"are too weak here{_enough(control)}."
            )


def _enough(finding: Mapping[str, Any]) -> str:
    """Number of tokens that would suffice. (Older documents lack it.)"""
    needed = finding.get("num_tokens_needed")
    return ": test more tokens" if needed is None else f": about {whole_text(needed)} tokens would suffice"


def _statistical_reasons(statistical: Mapping[str, Any] | None, towards: str) -> Iterator[str]:
    if statistical is None:
        return
    for test in statistical["tests"]:
        if test["is_alarm"]:
            found, _ = TESTS[test["name"]]
            yield f"The output is {found.format(towards=towards)} ({test['name']}, p = {number_text(test['p'])})."
    if statistical["num_forbidden"]:
        yield f"{whole_text(statistical['num_forbidden'])} generated tokens have probability 0 under the target."


def _statistical_doubts(statistical: Mapping[str, Any] | None, towards: str) -> Iterator[str]:
    if statistical is None:
        return
    wanted, least = statistical["wanted"], statistical["detectable"]
    if wanted is not None and (least is None or least > wanted):
        enough = _enough(statistical)
        yield f"A deviation of {share_text(wanted)}, the requested limit, might have gone undetected{enough}."
    elif "num_tokens_needed" in statistical and least is None and 1 - statistical["alpha"] >= NEGLIGIBLE_TV:
        yield f"Even output that follows {towards} alone might have gone undetected{_enough(statistical)}."


def _greedy_reasons(greedy: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for one in greedy:
        num_bugs = sum(difference["verdict"] != "numerics" for difference in one["differences"])
        if num_bugs:
            how = "with the same seed" if one["has_noise"] else "at temperature 0"
            yield (
                f"Of {whole_text(one['num_texts'])} sequences {how}, {whole_text(num_bugs)} differ from plain decoding "
                "by more than rounding explains."
            )


def _sampling(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options that change the distribution of a token."""
    for name, none in _SAMPLING.items():
        if options.get(name, none) != none:
            yield f"{_dashed(name)} {value_text(options[name])}"
    for name, about in _CONSTRAINTS.items():
        if options.get(name) is not None:
            yield f"under {about}"
    if options.get("bad_words"):
        yield f"bad-words {value_text(options['bad_words'])}"


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _figures(statistical: Mapping[str, Any]) -> dict[str, Any]:
    """Figures for any samples, and the numbers in their captions."""
    num_tokens, bins = statistical["num_tokens"], statistical["pit_histogram"]
    band = uniform_bins(num_tokens, len(bins))
    figures = {
        "bins": svg_of_bins(bins, band),
        "band": band,
        "num_bins_outside": sum(not band[0] <= count <= band[1] for count in bins),
    }
    if "pit_excess" in statistical:  # older documents lack it
        distance = uniform_distance(num_tokens)
        excess = statistical["pit_excess"]
        figures |= {
            "excess": svg_of_excess(excess, distance),
            "distance": distance,
            "least_excess": min(excess),
            "most_excess": max(excess),
        }
    return figures


def _round_figures(places: Sequence[Mapping[str, Any]], num_draft_tokens: int | str) -> dict[str, Any]:
    """Figures for output generated in rounds."""
    zs = [place["z"] for place in places]
    z_limit = normal_limit(len(zs))
    counts = [place["num_tokens"] for place in places]
    most = num_draft_tokens if isinstance(num_draft_tokens, int) else 1  # "auto"
    counts += [0] * (most + 1 - len(counts))  # places that no round reached
    return {
        "acceptance": svg_of_acceptance(
            [wilson(there, before) if before else None for before, there in pairwise(counts)],
            [wilson(there, counts[0]) for there in counts[1:]],
        ),
        "z": svg_of_z(zs, z_limit),
        "z_limit": z_limit,
    }
