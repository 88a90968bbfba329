"""``outrider generate``: generates from a prompt, or from a file of prompts."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer import Argument, Option

from outrider.cli.shared import options as shared
from outrider.cli.shared.findings import difference_lines
from outrider.cli.shared.flat import flat
from outrider.cli.shared.output import console_for, make_document, report_context_limit, say, write_document
from outrider.cli.shared.pair_options import PairOptions, single_k
from outrider.cli.shared.progress import progress, until_first
from outrider.cli.shared.ray_workers import RayOptions, open_ray_workers
from outrider.cli.shared.template_options import TemplateOptions, hint_at_chat, read_prompt
from outrider.cli.shared.terminal import write_chunks
from outrider.errors import OptionError
from outrider.options import Sampling
from outrider.system.files import short_name

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.certify.divergence import GreedyReport
    from outrider.cli.shared.prompt_job import Setup, Workers
    from outrider.decoder import Decoder
    from outrider.offline.output_file import Totals

_STYLES = {"accepted": "green", "correction": "bold red", "bonus": "bold blue"}


@flat
def generate(
    command: typer.Context,
    pair: PairOptions,
    sampling: shared.SamplingOptions,
    end: shared.EndOptions,
    structure: shared.StructureOptions,
    template: TemplateOptions,
    cluster: RayOptions,
    prompt: str | None = Argument(None, help="Prompt, which may stand alone. Default, and -: standard input."),
    prompts: Path | None = Option(
        None,
        help="File of prompts. Plain lines, or JSON lines (or an array) with 'prompt' or 'messages' and optional "
        "sampling options.",
    ),
    output: Path | None = Option(None, help="With --prompts: write JSON lines. An interrupted run resumes."),
    batch_size: int = Option(1, min=1, help="With --prompts: so many at once."),
    shard: str | None = Option(
        None, metavar="I/N", help="With --prompts: run part I of N. Each with its own --output file."
    ),
    num_draft_tokens: shared.NumDraftTokensOption = None,
    seed: int | None = Option(None, help="Prompt i gets this seed + i. Default: random."),
    logprobs: int | None = Option(
        None, help="Add log-probabilities to the JSON. Of each token, and of the N most probable."
    ),
    probs: bool = Option(False, "--probs", help="Keep p of each token. Replays of sampled outputs need it."),
    show_origin: bool = Option(False, "--show-origin", help="Colour tokens by origin. Accepted, correction or bonus."),
    verify_bytes: bool = Option(
        False, "--verify-bytes", help="Generate without the draft, too. Differences are explained; exit code 1."
    ),
    verify_model: bool = Option(
        False, "--verify-model", help="Compare logits with Transformers' code. A difference ends the command."
    ),
    generation_config: shared.GenerationConfigOption = "auto",
    json_target: shared.JsonOption = None,
) -> None:
    """Generate text from a prompt, or from a file of prompts.

    Exit code 1: some prompts of the file failed; the others have output."""
    sampling = shared.over_checkpoint(sampling, command, generation_config, pair.target, pair.models)
    draft, k = pair.single_draft, single_k(num_draft_tokens, pair, sampling, seed)
    if prompts is None:
        for option, value, default in (
            ("--output", None if output is None else str(output), None),
            ("--batch-size", batch_size, 1),
            ("--shard", shard, None),
            ("--ray", cluster.ray, None),
            ("--probs", probs, False),
        ):
            if value != default:
                raise OptionError(option, value, "this option needs a file of prompts: add --prompts FILE")
    elif prompt is not None or show_origin:
        raise OptionError("--prompts", str(prompts), "leave out the PROMPT and --show-origin")
    for is_unproven, remedy in (
        (prompts is not None, "it takes one PROMPT; certify --prompts FILE compares many"),
        (draft == "none", "there is no draft: leave out --draft none"),
        (
            sampling.temperature > 0 and (pair.acceptance != "gumbel" or seed is None),
            "a sampled text is that of plain decoding under --acceptance gumbel with a --seed; -t 0 needs neither",
        ),
    ):
        if verify_bytes and is_unproven:
            raise OptionError("--verify-bytes", True, remedy)
    if verify_model and cluster.ray is not None:
        raise OptionError("--verify-model", True, "models on other machines are not compared: leave out --ray")

    from outrider.cli.shared.prompt_job import LocalWorker, Setup, run_job
    from outrider.offline.output_file import Totals
    from outrider.offline.prompt_file import open_prompts, parse_shard

    part = parse_shard(shard)
    cluster.check(pair)
    with ExitStack() as files:
        lines = None if prompts is None else files.enter_context(open_prompts(prompts))
        text = read_prompt(prompt) if lines is None else ""
        num_seeds = 1 if lines is None else len(lines)
        more = {"logprobs": logprobs, **end.to_options(), **structure.to_options()}
        options = sampling.to_options(seed=seed, num_seeds=num_seeds, **more)
        shared.check_constraint(Sampling(**options))
        setup = Setup(pair, draft, k, options, template, probs)

        def local_worker(num_slots: int) -> LocalWorker:
            worker = LocalWorker(setup, num_slots)
            if verify_model:
                _verify_models(worker.decoder)
            return worker

        totals = Totals(None if json_target is None or output is not None else [])
        workers: Workers
        if lines is None:
            workers = worker = local_worker(1)
            console = console_for(json_target, has_colours=show_origin or None)
            row = _show(setup, worker.decoder, text, console, show_origin, totals)
        else:

            def open_workers(num_prompts: int) -> Workers:
                if cluster.ray is None:
                    return local_worker(batch_size)
                return files.enter_context(open_ray_workers(cluster, setup, batch_size, num_prompts))

            stream = sys.stderr if json_target == "-" else sys.stdout
            write = partial(print, end="", file=stream, flush=True)
            how: dict[str, Any] = {"num_slots": batch_size, "output": output, "write": write, "part": part}
            workers = run_job(setup, lines, files, totals, open_workers, **how)
        summary, origin = totals.summary(workers.pair()), None if json_target is None else workers.origin()
    say(summary)
    same = _verify(setup, worker.decoder, row) if verify_bytes and not totals.is_interrupted else None
    if json_target is not None:
        settings = setup.settings() | {"shard": shard}
        body = totals.to_json() | {"same_bytes": None if same is None else asdict(same)}
        write_document(json_target, make_document("generate", settings, body, origin=origin))
    if totals.is_interrupted:
        raise typer.Exit(130)
    if totals.num_failed or same is not None and same.differences:
        raise typer.Exit(1)


def _verify_models(decoder: Decoder) -> None:
    from outrider.models.heads.base import Head
    from outrider.models.probe import verify

    for lm in (decoder.target, *decoder.drafter.models):
        if isinstance(lm.weights, Head) or lm.token_ids is not None:
            say(f"not verified: {lm.name}, a draft for which Transformers has no code")
            continue
        with progress(f"comparing {short_name(lm.name)} with Transformers"):
            line = verify(lm)
        say(line)


def _verify(setup: Setup, decoder: Decoder, row: dict[str, Any]) -> GreedyReport:
    from outrider.certify.divergence import compare_texts

    ids = row["prompt_ids"]
    with progress("generating without the draft"):
        (plain,) = decoder.plain().generate([ids], **setup.options)
    found = compare_texts(decoder, [(ids, setup.options)], [plain.token_ids], [row["token_ids"]])
    for line in difference_lines(found, "text", decoder.tokenizer):
        say(line)
    if not found.differences:
        say(f"same bytes as plain decoding ({found.num_tokens} tokens)")
    return found


def _show(
    setup: Setup, decoder: Decoder, prompt: str, console: Console, has_colours: bool, totals: Totals
) -> dict[str, Any]:
    """Print the text of a prompt as it is generated. Returns its row."""
    from outrider.offline.output_file import row_of, stats_of
    from outrider.offline.prompt_row import PromptLine
    from outrider.records import Completion, Timing

    ids = setup.encode(decoder, prompt)
    report_context_limit(decoder.target.name, decoder.target.context_len, [ids], setup.options["max_new_tokens"])
    stream = until_first(decoder.stream(ids, **setup.options), f"reading {len(ids):,} tokens")
    before, styles = prompt if console.file.isatty() else "", _STYLES if has_colours else {}
    chunks, totals.is_interrupted = write_chunks(stream, console, styles, before=before)
    if has_colours:
        console.print("  ".join(f"[{style}]{origin}[/]" for origin, style in _STYLES.items()))
    hint_at_chat(decoder, [setup.template.prompt(prompt)])
    totals.time_s = {**sum((chunk.timing for chunk in chunks), Timing()).to_json()}
    done = Completion.of(chunks, len(ids)) if chunks else None
    row = row_of(0, PromptLine("line 1", prompt), ids, setup.options["seed"], done)
    temperature = setup.options["temperature"]
    if setup.options["seed"] is None and temperature > 0:
        totals.seed = f"--seed {row['seed']} repeats this text"
        if setup.k == "auto" and decoder.depends_on_draft(temperature):
            totals.seed = "K followed the load, so that no seed repeats this text (-k 4 keeps K)"
    totals.add(row, stats_of(done))
    return row
