"""``outrider export``: configures a pair for another inference engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.completion import ENGINES, complete_draft, one_of
from outrider.cli.shared.options import JsonOption, SamplingOptions, SeedOption, flat, parse_k
from outrider.cli.shared.output import check_json_target, console_for, progress_bar, write_json
from outrider.cli.shared.own_text import open_log, own_text
from outrider.cli.shared.pair_options import MachineOptions, PairOptions, TargetOption, set_threads
from outrider.cli.shared.template_options import TemplateOptions, encode_lines
from outrider.cli.shared.wrapping import print_command
from outrider.errors import OptionError
from outrider.options import DEFAULT_NUM_DRAFT_TOKENS, Sampling, looks_up
from outrider.system.ranks import is_one_of_several

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.export.checks import DescribedModel
    from outrider.export.engine_files import Handover
    from outrider.export.engine_rules import Outlook
    from outrider.export.engines import ServingEngine
    from outrider.export.folder import Facts
    from outrider.replay.log import Header, Log, Record

_NUM_TOKENS, _CONTEXT, _ROWS, _NUM_PASSES = 64, 64, (1, 2, 4, 8), 3  # of the sequences and rounds of --measure


@flat
def export(
    machine: MachineOptions,
    sampling: SamplingOptions,
    to: Annotated[str, typer.Option(help=f"Engine: {', '.join(ENGINES)}.", autocompletion=one_of(ENGINES))],
    output: Annotated[Path, typer.Option(help="Folder for the files.")],
    target: TargetOption = "fable",
    draft: Annotated[
        str | None,
        typer.Option(
            help="Model, or EAGLE-3 or DFlash head. Known name, folder or hub id. Default: fable-draft for fable.",
            autocompletion=complete_draft,
        ),
    ] = None,
    num_draft_tokens: Annotated[
        str,
        typer.Option("-k", "--num-draft-tokens", help="Tokens drafted per round. auto: the best if known, else 4."),
    ] = "auto",
    context: Annotated[
        int | None, typer.Option(help="Maximum tokens of a sequence. Default: the target's context.")
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(help="Output recorded with --probs 1. The log of outrider record, whose sampling options hold."),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure rounds here, for the best K. Of 1, 2, 4 and 8 sequences; without --log, first "
            "generate 15 sequences with the target.",
        ),
    ] = False,
    draft_cost: Annotated[
        float | None,
        typer.Option(help="Cost of a draft step in target steps. In the engine. Default: the ratio of the parameters."),
    ] = None,
    seed: SeedOption = 0,
    json_target: JsonOption = None,
) -> None:
    """Write the files to serve a pair with another engine. Configuration, command, and tau under its rule."""
    from outrider.export import engines
    from outrider.export.checks import check_pair, describe, describe_head
    from outrider.export.engine_files import Handover
    from outrider.export.folder import Facts, conversion, location, write_folder
    from outrider.models.heads.loading import is_head
    from outrider.models.placement import DTYPES
    from outrider.models.registry import resolve

    if is_one_of_several():
        raise OptionError("torchrun", "outrider export", "export runs in one process: leave out torchrun")
    if to not in engines.ENGINES:
        raise OptionError("--to", to, f"choose one of {', '.join(engines.ENGINES)}")
    engine = engines.ENGINES[to]
    ks = parse_k(num_draft_tokens)
    if len(ks) > 1:
        raise OptionError("-k/--num-draft-tokens", num_draft_tokens, "one number, or auto")
    if draft_cost is not None and not (math.isfinite(draft_cost) and draft_cost >= 0):
        raise OptionError("--draft-cost", draft_cost, "a number >= 0")
    if measure and draft_cost is not None:
        raise OptionError("--draft-cost", draft_cost, "--measure measures it: leave one of the two out")
    options = sampling.to_options(seed=seed, num_seeds=1, max_new_tokens=_NUM_TOKENS)
    check_json_target(json_target)
    set_threads(machine.threads)
    names = target, draft or ("fable-draft" if target == "fable" else "none")
    if names[1] == "none" or looks_up(names[1]):
        raise OptionError("--draft", names[1], "name a draft model")
    described: list[DescribedModel] = []
    for option, name in zip(("--target", "--draft"), names, strict=True):
        spec = resolve(name, machine.models)
        if spec.quantization is not None or spec.gguf is not None or machine.quantize not in (None, "none"):
            raise OptionError(option, name, "checkpoints are exported as stored: give the one in safetensors")
        if spec.adapter is not None:
            raise OptionError(option, name, "merge the adapter (PEFT's merge_and_unload), and export the saved model")
        if option == "--draft" and is_head(spec):
            described.append(describe_head(spec, described[0]))
        else:
            described.append(describe(spec))
    if (kind := described[1].kind) is not None:
        if kind not in engine.heads:
            known = [key for key, one in engines.ENGINES.items() if kind in one.heads]
            thing = f"{names[1]} is a head ({described[1].architecture}): choose one of {', '.join(known)}"
            takes = " and ".join(engine.heads) + " heads, too" if engine.heads else "draft models only"
            raise OptionError("--to", to, f"{engine.name} takes {takes}, and {thing}")
        engine = engine.with_head(kind)
        if (limit := described[1].most_drafted) is not None and isinstance(ks[0], int) and ks[0] > limit:
            raise OptionError("-k/--num-draft-tokens", num_draft_tokens, f"{names[1]} drafts at most {limit} tokens")
    most = check_pair(described[0], described[1], context, engine.vocab_gap)

    header, outlooks, basis = _predict(engine, (described[0], described[1]), machine, options, log, measure, draft_cost)
    asked = header.sampling if header is not None else Sampling(**options)
    _check_sampling(engine, asked)
    k = ks[0] if isinstance(ks[0], int) else None
    setting = _setting(engine, outlooks, asked, k)
    chosen = outlooks.get(setting)
    handover = Handover(
        target=location(described[0].spec, "target"),
        draft="draft" if conversion(engine, described[1]) is not None else location(described[1].spec, "draft"),
        k=k or (chosen and chosen.best_k) or described[1].num_draft_tokens or DEFAULT_NUM_DRAFT_TOKENS,
        sampling=asked,
        setting=setting,
        context=most,
        k_by_rows=chosen.k_by_rows if chosen is not None and k is None else (),
        head=kind,
    )
    facts = Facts(described[0], described[1], outlooks, basis)
    written = write_folder(output, engine, handover, facts, DTYPES.get(machine.dtype))
    console = console_for(json_target)
    _show(console, engine, handover, facts, output, written)
    body: dict[str, Any] = {
        "engine": {"name": engine.name, "version": engine.version},
        "law": engine.rules[setting].name,
        "setting": setting or None,
        "k": handover.k,
        "k_by_rows": [list(entry) for entry in handover.k_by_rows],
        "outlooks": [_outlook_json(engine, key, one) for key, one in outlooks.items()],
        "files": written,
    }
    settings = asdict(machine) | {"to": to, "target": names[0], "draft": names[1], "output": output, "log": log}
    settings |= {"num_draft_tokens": num_draft_tokens, "context": context, "measure": measure}
    write_json(json_target, "export", settings | {"draft_cost": draft_cost, "seed": seed, **asdict(sampling)}, body)


def _check_sampling(engine: ServingEngine, sampling: Sampling) -> None:
    """Raises OptionError if the engine cannot sample with these options and a draft exactly."""
    for one in fields(SamplingOptions):
        value = getattr(sampling, one.name)
        if value != one.default and one.name not in engine.options:
            option = f"--{one.name.replace('_', '-')}"
            raise OptionError(option, value, f"{engine.name} {engine.version} cannot do this exactly with a draft")


def _predict(
    engine: ServingEngine,
    described: tuple[DescribedModel, DescribedModel],
    machine: MachineOptions,
    options: dict[str, Any],
    log: Path | None,
    measure: bool,
    draft_cost: float | None,
) -> tuple[Header | None, dict[str, Outlook], str]:
    """Predict tau under each of the engine's rules, as far as there is data; returns its source too."""
    if log is None and not measure:
        return None, {}, ""
    from outrider.bench.round_costs import tokens_needed
    from outrider.export.engine_rules import KS, by_draft_cost, by_measured_costs
    from outrider.models.memory import sizes_of
    from outrider.replay.plan import Setting, measure_costs
    from outrider.replay.replay import load_draft
    from outrider.sampling.rules import REJECTION

    specs, kind = (described[0].spec, described[1].spec), described[1].kind
    records: Sequence[Record] | Log
    if log is not None:
        records = open_log(log, specs[0].name, described[0].tokenizer)
        header = records.header
        basis = f"From {len(records)} sequences of {log.name}"
    decoder = None
    if measure or kind is not None:  # the drafts of a head are forced along the target
        pair = PairOptions(target=specs[0].name, draft=[specs[1].name], **asdict(machine))
        decoder = pair.load()
        drafter = pair.load_draft(decoder, specs[1].name)
        if log is None:
            lines = TemplateOptions().read(None)
            records, header = own_text(decoder, lines, encode_lines(decoder, lines), options, num_probs=1)
            basis = f"From {len(records)} sequences of {_NUM_TOKENS} tokens generated here"
    else:
        drafter = load_draft(
            specs[1].name, header, device=machine.device, dtype=machine.dtype, models_file=machine.models
        )
    ks = [k for k in KS if drafter.most_drafted is None or k <= drafter.most_drafted]
    target = None if decoder is None else decoder.target
    expected = {key: rule.expected(records, header, drafter, ks, target) for key, rule in engine.rules.items()}
    if measure:
        assert decoder is not None
        context = min(_CONTEXT, decoder.target.context_len - tokens_needed(max(ks)))
        settings = [Setting(rows, context) for rows in _ROWS]
        drafters, costs = {specs[1].name: drafter}, []
        with progress_bar("timing rounds", len(settings) * (_NUM_PASSES + 1)) as advance:
            for one in settings:
                how = dict.fromkeys(drafters, ks), REJECTION, header.sampling, one, lambda: advance(1), _NUM_PASSES
                costs.append(measure_costs(decoder.target, drafters, *how))
        basis += "; rounds timed by Outrider on this machine, not by the engine."
        return header, {key: by_measured_costs(one, costs) for key, one in expected.items()}, basis
    sizes = [sizes_of(spec) if kind is None else None for spec in specs]  # a head borrows parts of its target
    if draft_cost is None and sizes[0] is not None and sizes[1] is not None:
        draft_cost = sizes[1].num_params / sizes[0].num_params
        basis += f"; assumes {draft_cost:.2f} target steps per draft step, by the sizes, and 1 per verify."
    elif draft_cost is not None:
        basis += f"; assumes {draft_cost:g} target steps per draft step, as given, and 1 per verify."
    else:
        basis += "; the cost of a draft step is unknown."
    is_at_once = kind == "dflash"
    outlooks = {key: by_draft_cost(one, draft_cost, is_at_once=is_at_once) for key, one in expected.items()}
    return header, outlooks, basis


