"""Words that other programs understand are answered with the option that is meant."""

import pytest

from commands import Outrider

WORDS: list[tuple[str, str]] = [
    ("generate Once --model fable", "--model = 'fable' is invalid: did you mean --target?"),
    ("generate Once --model=fable", "--model = 'fable' is invalid: did you mean --target?"),
    ("generate Once -m fable", "-m = 'fable' is invalid: did you mean --target?"),
    ("generate Once --draft-model x", "did you mean --draft?"),
    ("generate Once -md x", "did you mean --draft?"),
    ("generate Once --assistant-model x", "did you mean --draft?"),
    ("generate Once --temp 1", "--temp = '1' is invalid: did you mean --temperature?"),
    ("generate Once --max-tokens 5", "did you mean --max-new-tokens?"),
    ("generate Once --n-predict 5", "did you mean --max-new-tokens?"),
    ("generate Once --stop-strings .", "did you mean --stop?"),
    ("generate Once --suppress-tokens 5", "there is no such option: logit_bias forbids a token"),
    ("generate Once --num-speculative-tokens 5", "did you mean --num-draft-tokens?"),
    ("generate --prompt Once", "there is no such option: the prompt is an argument without a name"),
    ("generate Once --trust-remote-code", "load the model and its tokenizer yourself"),
    ("serve --model fable", "did you mean --target?"),
    ("serve --max-model-len 99", "did you mean --context?"),
    ("serve --max-num-seqs 9", "did you mean --slots?"),
    ("eval multiplication --model fable", "did you mean --target?"),
]


@pytest.mark.parametrize(("words", "message"), WORDS, ids=[words for words, _ in WORDS])
def test_the_option_that_is_meant_is_named(outrider: Outrider, words: str, message: str) -> None:
    assert message in outrider(*words.split()).error


def test_known_options_are_taken_as_they_are(outrider: Outrider) -> None:
    """Other mistakes keep Typer's words, and a value may look like another program's option."""
    assert "No such option: --colour" in outrider("generate", "Once", "--json", "-", "--no-compile", "--colour", 5).err
    ended = outrider("generate", "Once", "-n", 1, "--seed", 1, "--stop", "--model")
    assert ended.code == 0 and ended.err.count("\n") == 1


@pytest.mark.parametrize(("value", "is_told"), [("8", True), ("2", False), ("0.5", False)])
def test_threads_are_no_temperature(outrider: Outrider, value: str, is_told: bool) -> None:
    ended = outrider("generate", "Once", "-n", 1, "--seed", 1, "-t", value)
    assert ended.code == 0
    hint = f"-t {value} sets the temperature; for {value} CPU threads use --threads {value}\n"
    assert ended.err.startswith(hint) == is_told and ended.err.count("\n") == 1 + is_told
