"""``outrider eval``: scores, plain and speculative."""

from __future__ import annotations

import typer

from outrider.cli.commands.eval_multiplication import multiplication
from outrider.cli.shared.examples import example_lines
from outrider.cli.shared.parsing import Command, Group

app = typer.Typer(
    cls=Group,
    help="Score a task with and without speculative decoding.",
    no_args_is_help=True,
)
app.command("multiplication", cls=Command, epilog=example_lines("eval multiplication"))(multiplication)
