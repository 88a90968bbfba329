"""Help of all commands, and values that the shell completes."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.core import TyperGroup

from commands import Outrider, command_of
from outrider.cli.shared import completion
from outrider.cli.shared.examples import EXAMPLES
from outrider.export.engines import ENGINES
from outrider.models.registry import known_models
from outrider.options import LOOKUPS
from outrider.sampling.rules import RULES

WIDTH = 80  # of a terminal


def commands() -> list[str]:
    """The words that name each command and each group of commands, the program itself included."""
    names = command_of("").commands
    groups = {name: group for name, group in names.items() if isinstance(group, TyperGroup)}
    return ["", *names, *(f"{name} {inner}" for name, group in groups.items() for inner in group.commands)]


LEAVES = [words for words in commands() if words not in ("", "eval")]


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def test_help_has_the_commands_in_groups(outrider: Outrider) -> None:
    out = without_colours(outrider("--help").out)
    panels = {
        title: re.findall(r"^│ ([a-z-]+) ", body, re.MULTILINE)
        for title, body in re.findall(r"╭─ ([\w ]+?) ─+╮\n(.*?)╰", out, re.DOTALL)
    }
    del panels["Options"]
    assert panels == {
        "Generate": ["generate", "chat", "serve", "compare", "latency"],
        "Choose a draft": ["models", "plan", "alpha", "record", "replay"],
        "Train": ["distill"],
        "Hand over": ["export"],
        "Trust and score": ["certify", "certify-samples", "eval"],
    }


def test_without_a_command_there_is_help(outrider: Outrider) -> None:
    for arguments in ((), ("eval",)):
        ended = outrider(*arguments)
        assert ended.code == 2 and "Usage: outrider" in ended.out + ended.err


@pytest.mark.parametrize("words", commands())
def test_help_has_all_options_and_the_examples(outrider: Outrider, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """Examples are parsed as the command does, and name models that are known."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    ended = outrider(*words.split(), "--help")
    assert (ended.code, ended.err) == (0, "")
    shown = without_colours(ended.out)
    assert max(map(len, shown.splitlines())) == WIDTH
    assert " ".join(f"Usage: outrider {words}".split()) in shown
    params = [param for param in command_of(words).params if param.param_type_name == "option" and not param.hidden]
    assert [param.opts[0] for param in params if not re.search(rf"{param.opts[0]}[ ,]", shown)] == []
    assert EXAMPLES.keys() == set(LEAVES)
    for example in EXAMPLES.get(words, ()):
        assert re.search(rf"^ outrider {re.escape(example)} *$", shown, re.MULTILINE)
        assert len(f" outrider {example}") < WIDTH and example.startswith(words)
        params = command_of(words).make_context(words, shlex.split(example.removeprefix(words))).params
        for name in ("target", "draft", "target_name", "draft_name"):
            value = params.get(name) or []
            for model in value if isinstance(value, list) else [value]:
                assert model in {*known_models(), *LOOKUPS, "none"}


def completing(line: str) -> dict[str, str]:
    """Variables by which bash asks for values at the end of a line."""
    return {"_OUTRIDER_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}


def test_the_shell_completes_values(outrider: Outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names come from models.toml, the user's own too."""

    def completed(line: str) -> list[str]:
        for name, value in completing(line).items():
            monkeypatch.setenv(name, value)
        ended = outrider()
        assert ended.err == ""
        return ended.out.split()

    file = tmp_path / "outrider" / "models.toml"
    file.parent.mkdir()
    file.write_text('[models.fabulous]\nhub = "an/id"\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert completed("outrider generate --target fab") == ["fable", "fable-draft", "fabulous"]
    assert completed("outrider compare --target qwen3-8b --draft qw") == ["qwen3-0.6b", "qwen3-1.7b"]
    assert completed("outrider chat qwen3-8b qw") == ["qwen3-0.6b", "qwen3-1.7b"]
    assert completed("outrider serve --draft ") == ["fable-draft", "ngram", "suffix", "mtp", "none"]
    assert completed("outrider export --to v") == ["vllm"]
    assert completed("outrider certify --acceptance g") == ["gumbel"]
    file.write_text("broken")
    assert completed("outrider generate --target fab") == []


def test_the_shell_completes_without_torch() -> None:
    code = (
        "import sys; from outrider.cli.app import main\n"
        "try: main()\n"
        "finally: print(sorted(sys.modules.keys() & {'torch', 'transformers', 'numpy'}))"
    )
    environment = os.environ | completing("outrider serve --target fable --draft n")
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (ended.stdout.split(), ended.stderr) == (["ngram", "none", "[]"], "")


def test_values_are_those_that_are_accepted() -> None:
    assert set(completion.ENGINES) == ENGINES.keys() and set(completion.RULES) == RULES.keys()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_takes_the_script() -> None:
    environment = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-m", "outrider", "--show-completion", "bash"]
    script = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    command = ["bash", "-c", f"{script}\ncomplete -p outrider"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.endswith(" outrider\n")
