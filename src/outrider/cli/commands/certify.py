"""``outrider certify``: tests that a pair, with these options, samples from the target's distribution."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer

from outrider.cli.shared.findings import FindingsOptions
from outrider.cli.shared.flat import flat
from outrider.cli.shared.options import (
    MODELS_PANEL,
    SAMPLING_PANEL,
    GenerationConfigOption,
    PromptsOption,
    SamplingOptions,
    SeedOption,
    StructureOptions,
    check_constraint,
    over_checkpoint,
)
from outrider.cli.shared.output import make_document, report_context_limit
from outrider.cli.shared.pair_options import PairOptions, options_json, single_k
from outrider.cli.shared.progress import progress
from outrider.cli.shared.template_options import TemplateOptions, encode_lines
from outrider.errors import OptionError
from outrider.options import DEFAULT_NUM_DRAFT_TOKENS, Sampling
from outrider.system.files import short_names

_option = partial(typer.Option, rich_help_panel="Statistics")
_DEFAULT_BUDGET = "5m"


@flat
def certify(
    context: typer.Context,
    pair: PairOptions,
    sampling: SamplingOptions,
    structure: StructureOptions,
    template: TemplateOptions,
    num_draft_tokens: Annotated[
        str,
        typer.Option(
            "-k", "--num-draft-tokens", help="K, tokens drafted per round, or auto.", rich_help_panel=MODELS_PANEL
        ),
    ] = str(DEFAULT_NUM_DRAFT_TOKENS),
    prompts: PromptsOption = None,
    max_new_tokens: Annotated[
        int, typer.Option("-n", "--max-new-tokens", help="Maximum tokens per sample.", rich_help_panel=SAMPLING_PANEL)
    ] = 64,
    *,
    findings: FindingsOptions,
    budget: Annotated[
        str | None, _option(help=f"Approximate time to spend: 90s, 5m. Default: {_DEFAULT_BUDGET}.")
    ] = None,
    detect_tv: Annotated[
        float | None,
        _option(min=1e-9, max=1, help="Total variation to detect with 99% probability; sets the sample size."),
    ] = None,
    num_tokens: Annotated[int | None, _option(help="Tokens to test, instead of --budget.")] = None,
    seed: SeedOption = 0,
    generation_config: GenerationConfigOption = "auto",
) -> None:
    """Test that a draft does not change the distribution. With this pair, on this machine.

    With -t 0: that greedy text is that of plain decoding; differences are explained, by rounding or by a bug.

    Exit code 0: certified; 1: not certified; 3: inconclusive (too little data)."""
    sizes = {"--num-tokens": num_tokens, "--detect-tv": detect_tv, "--budget": budget}
    given = [(name, value) for name, value in sizes.items() if value is not None]
    if len(given) > 1:
        raise OptionError(*given[0], f"give one of {', '.join(sizes)}")
    constraint = structure.to_options()
    sampling = over_checkpoint(sampling, context, generation_config, pair.target, pair.models)
    k = single_k(num_draft_tokens, pair, sampling, seed)
    budget_s = _seconds(budget or _DEFAULT_BUDGET)
    draft = pair.single_draft
    if draft == "none":
        raise OptionError("--draft", draft, "without a draft there is nothing to certify")
    options = sampling.to_options(seed=seed, num_seeds=2**33, max_new_tokens=max_new_tokens, **constraint)
    check_constraint(Sampling(**options))
    lines = template.read(prompts)

    with progress("loading libraries"):
        from outrider.certify.controls import CONTROLS
        from outrider.certify.run import LEAST_NUM_TOKENS, CertifyTask, run_checks, run_pilot
        from outrider.certify.run import certify as judge
        from outrider.models.weights import weights_checksum
        from outrider.system.provenance import sha256_of

    if num_tokens is not None and num_tokens < LEAST_NUM_TOKENS:
        raise OptionError("--num-tokens", num_tokens, f"a whole number >= {LEAST_NUM_TOKENS}")
    plain = pair.load()
    draft, drafter = pair.load_named(plain, draft)
    decoder = replace(plain, drafter=drafter, num_draft_tokens=k)
    prompt_ids = encode_lines(decoder, lines, prompts)
    decoder = decoder.of_one_kind(prompt_ids)
    report_context_limit(decoder.target.name, decoder.target.context_len, prompt_ids, max_new_tokens)
    how = findings.significance, findings.batch_size, seed
    job = CertifyTask(decoder, Sampling(**options | {"seed": None}), prompt_ids, *how)
    with progress("reading checksums of the weights"):
        drafts = " ".join(weights_checksum(lm.weights) for lm in decoder.drafter.models)
        weights = {"target": weights_checksum(decoder.target.weights), "draft": drafts or None}
    with progress("generating a first sample, which tells how much is needed"):
        pilot = run_pilot(job)
    if num_tokens is None and detect_tv is not None:
        num_tokens = pilot.num_tokens_to_detect(detect_tv, job.level)
    elif num_tokens is None:
        num_tokens = pilot.num_tokens_for(budget_s)
    with progress("checking the rule, and greedy texts against plain decoding"):
        checks = run_checks(job, pilot)
    total = None if job.is_greedy else num_tokens * (1 + len(CONTROLS))
    with progress(f"generating {'' if job.is_greedy else 'with the draft, and '}with mistakes", total) as advance:
        certificate = judge(job, pilot, num_tokens, checks=checks, wanted=detect_tv, on_tokens=advance)
    more: dict[str, Any] = {"draft": [draft], "num_draft_tokens": k, "prompts": prompts, "significance": job.level}
    more |= {"budget": budget, "detect_tv": detect_tv, "num_tokens": num_tokens, "batch_size": job.batch_size}
    settings = options_json(pair, options, **more, **template.to_json())
    body = certificate.to_json() | {"weights": weights, "prompts_sha256": sha256_of(job.prompts)}
    document = make_document("certify", settings, body, decoder)
    names = " with ".join(short_names([decoder.target.name, decoder.drafter.name]))
    title = f"{names}, {decoder.acceptance}, K = {decoder.num_draft_tokens}, temperature {job.sampling.temperature:g}"
    about = {"word": "CERTIFIED", "towards": "the draft", "unit": "prompt"}
    findings.report([(title, certificate, ())], document, tokenizer=decoder.tokenizer, **about)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if not match or float(match[1]) == 0:
        raise OptionError("--budget", text, "give a time, like 90s or 5m")
    return float(match[1]) * {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}[match[2]]
