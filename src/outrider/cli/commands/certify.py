"""``outrider certify``: tests that a pair, with these options, samples from the target's distribution."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.findings import (
    exit_with,
    greedy_row,
    print_deviation,
    print_differences,
    print_verdict,
    statistical_rows,
    verdict,
)
from outrider.cli.shared.options import (
    DEFAULT_SIGNIFICANCE,
    BatchSizeOption,
    GenerationConfigOption,
    HtmlOption,
    JsonOption,
    PromptsOption,
    SamplingOptions,
    SeedOption,
    SignificanceOption,
    StructureOptions,
    check_alone,
    check_constraint,
    flat,
    over_checkpoint,
)
from outrider.cli.shared.output import (
    console_for,
    make_document,
    print_table,
    progress_bar,
    report_context_limit,
    write_outputs,
)
from outrider.cli.shared.pair_options import PairOptions, options_json, single_k
from outrider.cli.shared.stored_certificates import INPUTS, read_certificate
from outrider.cli.shared.template_options import TemplateOptions, encode_lines
from outrider.errors import FileError, OptionError
from outrider.offline.prompt_row import PromptLine
from outrider.options import DEFAULT_NUM_DRAFT_TOKENS, NumDraftTokens, Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from outrider.certify.certificate import Certificate, ControlReport
    from outrider.certify.job import CertifyTask
    from outrider.certify.run import Pilot
    from outrider.decoder import Decoder

_STATISTICS = "Statistics"
_DEFAULT_BUDGET = "5m"
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


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
            "-k", "--num-draft-tokens", help="K, tokens drafted per round, or auto.", rich_help_panel="Models"
        ),
    ] = str(DEFAULT_NUM_DRAFT_TOKENS),
    prompts: PromptsOption = None,
    max_new_tokens: Annotated[
        int, typer.Option("-n", "--max-new-tokens", help="Maximum tokens per sample.", rich_help_panel="Sampling")
    ] = 64,
    significance: SignificanceOption = DEFAULT_SIGNIFICANCE,
    budget: Annotated[
        str | None,
        typer.Option(
            help=f"Approximate time to spend: 90s, 5m. Default: {_DEFAULT_BUDGET}.", rich_help_panel=_STATISTICS
        ),
    ] = None,
    detect_tv: Annotated[
        float | None,
        typer.Option(
            min=1e-9,
            max=1,
            help="Total variation to detect with 99% probability; sets the sample size.",
            rich_help_panel=_STATISTICS,
        ),
    ] = None,
    num_tokens: Annotated[
        int | None, typer.Option(help="Tokens to test, instead of --budget.", rich_help_panel=_STATISTICS)
    ] = None,
    batch_size: BatchSizeOption = 8,
    seed: SeedOption = 0,
    generation_config: GenerationConfigOption = "auto",
    again: Annotated[Path | None, typer.Option(help="Run a certificate again, from its JSON document.")] = None,
    html: HtmlOption = None,
    json_target: JsonOption = None,
) -> None:
    """Test that a draft does not change the distribution. With this pair, on this machine.

    With -t 0: that greedy text is that of plain decoding; differences are explained, by rounding or by a bug.

    Exit code 0: certified; 1: not certified; 3: inconclusive (too little data)."""
    sizes = {"--num-tokens": num_tokens, "--detect-tv": detect_tv, "--budget": budget}
    given = [(name, value) for name, value in sizes.items() if value is not None]
    if len(given) > 1:
        raise OptionError(*given[0], f"give one of {', '.join(sizes)}")
    stored: dict[str, Any] | None = None
    if again is None:
        constraint = structure.to_options()
        sampling = over_checkpoint(sampling, context, generation_config, pair.target, pair.models)
    else:
        remedy = "with --again all options come from the file; leave it out"
        check_alone(context, ("again", "html", "json_target"), remedy)
        pair, sampling, template, constraint, own, stored = read_certificate(again)
        prompts, chosen_k, max_new_tokens, significance, detect_tv, num_tokens, batch_size, seed = own
        num_draft_tokens = str(chosen_k)
    k = single_k(num_draft_tokens, pair, sampling, seed)
    budget_s = _seconds(budget or _DEFAULT_BUDGET)
    draft = pair.single_draft
    if draft == "none":
        raise OptionError("--draft", draft, "without a draft there is nothing to certify")
    options = sampling.to_options(seed=seed, num_seeds=2**33, max_new_tokens=max_new_tokens, **constraint)
    check_constraint(Sampling(**options))
    lines = template.read(prompts)

    from outrider.certify.page import render_certificate
    from outrider.certify.run import LEAST_NUM_TOKENS, run_pilot
    from outrider.certify.run import certify as judge

    if num_tokens is not None and num_tokens < LEAST_NUM_TOKENS:
        raise OptionError("--num-tokens", num_tokens, f"a whole number >= {LEAST_NUM_TOKENS}")
    decoder, job = _job_of(pair, options, k, lines, prompts, significance, batch_size, seed)
    checksums = {"weights": _weights(decoder), "prompts_sha256": _checksum(job.prompts)}
    if stored is not None and stored != checksums:
        what = " and ".join(name.split("_")[0] for name in INPUTS if stored[name] != checksums[name])
        raise FileError(f"{again}: the {what} have changed, so the certificate cannot be run again")
    pilot = run_pilot(job)
    if num_tokens is None:
        num_tokens = _num_tokens(job, pilot, detect_tv, budget_s)
    with _progress(num_tokens) as on_tokens:
        certificate = judge(job, pilot, num_tokens, wanted=detect_tv, on_tokens=on_tokens)
    _show(console_for(json_target), job, draft, certificate)
    settings = options_json(
        pair,
        options,
        num_draft_tokens=k,
        prompts=prompts,
        significance=significance,
        budget=budget,
        detect_tv=detect_tv,
        num_tokens=num_tokens,
        batch_size=batch_size,
        **template.to_json(),
    )
    document = make_document("certify", settings, {**certificate.to_json(), **checksums}, decoder)
    write_outputs(document, json_target, html, render_certificate)
    exit_with(certificate.verdict)


def _job_of(
    pair: PairOptions,
    options: dict[str, Any],
    k: NumDraftTokens,
    lines: Sequence[PromptLine],
    path: Path | None,
    level: float,
    batch_size: int,
    seed: int,
) -> tuple[Decoder, CertifyTask]:
    """Task to certify. Warns if a limit exceeds the context.

    Args:
        lines: prompts.
        path: of their file, if any.

    Raises:
        PromptError: with the place of the prompt.
    """
    from dataclasses import replace

    from outrider.certify.job import CertifyTask

    plain = pair.load()
    decoder = replace(plain, drafter=pair.load_draft(plain, pair.single_draft), num_draft_tokens=k)
    prompts = encode_lines(decoder, lines, path)
    decoder = decoder.of_one_kind(prompts)
    job = CertifyTask(decoder, Sampling(**options | {"seed": None}), prompts, level, batch_size, seed)
    report_context_limit(decoder.target.name, decoder.target.context_len, prompts, options["max_new_tokens"])
    return decoder, job


def _weights(decoder: Decoder) -> dict[str, str | None]:
    """Checksum of each model's weights."""
    from outrider.models.weights import weights_checksum

    drafts = [weights_checksum(lm.weights) for lm in decoder.drafter.models]
    return {"target": weights_checksum(decoder.target.weights), "draft": " ".join(drafts) or None}


