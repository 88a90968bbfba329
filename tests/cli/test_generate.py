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
from outrider.text import constraint_check
from pairs import embedded

PROMPT = "Once upon a time there was a miller"
SHORT = ("-n", "10", "--seed", "1")
SUMMARY = re.compile(
    r"(\d+) tokens, ([\d.]+) tokens/s, mean acceptance length (\d\.\d\d) "
    r"\((\S+) with (\S+), K = (\d+), (\w+)\)(, interrupted)?\n"
)


def said(prompt: str = PROMPT, **options: Any) -> str:
    """What the library says to the same prompt."""
    return embedded().generate(prompt, **{"max_new_tokens": 10, "seed": 1} | options)[0].text


def test_the_text_is_all_there_is_on_standard_output(outrider: Outrider) -> None:
    """And the summary one line on standard error, so that the text can be piped on."""
    ended = outrider("generate", PROMPT, *SHORT)
    assert (ended.code, ended.out) == (0, said() + "\n")
    match = SUMMARY.fullmatch(ended.err)
    assert match is not None, ended.err
    assert match.groups()[:1] + match.groups()[3:] == ("10", "fable", "fable-draft", "4", "block", None)
    assert float(match[2]) > 0


def test_options_reach_the_decoder(outrider: Outrider) -> None:
    """Each of them, by a text that without it would be another."""
    bias = embedded().encode(" king")[-1]
    ended = outrider(
        *("generate", PROMPT, "-n", 14, "--seed", 8, "-t", 0.9, "--top-k", 50, "--top-p", 0.9, "--min-p", 0.01),
        *("--repetition-penalty", 1.3, "--logit-bias", f"{bias}=4", "--logit-bias", "0=-inf", "--stop", "zzz"),
        *("--presence-penalty", 0.5, "--frequency-penalty", 0.25, "--min-tokens", 6, "--stop-token-id", bias),
        *("--stop-token-id", 40, "--ignore-eos", "-k", 2, "--acceptance", "block"),
    )
    options: dict[str, Any] = {"max_new_tokens": 14, "seed": 8, "temperature": 0.9, "top_k": 50, "top_p": 0.9}
    options |= {"min_p": 0.01, "repetition_penalty": 1.3, "logit_bias": {bias: 4.0, 0: -float("inf")}}
    options |= {"presence_penalty": 0.5, "frequency_penalty": 0.25, "min_tokens": 6, "stop_token_ids": [bias, 40]}
    options |= {"stop": ["zzz"], "ignore_eos": True, "num_draft_tokens": 2, "acceptance": "block"}
    assert ended.out == said(**options) + "\n"
    assert "K = 2, block" in ended.err


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
    ended = outrider("generate", PROMPT, *SHORT, "--grammar", tmp_path / "animal.lark")
    assert ended.out in (" a fox\n", " a hen\n")
    ended = outrider("generate", PROMPT, *SHORT, "--regex", " (yes|no)")
    assert ended.out == said(regex=" (yes|no)") + "\n"
    ended = outrider("generate", PROMPT, *SHORT, "--bad-word", "had", "--bad-word", "who")
    assert ended.out == said(bad_words=["had", "who"]) + "\n"
    (tmp_path / "half.json").write_text("{")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Once", "regex": "(a"}\n')
    for arguments, message in (
        ((PROMPT, "--regex", "(a"), "regex = '(a' is invalid: "),
        ((PROMPT, "--regex", "a", "--grammar", tmp_path / "animal.lark"), "give it or regex, not both"),
        ((PROMPT, "--regex", "a", "--ignore-eos"), "ignore_eos = True is invalid: with regex"),
        ((PROMPT, "--json-schema", tmp_path / "half.json"), f"{tmp_path / 'half.json'} is not JSON"),
        ((PROMPT, "--json-schema", tmp_path / "none.json"), "none.json"),
        ((PROMPT, "--regex", "a", "--bad-word", "a"), "bad_words = ('a',) is invalid: they may forbid"),
        (("--prompts", prompts), f"{prompts}, line 1: regex = '(a' is invalid"),
    ):
        assert message in outrider("generate", *arguments).error


def test_a_constraint_that_takes_too_long_to_read(
    outrider: Outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is refused in one line, in a file of prompts too."""
    monkeypatch.setattr(constraint_check, "_MOST_CPU_S", 1)
    schema = {"type": "string", "allOf": [{"pattern": f".*a{i}.*b{i}.*"} for i in range(30)]}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "Once", "json_schema": schema}))
    for arguments in ((PROMPT, "--json-schema", tmp_path / "schema.json"), ("--prompts", tmp_path / "prompts.jsonl")):
        assert "it takes too much time or memory to read" in outrider("generate", *arguments, *SHORT).error


def test_stop_strings_may_be_repeated(outrider: Outrider) -> None:
    full = said(ignore_eos=True)
    first, second = full[6:8], full[3:5]
    ended = outrider("generate", PROMPT, *SHORT, "--ignore-eos", "--stop", first, "--stop", second)
    assert ended.out == full[: min(full.index(first), full.index(second))] + "\n"


@pytest.mark.parametrize(("draft", "tau"), [("none", "1.00"), ("ngram", None), ("fable", "5.00")])
def test_drafts_by_name(outrider: Outrider, draft: str, tau: str | None) -> None:
    ended = outrider("generate", PROMPT, *SHORT, "--draft", draft, "--dtype", "float64", "--ignore-eos")
    match = SUMMARY.fullmatch(ended.err)
    if draft == "none":
        assert ended.err.endswith("mean acceptance length 1.00 (fable, plain)\n")
        return
    assert match is not None and match[5] == draft
    assert tau is None or match[3] == tau


def test_without_a_seed_it_is_told_in_the_document(outrider: Outrider, tmp_path: Path) -> None:
    """Two runs differ; the seed in the document says the same again."""
    documents = []
    for name in ("a.json", "b.json"):
        ended = outrider("generate", PROMPT, "-n", 10, "-k", 4, "--json", tmp_path / name)
        documents.append(only_document((tmp_path / name).read_text(), "generate"))
    seeds = [document["completions"][0]["seed"] for document in documents]
    assert seeds[0] != seeds[1]
    assert documents[1]["options"]["seed"] is None
    assert ended.out == said(seed=seeds[1]) + "\n"


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_the_prompt_may_come_from_standard_input(outrider: Outrider, end: bytes) -> None:
    """Less the newline that echo writes."""
    ended = outrider("generate", *SHORT, stdin=f"{PROMPT}: für den König".encode() + end)
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


def test_infinite_biases_do_not_spoil_the_document(outrider: Outrider) -> None:
    """JSON has no infinity."""
    ended = outrider("generate", PROMPT, *SHORT, "--logit-bias", "5=-inf", "--logit-bias", "6=1.5", "--json", "-")
    assert only_document(ended.out, "generate")["options"]["logit_bias"] == ["5=-inf", "6=1.5"]


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
    """And the text is printed as it comes, with markup in it left alone."""
    terminal = Terminal()
    monkeypatch.setattr(command, "console_for", lambda *_, **__: Console(file=terminal, width=400, highlight=False))
    outrider("generate", "[bold] once upon a time", *SHORT)
    plain = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue())
    assert plain == "[bold] once upon a time" + said("[bold] once upon a time") + "\n"


def test_a_terminal_without_a_prompt(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for typed text without a word would look like hanging."""
    ended = outrider("generate", stdin=Terminal())
    assert "give one as an argument, pipe it in, or use --prompts FILE" in ended.error


def test_threads_are_set(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    outrider("generate", PROMPT, *SHORT)
    assert numbers == []
    outrider("generate", PROMPT, *SHORT, "--threads", 3)
    assert numbers == [3]


def test_chats(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt is a user's message, in the model's template."""
    monkeypatch.setattr(embedded().tokenizer, "chat_template", "{{ messages[0].role }}: {{ messages[0].content }} #")
    monkeypatch.setattr("outrider.api.load_checkpoint", lambda *_, **__: pytest.fail("loaded"))
    plain = embedded().plain()
    monkeypatch.setattr("outrider.cli.shared.pair_options.PairOptions.load", lambda self: plain)
    ended = outrider("generate", "Hello", "--chat", *SHORT, "--draft", "none")
    want = embedded().plain().generate("user: Hello #", seed=1, max_new_tokens=10)[0].text
    assert ended.out == want + "\n"


@pytest.mark.parametrize("more", [("-k", 3), ("--acceptance", "gumbel"), ("--draft", "none")])
def test_a_drawn_seed_repeats_the_text(outrider: Outrider, more: tuple[object, ...]) -> None:
    """It is in the summary and in the document."""
    arguments = ("generate", PROMPT, "-n", 8, "--dtype", "float64", *more)
    drawn = outrider(*arguments, "--json", "-")
    (row,) = only_document(drawn.out, "generate")["completions"]
    assert drawn.err.endswith(f", seed {row['seed']}\n")
    again = outrider(*arguments, "--seed", row["seed"])
    assert again.out == row["text"] + "\n" and "seed" not in again.err


def test_a_text_that_a_seed_does_not_repeat(outrider: Outrider) -> None:
    """Under -k auto the text follows the load, too. A greedy text needs no seed."""
    message = outrider("generate", "Once", "-n", 2).err
    assert re.search(r", seed \d+ \(K adapted to the load: to repeat an output, give -k 4 ", message)
    assert "seed" not in outrider("generate", "Once", "-n", 2, "-t", 0).err


def test_a_limit_beyond_the_context_is_told(outrider: Outrider, tmp_path: Path) -> None:
    message = "-n 2000 exceeds the context of fable, 1024 tokens: with 1 in the prompt, at most 1023 are generated"
    assert outrider("generate", "Once", "-n", 2000, "--stop", " ").err.splitlines()[0] == message
    assert "context" not in outrider("generate", "Once", "-n", 1023, "--stop", " ").err
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Once", "max_new_tokens": 9}\n{"prompt": "Once"}\n{"prompt": "A"}\n')
    ended = outrider("generate", "--prompts", prompts, "-n", 2000, "--stop", " ")
    assert ended.err.splitlines()[0] == "-n exceeds the context of fable for 2 prompts: generation stops there"


def test_ctrl_c_keeps_what_was_generated(outrider: Outrider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The text so far, the summary of it, the document, and exit code 130."""
    whole = type(embedded()).stream

    def interrupted(self: Any, prompt: Any, **options: Any) -> Any:
        stream = whole(self, prompt, **options)
        yield next(stream)
        yield next(stream)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(embedded()), "stream", interrupted)
    ended = outrider("generate", PROMPT, "-n", 100, "--seed", 1, "--json", tmp_path / "a.json")
    (row,) = only_document((tmp_path / "a.json").read_text(), "generate")["completions"]
    assert ended.code == 130
    assert ended.out == row["text"] + "\n" and said(max_new_tokens=100).startswith(row["text"])
    assert row["finish_reason"] is None and len(row["token_ids"]) >= 2
    assert row["stats"]["num_rounds"] == 2 and row["stats"]["num_generated_tokens"] == len(row["token_ids"])
    match = SUMMARY.fullmatch(ended.err)
    assert match is not None and (match[1], match[8]) == (str(len(row["token_ids"])), ", interrupted")


def test_ctrl_c_before_the_first_token(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the model is read."""

    def interrupted(self: Any, *_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.cli.shared.pair_options.PairOptions.load", interrupted)
    for arguments in (("generate", PROMPT), ("compare",), ("latency",), ("eval", "multiplication")):
        ended = outrider(*arguments)
        assert ended.code == 130
        assert "Traceback" not in ended.err
