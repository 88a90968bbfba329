"""``outrider distill``: from a text to a draft that the other commands take."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from commands import Outrider, only_document
from pairs import random_llama, save

QUICK = "--length", 32, "--written", 8, "--batch-size", 2, "--learning-rate", 1e-2


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text("Once upon a time there was a king who had three sons and a horse.\n" * 40)
    return path


def test_a_draft_that_can_be_used(outrider: Outrider, tmp_path: Path, text: Path) -> None:
    out = tmp_path / "draft"
    shape = "--layers", 1, "--hidden-size", 64
    ended = outrider("distill", "fable", "--output", out, "--data", text, "--steps", 12, *QUICK, *shape)
    assert (ended.code, ended.err) == (0, "")
    assert "0.31 M parameters, for fable" in ended.out and "step 12" in ended.out and "Best: step" in ended.out
    document = only_document((out / "distill.json").read_text(), "distill")
    assert len(document["checks"]) == 13
    assert document["best"]["alphas"][0]["value"] > document["checks"][0]["alphas"][0]["value"] + 0.02
    config = AutoConfig.from_pretrained(out)
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (1, 64, 176)
    assert str(AutoModelForCausalLM.from_pretrained(out).dtype) == "torch.bfloat16"  # as the target is on disk
    used = outrider("generate", "The king", "-n", 8, "--draft", out, "-k", 2, "--json", tmp_path / "json")
    assert used.code == 0
    assert json.loads((tmp_path / "json").read_text())["completions"][0]["stats"]["num_draft_tokens"] > 0

    # With other options it is another run; and it may be the beginning of another draft.
    other = outrider("distill", "fable", "--output", out, "--data", text, "--steps", 12, *QUICK)
    assert "its hidden_size, layers differ" in other.error
    to = tmp_path / "more"
    more = outrider("distill", "fable", "--output", to, "--init", out, "--steps", 1, "--loss", "tv", *QUICK)
    assert more.code == 0 and AutoConfig.from_pretrained(to).hidden_size == 64


@pytest.mark.parametrize(
    "kind", [("eagle3", "--draft-vocab", 300), pytest.param(("dflash", "--layers", 2), marks=pytest.mark.slow)]
)
def test_a_head_that_can_be_used(outrider: Outrider, tmp_path: Path, text: Path, kind: tuple[str | int, ...]) -> None:
    out = tmp_path / "head"
    kind = "--kind", *kind, "--depth", 2
    ended = outrider("distill", "fable", "--output", out, "--data", text, "--steps", 8, *QUICK, *kind)
    assert (ended.code, ended.err) == (0, "")
    document = only_document((out / "distill.json").read_text(), "distill")
    first, best = document["checks"][0], document["best"]
    assert len(best["alphas"]) == 2
    assert sum(alpha["value"] for alpha in best["alphas"]) > sum(alpha["value"] for alpha in first["alphas"])
    used = outrider("generate", "The king", "-n", 8, "--draft", out, "-k", 2, "--json", tmp_path / "json")
    assert used.code == 0
    assert json.loads((tmp_path / "json").read_text())["completions"][0]["stats"]["num_draft_tokens"] > 0


def test_recorded_answers(outrider: Outrider, tmp_path: Path) -> None:
    """A draft of few tokens, trained on a target's log alone."""
    log, out, prompts = tmp_path / "log", tmp_path / "draft", tmp_path / "prompts"
    prompts.write_text("".join(f"Once upon a time there {word}\n" for word in ("was", "lived", "stood") * 7))
    assert outrider("generate", "--prompts", prompts, "--output", log, "-n", 40).code == 0
    how = "--output", out, "--length", 32, "--steps", 4, "--batch-size", 2, "--layers", 1, "--hidden-size", 64
    few = "distill", "fable", *how, "--written-from", log, "--keep-states", "--draft-vocab", 50
    ended = outrider(*few)
    assert ended.code == 0 and f"--draft {out}:vocab={out / 'tokens.jsonl'}" in ended.out.replace("\n", "")
    assert len(json.loads((out / "tokens.jsonl").read_text())["token_ids"]) == 50
    assert list((out / "training" / "states").iterdir()) and not list((out / "training").glob("written-*"))
    draft = f"{out}:vocab={out / 'tokens.jsonl'}"
    assert outrider("generate", "The king", "-n", 4, "--draft", draft, "-k", 2).code == 0
    # A log that has grown is another run.
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:-1]))
    assert "its num_logged_tokens differ" in outrider(*few).error
    log.write_text("".join(lines).replace('"fable"', '"other"'))
    assert "--written-from" in (error := outrider(*few).error) and "recorded from other" in error


def test_bad_options(outrider: Outrider, tmp_path: Path, text: Path) -> None:
    to = "distill", "fable", "--output", tmp_path / "draft"
    assert "either --steps or --minutes" in outrider(*to, "--steps", 5, "--minutes", 1).error
    assert "a number above 0" in outrider(*to, "--written-fraction", 0).error
    assert "accepts 1024" in outrider(*to, "--length", 2000).error
    assert "num_layers = 0" in outrider(*to, "--layers", 0).error
    assert "leave out the sizes" in outrider(*to, "--init", "fable-draft", "--layers", 1).error
    assert "choose one of model, eagle3, dflash" in outrider(*to, "--kind", "medusa").error
    assert "add --kind eagle3" in outrider(*to, "--depth", 9).error
    assert "a whole number >= 1" in outrider(*to, "--draft-vocab", 0).error
    assert "those of --written-from" in outrider(*to, "--written", 5, "--written-from", text).error
    assert "do not repeat" in outrider(*to, "--keep-states", "--data", text).error
    assert "not JSON" in outrider(*to, "--written-from", text).error
    head = *to, "--kind", "eagle3"
    assert "has one layer" in outrider(*head, "--layers", 2).error
    assert "a whole number >= 1" in outrider(*to, "--kind", "dflash", "--layers", 0).error
    assert "leave out --init and the sizes" in outrider(*head, "--init", "scratch").error
    assert "fable has 4096 tokens" in outrider(*head, "--draft-vocab", 5000).error
    assert "less than --length - 1" in outrider(*head, "--length", 6, "--depth", 5).error
    assert "cannot read" in outrider(*to, "--data", tmp_path / "missing").error
    assert "tokens to train on" in outrider(*to, "--data", text, "--length", 900).error
    other = save(tmp_path / "other", random_llama())
    assert "tokens" in outrider(*to, "--init", other).error
    # None of these has begun a run, so the folder is free for one.
    assert not (tmp_path / "draft").exists()
