"""What all commands have in common: options are checked, with one line, before the work, which Ctrl-C ends."""

import re
from pathlib import Path

import pytest

from commands import Outrider, command_of
from outrider.cli.app import EXAMPLES

COMMANDS: dict[str, tuple[object, ...]] = {  # with what they need, in a folder that has these files
    "generate": ("generate", "Once"),
    "compare": ("compare", "--draft", "fable-draft"),
    "latency": ("latency",),
    "plan": ("plan",),
    "certify": ("certify",),
    "certify-samples": ("certify-samples", "fable", "samples.jsonl"),
    "eval multiplication": ("eval", "multiplication"),
    "replay": ("replay", "log.jsonl"),
    "export": ("export", "--to", "vllm", "--output", "folder", "--draft", "fable-draft"),
    "distill": ("distill", "fable", "--output", "folder"),
    "models": ("models", "--target", "fable"),
    "chat": ("chat",),
    "serve": ("serve", "--port", 0),
}
SUFFIXES = {"--json": ".json", "--html": ".html"}
BAD: list[tuple[str, str, str]] = [
    ("--temperature", "-1", r"temperature = -1.0 is invalid: a number >= 0"),
    (
        "--max-new-tokens",
        "0",
        r"'--max-new-tokens'.*: (Input should be .* equal to 1|0 is not in the range x>=1)|max_new_tokens = 0",
    ),
    ("--num-draft-tokens", "-2", r"num.draft.tokens'? ?=? ?.*-2|greater than or equal to 1"),
    (
        "--batch-size",
        "0",
        r"'--batch-size': (Input should be greater|0 is not in the range)|batch.size = '?0'? is invalid",
    ),
    (
        "--seed",
        "-1",
        r"seed = -1 is invalid|'--seed': (Input should be greater than or equal to 0|-1 is not in the range x>=0)",
    ),
    ("--significance", "0", r"'--significance': (Input should be greater|0.0 is not in the range)"),
    ("--detect-tv", "2", r"'--detect-tv': (Input should be less|2.* is not in the range)"),
    ("--acceptance", "typical", r"acceptance = 'typical' is invalid: choose one of rejection"),
    ("--target", "fabel", r"no model is called 'fabel': did you mean 'fable'\?"),
    ("--draft", "fabel", r"no model is called 'fabel': did you mean 'fable'\?"),
    ("--models", "nowhere.toml", r"nowhere.toml"),
    ("--device", "tpu", r"there is no device 'tpu' here: choose auto, cpu"),
    ("--dtype", "float13", r"dtype = 'float13' is invalid: choose"),
    ("--threads", "0", r"'--threads': (Input should be greater|0 is not in the range)"),
]


def options_of(name: str) -> set[str]:
    return {option for param in command_of(name).params for option in param.opts}


@pytest.fixture(scope="module")
def log() -> list[str]:
    """The text of the log, once it has been recorded."""
    return []


@pytest.fixture
def folder(outrider: Outrider, log: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("Once\n")
    (tmp_path / "samples.jsonl").write_text('{"prompt_ids": [1], "token_ids": [2]}\n' * 2)
    if not log:
        assert outrider("generate", "--prompts", "prompts.txt", "--output", "log.jsonl", "-t", 0, "-n", 2).code == 0
        log.append((tmp_path / "log.jsonl").read_text())
    (tmp_path / "log.jsonl").write_text(log[0])
    return tmp_path


def test_every_command_is_here() -> None:
    assert COMMANDS.keys() == EXAMPLES.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_bad_values_are_refused(outrider: Outrider, folder: Path, name: str) -> None:
    """In every command that has the option; and no file is written, changed or removed."""
    known = options_of(name)
    (folder / "old.json").write_text("old")
    document = ("--json", "old.json") if "--json" in known else ()
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for option, value, message in BAD:
        if option in known:
            ended = outrider(*COMMANDS[name], option, value, *document)
            *log, error = ended.err.splitlines()
            assert (ended.code, ended.out) == (2, "") and (not log or name == "serve"), (option, ended)
            assert error.startswith("error: ") and re.search(message, error), (option, ended)
            assert {path: path.read_bytes() for path in folder.iterdir()} == before, option


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name in COMMANDS for option in SUFFIXES if option in options_of(name)]
)
def test_outputs_are_checked_before_the_work(outrider: Outrider, folder: Path, name: str, option: str) -> None:
    suffix = SUFFIXES[option]
    taken, new, models = (folder / f"{stem}{suffix}" for stem in ("taken", "new", "models"))
    taken.mkdir()
    models.write_text("")

    def error(file: object, *more: object) -> str:
        return outrider(*COMMANDS[name], option, file, *more).error

    assert re.search("No such file or directory|there is no folder nowhere", error(f"nowhere/new{suffix}"))
    assert f"cannot write {taken}: Is a directory" in error(taken)
    if option != "--json":
        assert "the name must end in" in error("new.txt")
        assert "another option reads or writes this file: choose another file" in error(new, "--json", new)
    assert "another option reads or writes this file: choose another file" in error(models, "--models", models)
    assert not new.exists() and models.read_text() == ""


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("models", "serve", "export")])
def test_ctrl_c_while_a_model_is_read(
    outrider: Outrider, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.api.load_checkpoint", interrupted)
    ended = outrider(*COMMANDS[name])
    assert ended.code == 130 and ended.out == "" and "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generat",), "No such command 'generat'. Did you mean 'generate'?"),
        (("generate", "Once", "--tempratur", 1), "No such option: --tempratur"),
        (("generate", "Once", "-n", "many"), "'-n' / '--max-new-tokens'"),
        (("eval", "division"), "No such command 'division'"),
        (("eval",), "Missing command."),
    ],
)
def test_words_that_typer_does_not_know(outrider: Outrider, arguments: tuple[object, ...], message: str) -> None:
    """One line, which names the command whose help tells more."""
    error = outrider(*arguments).error
    assert message in error and error.endswith("--help)")
