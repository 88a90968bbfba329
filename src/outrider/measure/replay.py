"""Replay: evaluate drafts on a target's recorded output, without generating it again.

p and q along each recorded sequence (outrider.measure.along) determine the distribution of rounds over this sequence,
for every K (see outrider.measure.renewal). The log has p of the recorded tokens, which suffices for most drafts and
rules; for the others the log's target is run beside the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.api import load, load_suffix
from outrider.drafters.base import Drafter
from outrider.drafters.draft_options import split_name
from outrider.drafters.few_tokens import with_vocab
from outrider.drafters.lookups import ngram_drafter
from outrider.drafters.model import SELF, model_drafter
from outrider.errors import ModelError, OptionError, TokenizerMismatch
from outrider.measure.along import along, needs_forcing
from outrider.measure.intervals import bounded_mean
from outrider.measure.log import Header, Record
from outrider.measure.renewal import Floats, Integers, RoundDistribution, by_offset, log_ratios, survival
from outrider.models.heads.loading import MTP, is_head
from outrider.models.reading import load_tokenizer
from outrider.models.registry import resolve
from outrider.options import AUTO, looks_up
from outrider.records import Interval, Stats
from outrider.runtime.lm import LM
from outrider.sampling.probs import normalise
from outrider.sampling.rules import GUMBEL, RULES
from outrider.text.tokenizer import fingerprint

MATCH = "match"
"""A drafted token is accepted if the target, sampling independently, draws the same: with probability sum p q. Lossless
for any draft, and no better than ``rejection``; some other engines accept like this."""
PREDICTED_RULES = (*RULES, MATCH)
"""Acceptance rules that can be predicted: our own, and those of other engines."""
_NO_DRAFT = "a log is plain decoding already: name a draft to replay"
_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class ReplayedRecord:
    """A draft's rounds over one record.

    Attributes:
        rounds: K -> the distribution of rounds. Computed on demand: all K up to 1024 would take gigabytes for a long
            sequence.
        overlap: min(1, q/p) of the recorded tokens (by forcing: at the beginnings of rounds that draft). Given the
            tokens before, its mean is sum_v p(v) min(1, q(v)/p(v)) = sum_v min(p(v), q(v)), so that it only needs p at
            the token itself. None for look-ups, or without a p.
    """

    index: int
    category: str | None
    rounds: Callable[[int], RoundDistribution]
    overlap: Floats | None


def load_draft(
    name: str,
    header: Header,
    *,
    device: str = "auto",
    dtype: str = "auto",
    models_file: Path | None = None,
    corpus: Sequence[Path] = (),
    allow_pickle: bool = False,
) -> Drafter:
    """Load a draft to replay on a log.

    Raises:
        OptionError: the name is not a draft.
        TokenizerMismatch: its tokens differ from the log's.
        ModelError, DeviceError: it cannot be loaded.
        FileError: its corpus cannot be read.
    """
    if name == "none":
        raise OptionError("--draft", name, _NO_DRAFT)
    if name == AUTO:
        raise _target_is_needed("--draft", name, "it depends on the target's files")
    if name == "ngram":
        return ngram_drafter()
    if name == "suffix":
        return load_suffix(_tokenizer_of(header, models_file) if corpus else None, header.vocab_size, corpus)
    model, options = split_name(name)
    if looks_up(name) or model in (MTP, SELF) or is_head(resolve(model, models_file)):
        raise _target_is_needed("--draft", name, "its q is known in rounds with the target only")
    loaded = load(model, device=device, dtype=dtype, models_file=models_file, allow_pickle=allow_pickle)
    lm = loaded.target
    if loaded.tokenizer is not None and header.tokenizer not in (None, fingerprint(loaded.tokenizer)):
        raise TokenizerMismatch(
            f"{header.target}, the target of the log, and {name} have different tokenizers; choose a draft of the same "
            "family, or the draft 'ngram', which needs none"
        )
    if lm.vocab_size < header.vocab_size:
        raise TokenizerMismatch(f"{name} knows {lm.vocab_size} tokens, but {header.vocab_size} are needed")
    if lm.vocab_size > header.vocab_size:
        lm = lm.with_vocabulary(header.vocab_size, lm.unknown_ids)
    return model_drafter(*with_vocab(lm, options, loaded.tokenizer, header.eos_ids))


def _tokenizer_of(header: Header, models_file: Path | None) -> Any | None:
    """The tokenizer of a log's target; None if it is not here. Raises TokenizerMismatch: the target's has changed."""
    try:
        tokenizer = load_tokenizer(resolve(header.target, models_file))
    except ModelError:
        return None
    if header.tokenizer not in (None, fingerprint(tokenizer)):
        raise TokenizerMismatch(f"{header.target}, the target of the log, has another tokenizer now")
    return tokenizer


def _target_is_needed(option: str, name: str, why: str) -> OptionError:
    return OptionError(option, name, f"{why}: give the log's target (--target)")


def replay(
    records: Sequence[Record],
    header: Header,
    drafter: Drafter,
    acceptance: str,
    ks: Sequence[int],
    *,
    target: LM | None = None,
    batch_size: int = 8,
) -> Iterator[ReplayedRecord]:
    """Replay a draft on records, in batches.

    Args:
        acceptance: one of PREDICTED_RULES.
        target: of the log; run only where the draft or the rule needs it.

    Raises:
        OptionError: the rule is unknown, there is no draft, or the log's probabilities or target are needed and not
            given.
    """
    if acceptance not in PREDICTED_RULES:
        raise OptionError("acceptance", acceptance, f"choose one of {', '.join(PREDICTED_RULES)}")
    if drafter.most_drafted == 0:
        raise OptionError("draft", drafter.name, _NO_DRAFT)
    is_sampled = header.sampling.temperature > 0 and not drafter.is_one_hot
    needs_rows = is_sampled and acceptance == GUMBEL.name
    if needs_rows and target is None:
        raise _target_is_needed("acceptance", acceptance, "it needs all of p")
    if is_sampled and acceptance not in (GUMBEL.name, MATCH) and not needs_forcing(drafter) and not header.has_probs:
        raise OptionError(
            "draft",
            drafter.name,
            f"the log was sampled at temperature {header.sampling.temperature:g} without the probabilities that "
            "replaying a draft model needs: record it again with --probs",
        )
    if target is None and needs_forcing(drafter, [one.text for one in records]):
        why = "its q is known in rounds with the target only"
        raise _target_is_needed(
            "draft", drafter.name, why if needs_forcing(drafter) else "some texts are longer than its context"
        )
    # A one-hot q is accepted where it equals the recorded token, and at temperature 0 with probability q.
    rule = acceptance if is_sampled else MATCH
    for begin in range(0, len(records), batch_size):
        group = records[begin : begin + batch_size]
        is_forced = needs_forcing(drafter, [record.text for record in group])
        # If q depends on the tokens alone, one score of each token serves every K; else each K is scored by itself,
        # since q may depend on how many tokens are drafted.
        lm = None if is_forced else drafter.lm
        run = target if needs_rows or is_forced else None
        scores = [
            _scores(group, header, drafter, k, run, has_rows=rule == GUMBEL.name)
            for k in (ks if lm is None else ks[:1])
        ]
        for record, *found in zip(group, *scores, strict=True):
            yield _replayed(record, header, rule, lm, dict(zip(ks, found, strict=False)))


_Scores = tuple[Floats, Integers]
"""q, p and g of the tokens at each place and offset, NaN where none is drafted or the number is unknown [3, n, K]; and
the number of tokens drafted at each place [n]."""


def _replayed(record: Record, header: Header, rule: str, lm: LM | None, by_k: Mapping[int, _Scores]) -> ReplayedRecord:
    """Rounds of a record.

    Args:
        lm: the draft model, if its q depends on the tokens alone; then the first K has one offset, which serves all.
    """
    first = next(iter(by_k))
    (q, p, _), _ = by_k[first]
    is_known = ~np.isnan(q[:, 0]) & ~np.isnan(p[:, 0])
    overlap = np.exp(np.minimum(log_ratios(q[is_known, 0], p[is_known, 0]), 0.0))

    def rounds(k: int) -> RoundDistribution:
        (q, p, g), num_drafted = by_k[k if lm is None else first]
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(g if rule == GUMBEL.name else q) if rule in (GUMBEL.name, MATCH) else log_ratios(q, p)
        logs = np.where(np.isnan(q), -np.inf, logs)
        if lm is not None:
            num_prompt = len(record.prompt_ids)
            room = min(header.max_new_tokens(num_prompt) + num_prompt, lm.context_len + 2)
            num_drafted = np.minimum(k, room - 1 - num_prompt - np.arange(len(logs)))
            logs = by_offset(logs[:, 0], k)
        return RoundDistribution.of(survival(rule, logs), num_drafted)

    return ReplayedRecord(record.index, record.category, rounds, overlap if is_known.any() else None)


def _scores(
    records: Sequence[Record], header: Header, drafter: Drafter, k: int, target: LM | None, *, has_rows: bool
) -> list[_Scores]:
    """Score the tokens of records at each place and offset.

    Args:
        has_rows: whether g is wanted, which needs all of p.
    """
    found = [
        (np.full((3, len(record.token_ids), k), np.nan), np.zeros(len(record.token_ids), np.int64))
        for record in records
    ]
    texts, limits = zip(*((one.text, header.max_new_tokens(len(one.prompt_ids))) for one in records), strict=True)
    sampling = header.sampling.with_ends(header.eos_ids)
    for places in along(drafter, texts, sampling, k, target=target, limits=limits):
        q_x = places.q_of_ids()
        values = torch.full((3, *q_x.shape), torch.nan, dtype=torch.float64)
        values[0] = q_x
        if places.p is not None:
            p = normalise(places.p)
            values[1] = p.gather(2, places.ids[..., None])[..., 0]
            if has_rows and places.q is not None:
                rows = p.flatten(0, 1), normalise(places.q).flatten(0, 1), places.ids.flatten()
                values[2] = agreement(*rows).view_as(q_x)
        values = torch.where(places.is_scored.cpu(), values, torch.nan)
        numbers = zip(places.rows.tolist(), places.places.tolist(), places.num_drafted.tolist(), strict=True)
        for j, (row, place, num) in enumerate(numbers):
            found[row][0][:, place, : values.shape[2]] = values[:, j].numpy()
            found[row][1][place] = num
    if target is None and drafter.lm is not None:
        for record, (scores, _) in zip(records, found, strict=True):
            if header.sampling.temperature == 0:  # p is one-hot at the recorded token
                scores[1, :, 0] = 1.0
            elif record.probs is not None:
                scores[1, :, 0] = record.probs
    return found


def agreement(target_probs: Tensor, draft_probs: Tensor, token_ids: Tensor) -> Tensor:
    """g = 1 / sum_v max(p(v), c q(v)) with c = p(x)/q(x): the probability that the argmax of log q plus Gumbel noise is
    x, given that the argmax of log p plus the same noise is. [M, V], [M, V], [M] -> [M]

    Both are x with probability 1 / sum_u max(p(u)/p(x), q(u)/q(x)): the smallest of independent exponential times, one
    for each u, of rate max(...). Maddison et al. 1411.0030 for the race; Daliri et al. 2408.07978 for the pair.
    """
    ids = token_ids[:, None]
    p_x, q_x = target_probs.gather(1, ids).clamp_min(_TINY), draft_probs.gather(1, ids)
    can_agree = q_x > 0  # else the draft cannot have drawn x, and c has no meaning
    c = p_x / torch.where(can_agree, q_x, 1.0)
    total = torch.maximum(target_probs, c * draft_probs).sum(dim=1, keepdim=True)
    return torch.where(can_agree, (1.0 / total).clamp_max(1.0), 0.0)[:, 0]


def summarise(replayed: Iterable[ReplayedRecord], ks: Sequence[int]) -> tuple[dict[int, list[Stats]], Interval | None]:
    """Aggregate all records; each is released after counting.

    Returns:
        K -> the expected counts of rounds, by record; and an estimate of alpha, with an interval over the records: None
        without a q or a p.
    """
    counts: dict[int, list[Stats]] = {k: [] for k in ks}
    sums, nums = list[float](), list[int]()
    for one in replayed:
        for k in ks:
            counts[k].append(one.rounds(k).expected())
        if one.overlap is not None:
            sums.append(float(one.overlap.sum()))
            nums.append(len(one.overlap))
    return counts, bounded_mean(sums, nums, (0.0, 1.0)) if sums else None
