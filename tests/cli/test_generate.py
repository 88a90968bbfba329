"""``outrider generate`` with one prompt."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from commands import Outrider, only_document
from outrider.cli.commands import generate as command
from outrider.cli.shared.output import json_text
from outrider.errors import PromptError
from pairs import depend_on_columns, embedded, stating

PROMPT = "Once upon a time there was a miller"
SHORT = ("-n", "10", "--seed", "1")
SUMMARY = re.compile(
    r"(\d+) tokens, ([\d.]+) tokens/s, tau (\d\.\d\d) tokens/round "
    r"\((\S+) with (\S+), K = (\d+), (\w+), same bytes: not promised \(block\)\)(, interrupted)?\n"
)


def said(prompt: str = PROMPT, **options: Any) -> str:
    """What the library says to the same prompt."""
    return embedded().generate(prompt, **{"max_new_tokens": 10, "seed": 1} | options)[0].text


def test_the_text_is_all_there_is_on_standard_output(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the summary one line on standard error, so that the text can be piped on."""
    numbers: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    ended = outrider("generate", PROMPT, *SHORT, "--threads", 3)
    assert (ended.code, ended.out, numbers) == (0, said() + "\n", [3])
    match = SUMMARY.fullmatch(ended.err)
    assert match is not None, ended.err
    assert match.groups()[:1] + match.groups()[3:] == ("10", "fable", "fable-draft", "4", "block", None)
    assert float(match[2]) > 0


def test_the_draft_that_auto_chose_is_recorded(outrider: Outrider) -> None:
    document = only_document(outrider("generate", PROMPT, *SHORT, "--draft", "auto", "--json", "-").out, "generate")
    assert (document["options"]["draft"], document["provenance"]["draft"]) == ("auto", "fable-draft")


def test_options_reach_the_decoder(outrider: Outrider) -> None:
    """Each of them, by a text that without it would be another."""
    bias = embedded().encode(" king")[-1]
    ended = outrider(
        *("generate", PROMPT, "-n", 14, "--seed", 8, "-t", 0.9, "--top-k", 50, "--top-p", 0.9, "--min-p", 0.01),
        *("--repetition-penalty", 1.3, "--logit-bias", f"{bias}=4", "--logit-bias", "0=-inf", "--stop", "zzz"),
        *("--presence-penalty", 0.5, "--frequency-penalty", 0.25, "--min-tokens", 6, "--stop-token-id", bias),
        *("--stop-token-id", 40, "--stop", "yy", "--ignore-eos", "-k", 2, "--acceptance", "block", "--json", "-"),
    )
    options: dict[str, Any] = {"max_new_tokens": 14, "seed": 8, "temperature": 0.9, "top_k": 50, "top_p": 0.9}
    options |= {"min_p": 0.01, "repetition_penalty": 1.3, "logit_bias": {bias: 4.0, 0: -float("inf")}}
    options |= {"presence_penalty": 0.5, "frequency_penalty": 0.25, "min_tokens": 6, "stop_token_ids": [bias, 40]}
    options |= {"stop": ["zzz", "yy"], "ignore_eos": True, "num_draft_tokens": 2, "acceptance": "block"}
    document = only_document(ended.out, "generate")
    assert document["completions"][0]["text"] == said(**options) and "K = 2, block" in ended.err
    assert document["options"]["stop"] == ["zzz", "yy"]
    assert document["options"]["logit_bias"] == [f"{bias}=4.0", "0=-inf"]  # JSON has no infinity


