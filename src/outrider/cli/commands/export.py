"""``outrider export``: configures a pair for another inference engine."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.flat import flat
from outrider.cli.shared.options import JsonOption, SamplingOptions, parse_k
from outrider.cli.shared.output import console_for, print_command, write_json
from outrider.cli.shared.pair_options import TargetOption
from outrider.cli.shared.progress import progress
from outrider.errors import OptionError
from outrider.options import DEFAULT_NUM_DRAFT_TOKENS, Sampling, looks_up
from outrider.system.ranks import is_one_of_several

if TYPE_CHECKING:
    from outrider.export.checks import DescribedModel


@flat
def export(
    sampling: SamplingOptions,
    to: Annotated[str, typer.Option(help="Engine: vllm, sglang, llama.cpp, transformers.")],
    output: Annotated[Path, typer.Option(help="Folder for the files.")],
    target: TargetOption = "fable",
    draft: Annotated[
        str | None,
        typer.Option(
            help="Model, or EAGLE-3 or DFlash head. Known name, folder or hub id. Default: fable-draft for fable."
        ),
    ] = None,
    num_draft_tokens: Annotated[
        str, typer.Option("-k", "--num-draft-tokens", help="Tokens drafted per round. auto: that of a head, else 4.")
    ] = "auto",
    context: Annotated[
        int | None, typer.Option(help="Maximum tokens of a sequence. Default: the target's context.")
    ] = None,
    models: Annotated[Path | None, typer.Option(help="TOML file with more model names.")] = None,
    json_target: JsonOption = None,
) -> None:
    """Write the files to serve a pair with another engine. Configuration, command, and the engine's rule."""
    with progress("loading libraries"):
        from outrider.export import engines
        from outrider.export.checks import check_pair, describe, describe_head
        from outrider.export.folder import is_converted, location, write_folder
        from outrider.models.heads.loading import is_head
        from outrider.models.registry import resolve

    if is_one_of_several():
        raise OptionError("torchrun", "outrider export", "export runs in one process: leave out torchrun")
    if to not in engines.ENGINES:
        raise OptionError("--to", to, f"choose one of {', '.join(engines.ENGINES)}")
    engine = engines.ENGINES[to]
    ks = parse_k(num_draft_tokens)
    if len(ks) > 1:
        raise OptionError("-k/--num-draft-tokens", num_draft_tokens, "one number, or auto")
    asked = Sampling(**sampling.to_options(seed=None, num_seeds=1))
    for one in fields(SamplingOptions):
        value = getattr(sampling, one.name)
        if value != one.default and one.name not in engine.options:
            option = f"--{one.name.replace('_', '-')}"
            raise OptionError(option, value, f"{engine.name} {engine.version} cannot do this exactly with a draft")
    names = target, draft or ("fable-draft" if target == "fable" else "none")
    if names[1] == "none" or looks_up(names[1]):
        raise OptionError("--draft", names[1], "name a draft model")
    described: list[DescribedModel] = []
    for option, name in zip(("--target", "--draft"), names, strict=True):
        spec = resolve(name, models)
        if spec.placement.quantization is not None or spec.gguf is not None:
            raise OptionError(option, name, "checkpoints are exported as stored: give the one in safetensors")
        is_for_target = option == "--draft" and is_head(spec)
        described.append(describe_head(spec, described[0]) if is_for_target else describe(spec))
    if (kind := described[1].kind) is not None:
        if kind not in engine.heads:
            known = [key for key, one in engines.ENGINES.items() if kind in one.heads]
            thing = f"{names[1]} is a head ({described[1].architecture}): choose one of {', '.join(known)}"
            takes = " and ".join(engine.heads) + " heads, too" if engine.heads else "draft models only"
            raise OptionError("--to", to, f"{engine.name} takes {takes}, and {thing}")
        engine = engine.heads[kind]
        if (limit := described[1].most_drafted) is not None and isinstance(ks[0], int) and ks[0] > limit:
            raise OptionError("-k/--num-draft-tokens", num_draft_tokens, f"{names[1]} drafts at most {limit} tokens")
    most = check_pair(described[0], described[1], context, engine.vocab_gap)
    # At temperature 0, where all rules are equal, the last one keeps no probabilities.
    setting = list(engine.rules)[-1 if asked.temperature == 0 else 0]
    handover = engines.Handover(
        target=location(described[0].spec, "target"),
        draft="draft" if is_converted(engine, described[1]) else location(described[1].spec, "draft"),
        k=ks[0] if isinstance(ks[0], int) else described[1].num_draft_tokens or DEFAULT_NUM_DRAFT_TOKENS,
        sampling=asked,
        setting=setting,
        context=most,
        head=kind,
    )
    written = write_folder(output, engine, handover, described[0], described[1])
    console = console_for(json_target)
    whole = not console.is_terminal
    console.print(
        f"{engine.name} {engine.version}, {names[0]} with {names[1]}: {output}", soft_wrap=whole, markup=False
    )
    console.print(f"  {', '.join(written)}", soft_wrap=whole, markup=False)
    about = engines.RULES[engine.rules[setting]]
    console.print(f"K = {handover.k}. A drafted token is accepted with probability {about}.", soft_wrap=whole)
    print_command(console, f"cd {output} && {engine.start}")
    body: dict[str, Any] = {
        "engine": {"name": engine.name, "version": engine.version},
        "law": engine.rules[setting],
        "setting": setting or None,
        "k": handover.k,
        "files": written,
    }
    settings = {"to": to, "target": names[0], "draft": names[1], "output": output, "context": context}
    settings |= {"num_draft_tokens": num_draft_tokens, "models": models, **asdict(sampling)}
    write_json(json_target, "export", settings, body)
