"""The entry point. Errors of ours are one line and exit code 2; Ctrl-C is exit code 130."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable

import typer

from outrider.cli.commands import (
    alpha,
    analyze,
    certify,
    certify_samples,
    compare,
    compile,
    costs,
    distill,
    divergence,
    export,
    generate,
    latency,
    models,
    plan,
    record,
    replay,
    serve,
    shapes,
)
from outrider.cli.commands import eval as eval_
from outrider.cli.shared.help import Command, Group
from outrider.cli.shared.processes import run_together
from outrider.cli.shared.streams import guard_streams
from outrider.errors import OutriderError
from outrider.system.ranks import is_one_of_several

_COMMANDS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Generate": {
        "generate": generate.generate,
        "serve": serve.serve,
        "compare": compare.compare,
        "latency": latency.latency,
        "compile": compile.compile,
        "costs": costs.costs,
    },
    "Choose a draft": {
        "models": models.models,
        "plan": plan.plan,
        "alpha": alpha.alpha,
        "record": record.record,
        "replay": replay.replay,
        "analyze": analyze.analyze,
        "shapes": shapes.shapes,
    },
    "Train": {"distill": distill.distill},
    "Hand over": {"export": export.export},
    "Trust and score": {
        "certify": certify.certify,
        "certify-samples": certify_samples.certify_samples,
        "divergence": divergence.divergence,
        "eval": eval_.app,
    },
}

app = typer.Typer(
    name="outrider",
    cls=Group,
    help="Speculative sampling: a large language model, faster, with the same distribution.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for _panel, _commands in _COMMANDS.items():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name, rich_help_panel=_panel)
        else:
            app.command(_name, cls=Command, rich_help_panel=_panel)(_command)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        typer.echo(f"outrider {version('outrider')}")
        raise typer.Exit()


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    pass


def main() -> None:
    check_output = guard_streams()

    def run() -> None:
        try:
            app(prog_name="outrider")  # also where Python was started with -m
        except SystemExit:
            check_output()
            raise

    # The libraries' own warnings and retries would bury the one line that tells what is wrong.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    for library in ("bitsandbytes", "torchao", "torch.utils._pytree"):
        logging.getLogger(library).setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # their progress bars, like ours, are for terminals
    # The processes of distill have the whole target each, and share the sequences to train on.
    if is_one_of_several() and "distill" not in sys.argv[1:2]:
        run_together(run, _mistake)
    try:
        run()
    except Exception as error:
        message = _mistake(error)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


def _mistake(error: BaseException) -> str | None:
    """What to tell the user, in one line; None if the fault is Outrider's own."""
    if isinstance(error, OutriderError):
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"cannot write {error.filename or 'the output'}: {error.strerror}"
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported before it is needed
        reason = str(error).split(". ")[0]
        return (
            f"the device's memory is full ({reason}): choose a narrower --dtype, a smaller batch, fewer tokens or a "
            "smaller model"
        )
    return None