def test_structured_output(outrider: Outrider, tmp_path: Path) -> None:
    """The schema and the grammar come from files, and are in the document; errors name file or option."""
    schema: dict[str, Any] = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 9}}}
    schema |= {"required": ["age"], "additionalProperties": False}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    (tmp_path / "animal.lark").write_text('start: " a " ("fox" | "hen")')
    ended = outrider(
        "generate", PROMPT, "-n", 60, "--seed", 1, "--json-schema", tmp_path / "schema.json", "--json", "-"
    )
    document = only_document(ended.out, "generate")
    assert document["options"]["json_schema"] == schema
    assert json.loads(document["completions"][0]["text"])["age"] <= 9
    for option, value, given in (
        ("--grammar", tmp_path / "animal.lark", {"grammar": (tmp_path / "animal.lark").read_text()}),
        ("--regex", " (yes|no)", {"regex": " (yes|no)"}),
        ("--bad-word", "had", {"bad_words": ["had"]}),
    ):
        assert outrider("generate", PROMPT, *SHORT, option, value).out == said(**given) + "\n"
    (tmp_path / "half.json").write_text("{")
    for arguments, message in (
        (("--regex", "(a"), "regex = '(a' is invalid: "),
        (("--json-schema", tmp_path / "half.json"), f"{tmp_path / 'half.json'} is not JSON"),
        (("--json-schema", tmp_path / "none.json"), "none.json"),
    ):
        assert message in outrider("generate", PROMPT, *arguments).error


@pytest.mark.parametrize(
    ("draft", "summary"),
    [
        ("none", r"tau 1.00 tokens/round \(fable, plain, same bytes: not promised \(eager\)\)"),
        ("ngram", r"\(fable with ngram, K = 4, block, same bytes: not promised \(block\)\)"),
        (
            "fable",
            r"tau 5.00 tokens/round \(fable with fable, K = 4, block, same bytes: not promised \(block\)\)",
        ),
    ],
)
def test_drafts_by_name(outrider: Outrider, draft: str, summary: str) -> None:
    ended = outrider("generate", PROMPT, *SHORT, "--draft", draft, "--dtype", "float64", "--ignore-eos")
    assert re.search(f"{summary}\n$", ended.err)


@pytest.mark.parametrize("more", [("-k", 4), ("--acceptance", "gumbel"), ("--draft", "none", "-k", 4)])
def test_a_drawn_seed_repeats_the_text(outrider: Outrider, more: tuple[object, ...]) -> None:
    """Two runs differ. The seed is in the summary and in the document, and says the same again."""
    arguments = ("generate", PROMPT, "-n", 8, "--dtype", "float64", *more)
    drawn = [outrider(*arguments, "--json", "-") for _ in range(2)]
    documents = [only_document(ended.out, "generate") for ended in drawn]
    first, row = (document["completions"][0] for document in documents)
    assert first["seed"] != row["seed"] and documents[1]["options"]["seed"] is None
    assert drawn[1].err.endswith(f", --seed {row['seed']} repeats this text\n")
    again = outrider(*arguments, "--seed", row["seed"])
    assert again.out == row["text"] + "\n" and "seed" not in again.err


def test_a_text_that_a_seed_does_not_repeat(outrider: Outrider) -> None:
    """Under -k auto the text follows the load, too: the summary says so. A greedy text needs no seed."""
    assert "so that no seed repeats this text (-k 4 keeps K)" in outrider("generate", "Once", "-n", 2).err
    assert "seed" not in outrider("generate", "Once", "-n", 2, "-t", 0).err