def _checksum(prompts: Sequence[Sequence[int]]) -> str:
    """SHA-256 of token ids."""
    return hashlib.sha256(json.dumps([list(ids) for ids in prompts]).encode()).hexdigest()


def _num_tokens(job: CertifyTask, pilot: Pilot, detect_tv: float | None, budget_s: float) -> int:
    if detect_tv is None:
        return pilot.num_tokens_for(budget_s)
    if job.is_greedy:
        raise OptionError("--detect-tv", detect_tv, "temperature 0 is deterministic; leave it out")
    return pilot.num_tokens_to_detect(detect_tv, job.level)


@contextmanager
def _progress(num_tokens: int) -> Iterator[Callable[[str, int, int], None]]:
    """One progress bar over the tokens of the sample and all controls; a control detected early makes it jump."""
    from outrider.certify.controls import CONTROLS

    done: dict[str, int] = {}
    with progress_bar("tokens", num_tokens * (1 + len(CONTROLS))) as advance:

        def on_tokens(what: str, steps: int, total: int) -> None:
            if what not in done:
                advance(sum(total - count for count in done.values()))
                done.update({name: total for name in done} | {what: 0})
            done[what] += steps
            advance(steps)

        yield on_tokens


def _seconds(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if not match or float(match[1]) == 0:
        raise OptionError("--budget", text, "give a time, like 90s or 5m")
    return float(match[1]) * _UNITS[match[2]]


def _show(console: Console, job: CertifyTask, draft: str, certificate: Certificate) -> None:
    from outrider.bench.tables import new_table
    from outrider.certify.exact import comparisons

    decoder = job.decoder
    title = (
        f"{decoder.target.name} with {draft}, {decoder.acceptance}, K = {decoder.num_draft_tokens}, "
        f"temperature {job.sampling.temperature:g}"
    )
    table = new_table(title, "layer", "found", "verdict")
    for name, gap, _, is_ok in comparisons(certificate.exact.to_json()):
        table.add_row(f"exact: {name}", f"off by {gap:.0e} at most", verdict(is_ok))
    statistical = certificate.statistical
    if statistical is None:
        table.add_row("statistical", "no randomness", "-")
    else:
        for row in statistical_rows(statistical):
            table.add_row(*row)
    for one in certificate.greedy:
        table.add_row(*greedy_row(one))
    for control in certificate.controls:
        found = "-" if control.excuse else "caught" if control.is_caught else "MISSED"
        table.add_row(f"control: {control.control.about}", _control_text(control), found)
    print_table(console, table)
    for one in certificate.greedy:
        print_differences(console, one, "prompt", decoder.tokenizer)
    if statistical is not None:
        print_deviation(console, statistical, "the draft")
    if certificate.is_idle:
        console.print("No drafted token was accepted, or no control has an effect: these options cannot be certified.")
    elif any(not control.is_ok for control in certificate.controls):
        more = "prompts, or longer samples (-n)" if statistical is None else "tokens (--budget, --num-tokens)"
        console.print(f"A deliberate error was not detected, so the tests are too weak: use more {more}.")
    false_alarm = "" if statistical is None else f" (a correct implementation fails 1 run in {1 / job.level:,.0f})"
    print_verdict(console, certificate.verdict, "CERTIFIED", false_alarm, certificate.num_tokens_needed)


def _control_text(report: ControlReport) -> str:
    if report.excuse:
        return report.excuse
    p = "" if report.p is None else f"p = {report.p:.0e}, "
    return f"{p}{report.num_tokens} tokens"
