"""``outrider eval``: task scores and perplexities; a file for each command."""

from __future__ import annotations

import typer

from outrider.cli.commands.eval_harness import harness
from outrider.cli.commands.eval_multiplication import multiplication
from outrider.cli.commands.eval_perplexity import perplexity

app = typer.Typer(
    help="Score a task with and without speculation, on the same prompts; perplexity of a text.", no_args_is_help=True
)
app.command("multiplication")(multiplication)
app.command("harness")(harness)
app.command("perplexity")(perplexity)