@pytest.mark.usefixtures("unloaded")
def test_the_target_may_stand_first(outrider: Outrider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In place of --target: a known name, a folder, a GGUF file, a hub id or a path. Any other single word is the
    prompt, and so is every word beside --target, also beside that of the default."""
    seen: list[str | None] = []
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")

    def read(text: str | None) -> str:
        seen.append(text)
        raise PromptError("enough")

    monkeypatch.setattr(command, "over_checkpoint", lambda *given: seen.append(given[3]) or given[0])
    monkeypatch.setattr(command, "read_prompt", read)
    for words in (("fable",), (tmp_path,), (file,), ("org/model",), ("fable:int8",), ("fable", "The king")):
        outrider("generate", *words)
        assert seen == [str(words[0]), words[1] if len(words) > 1 else None], seen
        seen.clear()
    for word in ("The king", "Hello", "what is org/model?", "-"):
        outrider("generate", word)
        assert seen == ["fable", word]
        seen.clear()
    for missing in ("mdoel.gguf", "mdoel.GGUF:int8", "/nowhere", "./nowhere", "../nowhere", "~/nowhere"):
        outrider("generate", missing)
        assert seen[0] == missing
        seen.clear()
    for word in ("yes/no", "fable:int8", str(tmp_path)):
        for target in ("gpt2", "fable"):
            outrider("generate", word, "--target", target)
            assert seen == [target, word]
            seen.clear()
    error = outrider("generate", "fable:int8", "Hi", "--target", "fable").error
    assert "give it or the argument 'fable:int8', not both" in error


@pytest.mark.parametrize("command", ["generate", "compare"])
def test_a_missing_file_is_no_prompt(outrider: Outrider, command: str) -> None:
    assert "mdoel.gguf" in outrider(command, "mdoel.gguf", "-n", 2).error


@pytest.mark.parametrize(("words", "end"), [((), b""), (("-",), b"\n")])
def test_the_prompt_may_come_from_standard_input(outrider: Outrider, words: tuple[str, ...], end: bytes) -> None:
    """Less the newline that echo writes."""
    ended = outrider("generate", *words, *SHORT, stdin=f"{PROMPT}: für den König".encode() + end)
    assert (ended.code, ended.out) == (0, said(f"{PROMPT}: für den König") + "\n")


def test_the_document(outrider: Outrider) -> None:
    """With ``--json -`` it is all there is on standard output; the text goes to standard error."""
    ended = outrider("generate", PROMPT, *SHORT, "--logprobs", 2, "--json", "-")
    document = only_document(ended.out, "generate")
    assert said() in ended.err and SUMMARY.search(ended.err)
    (row,) = document["completions"]
    (completion,) = embedded().generate(PROMPT, seed=1, max_new_tokens=10, logprobs=2)
    assert row["prompt"] == PROMPT and row["index"] == 0 and row["seed"] == 1
    assert (row["text"], row["finish_reason"]) == (completion.text, completion.finish_reason)
    assert (row["token_ids"], row["origins"]) == (list(completion.token_ids), list(completion.origins))
    assert row["stats"] == document["stats"] == completion.stats.to_json()
    assert completion.logprobs is not None
    for got, want in zip(row["logprobs"], completion.logprobs, strict=True):
        assert got["logprob"] == pytest.approx(want.logprob, abs=1e-4)
        assert [i for i, _ in got["top"]] == [i for i, _ in want.top]
    assert not document["is_interrupted"] and document["tokens_per_s"] > 0
    options = document["options"]
    assert (options["target"], options["draft"], options["num_draft_tokens"]) == ("fable", "fable-draft", 4)
    assert (options["max_new_tokens"], options["temperature"], options["stop"]) == (10, 1.0, [])
    assert document["provenance"]["argv"] == ["generate", PROMPT, *SHORT, "--logprobs", "2", "--json", "-"]


def test_numbers_that_json_does_not_have_are_null() -> None:
    """A token that the model rules out has a log-probability of minus infinity."""
    text = json_text({"top": [(3, -float("inf")), (4, -0.5)], "nan": float("nan"), 5: "inf"})
    assert json.loads(text) == {"top": [[3, None], [4, -0.5]], "nan": None, "5": "inf"}
    assert text.endswith("}\n") and text.count("\n") == 1


def test_show_origin_colours_the_text(outrider: Outrider) -> None:
    """Each piece in the colour of its origin, and a legend; without the colours it is the text."""
    ended = outrider("generate", PROMPT, *SHORT, "--show-origin")
    (completion,) = embedded().generate(PROMPT, seed=1, max_new_tokens=10)
    text, legend = ended.out.rstrip("\n").rsplit("\n", 1)
    assert re.sub(r"\x1b\[[\d;]*m", "", text) == completion.text
    assert re.sub(r"\x1b\[[\d;]*m", "", legend).split() == ["accepted", "correction", "bonus"]
    colours = {"accepted": "\x1b[32m", "correction": "\x1b[1;31m", "bonus": "\x1b[1;34m"}
    for origin, colour in colours.items():
        assert f"{colour}{origin}" in legend
        assert (colour in text) == (origin in completion.origins)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_prompt_stands_before_the_text(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the text is printed as it comes, with markup in it left alone. Waiting for typed text without a word would
    look like hanging."""
    message = outrider("generate", stdin=Terminal()).error
    assert "give one as an argument, pipe it in, or use --prompts FILE" in message
    terminal = Terminal()
    monkeypatch.setattr(command, "console_for", lambda *_, **__: Console(file=terminal, width=400, highlight=False))
    outrider("generate", "[bold] once upon a time", *SHORT)
    plain = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue())
    assert plain == "[bold] once upon a time" + said("[bold] once upon a time") + "\n"


