"""``replay`` and ``plan`` with a draft whose q depends on where a round began."""

from pathlib import Path
from typing import Any

import pytest

import outrider.api
from commands import Outrider, only_document
from outrider.drafters.base import Drafter
from round_drafters import parallel


@pytest.fixture(autouse=True)
def _parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft "parallel": the embedded one, which has not learned to fill in masks."""
    load_drafter = outrider.api.load_drafter

    def load(decoder: Any, name: str, **options: Any) -> Drafter:
        if name != "parallel":
            return load_drafter(decoder, name, **options)
        return parallel(load_drafter(decoder, "fable-draft", **options).models[0])

    monkeypatch.setattr(outrider.api, "load_drafter", load)


BOTH = "--draft", "fable-draft", "--draft", "parallel"


def test_replay_beside_the_target(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """Numbers of other drafts do not depend on it; the first token of a parallel draft is that of the model."""
    log = tmp_path / "log"
    assert outrider("generate", "--prompts", prompts, "--output", log, "-n", 12, "--probs").code == 0

    def taus(*arguments: object) -> dict[tuple[str, int], dict[str, Any]]:
        document = only_document(outrider("replay", log, *arguments, "-k", "1,3", "--json", "-").out, "replay")
        return {(arm["draft"], arm["k"]): arm for arm in document["arms"]}

    alone, beside = taus("--draft", "fable-draft"), taus("--target", "fable", *BOTH)
    assert alone == {key: arm for key, arm in beside.items() if key[0] == "fable-draft"}
    tau = {key: arm["tau"]["value"] for key, arm in beside.items()}
    assert tau["parallel", 1] == pytest.approx(tau["fable-draft", 1], abs=1e-3)
    assert 1 < tau["parallel", 3] < tau["fable-draft", 3]


def test_plan(outrider: Outrider, prompts: Path) -> None:
    arguments = *BOTH, "--prompts", prompts, "-n", 12, "--context", 8, "-k", "1,2", "--json", "-"
    (setting,) = only_document(outrider("plan", *arguments).out, "plan")["settings"]
    tau = {(choice["draft"], choice["k"]): choice["tau"]["value"] for choice in setting["choices"]}
    assert len(tau) == 4 and tau["parallel", 1] == pytest.approx(tau["fable-draft", 1], abs=1e-3)
