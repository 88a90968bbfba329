"""``outrider plan``: predictions from measured costs and replayed acceptance, or from numbers (``--what-if``)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from block_heads import write_block
from commands import Outrider, only_document
from outrider.bench.round_costs import CostArm
from outrider.records import Timing
from pairs import embedded

QUICK = "-n", 12, "--context", 8


@pytest.fixture(autouse=True)
def _made_up_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft step costs as much as a step of the target, but the draft "fable-draft" a fifth of that."""

    def time_rounds(arms: Sequence[CostArm], *_: object, num_passes: int, on_pass: Any, **__: object) -> Any:
        for _pass in range(1 + num_passes):
            on_pass()
        costs = [0.002 if arm.drafter.name.startswith("fable-draft") else 0.01 for arm in arms]
        return [[Timing(1.0, cost * arm.k, 0.01, 1.01 + cost * arm.k)] for arm, cost in zip(arms, costs, strict=True)]

    monkeypatch.setattr("outrider.replay.plan.time_rounds", time_rounds)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts"
    path.write_text("Once upon a time\nThe king\n")
    return path


def test_the_table_and_the_answer(outrider: Outrider, prompts: Path) -> None:
    """Every option that matters is in the command that is the answer."""
    drafts = "-k", "1,2", "--draft", "fable-draft", "--draft", "ngram"
    options = "-t", 0.5, "--top-k", 20, "--logit-bias", "5=-inf", "--acceptance", "gumbel", "--dtype", "float64"
    ended = outrider("plan", *QUICK, "--prompts", prompts, "--batch-size", "2,4", *drafts, *options)
    assert (ended.code, ended.err) == (0, "")
    rows = [line.split() for line in ended.out.splitlines() if line.split()[:1] in (["fable-draft"], ["ngram"])]
    assert sorted((row[0], row[1]) for row in rows) == [(d, k) for d in ("fable-draft", "ngram") for k in "1122"]
    assert "if fable-draft took no time; " in ended.out and "A plain round takes 10.00 ms" in ended.out
    *_, command = ended.out.splitlines()
    assert "Best: " in ended.out and "outrider generate --target fable --draft fable-draft " in command
    assert "-t 0.5" in command and "--top-k 20" in command and "--logit-bias 5=-inf" in command
    assert "--dtype float64" in command and "--top-p" not in command
    assert (
        command.endswith(f" --prompts {prompts} --batch-size 2 -n 12")
        and "--seed" not in command
        and "--generation-config" not in command
    )


def test_the_document(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """Two batch sizes; the page is of the first."""
    page = tmp_path / "plan.html"
    arguments = "--prompts", prompts, "-k", "1,3", "--batch-size", "1,2", "--html", page, "-t", 0
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
    assert page.read_text(encoding="utf-8").count("<svg") == 2


def test_the_answer_may_be_none(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """A draft that costs as much as the target gains nothing, though it always agrees. No head is given more tokens
    than it drafts."""
    ended = outrider("plan", *QUICK, "--prompts", prompts, "-k", "2", "--draft", "fable")
    assert "Best: none (fable at K = 2 comes closest, with " in ended.out
    assert "outrider generate --target fable --draft none" in ended.out
    write_block(tmp_path / "head", embedded().target.model, block_size=4, num_layers=1)
    head = "-k", "2,5", "--draft", tmp_path / "head"
    document = only_document(outrider("plan", *QUICK, "--prompts", prompts, *head, "--json", "-").out, "plan")
    assert {choice["k"] for choice in document["settings"][0]["choices"]} == {2, 3}


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-k", "1,auto"), "like 1-8"),
        (("--context", "x"), "like 1,4"),
        (("--draft", "none"), "give the drafts"),
        (("--log", "a", "--prompts", "b"), "leave out --prompts"),
        (("--what-if", "alpha=0.5,c=0.1", "-k", "auto"), "like 1-8"),
        (("--what-if", "alpha=1.2,c=0.1"), "0 <= alpha <= 1"),
        (("--what-if", "alpha=0.5,c=-1"), "c >= 0"),
        (("--what-if", "alpha=0.5,c=0,v=0"), "v > 0"),
        (("--what-if", "alpha=0.5"), "c must be given"),
        (("--what-if", "alpha=0.5,c=nan"), "numbers for alpha, c, v, c_ops"),
        (("--what-if", "alpha=0.5,c=0.1,c=0.2"), "each once"),
        (("--what-if", "alfa=0.5"), "like alpha=0.8,c=0.05"),
    ],
)
def test_bad_options(outrider: Outrider, arguments: tuple[object, ...], message: str) -> None:
    assert message in outrider("plan", *arguments).error


def test_a_log_brings_its_own_options(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """The texts are those of the log, and so is the temperature, whatever else is said."""
    log = tmp_path / "log"
    recorded = outrider("record", "--prompts", prompts, "--output", log, "--probs", "-n", 12, "-t", 0.5)
    assert recorded.code == 0
    documents = []
    for _ in range(2):
        ended = outrider("plan", "--log", log, "-k", 2, "--context", 8, "--json", "-")
        documents.append(only_document(ended.out, "plan"))
        assert documents[-1]["options"]["temperature"] == 0.5 and "-t 0.5" in ended.err
    tau = [document["settings"][0]["choices"][0]["tau"]["value"] for document in documents]
    assert tau[0] == tau[1] > 1
    assert "accepts 1024" in outrider("plan", "--log", log, "--context", "1000", "-k", 8).error
    other = outrider("plan", "--log", log, "--target", "fable-draft", "--draft", "ngram")
    assert "it was recorded from fable, not from this fable-draft" in other.error
    log.write_text("")
    assert "has no records yet: create them with outrider record" in outrider("plan", "--log", log).error


def test_what_if(outrider: Outrider, tmp_path: Path) -> None:
    """The table, the answer and the page."""
    page = tmp_path / "plan.html"
    ended = outrider("plan", "--what-if", "alpha=0.8,c=0.05", "-k", "1-8", "--html", page)
    assert (ended.code, ended.err) == (0, "")
    rows = [line.split() for line in ended.out.splitlines() if line.split()[:1] and line.split()[0].isdigit()]
    assert [row[0] for row in rows] == [str(k) for k in range(1, 9)]
    assert rows[4] == ["5", "3.69", "2.95", "1.69"]
    assert "Best: 3.09 (K = 8) times as fast as plain decoding" in ended.out
    assert "takes no time: 4.33 (K = 8)" in ended.out and "always agrees: 6.43 (K = 8)" in ended.out
    assert "<svg" in page.read_text(encoding="utf-8")


def test_what_if_the_answer_is_none(outrider: Outrider) -> None:
    """A draft that costs as much as it agrees gains nothing, even with a verify for nothing more than a plain step."""
    document = only_document(outrider("plan", "--what-if", "c=0.5, alpha=0.5", "--json", "-").out, "plan")
    assert document["best"] is None
    assert document["limits"]["agreeing"]["k"] == 12
    assert [one["k"] for one in document["predictions"]] == list(range(1, 13))
    assert document["options"]["what_if"] == {"alpha": 0.5, "c": 0.5, "v": 1.0, "c_ops": 0.5}
    ended = outrider("plan", "--what-if", "alpha=0,c=0,v=2")
    assert "Best: none (no K is faster)" in ended.out
    assert "With a draft that takes no time: none" in ended.out
