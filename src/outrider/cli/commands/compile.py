"""``outrider compile``: compiles the programs of a pair ahead of time."""

from __future__ import annotations

import time
from concurrent.futures import as_completed
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.generation_config import GenerationConfigOption, over_checkpoint
from outrider.cli.shared.options import JsonOption, SamplingOptions, flat, parse_k
from outrider.cli.shared.output import check_json_target, console_for, options_json, progress_bar, write_json
from outrider.cli.shared.pair_options import PairOptions
from outrider.errors import CompileError, OptionError
from outrider.options import Sampling, check_num_slots

if TYPE_CHECKING:
    from outrider.compile.service import ProgramOrder
    from outrider.decoder import Decoder

_MOST_PROCESSES = 4  # each takes about a gigabyte


@flat
def compile(
    command: typer.Context,
    pair: PairOptions,
    sampling: SamplingOptions,
    num_draft_tokens: Annotated[
        str,
        typer.Option("-k", "--num-draft-tokens", help="One or several K, as in later use.", rich_help_panel="Models"),
    ] = "auto",
    slots: Annotated[
        int, typer.Option("--slots", "--batch-size", help="Concurrent sequences, as in later use; 8 for serve.")
    ] = 1,
    context: Annotated[
        int,
        typer.Option(
            help="Maximum tokens of a sequence, prompt included, rounded up to a power of two. Each power of two needs "
            "programs of its own."
        ),
    ] = 256,
    generation_config: GenerationConfigOption = "auto",
    json_target: JsonOption = None,
) -> None:
    """Compile ahead of time what --compile needs (CPU only).

    A program depends on the models and their dtypes, threads, K, rows, the context, and on which sampling options are
    set (not on their values)."""
    sampling = over_checkpoint(sampling, command, generation_config, pair.target, pair.models)
    options = sampling.to_options(seed=None, num_seeds=1)
    chosen = parse_k(num_draft_tokens)
    check_num_slots(slots)
    if context < 64:
        raise OptionError("--context", context, "a whole number >= 64")
    check_json_target(json_target)
    plain = replace(pair, compile=False).load()
    if plain.target.device.type != "cpu":
        raise CompileError(f"{plain.target.name} is on {plain.target.device}, where CUDA graphs need no compiling")
    decoder = replace(plain, drafter=pair.load_draft(plain, pair.single_draft))
    begin_s = time.perf_counter()
    ks, orders = _compile(decoder, chosen, Sampling(**options), slots, context)
    num_found = sum(order.was_found for order in orders)
    console_for(json_target).print(
        f"{len(orders)} programs in {time.perf_counter() - begin_s:.0f} s, {num_found} of them found on disk "
        f"(K = {', '.join(map(str, ks))}; {slots} {'rows' if slots > 1 else 'row'}, {context} tokens each)"
    )
    body: dict[str, Any] = {
        "programs": [{"step": order.what, "was_found": order.was_found} for order in orders],
        "seconds": time.perf_counter() - begin_s,
    }
    settings = options_json(pair, options, num_draft_tokens=chosen, slots=slots, context=context)
    write_json(json_target, "compile", settings, body, decoder.target)


def _compile(
    decoder: Decoder, chosen: list[Any], sampling: Sampling, num_slots: int, num_tokens: int
) -> tuple[list[int], list[ProgramOrder]]:
    """Compile the programs; for adaptive K, measure round costs. Returns the K and the programs."""
    import torch

    from outrider.compile.service import CompileService
    from outrider.decoding.cost_cache import costs_by_load
    from outrider.decoding.measured_costs import favoured_ks
    from outrider.decoding.warm_up import warm_up
    from outrider.sampling.rules import RULES

    rule = RULES[decoder.acceptance]
    orders: list[ProgramOrder] = []
    service = CompileService(on_order=orders.append, num_processes=min(_MOST_PROCESSES, torch.get_num_threads()))
    beside = decoder.compiled(waits=False, service=service)
    wanted = {0, *(k for k in chosen if k != "auto")}
    if "auto" in chosen:
        wanted |= set(favoured_ks(beside.target, beside.drafter))
    most = decoder.drafter.most_drafted
    ks = sorted({k if most is None else min(k, most) for k in wanted})
    warm_up(beside.target, beside.drafter, rule, sampling, ks, num_slots, num_tokens)
    with progress_bar("programs", len(orders)) as advance:
        for program in as_completed([order.program for order in orders]):
            program.result()
            advance(1)
    if "auto" in chosen and most != 0:
        ready = decoder.compiled()
        costs_by_load(ready.target, ready.drafter, rule, num_slots, num_tokens)
    return ks, orders
