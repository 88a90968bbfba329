"""Reports of measurements as pages: whole, closed in themselves, true to their documents, for everyone to read."""

import copy
import io
import json
import re
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from browsers import browser, complaints
from outrider.cli.shared.output import print_report
from outrider.pages.reports import render_report, report_of
from outrider.race.page import recorded_page

ORIGIN = {
    "outrider": "0.1.0",
    "torch": "2.13.0",
    "processor": "a processor",
    "device": "cpu",
    "argv": ["plan", "--target", "toy & <b>", "--json", "a.json"],
}
KINDS = ["latency", "plan", "replay", "what-if"]


def interval(value: float, half: float | None = 0.1) -> dict[str, float | None]:
    low, high = (None, None) if half is None else (value - half, value + half)
    return {"value": value, "low": low, "high": high, "level": 0.95}


def stats(k: int) -> dict[str, Any]:
    return {
        "mean_acceptance_length": 1 + k / 2,
        "draft_acceptance_rate": 0.5 if k else None,
        "acceptance_histogram": [30, *[10] * k],
        "num_rounds": 30 + 10 * k,
        "num_generated_tokens": 100,
    }


def arm(draft: str | None, k: int | str | None) -> dict[str, Any]:
    return {
        "name": f"{draft}, K = {k}" if draft else "plain",
        "draft": draft,
        "k": k,
        "num_cases": 3,
        "ms_per_token": {"mean": 20.25, "std": 1.5},
        "prefill_ms": {"mean": 30.5, "std": None},
        "tokens_per_s": 49.0,
        "speed_up": interval(1.2) if draft else None,
        "stats": stats(k if isinstance(k, int) else 0),
        "time_s": {"prefill": 0.1, "draft": 0.5, "verify": 1.0, "rest": 0.2},
    }


def choice(draft: str, k: int, speed_up: float) -> dict[str, Any]:
    times = {"tokens_per_s": 50.0, "round_ms": 40.0, "draft_ms": 10.0, "verify_ms": 30.0}
    speed_ups = {"speed_up": interval(speed_up), "if_free": 2.5, "if_agreeing": 1.75}
    return {"draft": draft, "k": k, "tau": interval(1 + k / 2), **speed_ups, **times}


def setting(rows: int) -> dict[str, Any]:
    choices = [choice("<small>", k, 1.25 - k / 100) for k in (1, 2, 4)] + [choice("ngram", 2, 0.9)]
    times = {"prefill_ms": 60.0, "plain_ms": 24.5}
    return {"num_rows": rows, "context": 64, **times, "choices": choices, "best": choices[0]}


@cache
def written(kind: str) -> str:
    """A document, as text."""
    body: dict[str, Any] = {"schema": f"outrider/{kind}/1", "provenance": ORIGIN}
    body["options"] = {"target": "toy", "draft": ["<small>", "ngram"], "log": None, "temperature": 1.0}
    if kind in ("latency", "compare"):
        arms = [arm(None, None), arm("<small>", 2), arm("<small>", "auto"), arm("ngram", 4)]
        body["options"]["max_new_tokens"] = 64
        body |= {"arms": arms, "num_prompts": 3, "peak_memory_bytes": 2**30, "is_interrupted": True}
        body |= {"same_bytes": []}
    elif kind == "plan":
        body |= {"settings": [setting(1), setting(4)]}
    elif kind == "replay":
        rounds = {"tau": interval(1.5), "stats": stats(2)}
        arms = [{"draft": "<small>", "k": k, **rounds} for k in (1, 2)]
        body |= {
            "arms": arms,
            "drafts": [{"draft": "<small>", "alpha": interval(0.55)}],
            "target": "toy",
            "num_prompts": 3,
        }
        body |= {"log_options": {"temperature": 0.5}, "options": body["options"] | {"acceptance": "gumbel"}}
    else:
        points = [{"k": k, "tau": 1.5, "speed_up": 1.0 + k / 10, "operations": 1.2} for k in (1, 2)]
        body |= {"schema": "outrider/plan/1", "options": {"what_if": {"alpha": 0.8, "c": 0.05}}}
        body |= {"predictions": points, "best": points[1], "limits": {"free": points[1], "agreeing": None}}
    return json.dumps(body)


@cache
def page_of(kind: str) -> str:
    """Drawn once for all tests, since that takes a second."""
    if kind == "compare":
        return recorded_page([], json.loads(written(kind)))
    return render_report(json.loads(written(kind)))


