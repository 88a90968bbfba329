"""``outrider export``: configures a pair for another inference engine."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated

from typer import Option

from outrider.cli.shared.flat import flat
from outrider.cli.shared.options import JsonOption, ModelsOption, SamplingOptions, parse_k
from outrider.cli.shared.output import console_for, write_json
from outrider.cli.shared.pair_options import TargetOption
from outrider.cli.shared.progress import progress
from outrider.errors import OptionError
from outrider.options import DEFAULT_NUM_DRAFT_TOKENS, Sampling, looks_up
from outrider.system.ranks import is_one_of_several


@flat
def export(
    sampling: SamplingOptions,
    to: Annotated[str, Option(help="Engine: vllm, llama.cpp.")],
    output: Annotated[Path, Option(help="Folder for the files.")],
    target: TargetOption = "fable",
    draft: str | None = Option(
        None, help="Model, or EAGLE-3 or DFlash head. Known name, folder or hub id. Default: fable-draft for fable."
    ),
    num_draft_tokens: str = Option(
        "auto", "-k", "--num-draft-tokens", help="Tokens drafted per round. auto: that of a head, else 4."
    ),
    context: int | None = Option(None, help="Maximum tokens of a sequence. Default: the target's context."),
    models: ModelsOption = None,
    json_target: JsonOption = None,
) -> None:
    """Write the files to serve a pair with another engine. Configuration, command, and the engine's rule."""
    with progress("loading libraries"):
        from outrider.export.engines import ENGINES, RULES, check_pair, describe, describe_head, write_folder
        from outrider.models.heads.loading import is_head
        from outrider.models.registry import resolve

    if is_one_of_several():
        raise OptionError("torchrun", "outrider export", "export runs in one process: leave out torchrun")
    if to not in ENGINES:
        flags = "; docs/guides/engines.md has the flags of SGLang and Transformers"
        remedy = f"choose one of {', '.join(ENGINES)}{flags if to in ('sglang', 'transformers') else ''}"
        raise OptionError("--to", to, remedy)
    engine = ENGINES[to]
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
    specs = [resolve(name, models) for name in names]
    for option, spec in zip(("--target", "--draft"), specs, strict=True):
        if spec.placement.quantization is not None or spec.gguf is not None:
            raise OptionError(option, spec.name, "checkpoints are exported as stored: give the one in safetensors")
    of_target = describe(specs[0])
    of_draft = describe_head(specs[1], of_target) if is_head(specs[1]) else describe(specs[1])
    pair = of_target, of_draft
    if of_draft.kind is not None and of_draft.kind not in engine.heads:
        known = ", ".join(key for key, one in ENGINES.items() if of_draft.kind in one.heads)
        thing = f"{names[1]} is a head ({of_draft.architecture}): choose one of {known}"
        raise OptionError("--to", to, f"{engine.name} takes {' and '.join(engine.heads)} heads, too, and {thing}")
    if (limit := of_draft.most_drafted) is not None and isinstance(ks[0], int) and ks[0] > limit:
        raise OptionError("-k/--num-draft-tokens", num_draft_tokens, f"{names[1]} drafts at most {limit} tokens")
    most = check_pair(pair, context, engine.vocab_gap)
    # At temperature 0, where all rules are equal, the last one keeps no probabilities.
    setting = list(engine.rules)[-1 if asked.temperature == 0 else 0]
    k = ks[0] if isinstance(ks[0], int) else of_draft.num_draft_tokens or DEFAULT_NUM_DRAFT_TOKENS
    written = write_folder(output, engine, pair, k, asked, setting, most)
    console, about = console_for(json_target), RULES[engine.rules[setting]]
    for line in (
        f"{engine.name} {engine.version}, {' with '.join(names)}: {output}",
        f"  {', '.join(written)}",
        f"K = {k}. A drafted token is accepted with probability {about}.",
    ):
        console.print(line, soft_wrap=not console.is_terminal, markup=False)
    console.print(f"  cd {output} && sh serve.sh", style="bold", markup=False, soft_wrap=True)
    named = {"engine": {"name": engine.name, "version": engine.version}, "law": engine.rules[setting]}
    settings = {"to": to, "target": names[0], "draft": names[1], "output": output, "context": context}
    settings |= {"num_draft_tokens": num_draft_tokens, "models": models, **asdict(sampling)}
    write_json(json_target, "export", settings, named | {"setting": setting, "k": k, "files": written})
