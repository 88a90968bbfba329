"""Other programs' names of options are aliases of ours, or are answered with the option that is meant."""

import json
from pathlib import Path

import pytest

from commands import Outrider

WORDS: list[tuple[str, str]] = [
    ("generate Once -md x", "did you mean --draft?"),
    ("generate Once --max-length 5", "--max-length = '5' is invalid: did you mean --max-new-tokens?"),
    ("generate Once --max-length=5", "--max-length = '5' is invalid: did you mean --max-new-tokens?"),
    ("generate Once --stop-strings .", "did you mean --stop?"),
    ("generate Once --suppress-tokens 5", "there is no such option: logit_bias forbids a token"),
    ("generate Once --trust-remote-code", "load the model and its tokenizer yourself"),
    ("serve --parallel 9", "did you mean --slots?"),
    ("generate Once --compile", "--compile = True is invalid: nothing is compiled any more"),
    ("alpha --no-compile", "--no-compile = False is invalid: nothing is compiled any more"),
    ("serve --wait", "nothing is compiled that a server could wait for"),
    ("compile --draft none", "outrider compile is gone"),
    ("eval harness --tasks gsm8k", "outrider eval harness is gone: run python -m outrider.evals.harness"),
    ("eval multiplication --model-name fable", "did you mean --target?"),
]


@pytest.mark.parametrize(("words", "message"), WORDS, ids=[words for words, _ in WORDS])
def test_the_option_that_is_meant_is_named(outrider: Outrider, words: str, message: str) -> None:
    assert message in outrider(*words.split()).error


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ("--target fable-draft --draft none", "--model fable-draft --draft-model none"),
        ("--target=fable-draft --draft fable-draft", "-m fable-draft --assistant-model=fable-draft"),
        ("-n 5 -t 0.7 -k 2 --repetition-penalty 1.2", "--max-tokens 5 --temp 0.7 --draft-max 2 --repeat-penalty 1.2"),
        ("-n 5 --min-tokens 5 -k 3", "--n-predict 5 --min-new-tokens 5 --num-speculative-tokens=3"),
    ],
)
def test_aliases_are_the_option(outrider: Outrider, tmp_path: Path, own: str, other: str) -> None:
    found = []
    for words in (own, other):
        ended = outrider("generate", "Once", "-n", 3, "-k", 4, "--seed", 1, *words.split(), "--json", tmp_path / "json")
        assert ended.code == 0, ended.err
        document = json.loads((tmp_path / "json").read_text())
        found.append((document["options"], document["completions"][0]["token_ids"]))
    assert found[0] == found[1]


def test_the_prompt_may_be_an_option(outrider: Outrider) -> None:
    few = ("-n", 3, "--seed", 1)
    outputs = {
        outrider("generate", *words).out
        for words in (("Once", *few), ("-p", "Once", *few), (*few, "--prompt=Once"), ("--prompt", "Once", *few))
    }
    assert len(outputs) == 1 and outputs != {""}
    assert "No such option: --colour" in outrider("generate", "--prompt", "Once", "--model", "x", "--colour", 5).err
    assert "there is a prompt already: 'Once'" in outrider("generate", "Once", "-p", "Twice").error
    ended = outrider("generate", "Once", "-n", 1, "--seed", 1, "--stop", "-p")  # a value, not an option
    assert ended.code == 0, ended.err


def test_aliases_are_not_in_the_help(outrider: Outrider) -> None:
    assert "--model " not in outrider("generate", "--help").out


def test_known_options_are_taken_as_they_are(outrider: Outrider) -> None:
    """Other mistakes keep Typer's words, and a value may look like another program's option."""
    assert "No such option: --colour" in outrider("generate", "Once", "--json", "-", "--ignore-eos", "--colour", 5).err
    ended = outrider("generate", "Once", "-n", 1, "--seed", 1, "--stop", "--model")
    assert ended.code == 0 and ended.err.count("\n") == 1


@pytest.mark.parametrize(("value", "is_told"), [("8", True), ("2", False), ("0.5", False)])
def test_threads_are_no_temperature(outrider: Outrider, value: str, is_told: bool) -> None:
    ended = outrider("generate", "Once", "-n", 1, "--seed", 1, "-t", value)
    assert ended.code == 0
    hint = f"-t {value} sets the temperature; for {value} CPU threads use --threads {value}\n"
    assert ended.err.startswith(hint) == is_told and ended.err.count("\n") == 1 + is_told
