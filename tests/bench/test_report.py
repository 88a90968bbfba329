"""What is said of measurements: by hand, from made-up times."""

import io
import math
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from scipy import stats

from outrider.bench.report import (
    ArmSummary,
    check_plot_file,
    interval_text,
    plot_prediction,
    plot_speed_up,
    pm_text,
    summarise,
    table,
)
from outrider.bench.run import Arm, Case, Measurement
from outrider.errors import FileError, MissingExtra
from outrider.flow import Stats, Timing
from outrider.intervals import Interval
from pairs import embedded


def arm(name: str, draft: str | None = None, k: int | None = None) -> Arm:
    return Arm(name, embedded(), draft, k)


def measurement(arm: Arm, index: int, prefill_s: float, decode_s: float, num_tokens: int = 10) -> Measurement:
    """Half of the decoding is the draft's, a quarter the verification's."""
    timing = Timing(prefill_s, decode_s / 2, decode_s / 4, prefill_s + decode_s)
    accepted = (0, 0, 5) if arm.draft else (10,)
    drafted = (0, 0, 0, 5) if arm.draft else (10,)
    counts = Stats(
        num_generated_tokens=num_tokens,
        num_rounds=sum(accepted),
        num_draft_tokens=15 if arm.draft else 0,
        num_accepted_draft_tokens=10 if arm.draft else 0,
        acceptance_histogram=accepted,
        drafted_histogram=drafted,
    )
    return Measurement(arm, Case(index, "prompt", index), counts, timing, "text")


PLAIN, FAST = arm("plain"), arm("fast, K = 3", "draft", 3)


def two_summaries() -> list[ArmSummary]:
    """Plain takes 1 s and 2 s for ten tokens, fast 0.8 s and 0.4 s; prefills of 0.1 s and 0.2 s."""
    measurements = [
        measurement(PLAIN, 0, 0.1, 1.0),
        measurement(FAST, 1, 0.2, 0.4),
        measurement(FAST, 0, 0.2, 0.8),
        measurement(PLAIN, 1, 0.1, 2.0),
    ]
    return summarise(measurements, [PLAIN, FAST])


def test_a_summary_by_hand() -> None:
    plain, fast = two_summaries()
    assert (plain.arm, fast.arm, plain.num_cases, fast.num_cases) == (PLAIN, FAST, 2, 2)
    assert plain.ms_per_token == pytest.approx((150.0, 50 * math.sqrt(2)))
    assert fast.ms_per_token == pytest.approx((60.0, 20 * math.sqrt(2)))
    assert plain.total_ms_per_token == pytest.approx((160.0, 50 * math.sqrt(2)))
    assert plain.prefill_ms == pytest.approx((100.0, 0.0))
    assert fast.prefill_ms == pytest.approx((200.0, 0.0))
    assert plain.tokens_per_s == pytest.approx(20 / 3)
    assert fast.tokens_per_s == pytest.approx(20 / 1.2)
    assert fast.stats.mean_acceptance_length == 3.0 and fast.stats.draft_acceptance_rate == pytest.approx(2 / 3)
    assert fast.timing.rest_s == pytest.approx(0.3)


def test_speed_ups_are_paired_by_case() -> None:
    """1.25 and 5: the geometric mean is 2.5, and the logarithms are ln 2 off it. (Paired in another order they would be
    2.5 and 2.5.)"""
    plain, fast = two_summaries()
    assert plain.speed_up is None and plain.total_speed_up is None
    assert fast.speed_up is not None and fast.total_speed_up is not None
    assert fast.speed_up.value == pytest.approx(2.5)
    half = stats.t.ppf(0.975, 1) * math.log(2)
    assert fast.speed_up.low == pytest.approx(2.5 * math.exp(-half))
    assert fast.speed_up.high == pytest.approx(2.5 * math.exp(half))
    assert fast.total_speed_up.value == pytest.approx(math.sqrt(1.1 / 1.0 * 2.1 / 0.6))


def test_cases_that_an_arm_has_not_done_are_left_out() -> None:
    """Of all arms, in whatever order they were measured."""
    measurements = [
        measurement(PLAIN, 1, 0.1, 2.0),
        measurement(FAST, 1, 0.1, 1.0),
        measurement(FAST, 0, 0.1, 9.0),
    ]
    plain, fast = summarise(measurements, [PLAIN, FAST])
    assert plain.num_cases == fast.num_cases == 1
    assert fast.ms_per_token == (pytest.approx(100.0), None)
    assert fast.speed_up is not None
    assert (fast.speed_up.value, fast.speed_up.low) == (pytest.approx(2.0), None)


