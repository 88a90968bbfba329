"""``outrider plan``: chooses a draft and K, or none."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.options import (
    GenerationConfigOption,
    HtmlOption,
    JsonOption,
    SamplingOptions,
    SeedOption,
    flat,
    over_checkpoint,
    parse_constant_k,
)
from outrider.cli.shared.output import (
    console_for,
    count_items,
    print_command,
    print_table,
    progress_bar,
    report_context_limit,
    write_json,
)
from outrider.cli.shared.own_text import open_log, own_text
from outrider.cli.shared.pair_options import PairOptions, options_json
from outrider.cli.shared.pairs import compare, run_pairs
from outrider.cli.shared.template_options import TemplateOptions, encode_lines
from outrider.cli.shared.what_if import what_if as predict_from
from outrider.errors import OptionError

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.bench.report import ArmSummary
    from outrider.decoder import Decoder
    from outrider.drafters.base import Drafter
    from outrider.records import Stats
    from outrider.replay.log import Header, Record
    from outrider.replay.plan import Costs, PairChoice

_EAGER_K, _WHAT_IF_K = "1-16", "1-12"
_NUM_ROWS_SHOWN = 10


@flat
def plan(
    command: typer.Context,
    pair: PairOptions,
    sampling: SamplingOptions,
    template: TemplateOptions,
    num_draft_tokens: Annotated[
        str | None,
        typer.Option(
            "-k", "--num-draft-tokens", help="K to choose from, like 1-8. Default: 1-16; a few with CUDA graphs."
        ),
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="File of prompts for the target. Default: 15 sentences.")] = None,
    log: Annotated[
        Path | None,
        typer.Option(help="Output recorded with --probs. The log of outrider record, whose sampling options hold."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("-n", "--max-new-tokens", help="Tokens to generate per prompt.")] = 64,
    batch_size: Annotated[str, typer.Option(help="One or several: 1,4.")] = "1",
    context: Annotated[str, typer.Option(help="Lengths when rounds are timed: 64,512.")] = "64",
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Also run the pairs, as a check. At K = 1, 2, 4, 8 and the best; rounds are timed again "
            "in between, in the same state of the machine.",
        ),
    ] = False,
    seed: SeedOption = 0,
    what_if: Annotated[
        str | None,
        typer.Option(
            help="Predict from numbers: alpha=0.8,c=0.05. alpha: acceptance probability of a "
            "drafted token; c: cost of a draft step over a plain step; v, cost of a verify over a plain step "
            "(default: 1); c_ops, operations of a draft step over a plain step (default: c)."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot speed-up: FILE.png or FILE.svg.")] = None,
    generation_config: GenerationConfigOption = "auto",
    html: HtmlOption = None,
    json_target: JsonOption = None,
) -> None:
    """Predict the speed-up of every draft and K. From measured costs and acceptance; the result may be: no draft."""
    default_k = _EAGER_K if what_if is None else _WHAT_IF_K
    ks = parse_constant_k(num_draft_tokens or default_k)
    sizes, contexts = _wholes("--batch-size", batch_size), _wholes("--context", context)
    sampling = over_checkpoint(sampling, command, generation_config, pair.target, pair.models)
    options = sampling.to_options(seed=seed, num_seeds=1, max_new_tokens=max_new_tokens)

    if what_if is not None:
        predict_from(what_if, ks, plot, html, json_target)
        return
    names = [name for name in pair.draft_names if name != "none"]
    if not names:
        raise OptionError("--draft", "none", "give the drafts to choose from; 'none' is always included")
    if measure and 1 not in sizes:
        raise OptionError("--measure", batch_size, "pairs run with batch size 1: include 1 in --batch-size")
    if log is not None and (prompts is not None or template.is_chat):
        raise OptionError("--log", str(log), "leave out --prompts and --chat: the log has its own prompts")
    lines = template.read(prompts)

    from outrider.bench.round_costs import tokens_needed
    from outrider.decoding.schedule import favoured_ks
    from outrider.replay.plan import NUM_STEPS, Setting, choices, measure_costs
    from outrider.replay.replay import MATCH
    from outrider.sampling.rules import RULES

    acceptance = pair.acceptance
    if acceptance == MATCH:
        if measure:
            raise OptionError("--measure", acceptance, "Outrider cannot run this rule; leave one of the two out")
        pair = replace(pair, acceptance="rejection")  # whose rounds cost the same
    decoder = pair.load()
    drafters = {name: pair.load_draft(decoder, name) for name in names}
    ks_of = {}
    for name, drafter in drafters.items():
        most = max(ks) if drafter.most_drafted is None else drafter.most_drafted
        wanted = {min(k, most) for k in ks}
        if num_draft_tokens is None and decoder.target.execution.is_prepared:
            wanted = {*favoured_ks(decoder.target, drafter)} - {0}
        ks_of[name] = sorted(wanted)
    ks = sorted({k for own in ks_of.values() for k in own})
    if max(contexts) + tokens_needed(max(ks)) > decoder.target.context_len:
        remedy = f"{decoder.target.name} accepts {decoder.target.context_len} tokens"
        raise OptionError("--context", max(contexts), remedy)
    if log is None:
        prompt_ids = encode_lines(decoder, lines, prompts)
        report_context_limit(decoder.target.name, decoder.target.context_len, prompt_ids, max_new_tokens)
        records, header = own_text(decoder, lines, prompt_ids, options)
    else:
        recording = open_log(log, decoder.target.name, decoder.tokenizer)
        records, header = list(recording.records), recording.header
        options |= {one.name: getattr(header.sampling, one.name) for one in fields(SamplingOptions)}
        options["max_new_tokens"] = header.sampling.max_new_tokens
    counts = _counts(decoder, drafters, records, header, acceptance, ks_of)
    settings = [Setting(rows, tokens) for rows in sizes for tokens in contexts]
    results: list[tuple[Costs, list[PairChoice]]] = []
    rule = RULES[pair.acceptance]
    with progress_bar("timing rounds", len(settings) * NUM_STEPS) as advance:
        for setting in settings:
            costs = measure_costs(decoder.target, drafters, ks_of, rule, header.sampling, setting, lambda: advance(1))
            results.append((costs, choices(costs, counts)))

    console = console_for(json_target)
    for costs, found in results:
        _show(console, decoder, pair, template, options, costs, found, is_ours=acceptance != MATCH)
    measured: list[ArmSummary] = []
    predicted: list[PairChoice] = []
    is_interrupted = False
    if measure:
        setting, alone = next((costs.setting, found) for costs, found in results if costs.setting.num_rows == 1)

        def time_again(ks: Sequence[int], between: Callable[[], None], num_passes: int) -> Costs:
            wanted = {name: [k for k in own if k in ks] for name, own in ks_of.items()}
            return measure_costs(decoder.target, drafters, wanted, rule, header.sampling, setting, between, num_passes)

        measured, again = run_pairs(decoder, drafters, alone, records, options, seed, time_again)
        is_interrupted = again is None
        if again is not None:
            ran = {key: texts for key, texts in counts.items() if key in again.rounds}
            predicted = choices(again, ran)
        compare(console, predicted or alone, measured)
    if plot is not None:
        _plot(plot, decoder.target.name, results, measured)
        console.print(f"Plot: {plot}")
    body: dict[str, Any] = {
        "settings": [_setting_json(costs, found) for costs, found in results],
        "measured": [summary.to_json() for summary in measured],
        "predicted": [_choice_json(one) for one in predicted],
        "is_interrupted": is_interrupted,
    }
    more = {"prompts": prompts, "log": log, "batch_size": sizes, "context": contexts, "num_draft_tokens": ks}
    more |= template.to_json()
    document_options = options_json(pair, options, **more) | {"acceptance": acceptance}
    write_json(json_target, "plan", document_options, body, decoder, html)
    if html is not None:
        console.print(f"Page: {html}", markup=False)
    if is_interrupted:
        raise typer.Exit(130)


def _wholes(name: str, text: str) -> list[int]:
    """Parse "1,4": unique whole numbers.

    Raises:
        OptionError
    """
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = [0]
    if numbers[0] < 1:
        raise OptionError(name, text, "comma-separated whole numbers >= 1, like 1,4")
    return numbers


def _counts(
    decoder: Decoder,
    drafters: Mapping[str, Drafter],
    records: Sequence[Record],
    header: Header,
    acceptance: str,
    ks_of: Mapping[str, Sequence[int]],
) -> dict[tuple[str, int], Sequence[Stats]]:
    """Expected rounds of each draft and K."""
    from outrider.replay.replay import replay, summarise

    counts: dict[tuple[str, int], Sequence[Stats]] = {}
    with progress_bar("replaying the drafts", len(drafters) * len(records)) as advance:
        for name, drafter in drafters.items():
            ks = ks_of[name]
            replayed = replay(records, header, drafter, acceptance, ks, target=decoder.target)
            expected = summarise(count_items(replayed, advance), ks).expected
            counts |= {(name, k): expected[k].prompts for k in ks}
    return counts


def _show(
    console: Console,
    decoder: Decoder,
    pair: PairOptions,
    template: TemplateOptions,
    options: Mapping[str, Any],
    costs: Costs,
    found: Sequence[PairChoice],
    is_ours: bool,
) -> None:
    from outrider.bench.report import interval_text
    from outrider.bench.tables import NameCell, new_table

    setting, plain_ms = costs.setting, 1e3 * costs.plain.round_s
    where = f"{setting.num_rows} row{'s' * (setting.num_rows > 1)} of {setting.context} tokens"
    table = new_table(
        f"{decoder.target.name}, {where}: a plain round takes {plain_ms:.2f} ms",
        *("draft", "K", "tau", "round ms", "draft", "verify", "speed-up, 95%", "tok/s"),
    )
    for one in found[:_NUM_ROWS_SHOWN]:
        milliseconds = (1e3 * value for value in (one.cost.round_s, one.cost.draft_s, one.cost.verify_s))
        times = (f"{value:.2f}" for value in milliseconds)
        table.add_row(
            NameCell(one.draft),
            str(one.k),
            f"{one.tau.value:.2f}",
            *times,
            interval_text(one.speed_up),
            f"{one.tokens_per_s:.0f}",
        )
    print_table(console, table)
    if len(found) > _NUM_ROWS_SHOWN:
        console.print(f"The best {_NUM_ROWS_SHOWN} of {len(found)}; --json has all.", style="dim")
    steps = ", ".join(f"{width}: {1e3 * seconds:.2f}" for width, seconds in costs.target_s().items())
    console.print(f"Target, ms for T tokens per sequence: {steps}; prefill {1e3 * costs.prefill_s:.1f}.", style="dim")
    drafts = ", ".join(f"{name} {1e3 * costs.draft_step_s(name):.2f}" for name in costs.drafts)
    console.print(f"Draft, ms per token: {drafts}. The interval is over the prompts.", style="dim")
    best = found[0]
    if best.speed_up.value > 1:
        console.print(f"Best: {best.draft}, K = {best.k}, {best.speed_up.value:.2f} times as fast as plain decoding.")
        command = _command(pair, template, options, best.draft, best.k)
    else:
        console.print(f"Best: none. {best.draft} at K = {best.k} comes closest, with {best.speed_up.value:.2f}.")
        command = _command(pair, template, options, "none", None)
    same = [one for one in found if one.draft == best.draft]
    free, agreeing = max(one.if_free for one in same), max(one.if_agreeing for one in same)
    console.print(f"If {best.draft} took no time: {free:.2f} at its best K; if it always agreed: {agreeing:.2f}.")
    if is_ours:
        print_command(console, command)
    else:
        console.print("The numbers are for engines that accept by equality, such as mlx-lm.", style="dim")


def _command(
    pair: PairOptions, template: TemplateOptions, options: Mapping[str, Any], draft: str, k: int | None
) -> str:
    """``outrider generate`` options that the prediction applies to, without defaults."""
    words = ["outrider", "generate", "--target", pair.target, "--draft", draft]
    if k is not None:
        words += ["-k", str(k), "--acceptance", pair.acceptance]
    for field in fields(SamplingOptions):
        value = options[field.name]
        if value != field.default and field.name != "logit_bias":
            words += [f"--{field.name.replace('_', '-')}", f"{value:g}"]
    for token_id, bias in (options["logit_bias"] or {}).items():
        words += ["--logit-bias", f"{token_id}={bias:g}"]
    for field in fields(PairOptions):
        value = getattr(pair, field.name)
        if field.name not in ("target", "draft", "acceptance") and value != field.default:
            words += [f"--{field.name.replace('_', '-')}", str(value)]
    words += template.to_words()
    return shlex.join(words)


def _plot(
    path: Path, name: str, results: Sequence[tuple[Costs, list[PairChoice]]], measured: Sequence[ArmSummary]
) -> None:
    from outrider.bench.plots import plot_plan

    lines: dict[str, list[tuple[int, float]]] = {}
    for costs, found in results:
        setting = costs.setting
        where = f", {setting.num_rows} x {setting.context}" if len(results) > 1 else ""
        for one in sorted(found, key=lambda one: one.k):
            lines.setdefault(f"{one.draft}{where}", []).append((one.k, one.speed_up.value))
    plot_plan(lines, measured, path, f"{name}: predicted speed-up")


def _setting_json(costs: Costs, found: Sequence[PairChoice]) -> dict[str, Any]:
    best = found[0] if found[0].speed_up.value > 1 else None
    return {
        "num_rows": costs.setting.num_rows,
        "context": costs.setting.context,
        "prefill_ms": 1e3 * costs.prefill_s,
        "plain_ms": 1e3 * costs.plain.round_s,
        "target_ms": [{"num_tokens": width, "ms": 1e3 * s} for width, s in costs.target_s().items()],
        "draft_ms": [{"draft": name, "ms": 1e3 * costs.draft_step_s(name)} for name in costs.drafts],
        "choices": [_choice_json(one) for one in found],
        "best": None if best is None else _choice_json(best),
    }


def _choice_json(one: PairChoice) -> dict[str, Any]:
    cost = {f"{name.removesuffix('_s')}_ms": 1e3 * seconds for name, seconds in asdict(one.cost).items()}
    return {
        "draft": one.draft,
        "k": one.k,
        "tau": one.tau.to_json(),
        "speed_up": one.speed_up.to_json(),
        "tokens_per_s": one.tokens_per_s,
        "if_free": one.if_free,
        "if_agreeing": one.if_agreeing,
        **cost,
    }
