"""``outrider distill``: from a text to a draft that the other commands take."""

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
    document = only_document((out / "distill.json").read_text(), "distill")
    assert document["best"]["alphas"][0]["value"] > document["checks"][0]["alphas"][0]["value"] + 0.02
    config = AutoConfig.from_pretrained(out)
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (1, 64, 176)
    assert str(AutoModelForCausalLM.from_pretrained(out).dtype) == "torch.bfloat16"  # as the target is on disk
    used = outrider("generate", "The king", "-n", 8, "--draft", out, "-k", 2)
    assert used.code == 0 and "fable with draft, K = 2" in used.err

    # With other options it is another run; and it may be the beginning of another draft.
    other = outrider("distill", "fable", "--output", out, "--data", text, "--steps", 12, *QUICK)
    assert "its hidden_size, layers differ" in other.error
    to = tmp_path / "more"
    more = outrider("distill", "fable", "--output", to, "--init", out, "--steps", 1, "--loss", "tv", *QUICK)
    assert more.code == 0 and AutoConfig.from_pretrained(to).hidden_size == 64


def test_a_head_that_can_be_used(outrider: Outrider, tmp_path: Path, text: Path) -> None:
    out = tmp_path / "head"
    kind = "--kind", "eagle3", "--draft-vocab", 300, "--depth", 2
    ended = outrider("distill", "fable", "--output", out, "--data", text, "--steps", 8, *QUICK, *kind)
    assert (ended.code, ended.err) == (0, "")
    document = only_document((out / "distill.json").read_text(), "distill")
    first, best = document["checks"][0], document["best"]
    assert sum(alpha["value"] for alpha in best["alphas"]) > sum(alpha["value"] for alpha in first["alphas"])
    used = outrider("generate", "The king", "-n", 8, "--draft", out, "-k", 2)
    assert used.code == 0 and "fable with head, K = 2" in used.err


def test_distill_reads_recorded_answers(outrider: Outrider, tmp_path: Path) -> None:
    """A draft of few tokens, trained on a target's log alone."""
    log, out, prompts = tmp_path / "log", tmp_path / "draft", tmp_path / "prompts"
    prompts.write_text("".join(f"Once upon a time there {word}\n" for word in ("was", "lived", "stood") * 7))
    recorded = outrider("generate", "--prompts", prompts, "--output", log, "-n", 40, "--probs", "--draft", "none")
    assert recorded.code == 0
    how = "--output", out, "--length", 32, "--steps", 4, "--batch-size", 2, "--layers", 1, "--hidden-size", 64
    few = "distill", "fable", *how, "--written-from", log, "--draft-vocab", 50
    ended = outrider(*few)
    draft = f"{out}:vocab={out / 'tokens.jsonl'}"
    assert ended.code == 0 and f"Draft: {draft}" in ended.out.replace("\n", "")
    assert outrider("generate", "The king", "-n", 4, "--draft", draft, "-k", 2).code == 0
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))  # another run
    assert "its num_logged_tokens differ" in outrider(*few).error


def test_distill_refuses_bad_options(outrider: Outrider, tmp_path: Path, text: Path) -> None:
    """None of these begins a run. (Others: test_refused_commands.py.)"""
    other = save(tmp_path / "other", random_llama())
    for more, message in (
        (("--length", 2000), "accepts 1024"),
        (("--init", "fable-draft", "--layers", 1), "leave out the sizes"),
        (("--written-from", text), "not JSON"),
        (("--kind", "eagle3", "--draft-vocab", 5000), "fable has 4096 tokens"),
        (("--kind", "eagle3", "--length", 6, "--depth", 5), "less than --length - 1"),
        (("--data", text, "--length", 900), "tokens to train on"),
        (("--init", other), "tokens"),
    ):
        assert message in outrider("distill", "fable", "--output", tmp_path / "draft", *more).error
    assert not (tmp_path / "draft").exists()