def test_the_json_of_a_summary() -> None:
    document = two_summaries()[1].to_json()
    assert document["name"] == "fast, K = 3" and document["draft"] == "draft" and document["k"] == 3
    assert document["ms_per_token"] == {"mean": pytest.approx(60.0), "std": pytest.approx(20 * math.sqrt(2))}
    assert document["speed_up"]["value"] == pytest.approx(2.5) and document["speed_up"]["level"] == 0.95
    times = document["time_s"]
    assert times["total"] == pytest.approx(sum(times[part] for part in ("prefill", "draft", "verify", "rest")))
    assert two_summaries()[0].to_json()["speed_up"] is None


def test_texts_for_people() -> None:
    assert interval_text(None) == "-"
    assert interval_text(Interval(1.308, 1.254, 1.377)) == "1.31 \\[1.25, 1.38]"
    assert interval_text(Interval(1.3, None, None)) == "1.30"
    assert pm_text((5.312, 0.124), 2) == "5.31 ±0.12"
    assert pm_text((5.312, None), 1) == "5.3"


def test_the_table_fits_a_terminal() -> None:
    """A line for each arm in 80 columns, with all its numbers whole, also for a slow model."""
    slow = [measurement(PLAIN, 0, 3.0, 54.0), measurement(PLAIN, 1, 2.0, 48.0)]
    fast = [measurement(FAST, 0, 3.2, 31.0), measurement(FAST, 1, 2.2, 26.0)]
    for summaries in (two_summaries(), summarise([*slow, *fast], [PLAIN, FAST])):
        console = Console(width=80, file=io.StringIO())
        console.print(table(summaries, "title"))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        (line,) = [line for line in text.splitlines() if line.startswith(" draft")]
        assert interval_text(summaries[1].speed_up).replace("\\[", "[") in line
        assert pm_text(summaries[1].ms_per_token, 2) in line and pm_text(summaries[1].prefill_ms, 1) in line
        assert line.split()[1] == "3" and "3.00" in line
        assert "…" not in text


def summary(draft: str | None, k: int | None, value: float | None) -> ArmSummary:
    speed_up = None if value is None else Interval(value, value - 0.1, value + 0.1)
    pair, empty = (1.0, 0.1), Stats()
    name = f"{draft} {k}"
    return ArmSummary(arm(name, draft, k), 2, pair, pair, pair, 1.0, speed_up, speed_up, empty, Timing())


SUMMARIES = [
    summary(None, None, None),
    summary("small", None, 3.0),  # the draft alone: no speed-up of a pair
    summary("small", 1, 1.2),
    summary("small", 2, 1.4),
    summary("ngram", 1, 0.9),
    summary("ngram", 2, 1.1),
]


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_plots_are_written(tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = tmp_path / f"plot{suffix}"
    check_plot_file(path)
    plot_speed_up(SUMMARIES, path, "title")
    assert path.read_bytes().startswith(magic)


def test_plots_have_a_line_for_each_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a point for each K, and none for what has no K: a draft alone is not a pair."""
    lines: dict[str, tuple[list[int], list[float]]] = {}
    errorbar = Axes.errorbar

    def record(self: Axes, x: list[int], y: list[float], **rest: Any) -> Any:
        lines[rest["label"]] = (list(x), list(y))
        return errorbar(self, x, y, **rest)

    monkeypatch.setattr(Axes, "errorbar", record)
    plot_speed_up(SUMMARIES, tmp_path / "plot.svg", "title")
    assert lines == {"small": ([1, 2], [1.2, 1.4]), "ngram": ([1, 2], [0.9, 1.1])}


@pytest.mark.parametrize("plot", ["measured", "predicted"])
def test_all_points_are_in_the_picture(plot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    if plot == "measured":
        plot_speed_up(SUMMARIES, tmp_path / "plot.svg", "title")
    else:
        plot_prediction([(1, 0.8), (2, 3.5)], tmp_path / "plot.svg", "title")
    (axes,) = figures[0].axes
    low, high = axes.get_ylim()
    heights = [y for line in axes.lines for y in line.get_ydata()]
    assert len(heights) > 2 and low == 0 and max(heights) < high


def test_plots_of_single_runs_have_no_bars(tmp_path: Path) -> None:
    plain, fast = summarise([measurement(PLAIN, 0, 0.1, 1.0), measurement(FAST, 0, 0.1, 0.5)], [PLAIN, FAST])
    plot_speed_up([plain, fast], tmp_path / "plot.svg", "title")
    assert (tmp_path / "plot.svg").stat().st_size > 0


def test_plot_files_are_checked_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileError, match="the name must end in .png, .svg, .pdf"):
        check_plot_file(tmp_path / "plot.bmp")
    with pytest.raises(FileError, match="there is no folder"):
        check_plot_file(tmp_path / "nowhere" / "plot.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(FileError, match="folder.png"):
        check_plot_file(tmp_path / "folder.png")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"this needs matplotlib: pip install 'outrider\[plot\]'"):
        check_plot_file(tmp_path / "plot.png")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]