def _setting(engine: ServingEngine, outlooks: Mapping[str, Outlook], sampling: Sampling, k: int | None) -> str:
    """Engine setting with the better acceptance. The first if nothing is known; at temperature 0, where all are
    equal, the one that keeps no probabilities."""
    if sampling.temperature == 0:
        return list(engine.rules)[-1]
    return max(engine.rules, key=lambda key: outlooks[key].merit(k)) if outlooks else next(iter(engine.rules))


def _show(
    console: Console, engine: ServingEngine, handover: Handover, facts: Facts, output: Path, written: Sequence[str]
) -> None:
    rule, whole = engine.rules[handover.setting], not console.is_terminal
    console.print(f"{engine.name} {engine.version}, {facts.target.spec.name} with {facts.draft.spec.name}: {output}")
    console.print(f"  {', '.join(written)}", soft_wrap=whole)
    console.print(f"It accepts a drafted token with probability {rule.about}.", soft_wrap=whole)
    outlook = facts.outlooks.get(handover.setting)
    if outlook is None:
        console.print(f"tau: unknown (give --log or --measure); K = {handover.k}")
    else:
        tau = outlook.tau[handover.k].tau if handover.k in outlook.tau else None
        value = "unknown" if tau is None else f"{tau.value:.2f} [{tau.low:.2f}, {tau.high:.2f}]"
        gain = outlook.speed_up.get(handover.k)
        text = "" if gain is None else f", speed-up {gain:.2f} (predicted)"
        console.print(f"K = {handover.k}: tau {value}{text}. {facts.basis}", markup=False, soft_wrap=whole)
        if outlook.best_k is not None and outlook.speed_up[outlook.best_k] <= 1:
            console.print("By this prediction no K is faster than plain decoding under this rule.")
    print_command(console, f"cd {output} && {engine.start}")


def _outlook_json(engine: ServingEngine, key: str, outlook: Outlook) -> dict[str, Any]:
    return {
        "setting": key or None,
        "law": engine.rules[key].name,
        "best_k": outlook.best_k,
        "k_by_rows": [list(entry) for entry in outlook.k_by_rows],
        "tau": [{"k": k, "tau": one.tau and one.tau.to_json()} for k, one in outlook.tau.items()],
        "speed_up": [{"k": k, "speed_up": value} for k, value in outlook.speed_up.items()],
    }
