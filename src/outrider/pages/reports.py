"""Tables and lines of measurements, for a terminal and for the page of a race.

They depend only on the document that a command writes with ``--json`` (docs/guides/long-jobs.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from outrider.system.files import short_names

_Document = Mapping[str, Any]
Columns = Mapping[str, str | Callable[[Any], str]]
_PARTS = "prefill", "draft", "verify", "rest"  # of the time of a token
_TIMED = "round", "draft", "verify"
_NAMES = "target", "draft", "name", "arm"  # of models, and of what begins with one


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

    @classmethod
    def of(cls, title: str, entries: Sequence[_Document], columns: Columns, note: str = "", **more: Any) -> Table:
        """Table with a row for each entry. A column has a key of the entries, or makes the text from an entry."""
        rows = [[one[by] if isinstance(by, str) else by(one) for by in columns.values()] for one in entries]
        return cls(title, [*columns], rows, note, **more)

    def html(self) -> str:
        def cells(kind: str, row: Sequence[str]) -> str:
            return "".join(
                f"<{kind}{' class=n' * (place >= self.num_texts)}>{escape(text)}</{kind.split()[0]}>"
                for place, text in enumerate(row)
            )

        title, rows = escape(self.title), "\n".join(f"<tr>{cells('td', row)}</tr>" for row in self.rows)
        return (
            f'<h2>{title}</h2>\n<div class="scroll" role="region" aria-label="{title}" tabindex="0"><table>\n'
            f"<thead><tr>{cells('th scope=col', self.columns)}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>"
            + (f'\n<p class="quiet">{escape(self.note)}</p>' if self.note else "")
        )


Report = tuple[Sequence[Table], Sequence[str]]  # tables, and lines below them


def report_of(document: _Document) -> Report:
    """Report of a document. ``document``: of analyze, compare, latency, plan or replay, as read from JSON."""
    names: dict[str, str] = {}
    _map_names(document, lambda name: names.setdefault(name, name))
    short = dict(zip(names, short_names(names), strict=True))
    return _REPORTS[document["schema"].split("/")[1]](_map_names(document, short.__getitem__))


def _map_names(value: Any, change: Callable[[str], str], key: str = "") -> Any:
    if isinstance(value, Mapping):
        return {name: _map_names(one, change, name) for name, one in value.items()}
    if isinstance(value, list):
        return [_map_names(one, change, key) for one in value]
    return change(value) if key in _NAMES and isinstance(value, str) else value


def _plan(document: _Document) -> Report:
    if "what_if" in document["options"]:
        return _what_if(document)
    settings = document["settings"]
    best, closest = settings[0]["best"], settings[0]["choices"][0]
    same = [one for one in settings[0]["choices"] if one["draft"] == closest["draft"]]
    name, speed_up = closest["draft"], _interval(closest["speed_up"])
    tables = [
        Table(
            f"{document['options']['target']}, {setting['num_rows']} row{'s' * (setting['num_rows'] > 1)} of "
            f"{setting['context']} tokens",
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
    free, agreeing = (max(one[limit] for one in same) for limit in ("if_free", "if_agreeing"))
    return tables, [
        f"Best: {name}, K = {best['k']}: {speed_up} times as fast as plain decoding, by prediction"
        if best
        else f"Best: none ({name} at K = {closest['k']} comes closest, with {speed_up})",
        f"Limits: {free:.2f} if {name} took no time; {agreeing:.2f} if it always agreed",
    ]


def _what_if(document: _Document) -> Report:
    best, limits = document["best"], document["limits"]

    def text(one: _Document | None) -> str:
        return "none" if one is None else f"{one['speed_up']:.2f} (K = {one['k']})"

    names = "tau", "speed_up", "operations"
    rows = [(str(one["k"]), *(f"{one[name]:.2f}" for name in names)) for one in document["predictions"]]
    given = ", ".join(f"{name} = {value:g}" for name, value in document["options"]["what_if"].items())
    note = "tau: tokens per round; ratios are relative to plain decoding; v is the same for every K"
    return [Table(given, ("K", "tau", "speed-up", "operations"), rows, note, num_texts=0)], [
        f"Best: {text(best)} {'times as fast as plain decoding' if best else '(no K is faster)'}",
        f"With a draft that takes no time: {text(limits['free'])}",
        f"With a draft that always agrees: {text(limits['agreeing'])}",
    ]


def _latency(document: _Document) -> Report:
    arms, target = document["arms"], document["options"]["target"]
    lines = [f"{target} alone: {arms[0]['ms_per_token']['mean']:.2f} ms per token, without the prefill"]
    if pairs := [arm for arm in arms if arm["draft"] and arm["k"]]:
        best = max(pairs, key=lambda arm: arm["speed_up"]["value"])
        lines.insert(0, f"Best speed-up: {_interval(best['speed_up'])} {best['name']}, over plain decoding")
    if (peak := document["peak_memory_bytes"]) is not None:
        lines.append(f"Peak memory: {peak / 2**20:.0f} MiB of this process or device")
    title = f"{target}, {document['num_prompts']} prompts, {document['options']['max_new_tokens']} tokens each"
    return [_arms_table(title, arms)], lines


def _compare(document: _Document) -> Report:
    arms, num_runs = document["arms"], document["arms"][0]["num_cases"]
    runs = "1 run" if num_runs == 1 else f"{num_runs} runs"

    def times(arm: _Document) -> list[str]:
        return [f"{1e3 * arm['time_s'][part] / arm['stats']['num_generated_tokens']:.2f}" for part in _PARTS]

    rows = [(_label(arm), _k(arm), *times(arm)) for arm in arms]
    tables = [
        _arms_table(f"{document['options']['target']}, {runs} of each arm, in turn", arms),
        Table("Parts of a token's time, ms", ("arm", "K", *_PARTS), rows),
    ]
    lines = ["One run has no interval: use --num-runs 5 or more."] * (num_runs == 1)
    same = {one["arm"]: one for one in document["same_bytes"]}
    for arm in arms[1:]:
        name = f"{arm['name']}: " if len(arms) > 2 else ""
        lines.append(f"{name}{_interval(arm['speed_up'])} times as fast{_bytes(same.get(arm['name']))}")
    return tables, lines


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
    alphas = {one["draft"]: one["alpha"] for one in document["drafts"]}
    columns: Columns = {
        "draft": "draft",
        "K": _k,
        "tau, 95%": lambda arm: _interval(arm["tau"]),
        "accepted / drafted": lambda arm: _percent(arm["stats"]),
        "alpha": lambda arm: "–" if alphas[arm["draft"]] is None else f"{alphas[arm['draft']]['value']:.3f}",
    }
    note = "tau: tokens per round, expected given the log, with an interval over the prompts; alpha: E sum min(p, q)"
    temperature, rule = document["log_options"]["temperature"], document["options"]["acceptance"]
    title = f"{document['target']}, {document['num_prompts']} prompts, temperature {temperature:g}, {rule}"
    return [Table.of(title, document["arms"], columns, note)], []


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
            _k(arm),
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


def _analyze(document: _Document) -> Report:
    return [rounds_table(str(document["options"]["file"]), document["arms"])], document["notes"]


_REPORTS = {"analyze": _analyze, "compare": _compare, "latency": _latency, "plan": _plan, "replay": _replay}


def _arms_table(title: str, arms: Sequence[_Document]) -> Table:
    columns: Columns = {
        "arm": _label,
        "K": _k,
        "ms/token": lambda arm: _pm(arm["ms_per_token"], 2),
        "tok/s": lambda arm: f"{arm['tokens_per_s']:.0f}",
        "speed-up, 95%": lambda arm: _interval(arm["speed_up"]),
        "tau": lambda arm: f"{arm['stats']['mean_acceptance_length'] or 1:.2f}",
        "prefill ms": lambda arm: _pm(arm["prefill_ms"], 1),
    }
    note = "ms/token: mean ± standard deviation, without the prefill; tau: tokens per round"
    return Table.of(title, arms, columns, note)


def _k(arm: _Document) -> str:
    return str(arm["k"] or "–")


def _label(arm: _Document) -> str:
    return str(arm["draft"] if arm["draft"] and arm["k"] else arm["name"])


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
