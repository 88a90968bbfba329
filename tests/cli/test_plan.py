"""``outrider plan``: predictions from measured costs and replayed acceptance, or from numbers (``--what-if``)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from block_heads import write_block
from commands import Outrider, only_document
from outrider.measure.round_costs import CostArm
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

    monkeypatch.setattr("outrider.measure.round_costs.time_rounds", time_rounds)


def test_the_table_the_document_and_the_answer(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """A draft as dear as the target gains nothing, though it always agrees; heads draft within their limits."""
    drafts = "-k", "1,3", "--draft", "fable-draft", "--draft", "ngram"
    options = "-t", 0.5, "--top-k", 20, "--logit-bias", "5=-inf", "--acceptance", "gumbel", "--dtype", "float64"
    to = tmp_path / "plan.json"
    ended = outrider("plan", *QUICK, "--prompts", prompts, "--batch-size", "1,2", *drafts, *options, "--json", to)
    assert (ended.code, ended.err) == (0, "")
    rows = [line.split() for line in ended.out.splitlines() if line.split()[:1] in (["fable-draft"], ["ngram"])]
    assert sorted((row[0], row[1]) for row in rows) == [(d, k) for d in ("fable-draft", "ngram") for k in "1133"]
    assert "A plain round takes 10.00 ms" in ended.out and "Best: fable-draft, K = " in ended.out
    one, two = only_document(to.read_text(), "plan")["settings"]
    assert (one["num_rows"], two["num_rows"], one["context"]) == (1, 2, 8)
    speed_ups = [choice["speed_up"]["value"] for choice in one["choices"]]
    assert speed_ups == sorted(speed_ups, reverse=True) and one["best"] == one["choices"][0]
    assert [entry["num_tokens"] for entry in one["target_ms"]] == [1, 2, 4]
    assert all(one["if_free"] > one["speed_up"]["value"] and one["tau"]["value"] >= 1 for one in one["choices"])
    ended = outrider("plan", *QUICK, "--prompts", prompts, "-k", "2", "--draft", "fable")
    assert "Best: none (fable at K = 2 comes closest, with " in ended.out
    write_block(tmp_path / "head", embedded().target.model, block_size=4, num_layers=1)
    head = "-k", "2,5", "--draft", tmp_path / "head"
    document = only_document(outrider("plan", *QUICK, "--prompts", prompts, *head, "--json", "-").out, "plan")
    assert {choice["k"] for choice in document["settings"][0]["choices"]} == {2, 3}


def test_a_log_brings_its_own_options(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """The texts are those of the log, and so is the temperature, whatever else is said."""
    log = tmp_path / "log"
    recorded = outrider("generate", "--prompts", prompts, "--output", log, "--seed", 0, "--probs", "-n", 12, "-t", 0.5)
    assert recorded.code == 0
    ended = outrider("plan", "--log", log, "-k", 2, "--context", 8, "--json", "-")
    document = only_document(ended.out, "plan")
    assert document["options"]["temperature"] == 0.5 and document["settings"][0]["choices"][0]["tau"]["value"] > 1
    assert "accepts 1024" in outrider("plan", "--log", log, "--context", "1000", "-k", 8).error
    other = outrider("plan", "--log", log, "--target", "fable-draft", "--draft", "ngram")
    assert "it was recorded from fable, not from this fable-draft" in other.error
    log.write_text("")
    assert "has no records yet: create them with outrider generate --output" in outrider("plan", "--log", log).error


def test_plan_what_if(outrider: Outrider) -> None:
    """A draft that costs as much as it agrees gains nothing, even with a verify for nothing more than a plain step."""
    ended = outrider("plan", "--what-if", "alpha=0.8,c=0.05", "-k", "1-8")
    assert (ended.code, ended.err) == (0, "")
    rows = [line.split() for line in ended.out.splitlines() if line.split()[:1] and line.split()[0].isdigit()]
    assert [row[0] for row in rows] == [str(k) for k in range(1, 9)]
    assert rows[4] == ["5", "3.69", "2.95", "1.69"]
    assert "Best: 3.09 (K = 8) times as fast as plain decoding" in ended.out
    document = only_document(outrider("plan", "--what-if", "c=0.5, alpha=0.5", "--json", "-").out, "plan")
    assert document["best"] is None and document["limits"]["agreeing"]["k"] == 12
    assert document["options"]["what_if"] == {"alpha": 0.5, "c": 0.5, "v": 1.0, "c_ops": 0.5}
