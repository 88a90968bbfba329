"""``outrider record`` and ``replay``, with the embedded pair."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import Outrider, only_document
from outrider.decoder import Decoder
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


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("acceptance", ["rejection", "gumbel"])
def test_replayed_greedy_rounds_are_those_of_generate(
    outrider: Outrider, prompts: Path, tmp_path: Path, acceptance: str
) -> None:
    """By both ways to the same analysis: generate's own lines, and replay of what the target alone has said."""
    log = record(outrider, prompts, *GREEDY)
    assert [one.token_ids for one in Log.open(log)] == [
        one.token_ids for one in embedded("float64").plain().generate(TEXTS, temperature=0.0, max_new_tokens=12)
    ]
    output = tmp_path / "rounds.jsonl"
    names = ("--draft", "fable-draft", "--draft", "ngram")
    ended = outrider(
        "replay", log, *names, "-k", "1,3", "--acceptance", acceptance, "--dtype", "float64", "--output", output,
        "--json", tmp_path / "replay.json", "--plot", tmp_path / "tau.png",
    )  # fmt: skip
    assert ended.code == 0 and (tmp_path / "tau.png").stat().st_size > 5000
    document = only_document((tmp_path / "replay.json").read_text(), "replay")
    rows = rows_of(output)
    assert len(rows) == 12 and len(document["arms"]) == 4
    for arm in document["arms"]:
        generated = tmp_path / f"{arm['draft']}-{arm['k']}.jsonl"
        options = ("--draft", arm["draft"], "-k", arm["k"], "--acceptance", acceptance, "--batch-size", 3, *GREEDY)
        assert outrider("generate", "--prompts", prompts, "--output", generated, *options).code == 0
        document = only_document(outrider("replay", generated, "--per-prompt", "--json", "-").out, "analyze")
        (got,) = document["arms"]
        assert (got["draft"], got["k"]) == (arm["draft"], arm["k"])
        assert got["tau"] == pytest.approx(arm["tau"])
        assert arm["stats"]["num_rounds"] == pytest.approx(got["stats"]["num_rounds"])
        assert [one["category"] for one in got["categories"]] == ["sum", "tale"]
        assert arm["upper"] is None
    document = only_document(outrider("replay", output, "--per-prompt", "--json", "-").out, "analyze")
    assert [(arm["draft"], arm["k"]) for arm in document["arms"]] == [
        (name, k) for name in ("fable-draft", "ngram") for k in (1, 3)
    ]
    assert "fable-draft" in ended.out and "tau, 95%" in ended.out


