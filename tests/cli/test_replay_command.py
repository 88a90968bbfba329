"""``outrider replay`` on the output of ``generate``, with the embedded pair."""

import json
from pathlib import Path

import pytest

from commands import Outrider, only_document, rows_of
from outrider.measure.log import Log
from pairs import embedded

TEXTS = ["Once upon a time", "8 * 12 = ", "the cat and the dog and the cat and the"]
PROMPTS = [
    {"prompt": TEXTS[0], "category": "tale"},
    {"turns": [TEXTS[1], "and then?"], "category": "sum"},
    {"prompt": TEXTS[2]},
]
GREEDY = ("-t", 0, "-n", 12, "--dtype", "float64")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return path


def record(outrider: Outrider, prompts: Path, *more: object, name: str = "log.jsonl", draft: str = "none") -> Path:
    log = prompts.parent / name
    ended = outrider("generate", "--prompts", prompts, "--draft", draft, "--output", log, "--seed", 0, *more)
    assert (ended.code, ended.out) == (0, ""), ended.err
    return log


def test_replayed_greedy_rounds_are_those_of_generate(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """By both ways to the same analysis: generate's own lines, and replay of what the target alone has said."""
    log = record(outrider, prompts, *GREEDY)
    assert [one.token_ids for one in Log.open(log).records] == [
        one.token_ids for one in embedded("float64").plain().generate(TEXTS, temperature=0.0, max_new_tokens=12)
    ]
    names = ("--draft", "fable-draft", "--draft", "ngram", "-k", "1,3", "--acceptance", "block", "--dtype", "float64")
    ended = outrider("replay", log, *names, "--json", tmp_path / "replay.json", "--per-prompt")
    assert ended.code == 0
    document = only_document((tmp_path / "replay.json").read_text(), "replay")
    assert len(document["arms"]) == 4
    for arm in document["arms"]:
        options = ("-k", arm["k"], "--acceptance", "block", "--batch-size", 3, *GREEDY)
        generated = record(outrider, prompts, *options, name=f"{arm['draft']}-{arm['k']}", draft=arm["draft"])
        (got,) = only_document(outrider("replay", generated, "--per-prompt", "--json", "-").out, "analyze")["arms"]
        assert (got["draft"], got["k"]) == (arm["draft"], arm["k"])
        assert got["tau"] == pytest.approx(arm["tau"])
        assert arm["stats"]["num_rounds"] == pytest.approx(got["stats"]["num_rounds"])
        assert [one["category"] for one in got["categories"]] == ["sum", "tale"]


def test_a_sampled_log_needs_probabilities_and_for_gumbel_the_target(outrider: Outrider, prompts: Path) -> None:
    log = record(outrider, prompts, "-n", 8, name="old")
    assert "generate it again with --output --probs" in outrider("replay", log).error
    log = record(outrider, prompts, "-n", 8, "--probs")
    gumbel = ("replay", log, "-k", 3, "--acceptance", "gumbel")
    assert "it needs all of p: give the log's target (--target)" in outrider(*gumbel).error
    taus = []
    for rule, more in (("gumbel", ("--target", "fable")), ("rejection", ()), ("block", ())):
        ended = outrider("replay", log, "-k", 3, "--acceptance", rule, *more, "--json", "-")
        document = only_document(ended.out, "replay")
        taus.append(document["arms"][0]["tau"]["value"])
        assert 0.3 < document["drafts"][0]["alpha"]["value"] < 1
    assert 1 < taus[0] < taus[1] <= taus[2]
    # Drawn rounds: the same with the same seed.
    a, b, c = (outrider("replay", log, "-k", 3, "--per-prompt", "--seed", seed).out for seed in (0, 0, 1))
    assert a == b != c


def test_printed_tensors_outputs_of_drafts_and_counts(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """All are read like the log; rows that failed are left out."""
    tensors, counts = tmp_path / "target.txt", tmp_path / "rounds.txt"
    log = record(outrider, prompts, *GREEDY, "--ignore-eos")
    generated = record(outrider, prompts, "-k", 3, *GREEDY, "--ignore-eos", name="generated", draft="fable-draft")
    tensors.write_text("".join(f"tensor([{list(one.token_ids)}])\n" for one in Log.open(log).records))
    tokens = "--format", "tensors", "--prompts", prompts, "--tokenizer-of", "fable"
    arms = []
    for where in ((log,), (generated,), (tensors, *tokens, "--draft", "fable-draft")):
        ended = outrider("replay", *where, "--dtype", "float64", "-k", "1-2", "--json", "-")
        arms.append(only_document(ended.out, "replay")["arms"])
    assert arms[0] == arms[1] == arms[2]
    assert "assumes greedy outputs" in ended.err
    counts.write_text("[3]\n[5]\n[6]\n[1]\n[4]\n[6]\n")
    ended = outrider("replay", counts, "--per-prompt", "--tokens-per-prompt", 6, "-k", 2, "--json", "-")
    (arm,) = only_document(ended.out, "analyze")["arms"]
    assert arm["tau"]["value"] == 2.0 and arm["num_prompts"] == 2
    assert "the ends of prompts are guessed" in outrider("replay", counts, "--per-prompt").out
    tensors.write_text("tensor([[1, 2], [1, 2], [1, 999999]])\n")
    assert "output 2: empty, or with ids unknown to fable" in outrider("replay", tensors, *tokens).error
    rows = rows_of(generated.read_text())
    rows[1] |= {"finish_reason": "error", "token_ids": []}
    generated.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "prompts without an output are left out (1)" in outrider("replay", generated, "-k", 2).err


def test_replay_refuses_bad_input_and_changes_no_file(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    log = record(outrider, prompts, "-t", 0, "-n", 2)
    before = [file.read_bytes() for file in (prompts, log)]
    for arguments, message in (
        ((log, "--target", "fable-draft", "--draft", "ngram"), "recorded from fable"),
        ((prompts, "--per-prompt", "--json", prompts), "choose another file"),
        ((prompts,), "create one with outrider generate --output"),
        ((prompts, "--per-prompt"), "not a line of generate --output"),
        ((log, "-k", "auto"), "numbers, like 1-8"),
        ((log, "--tokens-per-prompt", 9), "it needs --per-prompt and a file of counts"),
    ):
        assert message in outrider("replay", *arguments).error
    assert [file.read_bytes() for file in (prompts, log)] == before
