"""``outrider eval``: task scores and perplexity; one file per command."""

from __future__ import annotations

import typer

from outrider.cli.commands.eval_harness import harness
from outrider.cli.commands.eval_multiplication import multiplication
from outrider.cli.commands.eval_perplexity import perplexity
from outrider.cli.shared.help import Command, Group

app = typer.Typer(
    cls=Group,
    help="Score tasks with and without speculative decoding. Or measure perplexity.",
    no_args_is_help=True,
)
app.command("multiplication", cls=Command)(multiplication)
app.command("harness", cls=Command)(harness)
app.command("perplexity", cls=Command)(perplexity)