def test_sampled_text(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """Needs probabilities; with some of them, gumbel and alpha have bounds."""
    log = record(outrider, prompts, "-n", 8, "--seed", 5)
    assert "record it again with --probs 1" in outrider("replay", log).error
    log.rename(tmp_path / "old")
    log = record(outrider, prompts, "-n", 8, "--seed", 5, "--probs", 10)
    ended = outrider("replay", log, "-k", 2, "--acceptance", "gumbel", "--json", "-")
    document = only_document(ended.out, "replay")
    (arm,) = document["arms"]
    assert arm["upper"]["tau"]["value"] > arm["tau"]["value"] > 1
    (draft,) = document["drafts"]
    assert draft["alpha"]["low"]["value"] < draft["alpha"]["high"]["value"]
    assert " to " in ended.err
    assert "bounds only" in outrider(
        "replay", log, "-k", 2, "--acceptance", "gumbel", "--output", tmp_path / "r"
    ).error  # fmt: skip
    taus = [
        only_document(outrider("replay", log, "-k", 3, "--acceptance", rule, "--json", "-").out, "replay")["arms"][0]
        for rule in ("rejection", "block")
    ]
    assert taus[0]["tau"]["value"] <= taus[1]["tau"]["value"] and taus[0]["upper"] is None
    # Drawn rounds: the same with the same seed, and in any batch.
    for name, more in (("a", ()), ("b", ("--batch-size", 1)), ("c", ("--seed", 1))):
        assert outrider("replay", log, "-k", 3, "--output", tmp_path / name, *more).code == 0
    a, b, c = ((tmp_path / name).read_text() for name in "abc")
    assert a == b != c


def test_printed_tensors(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """Written by record, read by replay: the same as from the log."""
    tensors, counts = tmp_path / "target.txt", tmp_path / "rounds.txt"
    log = record(outrider, prompts, *GREEDY, "--ignore-eos", "--tensors", tensors)
    foreign = (
        tensors,
        "--format",
        "tensors",
        "--prompts",
        prompts,
        "--tokenizer-of",
        "fable",
        "--draft",
        "fable-draft",
    )
    arms = [
        only_document(outrider("replay", *where, "--dtype", "float64", "-k", "1-2", "--json", "-").out, "replay")[
            "arms"
        ]
        for where in ((log,), foreign)
    ]
    assert arms[0] == arms[1]
    assert "assumes greedy outputs" in outrider("replay", *foreign, "-k", 1).out
    options = ("-k", 2, "--output", counts, "--output-format", "cumulative", "--batch-size", 2, "--dtype", "float64")
    assert outrider("replay", log, *options).code == 0
    assert counts.read_text().startswith("[")
    ended = outrider("replay", counts, "--per-prompt", "--tokens-per-prompt", 12, "-k", 2, "--json", "-")
    (arm,) = only_document(ended.out, "analyze")["arms"]
    assert arm["tau"]["value"] == pytest.approx(arms[0][1]["tau"]["value"])
    assert "Note: the ends of prompts are guessed" in outrider("replay", counts, "--per-prompt").out


def test_rounds_by_prompt(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """Of a log, as of the file that is written from it; and of counts, with a plot."""
    log, output = record(outrider, prompts, *GREEDY), tmp_path / "rounds.jsonl"
    options = ("--draft", "fable-draft", "-k", 2, "--dtype", "float64", "--per-prompt", "--output", output)
    ended = outrider("replay", log, *options, "--json", tmp_path / "replay.json")
    of_file = outrider("replay", output, "--per-prompt")
    assert ended.code == of_file.code == 0

    def table(out: str) -> list[str]:
        return [line for line in out.splitlines() if line.split()[2:3] in (["all"], ["sum"], ["tale"])]

    assert len(table(ended.out)) == 3 and table(ended.out) == table(of_file.out)
    assert only_document((tmp_path / "replay.json").read_text(), "replay")["arms"][0]["k"] == 2
    rounds, plot = tmp_path / "rounds.txt", tmp_path / "rounds.svg"
    rounds.write_text("[3]\n[4]\n[2]\n[4]\n")
    ended = outrider("replay", rounds, "--per-prompt", "--plot", plot)
    assert ended.code == 0 and plot.stat().st_size > 5000 and "Plot:" in ended.out


def test_an_interrupted_recording_is_continued(
    outrider: Outrider, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 130, and in the end what an uninterrupted run writes, without generating anything again."""
    options = ("-n", 4, "--seed", 1, "--probs", 2, "--batch-size", 1, "--dtype", "float64")
    whole = [(one.category, one.seed, one.token_ids) for one in Log.open(record(outrider, prompts, *options))]
    assert [one[:2] for one in whole] == [("tale", 1), ("sum", 2), (None, 3)]
    complete, num_asked = Decoder.complete, list[int]()

    def interrupted(self: Decoder, items: Any, *given: Any, **more: Any) -> Any:
        num_asked.append(0)

        def counted() -> Any:
            for item in items:
                num_asked[-1] += 1
                yield item

        for num_done, one in enumerate(complete(self, counted(), *given, **more)):
            if len(num_asked) == 1 and num_done == 2:
                raise KeyboardInterrupt
            yield one

    monkeypatch.setattr(Decoder, "complete", interrupted)
    arguments = ("record", "--prompts", prompts, "--output", tmp_path / "cut", *options)
    ended = outrider(*arguments)
    assert ended.code == 130 and ended.err.endswith(f", interrupted: {tmp_path / 'cut'}\n")
    assert len(Log.open(tmp_path / "cut")) == 2
    assert outrider(*arguments).code == 0
    assert num_asked[1] == 1
    assert [(one.category, one.seed, one.token_ids) for one in Log.open(tmp_path / "cut")] == whole
    assert outrider(*arguments).code == 0 and num_asked[2:] == [0]
    for change in (("-n", 5), ("--probs", 3), ("--seed", 2), ("-t", 0.5), ("--dtype", "float32")):
        assert "belongs to another run" in outrider(*arguments, *change).error


def test_outputs_of_generate_are_logs_too(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """With a draft, since what is generated is the target's; and rows that failed are left out."""
    log, generated = record(outrider, prompts, *GREEDY, "--probs", 1), tmp_path / "generated.jsonl"
    options = ("--draft", "fable-draft", "-k", 3, "--seed", 0, "--probs", 1, *GREEDY)
    assert outrider("generate", "--prompts", prompts, "--output", generated, *options).code == 0
    arms = [
        only_document(outrider("replay", path, "-k", 2, "--dtype", "float64", "--json", "-").out, "replay")["arms"]
        for path in (log, generated)
    ]
    assert arms[0] == arms[1]
    rows = rows_of(generated)
    rows[1] |= {"finish_reason": "error", "token_ids": []}
    generated.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "prompts without an output are left out (1)" in outrider("replay", generated, "-k", 2).err


def test_a_refused_recording_claims_no_file(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """What is found wrong only once the model is there does not stand in the way of the next try."""
    options = ("record", "--prompts", prompts, "--output", tmp_path / "log", "-n", 2)
    assert "token ids are below" in outrider(*options, "--logit-bias", "99999=1").error
    assert outrider(*options, "--logit-bias", "99=1").code == 0
    assert len(Log.open(tmp_path / "log")) == 3


def test_a_draft_with_other_tokens(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    log = record(outrider, prompts, "-t", 0, "-n", 2)
    folder = save(tmp_path / "model", random_llama())
    assert "have different tokenizers; choose a draft of the same family" in outrider(
        "replay", log, "--draft", folder
    ).error  # fmt: skip


def test_bad_input(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """One line, exit code 2, and what is there stays as it is."""
    log = record(outrider, prompts, "-t", 0, "-n", 2)
    greedy = ("record", "--prompts", prompts, "--output", log, "-t", 0, "-n", 2)
    before = [file.read_bytes() for file in (prompts, log)]
    (tmp_path / "text").write_text("once\n")
    cases = [
        (("record", "--prompts", prompts, "--output", tmp_path / "x", "--probs", 0), "--probs = 0"),
        (("record", "--prompts", prompts, "--output", tmp_path / "x", "--batch-size", 0), "--batch-size = 0"),
        (("record", "--prompts", prompts, "--output", prompts), "choose another file"),
        (("record", "--prompts", prompts, "--output", tmp_path), "cannot write"),
        (("record", "--prompts", tmp_path / "no", "--output", tmp_path / "x"), "cannot read"),
        ((*greedy, "--tensors", prompts), "choose another file"),
        ((*greedy, "--tensors", log), "choose another file"),
        ((*greedy, "--tensors", tmp_path / "t", "--chat"), "is read as greedy"),
        ((*greedy, "--tensors", tmp_path / "t", "--logit-bias", "3=1"), "is read as greedy"),
        ((*greedy, "--tensors", tmp_path / "t", "--repetition-penalty", 1.1), "is read as greedy"),
        ((*greedy, "--tensors", tmp_path / "t", "-t", 0.5), "is read as greedy"),
        (("replay", log, "--output", log), "choose another file"),
        (("replay", log, "--output", tmp_path / "r", "--json", tmp_path / "." / "r"), "choose another file"),
        (("replay", log, "--output", tmp_path / "r", "--seed", -1), "--seed = -1"),
        (("replay", log, "-k", 2, "--output-format", "cumulative"), "it needs --output"),
        (("replay", prompts, "--per-prompt", "--json", prompts), "choose another file"),
        (("replay", tmp_path / "nowhere"), "cannot read"),
        (("replay", prompts), "create one with outrider record"),
        (("replay", log, "--draft", "none"), "name a draft to replay"),
        (("replay", log, "-k", "auto"), "numbers, like 1-8"),
        (("replay", log, "--acceptance", "hope"), "choose one of rejection"),
        (("replay", log, "--format", "xml"), "choose outrider or tensors"),
        (("replay", log, "--format", "tensors"), "tensors need --prompts and --tokenizer-of"),
        (("replay", log, "--prompts", prompts), "tensors need --prompts and --tokenizer-of"),
        (("replay", log, "--output", tmp_path / "r", "--output-format", "cumulative"), "give one of each"),
        (("replay", log, "--plot", tmp_path / "p.xyz"), "the name must end in"),
        (("replay", tmp_path / "text", "--per-prompt"), "neither a line of replay"),
        (("replay", tmp_path / "nowhere", "--per-prompt"), "cannot read"),
        (("replay", log, "--tokens-per-prompt", 0), "--tokens-per-prompt = 0"),
        (("replay", log, "--tokens-per-prompt", 9), "it needs --per-prompt and a file of counts"),
        (("replay", prompts, "--per-prompt", "--draft", "ngram"), "--draft = ['ngram'] is invalid: a file of rounds"),
        (("replay", prompts, "--per-prompt", "-k", 1025), "whole numbers from 1 to 1024"),
        (("replay", prompts, "--per-prompt", "-k", "1-2"), "one number: that of the file"),
    ]
    for arguments, message in cases:
        assert message in outrider(*arguments).error
    assert [file.read_bytes() for file in (prompts, log)] == before


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"turns": []}, "the key 'turns' has no string"),
        ({"turns": "text"}, "the key 'turns' has no string"),
        ({"text": "x"}, "the key 'prompt' has no string"),
        ({"prompt": "x", "category": 3}, "the category 3 is not a string"),
        ({"prompt": "x", "category": "a\ud800"}, "line 1: the category has a lone surrogate at 1"),
        ({"prompt": "\udc00"}, "line 1: the prompt has a lone surrogate at 0"),
        ('{"prompt": "x", "n": ' + "9" * 5000 + "}", "line 1: a number has too many digits"),
        ('{"prompt": ' + "[" * 99_999, "line 1: a number has too many digits, or the nesting is too deep"),
    ],
    ids=range(8),
)
def test_rows_that_are_no_prompts(outrider: Outrider, tmp_path: Path, row: Any, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(row if isinstance(row, str) else json.dumps(row))
    assert message in outrider("record", "--prompts", path, "--output", tmp_path / "log").error
    assert not (tmp_path / "log").exists()


def test_texts_of_another_number_than_prompts(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    tensors = tmp_path / "t.txt"
    options = ("--format", "tensors", "--prompts", prompts, "--tokenizer-of", "fable")
    tensors.write_text(f"{torch.tensor([[1, 2]])}\n")
    assert "has 1 outputs, but" in outrider("replay", tensors, *options).error
    tensors.write_text(f"{torch.tensor([[1, 2], [1, 2], [1, 999999]])}\n")
    assert "output 2: empty, or with ids unknown to fable" in outrider("replay", tensors, *options).error
