"""``outrider generate`` with one prompt."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from commands import Outrider, only_document
from gguf_models import CASES, write_case
from outrider.cli.commands import generate as command
from outrider.cli.shared.prompt_job import Setup
from outrider.errors import PromptError
from outrider.models.families.table import config_of, plan_of
from outrider.models.registry import Placement
from pairs import depend_on_columns, embedded, stating

PROMPT = "Once upon a time there was a miller"
SHORT = ("-n", "10", "--seed", "1")


def said(prompt: str = PROMPT, **options: Any) -> str:
    return embedded().generate(prompt, **{"max_new_tokens": 10, "seed": 1} | options)[0].text


def test_the_text_stands_alone_on_standard_output(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the summary in one line on standard error. The prompt may come from a pipe, less the newline of echo."""
    numbers: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    prompt = f"{PROMPT}: für den König"
    ended = outrider("generate", "-", *SHORT, "--threads", 3, stdin=f"{prompt}\n".encode())
    assert (ended.code, ended.out, numbers) == (0, said(prompt) + "\n", [3])
    about = r"\(fable with fable-draft, K = 4, block, same bytes: not promised \(block\)\)"
    assert re.fullmatch(rf"10 tokens, [\d.]+ tokens/s, tau \d\.\d\d tokens/round {about}\n", ended.err)


def test_show_origin_colours_the_text(outrider: Outrider) -> None:
    text, legend = outrider("generate", PROMPT, *SHORT, "--show-origin").out.rstrip("\n").rsplit("\n", 1)
    assert re.sub(r"\x1b\[[\d;]*m", "", text) == said() and "\x1b[32m" in text and "\x1b[32maccepted" in legend


def test_generate_document(outrider: Outrider) -> None:
    """With ``--json -`` standard output has nothing else; the text goes to standard error."""
    arguments = ["generate", PROMPT, *SHORT, "--logprobs", "2", "--draft", "auto", "--json", "-"]
    ended = outrider(*arguments)
    document = only_document(ended.out, "generate")
    assert said() in ended.err
    (row,) = document["completions"]
    (completion,) = embedded().generate(PROMPT, seed=1, max_new_tokens=10, logprobs=2)
    assert (row["text"], row["finish_reason"], row["seed"]) == (completion.text, completion.finish_reason, 1)
    assert (row["token_ids"], row["origins"]) == (list(completion.token_ids), list(completion.origins))
    assert row["stats"] == document["stats"] == completion.stats.to_json()
    assert completion.logprobs is not None
    for got, want in zip(row["logprobs"], completion.logprobs, strict=True):
        assert got["logprob"] == pytest.approx(want.logprob, abs=1e-4)
    options, origin = document["options"], document["provenance"]
    assert (options["target"], options["draft"], options["num_draft_tokens"]) == ("fable", "auto", 4)
    assert (origin["argv"], origin["draft"]) == (arguments, "fable-draft")  # auto's choice