def test_sampling_options_of_the_checkpoint(outrider: Outrider, tmp_path: Path) -> None:
    """They are taken where none are given, and it is told."""
    stated = {"temperature": 0.4, "top_k": 9}
    folder = stating(tmp_path / "fable", stated)
    arguments = ("generate", "Once", "--target", folder, "--draft", "none", "-n", 2, "--seed", 1, "--json", "-")
    line = "sampling as fable states: "
    ended = outrider(*arguments)
    assert f"{line}temperature 0.4, top-k 9 (--generation-config none does without)" in ended.err
    options = only_document(ended.out, "generate")["options"]
    assert options.items() >= stated.items() and options["max_new_tokens"] == 2
    for more in (("-t", 1.0, "--top-k", 0), ("--generation-config", "none")):  # given, though they are the defaults
        ended = outrider(*arguments, *more)
        options = only_document(ended.out, "generate")["options"]
        assert (options["temperature"], options["top_k"]) == (1.0, 0) and "sampling as" not in ended.err
    assert "generation_config = 'x' is invalid" in outrider(*arguments, "--generation-config", "x").error


@pytest.mark.parametrize("options", [("-t", 0), ("--acceptance", "gumbel", "--seed", 3)])
def test_verified_bytes(options: tuple[object, ...], outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is generated without the draft, too; exit code 1 if a forward's results depend on the draft."""
    words = "generate", PROMPT, "-n", 12, *options, "--verify-bytes", "--json", "-"
    ended = outrider(*words)
    assert ended.code == 0 and ended.err.endswith("same bytes: promised)\nsame bytes as plain decoding (12 tokens)\n")
    same = only_document(ended.out, "generate")["same_bytes"]
    assert (same["num_tokens"], same["differences"], same["promise"]) == (12, [], "promised")
    monkeypatch.setattr(command, "report_context_limit", lambda *_: depend_on_columns(monkeypatch))
    ended = outrider(*words)
    assert ended.code == 1 and re.search(r"\ntext 0 differs from token \d+ on .*: bug\n$", ended.err)
    assert len(only_document(ended.out, "generate")["same_bytes"]["differences"]) == 1


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((PROMPT, "-t", 0, "--draft", "none"), "there is no draft"),
        ((PROMPT, "--seed", 1), "is that of plain decoding under --acceptance gumbel with a --seed"),
        ((PROMPT, "--acceptance", "gumbel"), "under --acceptance gumbel with a --seed"),
        (("--prompts", "a file", "-t", 0), "it takes one PROMPT"),
    ],
)
def test_bytes_that_nothing_promises(options: tuple[object, ...], reason: str, outrider: Outrider) -> None:
    ended = outrider("generate", *options, "--verify-bytes")
    assert ended.error.startswith("--verify-bytes = True is invalid: ") and reason in ended.error
