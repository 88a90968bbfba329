"""``outrider replay``: evaluates drafts on a log, without generating it again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Option

from outrider.cli.shared.flat import flat
from outrider.cli.shared.options import MODELS_PANEL, BatchSizeOption, ReportOptions, check_alone, parse_constant_k
from outrider.cli.shared.output import say, show_table
from outrider.cli.shared.pair_options import DRAFT_OPTIONS, DraftOnlyOptions, set_threads
from outrider.cli.shared.progress import count_items, progress
from outrider.errors import FileError, OptionError
from outrider.options import AUTO, DEFAULT_ACCEPTANCE, Sampling

if TYPE_CHECKING:
    from outrider.drafters.base import Drafter
    from outrider.measure.log import Header, Record
    from outrider.measure.replay import ReplayedRecord


_FORMATS = ("outrider", "tensors")
# Options with a file of rounds.
_OF_ROUNDS = "log", "per_prompt", "num_draft_tokens", "tokens_per_prompt", "json_target"


@flat
def replay(
    context: Context,
    drafts: DraftOnlyOptions,
    report: ReportOptions,
    log: Annotated[Path, Argument(help="Output file of generate. With --per-prompt: or a file of rounds.")],
    target: str | None = Option(
        None,
        help="Target of the log, for drafts that need it. Heads, which read its hidden states, and drafts whose "
        "tokens depend on where a round began.",
        rich_help_panel=MODELS_PANEL,
    ),
    num_draft_tokens: str | None = Option(
        None,
        *("-k", "--num-draft-tokens"),
        help="One or several K: 4, 1-8, 1,2,4. Default: 1-8; of cumulative counts: the most accepted in a round.",
        rich_help_panel=MODELS_PANEL,
    ),
    batch_size: BatchSizeOption = 8,
    per_prompt: bool = Option(
        False,
        "--per-prompt",
        help="Summarise rounds by prompt and category. Of the log, drawn at random; or of a file: the --output of "
        "generate, or lines of cumulative counts like [3, 5] (decoding-speculative-decoding), where a decrease "
        "starts a new prompt, unless --tokens-per-prompt is given.",
    ),
    tokens_per_prompt: int | None = Option(None, help="For cumulative counts: tokens generated per prompt."),
    seed: int = Option(0, help="Seed for --per-prompt. Rounds over sampled logs are random."),
    log_format: str = Option(
        "outrider",
        "--format",
        help="Of the log: outrider or tensors. tensors: printed output ids of greedy decoding without prompts "
        "(decoding-speculative-decoding), which needs --prompts and --tokenizer-of.",
    ),
    prompts: Path | None = Option(None, help="With --format tensors: the prompts, in the order of the log."),
    tokenizer_of: str | None = Option(None, help="With --format tensors: the model that the ids belong to."),
) -> None:
    """Compute tokens per round of drafts from a log. For every draft and K, without generating it again."""
    if tokens_per_prompt is not None and tokens_per_prompt < 1:
        raise OptionError("--tokens-per-prompt", tokens_per_prompt, "a whole number >= 1")
    from outrider.measure.rounds_file import PromptRounds, RecordedArm, arms_json, read_file

    if per_prompt and log_format == "outrider" and not _has_no_draft(log):
        check_alone(context, _OF_ROUNDS, "a file of rounds has been replayed already: leave it out")
        k, *others = [None] if num_draft_tokens is None else parse_constant_k(num_draft_tokens)
        if others:
            raise OptionError("-k/--num-draft-tokens", num_draft_tokens, "one number: that of the file")
        arms, notes = read_file(log, tokens_per_prompt=tokens_per_prompt, k=k)
        options = {"file": str(log), "tokens_per_prompt": tokens_per_prompt, "num_draft_tokens": k}
        report.finish("analyze", options, {"arms": arms_json(arms), "notes": notes})
        return
    if tokens_per_prompt is not None:
        raise OptionError("--tokens-per-prompt", tokens_per_prompt, "it needs --per-prompt and a file of counts")
    ks = parse_constant_k(num_draft_tokens or "1-8")
    if log_format not in _FORMATS:
        raise OptionError("--format", log_format, f"choose {' or '.join(_FORMATS)}")
    given = [prompts is not None, tokenizer_of is not None]
    if target is not None and log_format == "tensors":
        remedy = "tensors do not name the model that wrote them: write a log with generate --output"
        raise OptionError("--target", target, remedy)
    if (log_format == "tensors" and not all(given)) or (log_format != "tensors" and any(given)):
        raise OptionError("--format", log_format, "tensors need --prompts and --tokenizer-of; a log takes neither")
    if seed < 0:
        raise OptionError("--seed", seed, "a whole number >= 0")

    with progress("loading libraries"):
        import numpy as np

        from outrider.measure.log import Log, open_log
        from outrider.measure.replay import PREDICTED_RULES, load_draft, summarise
        from outrider.measure.replay import replay as judge
        from outrider.measure.tau import counts_json, stats_of

    if drafts.acceptance not in PREDICTED_RULES:
        raise OptionError("--acceptance", drafts.acceptance, f"choose one of {', '.join(PREDICTED_RULES)}")
    set_threads(drafts.threads)
    decoder = None
    if target is not None:
        decoder = replace(drafts, target=target, acceptance=DEFAULT_ACCEPTANCE).load()
    header: Header
    records: Sequence[Record]
    if prompts is not None and tokenizer_of is not None:
        header, records = _foreign(log, prompts, tokenizer_of, drafts.models)
    else:
        opened = Log.open(log) if decoder is None else open_log(log, decoder.target.name, decoder.tokenizer)
        header, records = opened.header, opened.records
        if opened.num_failed:
            say(f"{log}: prompts without an output are left out ({opened.num_failed})")
    how: dict[str, Any] = {name: getattr(drafts, name) for name in ("device", "dtype", "allow_pickle")}
    how |= {"header": header, "models_file": drafts.models, "corpus": drafts.corpus or ()}
    names = replace(drafts, target=header.target).draft_names
    if drafts.draft is None:  # auto needs the target
        names = ["suffix" if name == AUTO else name for name in names]
    loaded: dict[str, Drafter] = dict(
        (name, load_draft(name, **how)) if decoder is None else drafts.load_named(decoder, name) for name in names
    )
    drawn: dict[RecordedArm, list[PromptRounds]] = {}

    def draw(replayed: Iterable[ReplayedRecord], name: str) -> Iterator[ReplayedRecord]:
        """Draw the rounds of each record at random, for --per-prompt."""
        for one in replayed:
            for k in ks if per_prompt else ():
                law = one.rounds(k)
                rounds, is_truncated = law.draw(np.random.default_rng([seed, one.index, k]))
                stats = stats_of(rounds, int(is_truncated), len(law.num_drafted))
                arm = RecordedArm(name, k, drafts.acceptance)
                drawn.setdefault(arm, []).append((one.index, one.category, stats))
            yield one

    body: dict[str, Any] = {"target": header.target, "num_prompts": len(records), "log_options": _options_json(header)}
    body |= {"drafts": [], "arms": []}
    lm = None if decoder is None else decoder.target
    with progress("prompts", len(loaded) * len(records)) as advance:
        for name, drafter in loaded.items():
            replayed = judge(records, header, drafter, drafts.acceptance, ks, target=lm, batch_size=batch_size)
            counts, alpha = summarise(count_items(draw(replayed, name), advance), ks)
            body["drafts"].append({"draft": name, "alpha": alpha and alpha.to_json()})
            body["arms"] += [RecordedArm(name, k, drafts.acceptance)._asdict() | counts_json(counts[k]) for k in ks]
    settings: dict[str, Any] = {name: getattr(drafts, name) for name in DRAFT_OPTIONS}
    settings |= {"target": target, "draft": [*loaded], "num_draft_tokens": ks, "log": str(log)}
    settings |= {"format": log_format, "prompts": prompts and str(prompts), "tokenizer_of": tokenizer_of}
    settings |= {"batch_size": batch_size, "seed": seed, "models": drafts.models and str(drafts.models)}
    ran = next((lm for drafter in loaded.values() for lm in drafter.models), None)
    report.finish("replay", settings, body, ran)
    if per_prompt:
        from outrider.pages.reports import rounds_table

        show_table(report.console(), rounds_table("Rounds", arms_json(drawn)))
    if log_format == "tensors":
        report.console().print("Note: assumes greedy outputs, each ended by its length limit")


def _has_no_draft(file: Path) -> bool:
    """Whether a file has outputs without a draft, and so no rounds of its own. False if it cannot be read."""
    try:
        with file.open("rb") as stream:
            row = json.loads(stream.readline())
        return bool(row["settings"]["draft"] == "none")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _options_json(header: Header) -> dict[str, Any]:
    options = {one.name: getattr(header.sampling, one.name) for one in fields(Sampling) if one.name != "processor"}
    if (bias := header.sampling.logit_bias) is not None:  # as text: JSON has no -inf
        options["logit_bias"] = {str(i): repr(float(value)) for i, value in bias.items()}
    return options | {"has_probs": header.has_probs}


def _foreign(log: Path, prompts: Path, tokenizer_of: str, models: Path | None) -> tuple[Header, list[Record]]:
    from outrider.measure.log import Header, Record
    from outrider.measure.rounds_file import read_tensors
    from outrider.models.reading import load_tokenizer
    from outrider.models.registry import resolve
    from outrider.offline.prompt_file import read_prompts
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
    longest = max(map(len, texts))
    sampling, context_len = Sampling(temperature=0.0, max_new_tokens=longest), max(map(len, prompt_ids)) + longest
    header = Header(str(log), sampling, False, num_tokens, context_len, (), fingerprint(tokenizer))
    known = enumerate(zip(lines, prompt_ids, texts, strict=True))
    return header, [Record(i, line.category, 0, "length", given, ids) for i, (line, given, ids) in known]
