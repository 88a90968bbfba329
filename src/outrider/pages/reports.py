"""Reports of measurements as HTML pages: pictures, then tables, then how it was measured.

A report depends only on the document that a command writes with ``--json`` (docs/reference/json.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.pages.figures import svg_of_lines, svg_of_parts
from outrider.pages.templates import render
from outrider.stats.intervals import Interval

_Document = Mapping[str, Any]
_PARTS = "draft", "verify", "rest"  # of the time of a token


@dataclass(frozen=True, slots=True)
class Fact:
    """A number with its name and a sentence about it."""

    name: str
    value: str
    about: str


@dataclass(frozen=True, slots=True)
class Figure:
    """An SVG element, its description for those who do not see it, and its caption."""

    svg: str
    alt: str
    caption: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table. Its first ``num_texts`` columns are texts, the others numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    num_texts: int = 1


@dataclass(frozen=True, slots=True)
class Report:
    """Content of a page, from top to bottom."""

    kind: str
    headline: str
    lead: str
    facts: Sequence[Fact] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = field(default=())


def render_report(document: _Document) -> str:
    """Page of a document.

    Args:
        document: of alpha, latency or plan, as read from JSON.
    """
    report = _REPORTS[_command(document)](document)
    return render("report.html", document, report=report)


def render_below(document: _Document) -> str:
    """Tables and provenance of a document of compare, for the page of its race."""
    report = _compare(document)
    return render("report_below.html", document, report=report)


def _command(document: _Document) -> str:
    return str(document["schema"].split("/")[1])


def _plan(document: _Document) -> Report:
    if "what_if" in document["options"]:
        return _what_if(document)
    settings, options = document["settings"], document["options"]
    first = settings[0]
    best, closest = first["best"], first["choices"][0]
    same = [one for one in first["choices"] if one["draft"] == closest["draft"]]
    gain = f"{closest['speed_up']['value']:.2f}"
    about = f"with {closest['draft']} at K = {closest['k']}, over plain decoding; 95% interval over the prompts"
    facts = [
        Fact("Predicted speed-up", _interval(closest["speed_up"]), about),
        Fact("A plain round", f"{first['plain_ms']:.2f} ms", f"{_where(first)}: one token for each row"),
        Fact(
            "Limits",
            f"{max(one['if_free'] for one in same):.2f}",
            f"if {closest['draft']} took no time; {max(one['if_agreeing'] for one in same):.2f} if it always agreed",
        ),
    ]
    several = len(settings) > 1
    where = {(one["num_rows"], one["context"]): f", {one['num_rows']} x {one['context']}" * several for one in settings}
    alone = next((text for (num_rows, _), text in where.items() if num_rows == 1), "")  # pairs run with one row
    measured = {f"{draft}{alone}": points for draft, points in _by_draft(document["measured"]).items()}
    lines: dict[str, list[tuple[float, Interval]]] = {}
    taus: dict[str, list[tuple[float, Interval]]] = {}
    for setting in settings:
        for one in sorted(setting["choices"], key=lambda one: one["k"]):
            label = one["draft"] + where[setting["num_rows"], setting["context"]]
            lines.setdefault(label, []).append((one["k"], _as_interval(one["speed_up"])))
            taus.setdefault(one["draft"], [])
            if setting is first:
                taus[one["draft"]].append((one["k"], _as_interval(one["tau"])))
    figures = [
        Figure(
            svg_of_lines("speed-up", lines, "K, drafted tokens per round", "speed-up", measured=measured, level=1.0),
            f"Predicted speed-up against K for {', '.join(lines)}; the best is {gain}.",
            "Predicted speed-up over plain decoding (dashed), with 95% intervals over the prompts."
            + (" Crosses: measured." if measured else ""),
        ),
        Figure(
            svg_of_lines("tau", taus, "K, drafted tokens per round", "tokens per round, tau"),
            f"Tokens per round against K for {', '.join(taus)}.",
            "Expected tokens per round, from the drafts' agreement with the target's own output.",
        ),
    ]
    columns = "draft", "K", "tau", "round ms", "draft ms", "verify ms", "speed-up, 95%", "tokens/s"
    tables = [
        Table(
            f"Predicted, {_where(setting)}",
            columns,
            [
                (
                    one["draft"],
                    str(one["k"]),
                    _interval(one["tau"]),
                    *(f"{one[name]:.2f}" for name in ("round_ms", "draft_ms", "verify_ms")),
                    _interval(one["speed_up"]),
                    f"{one['tokens_per_s']:.0f}",
                )
                for one in setting["choices"]
            ],
            f"A plain round takes {setting['plain_ms']:.2f} ms, a prefill {setting['prefill_ms']:.1f} ms.",
        )
        for setting in settings
    ]
    if document["measured"]:
        tables.append(_arms_table("Measured", document["measured"]))
    drafts = ", ".join(options["draft"])
    headline = f"{best['draft']}, K = {best['k']}" if best else "No draft"
    lead = f"The best way to run {options['target']} with {drafts}: " + (
        f"{gain} times as fast as plain decoding, by prediction." if best else "no draft is faster than plain decoding."
    )
    return Report("plan: which draft, which K, or none?", headline, lead, facts, figures, tables)


def _what_if(document: _Document) -> Report:
    known, found = document["options"]["what_if"], document["predictions"]
    points = [(one["k"], Interval(one["speed_up"], None, None)) for one in found]
    best = document["best"]
    figure = Figure(
        svg_of_lines("speed-up", {"predicted": points}, "K, drafted tokens per round", "speed-up", level=1.0),
        "Predicted speed-up against K.",
        "Predicted speed-up over plain decoding (dashed).",
    )
    rows = [(str(one["k"]), *(f"{one[name]:.2f}" for name in ("tau", "speed_up", "operations"))) for one in found]
    table = Table("Predicted", ("K", "tau", "speed-up", "operations"), rows, num_texts=0)
    lead = "Nothing was measured: predicted from " + ", ".join(f"{name} = {value:g}" for name, value in known.items())
    headline = "No draft" if best is None else f"K = {best['k']}: {best['speed_up']:.2f} times as fast"
    return Report("plan: what if?", headline, f"{lead}.", figures=[figure], tables=[table])


def _latency(document: _Document) -> Report:
    arms, target = document["arms"], document["options"]["target"]
    pairs = [arm for arm in arms if arm["draft"] and arm["k"]]
    plain = arms[0]
    peak = document["peak_memory_bytes"]
    facts = [Fact(f"{target} alone", f"{plain['ms_per_token']['mean']:.2f} ms", "per token, without the prefill")]
    if pairs:
        best = max(pairs, key=lambda arm: arm["speed_up"]["value"])
        about = f"{best['name']}, over plain decoding; 95% interval over the prompts"
        facts.insert(0, Fact("Best speed-up", _interval(best["speed_up"]), about))
    if peak is not None:
        facts.append(Fact("Peak memory", f"{peak / 2**20:.0f} MiB", "of this process or device"))
    figures = []
    if lines := _by_draft(pairs):
        figures.append(
            Figure(
                svg_of_lines("speed-up", lines, "K, drafted tokens per round", "speed-up", level=1.0),
                f"Speed-up against K for {', '.join(lines)}.",
                "Measured speed-up over plain decoding (dashed), with 95% intervals over the prompts.",
            )
        )
    figures.append(_parts_figure(arms))
    lead = f"{target} and its drafts on {document['num_prompts']} prompts, in turn, after a warm-up."
    tables = [_arms_table("Arms", arms)]
    return Report("latency of target, drafts and pairs", f"Latency of {target}", lead, facts, figures, tables)


def _compare(document: _Document) -> Report:
    arms = document["arms"]
    lead = f"{arms[0]['num_cases']} runs of each arm after the race, in turn."
    tables = [_arms_table("Measured", arms)]
    notes = [check["message"] for check in document["same_model_checks"]]
    return Report("compare", "Measured", lead, tables=tables, notes=notes)


def _alpha(document: _Document) -> Report:
    options, alphas = document["options"], document["alphas"]
    drafts = ", ".join(options["draft"])
    lines: dict[str, list[tuple[float, Interval]]] = {}
    top_ps = sorted({one["top_p"] for one in alphas if one["temperature"] > 0}) or [1.0]
    for one in alphas:
        for top_p in [one["top_p"]] if one["temperature"] > 0 else top_ps:  # top-p has no effect at temperature 0
            label = one["draft"] if len(top_ps) == 1 else f"{one['draft']}, top-p {top_p:g}"
            lines.setdefault(label, []).append((one["temperature"], _as_interval(one["alpha"])))
    lines = {label: sorted(dict(points).items()) for label, points in lines.items()}
    figure = Figure(
        svg_of_lines("alpha", lines, "temperature", "alpha", most=1.02),
        f"alpha against temperature for {', '.join(lines)}.",
        "alpha, the mean probability that a drafted token is accepted, with 95% intervals over the texts.",
    )
    columns = "draft", "temperature", "top-p", "alpha, 95%", "TV", "of each token of a round"
    has_offsets = any(one["by_offset"] for one in alphas)
    rows = [
        (
            one["draft"],
            f"{one['temperature']:g}",
            f"{one['top_p']:g}" if one["temperature"] > 0 else "–",
            _interval(one["alpha"], 3),
            f"{1 - one['alpha']['value']:.3f}",
            *([" ".join(f"{part['value']:.3f}" for part in one["by_offset"] or ())] * has_offsets),
        )
        for one in alphas
    ]
    note = "alpha = E[sum min(p, q)] = 1 − TV, where TV is the total variation of target and draft."
    table = Table("Agreement", columns[: 5 + has_offsets], rows, note)
    best = max(alphas, key=lambda one: one["alpha"]["value"])
    about = f"{best['draft']} at temperature {best['temperature']:g}; 95% interval over the texts"
    facts = [Fact("Highest alpha", _interval(best["alpha"], 3), about)]
    lead = f"How far {options['target']} and {drafts} agree on {best['num_tokens']:,} tokens of given texts, by logits."
    return Report(
        "alpha: agreement of target and draft", f"{options['target']} with {drafts}", lead, facts, [figure], [table]
    )


_REPORTS: dict[str, Callable[[_Document], Report]] = {
    "alpha": _alpha,
    "latency": _latency,
    "plan": _plan,
}


def _arms_table(title: str, arms: Sequence[_Document]) -> Table:
    columns = (
        "arm",
        "K",
        "ms/token",
        "tokens/s",
        "speed-up, 95%",
        "tau",
        "prefill ms",
        *(f"{part} ms" for part in _PARTS),
    )
    rows = [
        (
            str(arm["draft"] or arm["name"]),
            str(arm["k"] or "–"),
            _pm(arm["ms_per_token"], 2),
            f"{arm['tokens_per_s']:.0f}",
            _interval(arm["speed_up"]),
            f"{arm['stats']['mean_acceptance_length'] or 1:.2f}",
            _pm(arm["prefill_ms"], 1),
            *(f"{value:.2f}" for value in _parts(arm).values()),
        )
        for arm in arms
    ]
    note = "ms/token: mean ± standard deviation, without the prefill; tau: tokens per round; parts are per token."
    return Table(title, columns, rows, note)


def _parts_figure(arms: Sequence[_Document]) -> Figure:
    rows = {arm["name"]: _parts(arm) for arm in arms}
    return Figure(
        svg_of_parts("parts", rows, "ms per token"),
        f"Time of a token by part for {', '.join(rows)}.",
        "The time of a token: drafting, verifying, and the rest.",
    )


def _parts(arm: _Document) -> dict[str, float]:
    """Milliseconds per token of each part."""
    return {part: 1e3 * arm["time_s"][part] / arm["stats"]["num_generated_tokens"] for part in _PARTS}


def _by_draft(arms: Sequence[_Document]) -> dict[str, list[tuple[float, Interval]]]:
    """K and speed-up of measured arms, by draft; "auto" has no place on the axis."""
    found: dict[str, list[tuple[float, Interval]]] = {}
    for arm in arms:
        if arm["draft"] and isinstance(arm["k"], int) and arm["speed_up"]:
            found.setdefault(arm["draft"], []).append((arm["k"], _as_interval(arm["speed_up"])))
    return found


def _where(setting: _Document) -> str:
    return f"{setting['num_rows']} row{'s' * (setting['num_rows'] > 1)} of {setting['context']} tokens"


def _as_interval(value: _Document) -> Interval:
    return Interval(value["value"], value["low"], value["high"], value["level"])


def _interval(value: _Document | None, digits: int = 2) -> str:
    if value is None:
        return "–"
    ends = "" if value["low"] is None else f" [{value['low']:.{digits}f}, {value['high']:.{digits}f}]"
    return f"{value['value']:.{digits}f}{ends}"


def _pm(value: _Document, digits: int) -> str:
    return f"{value['mean']:.{digits}f}" + ("" if value["std"] is None else f" ±{value['std']:.{digits}f}")
