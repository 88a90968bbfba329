"""Other programs' names of options are aliases of ours, or are answered with the option that is meant."""

import shlex
from typing import Any

import pytest

from commands import Outrider, command_of

WORDS: list[tuple[str, str]] = [
    ("generate Once -md x", "did you mean --draft?"),
    ("generate Once --max-length 5", "--max-length = '5' is invalid: did you mean --max-new-tokens?"),
    ("generate Once --max-length=5", "--max-length = '5' is invalid: did you mean --max-new-tokens?"),
    ("generate Once --suppress-tokens 5", "there is no such option: logit_bias forbids a token"),
    ("generate Once --trust-remote-code", "load the model and its tokenizer yourself"),
    ("generate Once -p Twice", "there is a prompt already: 'Once'"),
    ("generate Once --compile", "--compile = True is invalid: nothing is compiled any more"),
    ("alpha --no-compile", "--no-compile = False is invalid: nothing is compiled any more"),
    ("serve --wait", "nothing is compiled that a server could wait for"),
    ("compile --draft none", "outrider compile is gone"),
    ("eval harness --tasks gsm8k", "outrider eval harness is gone: run python -m outrider.evals.harness"),
    ("eval multiplication --model-name fable", "did you mean --target?"),
]


def parsed(words: str) -> dict[str, Any]:
    """Values of the parameters of ``generate``."""
    params: dict[str, Any] = command_of("generate").make_context("generate", shlex.split(words)).params
    return params


@pytest.mark.parametrize(("words", "message"), WORDS, ids=[words for words, _ in WORDS])
def test_the_option_that_is_meant_is_named(outrider: Outrider, words: str, message: str) -> None:
    assert message in outrider(*words.split()).error


def test_other_mistakes_keep_the_words_of_typer(outrider: Outrider) -> None:
    for prompt in (("Once",), ("--prompt", "Once", "--model", "x")):
        assert "No such option: --colour" in outrider("generate", *prompt, "--ignore-eos", "--colour", 5).err


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ("--target fable-draft --draft none", "--model fable-draft --draft-model none"),
        ("--target=fable-draft --draft fable-draft", "-m fable-draft --assistant-model=fable-draft"),
        ("-n 5 -t 0.7 -k 2 --repetition-penalty 1.2", "--max-tokens 5 --temp 0.7 --draft-max 2 --repeat-penalty 1.2"),
        ("-n 5 --min-tokens 5 -k 3", "--n-predict 5 --min-new-tokens 5 --num-speculative-tokens=3"),
        ("Once -n 3", "-p Once -n 3"),
        ("Once -n 3", "-n 3 --prompt=Once"),
    ],
)
def test_aliases_are_the_option(own: str, other: str) -> None:
    assert parsed(own) == parsed(other) != parsed("")


def test_a_value_may_look_like_another_program_s_option() -> None:
    for value in ("--model", "-p"):
        params = parsed(f"Once --stop {value}")
        assert ([*params["stop"]], params["prompt"]) == ([value], "Once")


def test_aliases_are_not_in_the_help(outrider: Outrider) -> None:
    assert "--model " not in outrider("generate", "--help").out


@pytest.mark.parametrize(("value", "is_told"), [("8", True), ("2", False), ("0.5", False)])
def test_threads_are_no_temperature(capsys: pytest.CaptureFixture[str], value: str, is_told: bool) -> None:
    parsed(f"Once -t {value}")
    hint = f"-t {value} sets the temperature; for {value} CPU threads use --threads {value}\n"
    assert capsys.readouterr().err == (hint if is_told else "")
