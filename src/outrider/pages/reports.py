"""Reports of measurements, for a terminal and as HTML pages: pictures, then tables, then how it was measured.

A report depends only on the document that a command writes with ``--json`` (docs/reference/json.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from outrider.pages.templates import render
from outrider.system.files import short_names

if TYPE_CHECKING:
    from outrider.records import Interval

_Document = Mapping[str, Any]
_Points = dict[str, list[tuple[float, "Interval"]]]
_PARTS = "draft", "verify", "rest"  # of the time of a token
_TIMED = "round", "draft", "verify"
_ACROSS = "K, drafted tokens per round"
_NAMES = "target", "draft", "name", "arm"  # of models, and of what begins with one


@dataclass(frozen=True, slots=True)
class Fact:
    """A number with its name and a sentence about it."""

    name: str
    value: str
    about: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """A function that draws an SVG element, its description for those who do not see it, and its caption."""

    svg: Callable[[], str]
    alt: str
    caption: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table. Its first ``num_texts`` columns are texts, the others numbers; a terminal shows its first ``most_rows``
    rows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    num_texts: int = 1
    most_rows: int | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """Content of a report, from top to bottom. A terminal shows tables, facts and notes."""

    kind: str
    headline: str
    lead: str
    facts: Sequence[Fact] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()


def report_of(document: _Document) -> Report:
    """Report of a document.

    Args:
        document: of analyze, compare, latency, plan or replay, as read from JSON.
    """
    names: dict[str, str] = {}
    _map_names(document, lambda name: names.setdefault(name, name))
    short = dict(zip(names, short_names(names), strict=True))
    return _REPORTS[document["schema"].split("/")[1]](_map_names(document, short.__getitem__))


def _map_names(value: Any, change: Callable[[str], str], key: str = "") -> Any:
    """A document, or a part of it, with other names of models."""
    if isinstance(value, Mapping):
        return {name: _map_names(one, change, name) for name, one in value.items()}
    if isinstance(value, list):
        return [_map_names(one, change, key) for one in value]
    return change(value) if key in _NAMES and isinstance(value, str) else value


def render_report(document: _Document) -> str:
    """Page of a document of analyze, latency, plan or replay."""
    return render("report.html", document, report=report_of(document))


def render_below(document: _Document) -> str:
    """Tables and provenance of a document of compare, for the page of its race."""
    return render("report_below.html", document, report=report_of(document))


def _plan(document: _Document) -> Report:
    if "what_if" in document["options"]:
        return _what_if(document)
    settings, options = document["settings"], document["options"]
    first = settings[0]
    best, closest = first["best"], first["choices"][0]
    same = [one for one in first["choices"] if one["draft"] == closest["draft"]]
    speed_up = _interval(closest["speed_up"])
    free, agreeing = max(one["if_free"] for one in same), max(one["if_agreeing"] for one in same)
    facts = [
        Fact("Best", f"{best['draft']}, K = {best['k']}", f"{speed_up} times as fast as plain decoding, by prediction")
        if best
        else Fact("Best", "none", f"({closest['draft']} at K = {closest['k']} comes closest, with {speed_up})"),
        Fact("A plain round", f"{first['plain_ms']:.2f} ms", f"{_where(first)}: one token for each row"),
        Fact("Limits", f"{free:.2f}", f"if {closest['draft']} took no time; {agreeing:.2f} if it always agreed"),
    ]
    lines: _Points = {}
    taus: _Points = {}
    for setting in settings:
        where = f", {setting['num_rows']} x {setting['context']}" if len(settings) > 1 else ""
        for one in sorted(setting["choices"], key=lambda one: one["k"]):
            lines.setdefault(one["draft"] + where, []).append((one["k"], _interval_of(**one["speed_up"])))
            if setting is first:
                taus.setdefault(one["draft"], []).append((one["k"], _interval_of(**one["tau"])))
    figures = [
        Figure(
            partial(_draw_lines, "speed-up", lines, _ACROSS, "speed-up", level=1.0),
            f"Predicted speed-up against K for {', '.join(lines)}; the best is {speed_up}.",
            "Predicted speed-up over plain decoding (dashed), with 95% intervals over the prompts.",
        ),
        _tau_figure(taus, "Expected tokens per round, from the drafts' agreement with the target's own output."),
    ]
    tables = [
        Table(
            f"{options['target']}, {_where(setting)}",
            ("draft", "K", "tau", "round ms", "draft", "verify", "speed-up, 95%", "tok/s"),
            [
                (
                    one["draft"],
                    str(one["k"]),
                    *(f"{value:.2f}" for value in (one["tau"]["value"], *(one[f"{part}_ms"] for part in _TIMED))),
                    _interval(one["speed_up"]),
                    f"{one['tokens_per_s']:.0f}",
                )
                for one in setting["choices"]
            ],
            f"A plain round takes {setting['plain_ms']:.2f} ms, a prefill {setting['prefill_ms']:.1f} ms. "
            "tau: tokens per round; the interval is over the prompts.",
            most_rows=10,
        )
        for setting in settings
    ]
    lead = f"The best way to run {options['target']} with {', '.join(options['draft'])}: "
    lead += f"{speed_up} times as fast as plain decoding, by prediction." if best else "no draft is faster than plain."
    headline = f"{best['draft']}, K = {best['k']}" if best else "No draft"
    return Report("plan: which draft, which K, or none?", headline, lead, facts, figures, tables)


def _what_if(document: _Document) -> Report:
    known, found, best = document["options"]["what_if"], document["predictions"], document["best"]

    def text(one: _Document | None) -> str:
        return "none" if one is None else f"{one['speed_up']:.2f} (K = {one['k']})"

    limits = document["limits"]
    facts = [
        Fact("Best", text(best), "times as fast as plain decoding" if best else "(no K is faster)"),
        Fact("With a draft that takes no time", text(limits["free"])),
        Fact("With a draft that always agrees", text(limits["agreeing"])),
    ]
    points = [(one["k"], _interval_of(one["speed_up"], None, None)) for one in found]
    figure = Figure(
        partial(_draw_lines, "speed-up", {"predicted": points}, _ACROSS, "speed-up", level=1.0),
        "Predicted speed-up against K.",
        "Predicted speed-up over plain decoding (dashed).",
    )
    rows = [(str(one["k"]), *(f"{one[name]:.2f}" for name in ("tau", "speed_up", "operations"))) for one in found]
    given = ", ".join(f"{name} = {value:g}" for name, value in known.items())
    note = "tau: tokens per round; ratios are relative to plain decoding; v is the same for every K"
    table = Table(given, ("K", "tau", "speed-up", "operations"), rows, note, num_texts=0)
    headline = "No draft" if best is None else f"K = {best['k']}: {best['speed_up']:.2f} times as fast"
    lead = f"Nothing was measured: predicted from {given}."
    return Report("plan: what if?", headline, lead, facts, [figure], [table])


def _latency(document: _Document) -> Report:
    arms, target = document["arms"], document["options"]["target"]
    pairs = [arm for arm in arms if arm["draft"] and arm["k"]]
    facts = [Fact(f"{target} alone", f"{arms[0]['ms_per_token']['mean']:.2f} ms", "per token, without the prefill")]
    if pairs:
        best = max(pairs, key=lambda arm: arm["speed_up"]["value"])
        about = f"{best['name']}, over plain decoding; 95% interval over the prompts"
        facts.insert(0, Fact("Best speed-up", _interval(best["speed_up"]), about))
    if (peak := document["peak_memory_bytes"]) is not None:
        facts.append(Fact("Peak memory", f"{peak / 2**20:.0f} MiB", "of this process or device"))
    lines: _Points = {}
    for arm in pairs:
        if isinstance(arm["k"], int):  # "auto" has no place on the axis
            lines.setdefault(arm["draft"], []).append((arm["k"], _interval_of(**arm["speed_up"])))
    parts = {arm["name"]: _parts(arm) for arm in arms}
    speed_ups = Figure(
        partial(_draw_lines, "speed-up", lines, _ACROSS, "speed-up", level=1.0),
        f"Speed-up against K for {', '.join(lines)}.",
        "Measured speed-up over plain decoding (dashed), with 95% intervals over the prompts.",
    )
    times = Figure(
        partial(_draw_parts, "parts", parts, "ms per token"),
        f"Time of a token by part for {', '.join(parts)}.",
        "The time of a token: drafting, verifying, and the rest.",
    )
    figures = [speed_ups, times] if lines else [times]
    title = f"{target}, {document['num_prompts']} prompts, {document['options']['max_new_tokens']} tokens each"
    lead = f"{target} and its drafts on {document['num_prompts']} prompts, in turn, after a warm-up."
    kind = "latency of target, drafts and pairs"
    return Report(kind, f"Latency of {target}", lead, facts, figures, [_arms_table(title, arms)])


def _compare(document: _Document) -> Report:
    arms, target = document["arms"], document["options"]["target"]
    num_runs = arms[0]["num_cases"]
    runs = "1 run" if num_runs == 1 else f"{num_runs} runs"
    rows = [
        (_label(arm), str(arm["k"] or "–"), *(f"{value:.2f}" for value in _parts(arm, "prefill").values()))
        for arm in arms
    ]
    tables = [
        _arms_table(f"{target}, {runs} of each arm, in turn", arms),
        Table("Parts of a token's time, ms", ("arm", "K", "prefill", *_PARTS), rows),
    ]
    notes = ["One run has no interval: use --num-runs 5 or more."] * (num_runs == 1)
    same = {one["arm"]: one for one in document["same_bytes"]}
    for arm in arms[1:]:
        name = f"{arm['name']}: " if len(arms) > 2 else ""
        notes.append(f"{name}{_interval(arm['speed_up'])} times as fast{_bytes(same.get(arm['name']))}")
    lead = f"{runs} of each arm after the race, in turn."
    return Report("compare", "Measured", lead, tables=tables, notes=notes)


def _bytes(same: _Document | None) -> str:
    """Whether texts are those of plain decoding; None if they are sampled and may differ."""
    if same is None:
        return "; sampled, so certify tests the distribution"
    num_texts, num_different = same["num_texts"], len(same["differences"])
    texts = "1 text" if num_texts == 1 else f"{num_texts} texts"
    if not num_different:
        return f", same bytes ({texts}, sha256 equal)"
    return f", but {num_different} of {texts} differ{'s' * (num_different == 1)} (same bytes: {same['promise']})"


def _replay(document: _Document) -> Report:
    arms, options, target = document["arms"], document["options"], document["target"]
    alphas = {one["draft"]: one["alpha"] for one in document["drafts"]}
    rows = [
        (
            arm["draft"],
            str(arm["k"]),
            _interval(arm["tau"]),
            _percent(arm["stats"]),
            "–" if alphas[arm["draft"]] is None else f"{alphas[arm['draft']]['value']:.3f}",
        )
        for arm in arms
    ]
    note = "tau: tokens per round, expected given the log, with an interval over the prompts; alpha: E sum min(p, q)"
    temperature = document["log_options"]["temperature"]
    title = f"{target}, {document['num_prompts']} prompts, temperature {temperature:g}, {options['acceptance']}"
    lines: _Points = {}
    for arm in arms:
        if arm["tau"] is not None:
            lines.setdefault(arm["draft"], []).append((arm["k"], _interval_of(**arm["tau"])))
    figures = [_tau_figure(lines, "Expected tokens per round on the recorded output.")] if lines else []
    table = Table(title, ("draft", "K", "tau, 95%", "accepted / drafted", "alpha"), rows, note)
    lead = f"Rounds of {', '.join(alphas)} over {document['num_prompts']} recorded outputs of {target}."
    return Report("replay", f"Drafts for {target}", lead, figures=figures, tables=[table])


def _analyze(document: _Document) -> Report:
    arms, name = document["arms"], str(document["options"]["file"])
    lead = f"Rounds by prompt and category, from {name}."
    return Report("replay: rounds", name, lead, tables=[rounds_table(name, arms)], notes=document["notes"])


def rounds_table(title: str, arms: Sequence[_Document]) -> Table:
    """Table with a row for each arm, and for each category of its prompts."""
    has_categories = any(arm["categories"] for arm in arms)
    rules = list(dict.fromkeys(arm["acceptance"] for arm in arms if arm["acceptance"]))
    texts = "draft", *["rule"] * (len(rules) > 1), *["category"] * has_categories
    rows = [
        (
            arm["draft"] or "–",
            *[arm["acceptance"] or "–"] * (len(rules) > 1),
            *[one.get("category", "all")] * has_categories,
            str(arm["k"] or "–"),
            str(one["num_prompts"]),
            str(round(one["stats"]["num_rounds"])),
            _interval(one["tau"]),
            "–" if one["prompt_tau"] is None else f"{one['prompt_tau']:.2f}",
            _percent(one["stats"]),
        )
        for arm in arms
        for one in (arm, *arm["categories"])
    ]
    note = "tau: tokens per round, with an interval over the prompts; by prompt: the mean of their own tau"
    title = f"{title}, {rules[0]}" if len(rules) == 1 else title
    columns = *texts, "K", "prompts", "rounds", "tau, 95%", "by prompt", "accepted"
    return Table(title, columns, rows, note, num_texts=len(texts))


_REPORTS: dict[str, Callable[[_Document], Report]] = {
    "analyze": _analyze,
    "compare": _compare,
    "latency": _latency,
    "plan": _plan,
    "replay": _replay,
}


def _arms_table(title: str, arms: Sequence[_Document]) -> Table:
    rows = [
        (
            _label(arm),
            str(arm["k"] or "–"),
            _pm(arm["ms_per_token"], 2),
            f"{arm['tokens_per_s']:.0f}",
            _interval(arm["speed_up"]),
            f"{arm['stats']['mean_acceptance_length'] or 1:.2f}",
            _pm(arm["prefill_ms"], 1),
        )
        for arm in arms
    ]
    note = "ms/token: mean ± standard deviation, without the prefill; tau: tokens per round"
    columns = "arm", "K", "ms/token", "tok/s", "speed-up, 95%", "tau", "prefill ms"
    return Table(title, columns, rows, note)


def _label(arm: _Document) -> str:
    """Name of an arm, without K."""
    return str(arm["draft"] if arm["draft"] and arm["k"] else arm["name"])


def _tau_figure(lines: _Points, caption: str) -> Figure:
    draw = partial(_draw_lines, "tau", lines, _ACROSS, "tokens per round, tau")
    return Figure(draw, f"Tokens per round against K for {', '.join(lines)}.", caption)


def _parts(arm: _Document, *more: str) -> dict[str, float]:
    """Milliseconds per token of each part."""
    return {part: 1e3 * arm["time_s"][part] / arm["stats"]["num_generated_tokens"] for part in (*more, *_PARTS)}


def _where(setting: _Document) -> str:
    return f"{setting['num_rows']} row{'s' * (setting['num_rows'] > 1)} of {setting['context']} tokens"


def _interval(value: _Document | None, digits: int = 2) -> str:
    if value is None:
        return "–"
    ends = "" if value["low"] is None else f" [{value['low']:.{digits}f}, {value['high']:.{digits}f}]"
    return f"{value['value']:.{digits}f}{ends}"


def _pm(value: _Document, digits: int) -> str:
    return f"{value['mean']:.{digits}f}" + ("" if value["std"] is None else f" ±{value['std']:.{digits}f}")


def _percent(stats: _Document) -> str:
    rate = stats["draft_acceptance_rate"]
    return "–" if rate is None else f"{100 * rate:.1f}%"


# Imported with NumPy, which commands without figures do without.


def _interval_of(*values: Any, **fields: Any) -> Interval:
    from outrider.records import Interval

    return Interval(*values, **fields)


def _draw_lines(*what: Any, **how: Any) -> str:
    from outrider.pages.figures import svg_of_lines

    return svg_of_lines(*what, **how)


def _draw_parts(*what: Any) -> str:
    from outrider.pages.figures import svg_of_parts

    return svg_of_parts(*what)
