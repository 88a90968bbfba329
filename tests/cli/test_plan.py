"""``outrider plan``: predictions from measured costs and replayed acceptance."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from block_heads import write_block
from commands import Outrider, only_document
from outrider.bench.round_costs import CostArm, time_rounds
from outrider.records import Timing
from pairs import embedded

QUICK = "-n", 12, "--context", 8


@pytest.fixture(autouse=True)
def _few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No verdict here depends on how well rounds are measured."""

    def quickly(*arguments: Any, num_passes: int, **options: Any) -> Any:
        return time_rounds(*arguments, num_passes=2, **options)

    monkeypatch.setattr("outrider.replay.plan.time_rounds", quickly)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts"
    path.write_text("Once upon a time\nThe king\n")
    return path


def test_the_table_and_the_answer(outrider: Outrider, prompts: Path) -> None:
    ended = outrider("plan", *QUICK, "--prompts", prompts, "-k", "1,2", "--draft", "fable-draft", "--draft", "ngram")
    assert (ended.code, ended.err) == (0, "")
    rows = [line.split() for line in ended.out.splitlines() if line.split()[:1] in (["fable-draft"], ["ngram"])]
    assert sorted((row[0], row[1]) for row in rows) == [(d, k) for d in ("fable-draft", "ngram") for k in "12"]
    assert "Best: " in ended.out and "outrider generate --target fable --draft " in ended.out
    assert "took no time: " in ended.out and "Target, ms for T tokens per sequence: 1: " in ended.out


