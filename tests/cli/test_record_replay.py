"""``outrider record`` and ``replay``, with the embedded pair."""

import json
from pathlib import Path

import pytest
import torch

from commands import Outrider, only_document, rows_of
from outrider.replay.log import Log
from pairs import embedded, random_llama, save

PROMPTS = [
    {"prompt": "Once upon a time", "category": "tale"},
    {"turns": ["8 * 12 = ", "and then?"], "category": "sum"},
    {"prompt": "the cat and the dog and the cat and the"},
]
TEXTS = ["Once upon a time", "8 * 12 = ", "the cat and the dog and the cat and the"]
GREEDY = ("-t", 0, "-n", 12, "--dtype", "float64")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return path


def record(outrider: Outrider, prompts: Path, *more: object) -> Path:
    log = prompts.parent / "log.jsonl"
    ended = outrider("record", "--prompts", prompts, "--output", log, *more)
    assert (ended.code, ended.out) == (0, ""), ended.err
    return log


def test_replayed_greedy_rounds_are_those_of_generate(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """By both ways to the same analysis: generate's own lines, and replay of what the target alone has said."""
    log = record(outrider, prompts, *GREEDY)
    assert [one.token_ids for one in Log.open(log).records] == [
        one.token_ids for one in embedded("float64").plain().generate(TEXTS, temperature=0.0, max_new_tokens=12)
    ]
    names = ("--draft", "fable-draft", "--draft", "ngram")
    ended = outrider(
        "replay", log, *names, "-k", "1,3", "--acceptance", "block", "--dtype", "float64",
        "--json", tmp_path / "replay.json", "--html", tmp_path / "tau.html", "--per-prompt",
    )  # fmt: skip
    assert ended.code == 0 and "<svg" in (tmp_path / "tau.html").read_text(encoding="utf-8")
    document = only_document((tmp_path / "replay.json").read_text(), "replay")
    assert len(document["arms"]) == 4
    for arm in document["arms"]:
        generated = tmp_path / f"{arm['draft']}-{arm['k']}.jsonl"
        options = ("--draft", arm["draft"], "-k", arm["k"], "--acceptance", "block", "--batch-size", 3, *GREEDY)
        assert outrider("generate", "--prompts", prompts, "--output", generated, *options).code == 0
        document = only_document(outrider("replay", generated, "--per-prompt", "--json", "-").out, "analyze")
        (got,) = document["arms"]
        assert (got["draft"], got["k"]) == (arm["draft"], arm["k"])
        assert got["tau"] == pytest.approx(arm["tau"])
        assert arm["stats"]["num_rounds"] == pytest.approx(got["stats"]["num_rounds"])
        assert [one["category"] for one in got["categories"]] == ["sum", "tale"]
    lines = [line for line in ended.out.splitlines() if line.split()[1:2] in (["all"], ["sum"], ["tale"])]
    assert len(lines) == 12
    assert "fable-draft" in ended.out and "tau, 95%" in ended.out


def test_sampled_text(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """Needs probabilities, and for gumbel the target."""
    log = record(outrider, prompts, "-n", 8, "--seed", 5)
    assert "record it again with --probs" in outrider("replay", log).error
    log.rename(tmp_path / "old")
    log = record(outrider, prompts, "-n", 8, "--seed", 5, "--probs")
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
    for name, more in (("a", ()), ("b", ()), ("c", ("--seed", 1))):
        assert outrider("replay", log, "-k", 3, "--output", tmp_path / name, *more).code == 0
    a, b, c = ((tmp_path / name).read_text() for name in "abc")
    assert a == b != c


def test_printed_tensors(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """Written by record, read by replay: the same as from the log."""
    tensors, counts = tmp_path / "target.txt", tmp_path / "rounds.txt"
    log = record(outrider, prompts, *GREEDY, "--ignore-eos", "--tensors", tensors)
    tokens = "--format", "tensors", "--prompts", prompts, "--tokenizer-of", "fable"
    foreign = tensors, *tokens, "--draft", "fable-draft"
    arms = []
    for where in ((log,), foreign):
        ended = outrider("replay", *where, "--dtype", "float64", "-k", "1-2", "--json", "-")
        arms.append(only_document(ended.out, "replay")["arms"])
    assert arms[0] == arms[1]
    assert "assumes greedy outputs" in ended.err
    options = ("-k", 2, "--output", counts, "--batch-size", 2, "--dtype", "float64")
    assert outrider("replay", log, *options).code == 0
    assert counts.read_text().startswith("[")
    ended = outrider("replay", counts, "--per-prompt", "--tokens-per-prompt", 12, "-k", 2, "--json", "-")
    (arm,) = only_document(ended.out, "analyze")["arms"]
    assert arm["tau"]["value"] == pytest.approx(arms[0][1]["tau"]["value"])
    ended = outrider("replay", counts, "--per-prompt")
    assert "the ends of prompts are guessed" in ended.out
    for text, message in (
        ("[[1, 2]]", "has 1 outputs, but"),
        ("[[1, 2], [1, 2], [1, 999999]]", "output 2: empty, or with ids unknown to fable"),
    ):
        tensors.write_text(f"{torch.tensor(json.loads(text))}\n")
        assert message in outrider("replay", tensors, *tokens).error


def test_outputs_of_generate_are_logs_too(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """With a draft, since what is generated is the target's; and rows that failed are left out."""
    log, generated = record(outrider, prompts, *GREEDY, "--probs"), tmp_path / "generated.jsonl"
    options = ("--draft", "fable-draft", "-k", 3, "--seed", 0, "--probs", *GREEDY)
    assert outrider("generate", "--prompts", prompts, "--output", generated, *options).code == 0
    arms = [
        only_document(outrider("replay", path, "-k", 2, "--dtype", "float64", "--json", "-").out, "replay")["arms"]
        for path in (log, generated)
    ]
    assert arms[0] == arms[1]
    rows = rows_of(generated.read_text())
    rows[1] |= {"finish_reason": "error", "token_ids": []}
    generated.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "prompts without an output are left out (1)" in outrider("replay", generated, "-k", 2).err


def test_bad_input(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """One line, exit code 2, and what is there stays as it is."""
    log = record(outrider, prompts, "-t", 0, "-n", 2)
    greedy = ("record", "--prompts", prompts, "--output", log, "-t", 0, "-n", 2)
    before = [file.read_bytes() for file in (prompts, log)]
    (tmp_path / "text").write_text("once\n")
    model = save(tmp_path / "model", random_llama())
    cases = [
        ((*greedy[:3], "--output", tmp_path / "x", "--logit-bias", "99999=1"), "token ids are below"),
        (("replay", log, "--target", "fable-draft", "--draft", "ngram"), "recorded from fable"),
        (("replay", log, "--draft", model), "have different tokenizers; choose a draft of the same family"),
        (("record", "--prompts", prompts, "--output", prompts), "choose another file"),
        (("record", "--prompts", prompts, "--output", tmp_path), "cannot write"),
        ((*greedy, "--tensors", prompts), "choose another file"),
        ((*greedy, "--tensors", tmp_path / "t", "--chat"), "is read as greedy"),
        ((*greedy, "--tensors", tmp_path / "t", "--repetition-penalty", 1.1), "is read as greedy"),
        (("replay", log, "--output", log), "choose another file"),
        (("replay", prompts, "--per-prompt", "--json", prompts), "choose another file"),
        (("replay", tmp_path / "nowhere"), "cannot read"),
        (("replay", prompts), "create one with outrider record"),
        (("replay", log, "--draft", "none"), "name a draft to replay"),
        (("replay", log, "--draft", "auto"), "give the log's target (--target)"),
        (("replay", log, "-k", "auto"), "numbers, like 1-8"),
        (("replay", log, "--format", "xml"), "choose outrider or tensors"),
        (("replay", log, "--format", "tensors"), "tensors need --prompts and --tokenizer-of"),
        (("replay", log, "--output", tmp_path / "r"), "give one of each"),
        (("replay", tmp_path / "text", "--per-prompt"), "not a line of generate --output"),
        (("replay", log, "--tokens-per-prompt", 0), "--tokens-per-prompt = 0"),
        (("replay", log, "--tokens-per-prompt", 9), "it needs --per-prompt and a file of counts"),
        (("replay", prompts, "--per-prompt", "--draft", "ngram"), "is invalid: a file of rounds"),
        (("replay", prompts, "--per-prompt", "-k", "1-2"), "one number: that of the file"),
    ]
    for arguments, message in cases:
        assert message in outrider(*arguments).error
    assert [file.read_bytes() for file in (prompts, log)] == before
    assert not (tmp_path / "x").exists()
