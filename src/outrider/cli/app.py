"""Entry point. User errors are one line and exit code 2; Ctrl-C is exit code 130."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

import typer

from outrider.cli.commands import (
    alpha,
    certify,
    certify_samples,
    chat,
    compare,
    distill,
    export,
    generate,
    latency,
    models,
    plan,
    record,
    replay,
    serve,
)
from outrider.cli.commands import eval as eval_
from outrider.cli.shared.examples import example_lines
from outrider.cli.shared.logs import log_to_stderr
from outrider.cli.shared.parsing import Command, Group
from outrider.cli.shared.processes import run_together
from outrider.cli.shared.streams import guard_streams
from outrider.cli.shared.wrapping import say
from outrider.errors import OutriderError
from outrider.system.ranks import is_one_of_several

_COMMANDS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Generate": {
        "generate": generate.generate,
        "chat": chat.chat,
        "serve": serve.serve,
        "compare": compare.compare,
        "latency": latency.latency,
    },
    "Choose a draft": {
        "models": models.models,
        "plan": plan.plan,
        "alpha": alpha.alpha,
        "record": record.record,
        "replay": replay.replay,
    },
    "Train": {"distill": distill.distill},
    "Hand over": {"export": export.export},
    "Trust and score": {
        "certify": certify.certify,
        "certify-samples": certify_samples.certify_samples,
        "eval": eval_.app,
    },
}

app = typer.Typer(
    name="outrider",
    cls=Group,
    help="Generate faster with a large language model by speculative sampling, with exactly its distribution.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for _panel, _commands in _COMMANDS.items():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name, rich_help_panel=_panel)
        else:
            app.command(_name, cls=Command, rich_help_panel=_panel, epilog=example_lines(_name))(_command)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        typer.echo(f"outrider {version('outrider')}")
        raise typer.Exit()


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
    verbose: bool = typer.Option(
        False, "--verbose", help="Before a command: tell on standard error how models are read, and where texts end."
    ),
) -> None:
    if verbose:
        log_to_stderr()


def main() -> None:
    check_output = guard_streams()

    def run() -> None:
        try:
            app(prog_name="outrider")  # also under python -m
        except SystemExit:
            check_output()
            raise

    # Warnings and retries of libraries would bury the one-line error.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars of libraries, like ours, are for terminals
    # Each process of distill has the whole target, and they share the training sequences.
    if is_one_of_several() and "distill" not in sys.argv[1:2]:
        run_together(run, _mistake)
    try:
        run()
    except Exception as error:
        message = _mistake(error)
        if message is None:
            raise
        say(f"error: {message}")
        sys.exit(2)


def _mistake(error: BaseException) -> str | None:
    """One-line message for a user's error; None for our own errors."""
    if isinstance(error, OutriderError):
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"cannot write {error.filename or 'the output'}: {error.strerror}"
    if type(error).__name__ == "OutOfMemoryError":  # torch's, without importing torch
        reason = str(error).split(". ")[0]
        return (
            f"out of device memory ({reason}): choose a narrower --dtype, a smaller batch, fewer tokens or a smaller "
            "model"
        )
    return None
