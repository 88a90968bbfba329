"""``outrider plan``: chooses a draft and K, or none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Context, Option

from outrider.cli.shared import options as shared
from outrider.cli.shared.flat import flat
from outrider.cli.shared.output import report_context_limit
from outrider.cli.shared.pair_options import PairOptions, options_json
from outrider.cli.shared.progress import count_items, progress
from outrider.cli.shared.template_options import TemplateOptions, encode_lines
from outrider.errors import OptionError

if TYPE_CHECKING:
    from outrider.measure.round_costs import Costs, PairChoice
    from outrider.records import Stats

_EAGER_K, _WHAT_IF_K = "1-16", "1-12"
_KNOWN = {"alpha": "0 <= alpha <= 1", "c": "c >= 0", "v": "v > 0", "c_ops": "c_ops >= 0"}  # of --what-if


@flat
def plan(
    command: Context,
    pair: PairOptions,
    sampling: shared.SamplingOptions,
    template: TemplateOptions,
    report: shared.ReportOptions,
    num_draft_tokens: str | None = Option(
        None, "-k", "--num-draft-tokens", help="K to choose from, like 1-8. Default: 1-16; a few with CUDA graphs."
    ),
    prompts: Path | None = Option(None, help="File of prompts for the target. Default: 15 sentences."),
    log: Path | None = Option(None, help="Output of generate --output --probs, whose sampling options hold."),
    max_new_tokens: shared.NumTokensOption = 64,
    batch_size: str = Option("1", help="One or several: 1,4."),
    context: str = Option("64", help="Lengths when rounds are timed: 64,512."),
    seed: shared.SeedOption = 0,
    what_if: str | None = Option(
        None,
        help="Predict from numbers: alpha=0.8,c=0.05. alpha: acceptance probability of a drafted token; c: cost of a "
        "draft step over a plain step; v, cost of a verify over a plain step (default: 1); c_ops, operations of a "
        "draft step over a plain step (default: c).",
    ),
    generation_config: shared.GenerationConfigOption = "auto",
) -> None:
    """Predict the speed-up of every draft and K. From measured costs and acceptance; the result may be: no draft."""
    default_k = _EAGER_K if what_if is None else _WHAT_IF_K
    ks = shared.parse_constant_k(num_draft_tokens or default_k)
    remedy = "comma-separated whole numbers >= 1, like 1,4"
    sizes = shared.parse_numbers("--batch-size", batch_size, remedy)
    contexts = shared.parse_numbers("--context", context, remedy)
    sampling = shared.over_checkpoint(sampling, command, generation_config, pair.target, pair.models)
    options = sampling.to_options(seed=seed, num_seeds=1, max_new_tokens=max_new_tokens)
    if what_if is not None:
        known = _numbers_of(what_if)
        report.finish("plan", {"what_if": known, "num_draft_tokens": ks}, _predictions(ks, known))
        return
    if pair.draft_names == ["none"]:
        raise OptionError("--draft", "none", "give the drafts to choose from; 'none' is always included")
    if log is not None and (prompts is not None or template.is_chat):
        raise OptionError("--log", str(log), "leave out --prompts and --chat: the log has its own prompts")
    lines = template.read_lines(prompts)

    decoder = pair.load()
    drafters = pair.load_drafts(decoder)

    from outrider.decoding.schedule import favoured_ks
    from outrider.measure.log import open_log, record_outputs
    from outrider.measure.replay import replay, summarise
    from outrider.measure.round_costs import NUM_STEPS, choices, measure_costs, tokens_needed
    from outrider.sampling.rules import RULES

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
        with progress("generating with the target", len(lines)) as advance:
            own, categories = decoder.of_one_kind(prompt_ids), [line.category for line in lines]
            header, records = record_outputs(own, prompt_ids, options, categories=categories, on_done=advance)
    else:
        recording = open_log(log, decoder.target.name, decoder.tokenizer)
        records, header = list(recording.records), recording.header
        options |= {one.name: getattr(header.sampling, one.name) for one in fields(shared.SamplingOptions)}
        options["max_new_tokens"] = header.sampling.max_new_tokens
    counts: dict[tuple[str, int], Sequence[Stats]] = {}
    with progress("replaying the drafts", len(drafters) * len(records)) as advance:
        for name, drafter in drafters.items():
            replayed = replay(records, header, drafter, pair.acceptance, ks_of[name], target=decoder.target)
            expected, _ = summarise(count_items(replayed, advance), ks_of[name])
            counts |= {(name, k): prompts for k, prompts in expected.items()}
    results: list[dict[str, Any]] = []
    how = decoder.target, drafters, ks_of, RULES[pair.acceptance], header.sampling
    with progress("timing rounds", len(sizes) * len(contexts) * NUM_STEPS) as advance:
        for rows, tokens in product(sizes, contexts):
            costs = measure_costs(*how, num_rows=rows, context=tokens, on_pass=lambda: advance(1))
            results.append(_setting_json(costs, choices(costs, counts)))
    more = {"draft": [*drafters], "prompts": prompts, "log": log, "num_draft_tokens": ks}
    more |= {"batch_size": sizes, "context": contexts}
    report.finish("plan", options_json(pair, options, **more, **template.to_json()), {"settings": results}, decoder)


def _setting_json(costs: Costs, found: Sequence[PairChoice]) -> dict[str, Any]:
    best = found[0] if found[0].speed_up.value > 1 else None
    drafts = dict.fromkeys(name for name, _ in costs.rounds)
    return {
        "num_rows": costs.num_rows,
        "context": costs.context,
        "prefill_ms": 1e3 * costs.prefill_s,
        "plain_ms": 1e3 * costs.plain.round_s,
        "target_ms": [{"num_tokens": width, "ms": 1e3 * s} for width, s in costs.target_s().items()],
        "draft_ms": [{"draft": name, "ms": 1e3 * costs.draft_step_s(name)} for name in drafts],
        "choices": [asdict(one) for one in found],
        "best": best and asdict(best),
    }


def _predictions(ks: Sequence[int], known: Mapping[str, float]) -> dict[str, Any]:
    """Speed-up of each K from numbers alone, the best one, and the best ones of drafts without cost or without error.
    The best is None if plain decoding is as fast."""
    from outrider.measure.tau import predict

    def best(**changed: float) -> dict[str, Any] | None:
        found = max(predict(ks, **{**known, **changed}), key=lambda one: (one.speed_up, -one.k))
        return found._asdict() if found.speed_up > 1 else None

    limits = {"free": best(c=0.0), "agreeing": best(alpha=1.0)}
    return {"predictions": [one._asdict() for one in predict(ks, **known)], "best": best(), "limits": limits}


def _numbers_of(text: str) -> dict[str, float]:
    """Parse ``alpha=0.8,c=0.05``. Raises OptionError."""
    known: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if name not in _KNOWN or name in known or not math.isfinite(number):
            raise OptionError("--what-if", text, f"numbers for {', '.join(_KNOWN)}, each once, like alpha=0.8,c=0.05")
        is_valid = number > 0 if name == "v" else 0 <= number <= (1 if name == "alpha" else math.inf)
        if not is_valid:
            raise OptionError("--what-if", text, _KNOWN[name])
        known[name] = number
    if missing := {"alpha", "c"} - known.keys():
        raise OptionError("--what-if", text, f"{' and '.join(sorted(missing))} must be given")
    known = {"v": 1.0, "c_ops": known["c"], **known}
    return {name: known[name] for name in _KNOWN}
