"""``outrider replay``: evaluates drafts on a log, without generating it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.flat import flat
from outrider.cli.shared.options import (
    MODELS_PANEL,
    BatchSizeOption,
    ReportOptions,
    check_alone,
    parse_constant_k,
)
from outrider.cli.shared.output import say, show_table
from outrider.cli.shared.own_text import open_log
from outrider.cli.shared.pair_options import DraftOptions, PairOptions, set_threads
from outrider.cli.shared.per_prompt import DrawnRounds, analyses_json, has_no_draft, show_file
from outrider.cli.shared.progress import count_items, progress
from outrider.errors import FileError, OptionError
from outrider.offline.prompt_file import read_prompts
from outrider.options import DEFAULT_ACCEPTANCE, Sampling
from outrider.pages.reports import rounds_table
from outrider.system.files import check_writable

if TYPE_CHECKING:
    from outrider.drafters.base import Drafter
    from outrider.replay.log import Header, Record
    from outrider.replay.replay import ExpectedRounds, Summary


_FORMATS = ("outrider", "tensors")
# Options with a file of rounds.
_OF_ROUNDS = "log", "per_prompt", "num_draft_tokens", "tokens_per_prompt", "html", "json_target"


@flat
def replay(
    context: typer.Context,
    drafts: DraftOptions,
    report: ReportOptions,
    log: Annotated[
        Path,
        typer.Argument(help="Output file of outrider record, or of generate. With --per-prompt: or a file of rounds."),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            help="Target of the log, for drafts that need it. Heads, which read its hidden states, and drafts whose "
            "tokens depend on where a round began.",
            rich_help_panel=MODELS_PANEL,
        ),
    ] = None,
    num_draft_tokens: Annotated[
        str | None,
        typer.Option(
            "-k",
            "--num-draft-tokens",
            help="One or several K: 4, 1-8, 1,2,4. Default: 1-8; of cumulative counts: the most accepted in a round.",
            rich_help_panel=MODELS_PANEL,
        ),
    ] = None,
    batch_size: BatchSizeOption = 8,
    per_prompt: Annotated[
        bool,
        typer.Option(
            "--per-prompt",
            help="Summarise rounds by prompt and category. Of the log, drawn at random; or of a file: the --output of "
            "generate, or lines of cumulative counts like [3, 5] (decoding-speculative-decoding), where a decrease "
            "starts a new prompt, unless --tokens-per-prompt is given.",
        ),
    ] = False,
    tokens_per_prompt: Annotated[
        int | None, typer.Option(help="For cumulative counts: tokens generated per prompt.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write the rounds of one draft and one K. As lines like [3, 5]: the tokens so far of each of the "
            "--batch-size prompts (decoding-speculative-decoding)."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed for --output and --per-prompt. Rounds over sampled logs are random.")
    ] = 0,
    log_format: Annotated[
        str,
        typer.Option(
            "--format",
            help="Of the log: outrider or tensors. tensors: printed output ids of greedy decoding without prompts "
            "(decoding-speculative-decoding), which needs --prompts and --tokenizer-of.",
        ),
    ] = "outrider",
    prompts: Annotated[
        Path | None, typer.Option(help="With --format tensors: the prompts, in the order of the log.")
    ] = None,
    tokenizer_of: Annotated[
        str | None, typer.Option(help="With --format tensors: the model that the ids belong to.")
    ] = None,
) -> None:
    """Compute tokens per round of drafts from a log. For every draft and K, without generating it again."""
    if tokens_per_prompt is not None and tokens_per_prompt < 1:
        raise OptionError("--tokens-per-prompt", tokens_per_prompt, "a whole number >= 1")
    if per_prompt and log_format == "outrider" and not has_no_draft(log):
        check_alone(context, _OF_ROUNDS, "a file of rounds has been replayed already: leave it out")
        show_file(log, tokens_per_prompt, _single_k(num_draft_tokens), report)
        return
    if tokens_per_prompt is not None:
        raise OptionError("--tokens-per-prompt", tokens_per_prompt, "it needs --per-prompt and a file of counts")
    ks = parse_constant_k(num_draft_tokens or "1-8")
    if log_format not in _FORMATS:
        raise OptionError("--format", log_format, f"choose {' or '.join(_FORMATS)}")
    given = [prompts is not None, tokenizer_of is not None]
    if target is not None and log_format == "tensors":
        raise OptionError("--target", target, "tensors do not name the model that wrote them: record a log")
    if (log_format == "tensors" and not all(given)) or (log_format != "tensors" and any(given)):
        raise OptionError("--format", log_format, "tensors need --prompts and --tokenizer-of; a log takes neither")
    if seed < 0:
        raise OptionError("--seed", seed, "a whole number >= 0")
    if output is not None:
        check_writable(output)

    with progress("loading libraries"):
        from outrider.replay.log import Log
        from outrider.replay.replay import PREDICTED_RULES, load_draft, summarise
        from outrider.replay.replay import replay as judge
        from outrider.replay.rounds import RecordedArm, round_lines

    if drafts.acceptance not in PREDICTED_RULES:
        raise OptionError("--acceptance", drafts.acceptance, f"choose one of {', '.join(PREDICTED_RULES)}")
    set_threads(drafts.threads)
    decoder = pair = None
    if target is not None:
        pair = PairOptions(target, **asdict(replace(drafts, acceptance=DEFAULT_ACCEPTANCE)))
        decoder = pair.load()
    header: Header
    records: Sequence[Record]
    if prompts is not None and tokenizer_of is not None:
        header, records = _foreign(log, prompts, tokenizer_of, drafts.models)
    else:
        opened = Log.open(log) if decoder is None else open_log(log, decoder.target.name, decoder.tokenizer)
        header, records = opened.header, opened.records
        if opened.num_failed:
            say(f"{log}: prompts without an output are left out ({opened.num_failed})")
    names = drafts.names(header.target)
    if output is not None and len(names) * len(ks) > 1:
        raise OptionError("--output", str(output), "it holds one draft and one K: give one of each")
    alone = partial(
        load_draft,
        header=header,
        device=drafts.device,
        dtype=drafts.dtype,
        models_file=drafts.models,
        corpus=drafts.corpus or (),
        allow_pickle=drafts.allow_pickle,
    )
    loaded: dict[str, Drafter] = dict(
        (name, alone(name)) if pair is None or decoder is None else pair.load_named(decoder, name) for name in names
    )
    names = [*loaded]
    rounds = DrawnRounds(drafts.acceptance, ks, seed)
    summaries: list[Summary] = []
    with progress("prompts", len(loaded) * len(records)) as advance:
        for name, drafter in loaded.items():
            lm = None if decoder is None else decoder.target
            replayed = judge(records, header, drafter, drafts.acceptance, ks, target=lm, batch_size=batch_size)
            if output is not None or per_prompt:
                replayed = rounds.draw(replayed, name)
            summaries.append(summarise(count_items(replayed, advance), ks))
    if output is not None:
        with output.open("w", encoding="utf-8") as stream:
            stream.writelines(round_lines(rounds.committed, batch_size))
    arms = [
        (RecordedArm(name, k, drafts.acceptance), summary.expected[k])
        for name, summary in zip(names, summaries, strict=True)
        for k in ks
    ]
    body: dict[str, Any] = {
        "target": header.target,
        "num_prompts": len(records),
        "log_options": _options_json(header),
        "drafts": [
            {"draft": name, "alpha": summary.alpha and summary.alpha.to_json()}
            for name, summary in zip(names, summaries, strict=True)
        ],
        "arms": [asdict(arm) | _expected_json(one) for arm, one in arms],
    }
    settings = {
        **asdict(drafts),
        "target": target,
        "draft": names,
        "num_draft_tokens": ks,
        "log": str(log),
        "format": log_format,
        "prompts": prompts and str(prompts),
        "tokenizer_of": tokenizer_of,
        "batch_size": batch_size,
        "seed": seed,
        "models": drafts.models and str(drafts.models),
    }
    ran = next((lm for drafter in loaded.values() for lm in drafter.models), None)
    report.finish("replay", settings, body, ran)
    if per_prompt:
        show_table(report.console(), rounds_table("Rounds", analyses_json(rounds.analyses())))
    if log_format == "tensors":
        report.console().print("Note: assumes greedy outputs, each ended by its length limit")


def _options_json(header: Header) -> dict[str, Any]:
    """Sampling options of a log, and whether it has p."""
    options = {one.name: getattr(header.sampling, one.name) for one in fields(Sampling) if one.name != "processor"}
    if (bias := header.sampling.logit_bias) is not None:  # as text: JSON has no -inf
        options["logit_bias"] = {str(i): repr(float(value)) for i, value in bias.items()}
    return options | {"has_probs": header.has_probs}


def _single_k(text: str | None) -> int | None:
    """K of a file of counts. Raises OptionError."""
    if text is None:
        return None
    ks = parse_constant_k(text)
    if len(ks) > 1:
        raise OptionError("-k/--num-draft-tokens", text, "one number: that of the file")
    return ks[0]


def _foreign(log: Path, prompts: Path, tokenizer_of: str, models: Path | None) -> tuple[Header, list[Record]]:
    """Read a log of printed tensors as greedy outputs, each ended by its length."""
    from outrider.models.reading import load_tokenizer
    from outrider.models.registry import resolve
    from outrider.replay.log import Header, Record
    from outrider.replay.rounds import read_tensors
    from outrider.text.chat import Chat
    from outrider.text.tokenizer import encode, fingerprint, vocab_size

    lines, texts = read_prompts(prompts), read_tensors(log)
    if any(isinstance(line.prompt, Chat) for line in lines):
        raise FileError(f"{prompts} has chats, which this format of logs has not: give the prompts as text")
    if len(lines) != len(texts):
        raise FileError(f"{log} has {len(texts)} outputs, but {prompts} has {len(lines)} prompts")
    tokenizer = load_tokenizer(resolve(tokenizer_of, models))
    num_tokens = vocab_size(tokenizer)
    prompt_ids = [tuple(encode(tokenizer, line.text)) for line in lines]
    for index, ids in enumerate(texts):
        if not ids or max(ids) >= num_tokens:
            raise FileError(f"{log}, output {index}: empty, or with ids unknown to {tokenizer_of}")
    max_new_tokens = max(map(len, texts))
    header = Header(
        target=str(log),
        sampling=Sampling(temperature=0.0, max_new_tokens=max_new_tokens),
        has_probs=False,
        vocab_size=num_tokens,
        context_len=max(map(len, prompt_ids)) + max_new_tokens,
        eos_ids=(),
        tokenizer=fingerprint(tokenizer),
    )
    records = [
        Record(index, line.category, 0, "length", given, ids)
        for index, (line, given, ids) in enumerate(zip(lines, prompt_ids, texts, strict=True))
    ]
    return header, records


def _expected_json(one: ExpectedRounds) -> dict[str, Any]:
    from outrider.stats.counts import positions_of

    return {
        "tau": one.tau and one.tau.to_json(),
        "stats": one.stats.to_json(),
        "positions": [position.to_json() for position in positions_of(one.stats)],
    }
