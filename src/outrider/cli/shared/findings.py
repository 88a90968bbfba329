"""Findings of ``certify`` and ``certify-samples``, as rows and sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from outrider.certify.certificate import Conclusion, GreedyReport, StatisticalReport

_EXIT_CODES = {"passed": 0, "failed": 1, "inconclusive": 3}  # 2: a user error


def verdict(is_ok: bool) -> str:
    return "ok" if is_ok else "FAILED"


def statistical_rows(report: StatisticalReport) -> Iterator[tuple[str, str, str]]:
    """Rows of layer, finding and verdict."""
    for test in report.tests:
        yield f"statistical: {test.name}", f"p = {test.p:.2g}", verdict(not test.is_alarm)
    yield "statistical: forbidden tokens", str(report.num_forbidden), verdict(report.num_forbidden == 0)


def greedy_row(report: GreedyReport) -> tuple[str, str, str]:
    same = report.num_texts - len(report.differences)
    name = "same seed, same text" if report.has_noise else "greedy text"
    return name, f"{same} of {report.num_texts} outputs the same", verdict(report.is_ok)


def print_deviation(console: Console, report: StatisticalReport, towards: str) -> None:
    """Print the estimated deviation and the detection limits.

    Args:
        towards: direction of the tests.
    """
    from outrider.certify.certificate import reuse_limits

    least = report.detectable
    console.print(
        f"{report.num_tokens} tokens in {report.num_texts} samples. "
        + (
            f"Too few to detect even a complete deviation towards {towards} with 99% probability."
            if least is None
            else f"A deviation towards {towards} of {least:.2%} or more, in total variation, would have been detected "
            "with 99% probability."
        )
    )
    for where, share in reuse_limits(report.to_json()["dependence"]):
        console.print(f"So would random numbers reused {where}, if {share:.0%} of the tokens or more depend on them.")
    wanted = report.wanted
    if wanted is not None and (least is None or least > wanted):
        console.print(f"The limit exceeds the requested {wanted:.2%}.")
    if report.estimate is not None and report.estimate_std is not None:
        console.print(
            f"Estimated: {report.estimate:+.2%} ± {report.estimate_std:.2%} (one standard error); "
            f"mean of -log p minus the entropy: {report.surprise_excess:+.4f} nats."
        )


def print_verdict(console: Console, verdict: Conclusion, word: str, about: str, num_needed: int | None) -> None:
    """Print the verdict.

    Args:
        word: if the verdict is "passed".
        about: added to a verdict that rests on the tests.
        num_needed: tokens that would decide.
    """
    if verdict != "inconclusive":
        console.print(("" if verdict == "passed" else "NOT ") + word + about, style="bold")
    else:
        would = "" if num_needed is None else f": about {num_needed:,} tokens would decide"
        console.print(f"INCONCLUSIVE{would}", style="bold")


def exit_with(verdict: Conclusion) -> None:
    """Exit with the code of the verdict, unless it passed."""
    if verdict != "passed":
        raise typer.Exit(_EXIT_CODES[verdict])


def print_differences(console: Console, report: GreedyReport, what: str, tokenizer: Any | None) -> None:
    """Print where outputs differ from plain decoding, and why.

    Args:
        what: unit of a difference's index: "prompt" or "line".
    """
    for one in report.differences:
        margin, gap = ("-" if value is None else f"{value:.2g}" for value in (one.margin, one.gap))
        plain, other = (_token(tokenizer, token_id) for token_id in (one.plain_id, one.other_id))
        console.print(
            f"{what} {one.prompt} differs from token {one.position} on ({plain} in plain decoding, {other} here): "
            f"margin {margin}, rounding {gap}: {one.verdict}",
            markup=False,
        )


def _token(tokenizer: Any | None, token_id: int | None) -> str:
    if token_id is None:
        return "the end"
    return str(token_id) if tokenizer is None else repr(tokenizer.decode([token_id]))
