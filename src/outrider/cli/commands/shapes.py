"""``outrider shapes``: measures the cost of draft shapes before training."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.completion import complete_target
from outrider.cli.shared.options import JsonOption, flat
from outrider.cli.shared.output import check_json_target, console_for, print_table, progress_bar, write_json
from outrider.cli.shared.pair_options import MachineOptions
from outrider.cli.shared.wrapping import print_command
from outrider.errors import OptionError

if TYPE_CHECKING:
    from outrider.distill.shapes import ShapeCost
    from outrider.distill.student import Shape


@flat
def shapes(
    machine: MachineOptions,
    target: Annotated[
        str,
        typer.Argument(
            help="Known name, folder or hub id. 'outrider models' lists the names.", autocompletion=complete_target
        ),
    ] = "fable",
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SHAPE",
            help="LAYERSxWIDTH or LAYERSxWIDTHxFEEDFORWARD. Repeatable. Default: 1, 2, 4, ... layers at four widths.",
        ),
    ] = None,
    budget_ms: Annotated[float | None, typer.Option(help="Maximum milliseconds per drafted token.")] = None,
    batch_size: Annotated[int, typer.Option(help="Batch size.")] = 1,
    context: Annotated[int, typer.Option(help="Sequence length when rounds are timed.")] = 64,
    plot: Annotated[Path | None, typer.Option(help="Plot the latencies: FILE.png or FILE.svg.")] = None,
    json_target: JsonOption = None,
) -> None:
    """Time drafts of several shapes, with random weights. The list has the shapes worth training."""
    if budget_ms is not None and not 0 < budget_ms < math.inf:
        raise OptionError("--budget-ms", budget_ms, "a number above 0")
    for name, value in (("--batch-size", batch_size), ("--context", context)):
        if value < 1:
            raise OptionError(name, value, "a whole number >= 1")
    asked = [_parse(text) for text in shape or ()]
    check_json_target(json_target)

    from outrider.bench.plots import check_plot_file, plot_shapes
    from outrider.bench.tables import new_table
    from outrider.decoding.measured_costs import tokens_needed
    from outrider.distill.shapes import default_shapes, measure_shapes, num_passes, worth_training

    if plot is not None:
        check_plot_file(plot)
    lm = machine.load(target).target
    if context + tokens_needed(max(lm.execution.favoured_k)) > lm.context_len:
        raise OptionError("--context", context, f"{lm.name} accepts {lm.context_len} tokens")
    wanted = asked or default_shapes(lm)
    with progress_bar("timing rounds", num_passes(len(wanted))) as advance:
        costs = measure_shapes(lm, wanted, num_rows=batch_size, length=context, on_pass=lambda: advance(1))
    within = math.inf if budget_ms is None else budget_ms / 1e3
    best = worth_training(costs, within)

    console = console_for(json_target)
    table = new_table(f"Drafts for {lm.name}", "layers x width", "parameters", "ms/token", "alpha needed", "worth it")
    for cost in costs:
        needed = "-" if cost.break_even is None else f"{cost.break_even:.2f}"
        is_worth = "yes" if cost in best else ""
        millions = f"{cost.num_params / 1e6:.2f} M"
        table.add_row(_name(cost.shape), millions, f"{1e3 * cost.draft_s:.3f}", needed, is_worth)
    print_table(console, table)
    console.print(
        "alpha needed: to be as fast as plain decoding (-: impossible); worth it: within the budget, and no shape of "
        "the same size or larger is faster",
        style="dim",
    )
    for cost in best:
        size = f"--layers {cost.shape.num_layers} --hidden-size {cost.shape.hidden_size}"
        if cost.shape.intermediate_size is not None:
            size += f" --intermediate-size {cost.shape.intermediate_size}"
        print_command(console, f"outrider distill {target} {size} --output DIR")
    if not best:
        console.print(f"No shape drafts a token within {budget_ms:g} ms.")
    if plot is not None:
        plot_shapes(costs, plot, f"Drafts for {lm.name}, {batch_size} x {context} tokens")
        console.print(f"Plot: {plot}")
    body: dict[str, Any] = {"shapes": [_to_json(cost) | {"is_worth_training": cost in best} for cost in costs]}
    options = {"target": target, "shape": shape, "budget_ms": budget_ms, "batch_size": batch_size, "context": context}
    write_json(json_target, "shapes", asdict(machine) | options, body, lm)


def _parse(text: str) -> Shape:
    """Parse "2x192" or "2x192x512".

    Raises:
        OptionError
    """
    from outrider.distill.student import Shape

    parts = text.lower().split("x")
    if len(parts) not in (2, 3) or not all(part.strip().isdigit() for part in parts):
        raise OptionError("--shape", text, "LAYERSxWIDTH or LAYERSxWIDTHxFEEDFORWARD, like 2x192")
    return Shape(*(int(part) for part in parts))


def _name(shape: Shape) -> str:
    feed_forward = "" if shape.intermediate_size is None else f" x {shape.intermediate_size}"
    return f"{shape.num_layers} x {shape.hidden_size}{feed_forward}"


def _to_json(cost: ShapeCost) -> dict[str, Any]:
    return {
        "layers": cost.shape.num_layers,
        "hidden_size": cost.shape.hidden_size,
        "intermediate_size": cost.shape.intermediate_size,
        "num_params": cost.num_params,
        "draft_ms": 1e3 * cost.draft_s,
        "break_even_alpha": cost.break_even,
    }
