"""Shows findings of ``certify`` and ``certify-samples``, on the terminal and as a page."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from outrider.cli.shared.options import BatchSizeOption, JsonOption, field_of
from outrider.cli.shared.output import console_for, print_table, write_document
from outrider.system.files import write_text

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.certify.certificate import Certificate
    from outrider.certify.divergence import GreedyReport


def _show_findings(
    console: Console,
    title: str,
    certificate: Certificate,
    remarks: Sequence[str],
    *,
    word: str,
    level: float,
    towards: str,
    unit: str,
    tokenizer: Any | None,
) -> None:
    from outrider.measure.tables import new_table

    def verdict(is_ok: bool) -> str:
        return "ok" if is_ok else "FAILED"

    statistical, exact = certificate.statistical, certificate.exact
    table = new_table(title, "layer", "found", "verdict")
    for name, gap, tolerance in () if exact is None else exact.comparisons():
        table.add_row(f"exact: {name}", f"off by {gap:.0e} at most", verdict(gap <= tolerance))
    if statistical is not None:
        for test in statistical.tests:
            table.add_row(f"statistical: {test.name}", f"p = {test.p:.2g}", verdict(not test.is_alarm))
        forbidden = statistical.num_forbidden
        table.add_row("statistical: forbidden tokens", str(forbidden), verdict(forbidden == 0))
    elif exact is not None:
        table.add_row("statistical", "no randomness", "-")
    for one in certificate.controls:
        p = "" if one.p is None else f"p = {one.p:.0e}, "
        found = "-" if one.excuse else "caught" if one.is_caught else "MISSED"
        table.add_row(f"control: {one.about}", one.excuse or f"{p}{one.num_tokens} tokens", found)
    print_table(console, table)
    if statistical is not None:
        least, wanted = statistical.detectable, statistical.wanted
        limit = f"Too few to detect even a complete deviation towards {towards}"
        if least is not None:
            found = f"{least:.2%} or more, in total variation, would have been detected"
            limit = f"A deviation towards {towards} of {found}"
        size = f"{statistical.num_tokens} tokens in {statistical.num_texts} samples."
        console.print(f"{size} {limit} with 99% probability.")
        for where, share in statistical.reuse_limits():
            depending = f"if {share:.0%} of the tokens or more depend on them."
            console.print(f"So would random numbers reused {where}, {depending}")
        if wanted is not None and (least is None or least > wanted):
            console.print(f"The limit exceeds the requested {wanted:.2%}.")
        if statistical.estimate is not None:
            estimate = f"{statistical.estimate:+.2%} ± {statistical.estimate_std:.2%} (one standard error)"
            excess = f"mean of -log p minus the entropy: {statistical.surprise_excess:+.4f} nats"
            console.print(f"Estimated: {estimate}; {excess}.")
    if certificate.greedy:
        promise = f"Same bytes as plain decoding: {certificate.greedy[0].promise}"
        table = new_table(promise, "texts", "number", "tokens", "differ", "verdict")
        for report in certificate.greedy:
            name = "sampled, with the same seeds" if report.has_noise else "greedy"
            numbers = report.num_texts, report.num_tokens, len(report.differences)
            table.add_row(name, *(f"{number:,}" for number in numbers), verdict(report.is_ok))
        print_table(console, table)
        for report in certificate.greedy:
            for line in difference_lines(report, unit, tokenizer):
                console.print(line, markup=False)
    if certificate.is_idle:
        console.print("No drafted token was accepted, or no control has an effect: these options cannot be certified.")
    elif any(not control.is_ok for control in certificate.controls):
        more = "tokens (--budget, --num-tokens)" if exact is not None else "texts"
        more = "prompts, or longer samples (-n)" if statistical is None else more
        console.print(f"A deliberate error was not detected, so the tests are too weak: use more {more}.")
    for remark in remarks:
        console.print(remark)
    if certificate.verdict == "inconclusive":
        needed = certificate.num_tokens_needed
        would = "" if needed is None else f": about {needed:,} tokens would decide"
        console.print(f"INCONCLUSIVE{would}", style="bold")
        return
    about = "" if statistical is None else f" (a correct system fails 1 run in {1 / level:,.0f})"
    console.print(("" if certificate.verdict == "passed" else "NOT ") + word + about, style="bold")


def difference_lines(report: GreedyReport, unit: str, tokenizer: Any | None) -> Iterator[str]:
    """Yield where each text differs from plain decoding, and why."""

    def token(token_id: int | None) -> str:
        if token_id is None:
            return "the end"
        return str(token_id) if tokenizer is None else repr(tokenizer.decode([token_id]))

    for one in report.differences:
        margin, gap = ("-" if value is None else f"{value:.2g}" for value in (one.margin, one.gap))
        plain, other = token(one.plain_id), token(one.other_id)
        differing = f"differs from token {one.position} on ({plain} in plain decoding, {other} here)"
        yield f"{unit} {one.prompt} {differing}: margin {margin}, rounding {gap}: {one.verdict}"


@dataclass(frozen=True)
class FindingsOptions:
    """Level of the tests, and outputs of their findings."""

    significance: float = field_of(
        "Statistics",
        1e-3,
        "Probability that a correct rule fails the statistical tests.",
        min=1e-12,
        max=0.5,
        metavar="N",
    )
    batch_size: BatchSizeOption = 8
    html: Path | None = field_of(None, None, "Write an HTML page.", metavar="FILE")
    json_target: JsonOption = None

    def report(
        self, shown: Sequence[tuple[str, Certificate, Sequence[str]]], document: dict[str, Any], **how: Any
    ) -> None:
        """Print certificates, and write the document and the page of the last. Exit with the code of its verdict.

        Args:
            shown: title, certificate and remarks, which are printed before the verdict.
            how: ``word`` of a verdict that passed; ``towards``, the direction of the tests; ``unit`` of a difference's
                index, "prompt" or "line"; and the tokenizer.
        """
        import shlex

        from rich.console import Console

        page = Console(record=True, file=io.StringIO(), width=110, highlight=False)
        for console in [console_for(self.json_target)] + [page] * (self.html is not None):
            for one in shown:
                _show_findings(console, *one, level=self.significance, **how)
        write_document(self.json_target, document)
        if self.html is not None:
            provenance = document["provenance"]
            page.print(f"\n{shlex.join(['outrider', *provenance['argv']])}", markup=False)
            page.print("outrider {outrider}, {platform}, {time}".format_map(provenance), markup=False)
            write_text(self.html, page.export_html(inline_styles=True))
        verdict = shown[-1][1].verdict
        if verdict != "passed":
            raise typer.Exit({"failed": 1, "inconclusive": 3}[verdict])  # 2: a user error