@pytest.fixture
def parsed(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The models and options that a command line asks for, and its prompt."""
    seen: list[Any] = []

    def stop(setup: Setup, num_slots: int) -> None:
        seen.append(setup)
        raise PromptError("enough")

    monkeypatch.setattr("outrider.cli.shared.prompt_job.LocalWorker", stop)
    monkeypatch.setattr(command, "read_prompt", lambda text: seen.append(text) or "?")
    monkeypatch.setattr("outrider.cli.shared.options.over_checkpoint", lambda sampling, *_: sampling)

    def setup_of(*words: object) -> tuple[Setup, str | None]:
        seen.clear()
        assert "enough" in outrider("generate", *words).error
        return seen[-1], seen[0]

    return setup_of


def test_options_reach_the_decoder(parsed: Any, tmp_path: Path) -> None:
    for words, target, text in (
        (["qwen3-8b"], "fable", "qwen3-8b"),
        (["qwen3-8b", "The king"], "qwen3-8b", "The king"),
        (["-", "--target", "gpt2"], "gpt2", "-"),
        ([], "fable", None),
    ):
        setup, prompt = parsed(*words)
        assert (setup.pair.target, prompt) == (target, text)
    setup, prompt = parsed(
        *("Once", "-n", 14, "--seed", 8, "-t", 0.9, "--top-k", 50, "--top-p", 0.9, "--min-p", 0.01, "--logprobs", 2),
        *("--repetition-penalty", 1.3, "--logit-bias", "7=4", "--logit-bias", "0=-inf", "--stop", "zz", "--stop", "yy"),
        *("--presence-penalty", 0.5, "--frequency-penalty", 0.25, "--min-tokens", 6, "--stop-token-id", 40),
        *("--ignore-eos", "-k", 2, "--bad-word", "had"),
    )
    assert prompt == "Once" and setup.k == 2 and setup.draft == "fable-draft"
    expected: dict[str, Any] = {"max_new_tokens": 14, "seed": 8, "temperature": 0.9, "top_k": 50, "top_p": 0.9}
    expected |= {"min_p": 0.01, "repetition_penalty": 1.3, "logit_bias": {7: 4.0, 0: -float("inf")}, "logprobs": 2}
    expected |= {"presence_penalty": 0.5, "frequency_penalty": 0.25, "min_tokens": 6, "stop_token_ids": (40,)}
    expected |= {"stop": ("zz", "yy"), "ignore_eos": True, "bad_words": ["had"]}
    assert setup.options == {**expected, **dict.fromkeys(("json_schema", "regex", "grammar", "thinking_budget"))}
    assert setup.settings()["logit_bias"] == ["7=4.0", "0=-inf"]  # JSON has no infinity
    schema, grammar = tmp_path / "schema.json", tmp_path / "animal.lark"
    schema.write_text('{"type": "object"}')
    grammar.write_text('start: "fox" | "hen"')
    for option, given, name, value in (
        ("--json-schema", schema, "json_schema", {"type": "object"}),
        ("--grammar", grammar, "grammar", grammar.read_text()),
        ("--regex", "a|b", "regex", "a|b"),
        ("--thinking-budget", 5, "thinking_budget", 5),
    ):
        assert parsed("Once", option, given)[0].options[name] == value


def test_options_reach_the_loader(parsed: Any, tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text("Once\n")
    setup, _ = parsed(
        *("Once", "--draft", "suffix", "--corpus", tmp_path / "story.txt", "--acceptance", "gumbel", "--seed", 1),
        *("--device", "cuda", "--dtype", "float16", "--quantize", "int8", "--device-map", "auto", "--store", "plain"),
        *("--max-memory", "0=1GiB", "--draft-device", "cuda:1", "--draft-dtype", "bfloat16", "--draft-quantize", "nf4"),
        *("--allow-pickle", "--execution", "eager"),
    )
    shared: dict[str, Any] = {"store": "plain", "allow_pickle": True, "execution": "eager"}
    assert setup.pair.placement == Placement("cuda", "float16", "int8", "auto", "0=1GiB", **shared)
    assert setup.pair.draft_placement == Placement("cuda:1", "bfloat16", "nf4", **shared)
    assert setup.k == "auto" and setup.pair.acceptance == "gumbel" and setup.pair.corpus == [tmp_path / "story.txt"]
    plain = parsed("Once", "-t", 0, "--device", "cpu")[0].pair
    assert plain.draft_placement == plain.placement == Placement("cpu")


def test_on_a_terminal_the_prompt_stands_before_the_text(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """And markup in it is left alone. Waiting for typed text without a word would look like hanging."""
    screen = type("Screen", (io.StringIO,), {"isatty": lambda self: True})
    assert "give one as an argument, pipe it in, or use --prompts FILE" in outrider("generate", stdin=screen()).error
    terminal = screen()
    monkeypatch.setattr(command, "console_for", lambda *_, **__: Console(file=terminal, width=400, highlight=False))
    outrider("generate", "[bold] once upon a time", *SHORT)
    plain = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue())
    assert plain == "[bold] once upon a time" + said("[bold] once upon a time") + "\n"


def test_a_drawn_seed_repeats_the_text(outrider: Outrider) -> None:
    """Under -k auto the text follows the load: the summary says so."""
    arguments = ("generate", PROMPT, "-n", 8, "--dtype", "float64", "-k", 4)
    ended = outrider(*arguments, "--json", "-")
    (row,) = only_document(ended.out, "generate")["completions"]
    assert ended.err.endswith(f", --seed {row['seed']} repeats this text\n")
    again = outrider(*arguments, "--seed", row["seed"])
    assert again.out == row["text"] + "\n" and "seed" not in again.err
    assert "so that no seed repeats this text (-k 4 keeps K)" in outrider("generate", "Once", "-n", 2).err


def test_sampling_options_of_the_checkpoint(outrider: Outrider, tmp_path: Path) -> None:
    """They are taken where none are given, though those be the defaults, and a line tells of them."""
    folder = stating(tmp_path / "fable", {"temperature": 0.4, "top_k": 9})
    line = "sampling as fable states: temperature 0.4, top-k 9 (--generation-config none does without)"
    for more, found in (
        ((), (0.4, 9)),
        (("-t", 1.0, "--top-k", 0), (1.0, 0)),
        (("--generation-config", "none"), (1, 0)),
    ):
        ended = outrider("generate", "Once", "--target", folder, "--draft", "none", "-n", 2, "--json", "-", *more)
        options = only_document(ended.out, "generate")["options"]
        assert (options["temperature"], options["top_k"]) == found and (line in ended.err) == (more == ())


def test_verified_bytes(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is generated without the draft, too; exit code 1 if a forward's results depend on the draft."""
    words = "generate", PROMPT, "-n", 12, "--acceptance", "gumbel", "--seed", 3, "--verify-bytes", "--json", "-"
    ended = outrider(*words)
    assert ended.code == 0 and ended.err.endswith("same bytes: promised)\nsame bytes as plain decoding (12 tokens)\n")
    same = only_document(ended.out, "generate")["same_bytes"]
    assert (same["num_tokens"], same["differences"], same["promise"]) == (12, [], "promised")
    monkeypatch.setattr(command, "report_context_limit", lambda *_: depend_on_columns(monkeypatch))
    ended = outrider(*words)
    assert ended.code == 1 and re.search(r"\ntext 0 differs from token \d+ on .*: bug\n$", ended.err)
    assert len(only_document(ended.out, "generate")["same_bytes"]["differences"]) == 1


def test_verified_by_code_of_transformers(outrider: Outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GGUF file, whose plan is right; then one that is run by a wrong plan."""
    files = [write_case(tmp_path / f"{name}.gguf", CASES["llama"]) for name in ("right", "wrong", "eager")]
    words = "-n", 2, "--draft", "none", "--verify-model"
    ended = outrider("generate", files[0], "a", *words)
    assert f"verified: {files[0]} gives the logits of Transformers' LlamaForCausalLM\n" in ended.err
    wrong = lambda config: plan_of(config_of(config.to_dict() | {"rms_norm_eps": 1.0}))  # noqa: E731
    monkeypatch.setattr("outrider.models.planned.plan_of", wrong)
    refused = outrider("generate", files[1], "a", *words)
    assert refused.code == 2 and "does not give the logits of Transformers' LlamaForCausalLM" in refused.error
    ended = outrider("generate", files[2], "a", *words, "--execution", "eager")
    assert "eager.gguf runs in the code of Transformers' LlamaForCausalLM itself\n" in ended.err