def test_the_document(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """Two batch sizes, and the pairs run: what is predicted and what is measured stand side by side."""
    plot = tmp_path / "plan.svg"
    arguments = "--prompts", prompts, "-k", "1,3", "--batch-size", "1,2", "--measure", "--plot", plot, "-t", 0
    document = only_document(outrider("plan", *QUICK, *arguments, "--json", "-").out, "plan")
    one, two = document["settings"]
    assert (one["num_rows"], two["num_rows"], one["context"]) == (1, 2, 8)
    assert {(choice["draft"], choice["k"]) for choice in one["choices"]} == {("fable-draft", 1), ("fable-draft", 3)}
    speed_ups = [choice["speed_up"]["value"] for choice in one["choices"]]
    assert speed_ups == sorted(speed_ups, reverse=True)
    assert one["best"] == (one["choices"][0] if speed_ups[0] > 1 else None)
    assert [entry["num_tokens"] for entry in one["target_ms"]] == [1, 2, 4]
    for choice in one["choices"]:
        assert choice["tau"]["value"] >= 1 and choice["if_free"] > choice["speed_up"]["value"]
    assert [arm["k"] for arm in document["measured"]][:2] == [None, 1]  # and 3, if it is the best
    again = {(choice["draft"], choice["k"]): choice for choice in document["predicted"]}
    assert ("fable-draft", 1) in again and len(again) == len(document["measured"]) - 1
    assert again["fable-draft", 1]["tau"] == next(one["tau"] for one in one["choices"] if one["k"] == 1)
    assert again["fable-draft", 1]["round_ms"] > 0
    # Greedy, so that the rounds of the measured arm are those that were foreseen. (Seeds differ, texts do not.)
    tau = {choice["k"]: choice["tau"]["value"] for choice in one["choices"]}
    stats = document["measured"][1]["stats"]
    assert tau[1] == pytest.approx(
        stats["num_generated_tokens"] / (stats["num_rounds"] + stats["num_truncated_rounds"])
    )
    assert plot.read_bytes().startswith(b"<?xml")


def test_no_more_tokens_than_a_head_drafts(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    write_block(tmp_path / "head", embedded().target.model, block_size=4, num_layers=1)
    document = only_document(
        outrider("plan", *QUICK, "--prompts", prompts, "-k", "2,5", "--draft", tmp_path / "head", "--json", "-").out,
        "plan",
    )
    assert {choice["k"] for choice in document["settings"][0]["choices"]} == {2, 3}


def test_the_answer_may_be_none(outrider: Outrider, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that costs as much as the target gains nothing, though it always agrees. (The times are made up.)"""

    def time_rounds(arms: Sequence[CostArm], *_: object, **__: object) -> list[list[Timing]]:
        return [[Timing(1.0, 0.01 * arm.k, 0.01, 1.01 + 0.01 * arm.k)] for arm in arms]

    monkeypatch.setattr("outrider.replay.plan.time_rounds", time_rounds)
    ended = outrider("plan", *QUICK, "--prompts", prompts, "-k", "2", "--draft", "fable")
    assert "Best: none. fable at K = 2 comes closest" in ended.out
    assert "outrider generate --target fable --draft none" in ended.out


def test_the_law_of_other_programs(outrider: Outrider, prompts: Path) -> None:
    """Drafts are compared by the law that is asked for, and a pair of equal samples is not one that runs here."""
    arguments = "plan", *QUICK, "--prompts", prompts, "-k", 2, "--json", "-"

    def taus(*more: object) -> dict[str, float]:
        document = only_document(outrider(*arguments, *more).out, "plan")
        return {one["draft"]: one["tau"]["value"] for one in document["settings"][0]["choices"]}

    both = taus("--draft", "fable-draft", "--draft", "fable-draft:greedy", "--acceptance", "rejection")
    match = taus("--acceptance", "match")
    assert both["fable-draft"] > both["fable-draft:greedy"] and both["fable-draft"] > match["fable-draft"] > 1
    assert "such as mlx-lm" in outrider(*arguments, "--acceptance", "match").err
    assert "leave one of the two out" in outrider("plan", "--acceptance", "match", "--measure").error


def test_every_option_that_matters_is_in_the_command(outrider: Outrider, prompts: Path) -> None:
    options = "-t", 0.5, "--top-k", 20, "--logit-bias", "5=-inf", "--acceptance", "gumbel", "--dtype", "float64"
    ended = outrider("plan", *QUICK, "--prompts", prompts, "-k", 1, *options)
    command = ended.out.splitlines()[-1]
    assert "--temperature 0.5" in command and "--top-k 20" in command and "--logit-bias 5=-inf" in command
    assert "--dtype float64" in command and "--top-p" not in command


def test_bad_options(outrider: Outrider, prompts: Path) -> None:
    assert "include 1 in" in outrider("plan", "--measure", "--batch-size", 4).error
    for k in ("auto", "1,auto"):
        assert "like 1-8" in outrider("plan", "-k", k).error
    assert "like 1,4" in outrider("plan", "--batch-size", "0").error
    assert "like 1,4" in outrider("plan", "--context", "x").error
    assert "give the drafts" in outrider("plan", "--draft", "none").error
    assert "accepts 1024" in outrider("plan", "--context", "1000", "-k", 8).error
    assert "leave out --prompts" in outrider("plan", "--log", prompts, "--prompts", prompts).error


def test_a_log_brings_its_own_options(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """The texts are those of the log, and so is the temperature, whatever else is said."""
    log = tmp_path / "log"
    recorded = outrider("record", "--prompts", prompts, "--output", log, "--probs", 1, "-n", 12, "-t", 0.5)
    assert recorded.code == 0
    ended = outrider("plan", "--log", log, "-k", 2, "--context", 8, "--json", "-")
    document = only_document(ended.out, "plan")
    assert document["options"]["temperature"] == 0.5
    assert "--temperature 0.5" in ended.err
    again = only_document(outrider("plan", "--log", log, "-k", 2, "--context", 8, "--json", "-").out, "plan")
    tau = [one["settings"][0]["choices"][0]["tau"]["value"] for one in (document, again)]
    assert tau[0] == tau[1] > 1
    other = outrider("plan", "--log", log, "--target", "fable-draft", "--draft", "ngram")
    assert "it was recorded from fable, not from this fable-draft" in other.error
    log.write_text("")
    assert "has no records yet: create them with outrider record" in outrider("plan", "--log", log).error