def words_of(page: str) -> str:
    return " ".join(re.sub(r"<style.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL).split())


@pytest.mark.parametrize("kind", KINDS)
def test_a_report_is_whole_and_fetches_nothing(kind: str) -> None:
    page = page_of(kind)
    assert page.startswith("<!DOCTYPE html>") and page == render_report(json.loads(written(kind)))
    assert not re.findall(r"<(script|link|img|iframe|object|image|small|b|i)\b", page)
    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\"\s<]*", page)) <= namespaces
    assert "@import" not in page and all(at.startswith("#") for at in re.findall(r"url\(([^)]*)\)", page))
    ids = re.findall(r"\bid=\"([^\"]*)\"", page)
    assert len(ids) == len(set(ids)) and ids
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)
    assert page.index("<svg") < page.index("<table") < page.index("How it was measured")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("latency", ["Latency of toy", "1.20 [1.10, 1.30]", "1024 MiB", "20.25 ±1.50", "which was interrupted"]),
        ("plan", ["&lt;small&gt;, K = 1", "1.24 [1.14, 1.34] times as fast", "4 rows of 64 tokens"]),
        ("replay", ["toy, 3 prompts, temperature 0.5, gumbel", "1.50 [1.40, 1.60]", "0.550"]),
        ("what-if", ["K = 2: 1.20 times as fast", "alpha = 0.8, c = 0.05", "Nothing was measured"]),
        ("compare", ["Measured", "20.25 ±1.50", "How it was measured"]),
    ],
)
def test_a_report_says_what_the_document_says(kind: str, said: list[str]) -> None:
    text = words_of(page_of(kind))
    for words in [*said, "outrider plan --target &#39;toy &amp; &lt;b&gt;&#39;", "2.13.0", "a processor"]:
        assert words in text
    assert "log" not in re.findall(r"<dt>(\w+)</dt>", page_of(kind))  # not given


def test_drafts_of_one_file_name_stay_apart() -> None:
    """In pictures, notes and columns."""
    drafts = ["/q4/small.gguf", "suffix+/q8/small.gguf"]
    document = json.loads(written("replay"))
    document["drafts"] = [
        {"draft": name, "alpha": interval(value)} for name, value in zip(drafts, (0.4, 0.8), strict=True)
    ]
    document["arms"] = [{**document["arms"][0], "draft": name} for name in drafts]
    (table,) = report_of(document).tables
    assert [(row[0], row[-1]) for row in table.rows] == [(drafts[0], "0.400"), (drafts[1], "0.800")]
    document["arms"][1]["draft"] = document["drafts"][1]["draft"] = "suffix+/q8/other.gguf"
    assert [row[0] for row in report_of(document).tables[0].rows] == ["small.gguf", "suffix+other.gguf"]


def test_no_draft_may_be_the_best() -> None:
    document = json.loads(written("plan"))
    for one in document["settings"]:
        one["best"] = None
    text = words_of(render_report(document))
    assert text.startswith("No draft: outrider plan") and "no draft is faster than plain." in text
    document = copy.deepcopy(json.loads(written("what-if"))) | {"best": None}
    assert words_of(render_report(document)).startswith("No draft")


@pytest.mark.parametrize("kind", [*KINDS, "compare"])
def test_a_terminal_shows_the_same_in_80_columns(kind: str) -> None:
    """Names and numbers are whole, and no line is longer; tables have the words of the page."""
    report = report_of(json.loads(written(kind)))
    console = Console(width=80, file=io.StringIO())
    print_report(console, report)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80 and "…" not in "".join(lines)
    words = " ".join(" ".join(lines).split())
    for table in report.tables:
        for row in table.rows[: table.most_rows]:
            assert kind == "replay" or " ".join(filter(None, row)) in words
    assert all(f"{fact.name}: {fact.value}" in words for fact in report.facts)
    assert all(note in words for note in report.notes)


@pytest.mark.slow
@pytest.mark.parametrize("is_dark", [False, True])
def test_everyone_can_read_a_report(tmp_path: Path, is_dark: bool) -> None:
    """axe (by Deque) finds nothing; on a phone nothing but tables scrolls sideways."""
    axe = pytest.importorskip("axe_core_python", reason="axe is not installed: pip install axe-core-python")
    script = (Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    found = "(found) => done(found.violations.map((one) => one.id))"
    run = f"const done = arguments[0]; axe.run().then({found}, (error) => done([String(error)]))"
    with browser(width=390 if is_dark else 1200, is_dark=is_dark, is_still=True) as driver:
        for kind in [*KINDS, "compare"]:
            (tmp_path / f"{kind}.html").write_text(page_of(kind), encoding="utf-8")
            driver.get((tmp_path / f"{kind}.html").as_uri())
            driver.execute_script(script)
            assert driver.execute_async_script(run) == [], kind
            width = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
            assert len(set(driver.execute_script(width))) == 1, kind
            assert complaints(driver) == [] or kind == "compare"
