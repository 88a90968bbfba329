"""Replay: evaluate drafts on a target's recorded output, without generating it again.

A draft model reads each recorded sequence once; that gives q for every token. With the recorded p it determines the
distribution of rounds over this sequence, for every K at once (see outrider.replay.renewal). A look-up drafter
proposes after every token of the sequence, by its own code. A drafter whose q is known in rounds only is led along the
sequence beside the target, for each K (see outrider.scoring.forcing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from outrider.api import load, load_suffix
from outrider.drafters.base import Drafter, q_sampling
from outrider.drafters.draft_options import split_name
from outrider.drafters.lookups import ngram_drafter
from outrider.drafters.model import model_drafter
from outrider.drafters.window import window_start
from outrider.errors import ModelError, OptionError, TokenizerMismatch
from outrider.models.heads.loading import MTP, is_head
from outrider.models.reading import load_tokenizer
from outrider.models.registry import resolve
from outrider.options import Sampling, looks_up
from outrider.records import Stats
from outrider.replay.forced import ForcedRecord, force_records
from outrider.replay.log import Header, Record
from outrider.replay.renewal import Floats, Integers, RoundDistribution, by_matches, by_offset, survival
from outrider.replay.teacher_forced import score_records
from outrider.runtime.lm import LM
from outrider.sampling.rules import GUMBEL, REJECTION, RULES
from outrider.scoring.forcing import needs_forcing
from outrider.scoring.lookups import proposals
from outrider.scoring.teacher_forcing import Text
from outrider.stats.counts import tau_interval, total
from outrider.stats.intervals import Interval, bounded_mean
from outrider.text.tokenizer import fingerprint

MATCH = "match"
"""A drafted token is accepted if the target, sampling independently, draws the same: with probability sum p q. Lossless
for any draft, and no better than ``rejection``; some other engines accept like this."""
PREDICTED_RULES = (*RULES, MATCH)
"""Acceptance rules that can be predicted: our own, and those of other engines."""
_NO_DRAFT = "a log is plain decoding already: name a draft to replay"
_IN_ROUNDS = "its q is known in rounds with the target only: give the log's target (--target)"


@dataclass(frozen=True, slots=True)
class ReplayedRecord:
    """A draft's rounds over one record.

    Attributes:
        distributions: K -> the distribution of rounds with the least and with the most possible acceptance; the same
            object if p is known well enough. Computed on demand: all K up to 1024 would take gigabytes for a long
            sequence.
        overlap: for each scored token the least and the largest possible sum_v min(p, q), and min(1, q/p) of the token
            itself, which has the same mean over the tokens drawn there; None without a q or a p. (By forcing: at the
            beginnings of rounds that draft.)
    """

    index: int
    category: str | None
    distributions: Callable[[int], tuple[RoundDistribution, RoundDistribution]]
    overlap: tuple[Floats, Floats, Floats] | None

    def is_exact(self, k: int) -> bool:
        least, most = self.distributions(k)
        return least is most


@dataclass(frozen=True, slots=True)
class ExpectedRounds:
    """Expected rounds of a draft and a K over all records.

    Attributes:
        prompts: expected counts of each record.
        tau: with an interval over the records; None if no round is whole.
        upper: with the most possible acceptance; None if the numbers are exact.
    """

    k: int
    prompts: tuple[Stats, ...]
    tau: Interval | None
    upper: ExpectedRounds | None = None

    @property
    def stats(self) -> Stats:
        return total(self.prompts)


@dataclass(frozen=True, slots=True)
class AlphaRange:
    """alpha over the recorded sequences; each number has an interval over the records.

    Attributes:
        low, high: bounds from the recorded part of p.
        estimate: mean of min(1, q/p) over the recorded tokens. Given the tokens before, its mean is
            sum_v p(v) min(1, q(v)/p(v)) = sum_v min(p(v), q(v)), so it only needs p at that token.
    """

    low: Interval
    high: Interval
    estimate: Interval

    def to_json(self) -> dict[str, dict[str, float | None]]:
        return {"low": self.low.to_json(), "high": self.high.to_json(), "estimate": self.estimate.to_json()}


@dataclass(frozen=True, slots=True)
class Summary:
    """Results of a draft over all records.

    Attributes:
        expected: by K.
        alpha: None without a q.
    """

    expected: Mapping[int, ExpectedRounds]
    alpha: AlphaRange | None


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
    if name == "ngram":
        return ngram_drafter()
    if name == "suffix":
        return load_suffix(_tokenizer_of(header, models_file) if corpus else None, header.vocab_size, corpus)
    model, options = split_name(name)
    if looks_up(name) or model == MTP or is_head(resolve(model, models_file)):
        raise OptionError("--draft", name, _IN_ROUNDS)
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
    return model_drafter(lm, options)


def _tokenizer_of(header: Header, models_file: Path | None) -> Any | None:
    """The tokenizer of a log's target; None if it is not here.

    Raises:
        TokenizerMismatch: the target's has changed.
    """
    try:
        tokenizer = load_tokenizer(resolve(header.target, models_file))
    except ModelError:
        return None
    if header.tokenizer not in (None, fingerprint(tokenizer)):
        raise TokenizerMismatch(f"{header.target}, the target of the log, has another tokenizer now")
    return tokenizer


def replay(
    records: Iterable[Record],
    header: Header,
    drafter: Drafter,
    acceptance: str,
    ks: Sequence[int],
    *,
    target: LM | None = None,
    draft_sampling: Sampling | None = None,
    batch_size: int = 8,
) -> Iterator[ReplayedRecord]:
    """Replay a draft on records, in batches.

    Args:
        acceptance: one of PREDICTED_RULES.
        target: of the log; run for drafters that need forcing, and only for these.
        draft_sampling: options of q, if they differ from the target's.

    Raises:
        OptionError: the rule is unknown, there is no draft, the log lacks the probabilities needed, or the target is
            needed and not given.
    """
    if acceptance not in PREDICTED_RULES:
        raise OptionError("acceptance", acceptance, f"choose one of {', '.join(PREDICTED_RULES)}")
    if drafter.most_drafted == 0:
        raise OptionError("draft", drafter.name, _NO_DRAFT)
    is_forced = needs_forcing(drafter)
    if is_forced and target is None:
        raise OptionError(
            "draft",
            drafter.name,
            _IN_ROUNDS,
        )
    needs_probs = not is_forced and not drafter.is_one_hot and acceptance != MATCH and header.sampling.temperature > 0
    if needs_probs and header.num_probs is None:
        raise OptionError(
            "draft",
            drafter.name,
            f"the log was sampled at temperature {header.sampling.temperature:g} without the probabilities "
            "that replaying a draft model needs: record it again with --probs 1 (for alpha and for gumbel, --probs 20 "
            "or more)",
        )
    remaining = iter(records)
    while group := list(islice(remaining, batch_size)):
        if is_forced:
            assert target is not None
            yield from _replay_forced(group, header, target, drafter, acceptance, ks, draft_sampling)
        elif drafter.lm is not None:
            sampling = q_sampling(drafter, draft_sampling or header.sampling)
            yield from _replay_model(group, header, drafter.lm, acceptance, sampling, drafter.is_one_hot)
        else:
            yield from _replay_look_up(group, header, drafter, ks)


def summarise(replayed: Iterable[ReplayedRecord], ks: Sequence[int]) -> Summary:
    """Aggregate all records; each is released after counting."""
    low: dict[int, list[Stats]] = {k: [] for k in ks}
    high: dict[int, list[Stats]] = {k: [] for k in ks}
    is_exact = dict.fromkeys(ks, True)
    sums: list[list[float]] = []
    counts: list[int] = []
    for one in replayed:
        for k in ks:
            least, most = one.distributions(k)
            low[k].append(least.expected())
            high[k].append(low[k][-1] if most is least else most.expected())
            is_exact[k] &= most is least
        if one.overlap is not None and len(one.overlap[0]):
            sums.append([float(values.sum()) for values in one.overlap])
            counts.append(len(one.overlap[0]))
    expected = {}
    for k in ks:
        upper = None if is_exact[k] else ExpectedRounds(k, tuple(high[k]), tau_interval(high[k]))
        expected[k] = ExpectedRounds(k, tuple(low[k]), tau_interval(low[k]), upper)
    alpha = None
    if sums:
        alpha = AlphaRange(*(bounded_mean(values, counts, (0.0, 1.0)) for values in zip(*sums, strict=True)))
    return Summary(expected, alpha)


def _replay_model(
    records: Sequence[Record], header: Header, lm: LM, acceptance: str, sampling: Sampling, is_one_hot: bool
) -> Iterator[ReplayedRecord]:
    scored = score_records(records, header, lm, sampling)
    for record, places in zip(records, scored, strict=True):
        low, high = places.log_ratios, places.log_ratios
        if is_one_hot or acceptance == MATCH:  # a one-hot q is accepted where it equals the recorded token
            low, high = places.log_probs, places.log_probs
        elif acceptance == GUMBEL.name:
            low, high = places.agreement
        # A row drafts fewer tokens near its end, and at the end of a window that the draft reads.
        lengths = range(len(record.prompt_ids), len(record.prompt_ids) + len(record.token_ids))
        window_ends = np.array([window_start(n, lm.context_len) + lm.context_len for n in lengths], dtype=np.int64)
        room = np.minimum(_room(record, header), window_ends + 1 - np.array(lengths, dtype=np.int64))
        yield ReplayedRecord(
            record.index, record.category, partial(_distributions, acceptance, low, high, room), places.overlap
        )


def _distributions(
    acceptance: str, low: Floats, high: Floats, room: Integers, k: int
) -> tuple[RoundDistribution, RoundDistribution]:
    """See ``ReplayedRecord``.

    Args:
        low, high: of each token, for the argument of ``survival``. [n], [n]
        room: draft limit of a round. [n]
    """
    num_drafted = np.minimum(k, room)
    least = RoundDistribution.of(survival(acceptance, by_offset(low, k)), num_drafted)
    if np.array_equal(low, high):
        return least, least
    return least, RoundDistribution.of(survival(acceptance, by_offset(high, k)), num_drafted)


def _replay_forced(
    records: Sequence[Record],
    header: Header,
    target: LM,
    drafter: Drafter,
    acceptance: str,
    ks: Sequence[int],
    draft_sampling: Sampling | None,
) -> Iterator[ReplayedRecord]:
    """Replay by forcing, for each K by itself, since q may depend on how many tokens are drafted."""
    by_k = {k: force_records(records, header, target, drafter, acceptance, k, draft_sampling) for k in ks}
    for i, record in enumerate(records):
        forced = {k: found[i] for k, found in by_k.items()}
        overlap, estimate = forced[ks[0]].overlap
        yield ReplayedRecord(
            record.index,
            record.category,
            partial(_forced_distributions, acceptance, forced),
            (overlap, overlap, estimate),
        )


def _forced_distributions(
    acceptance: str, forced: Mapping[int, ForcedRecord], k: int
) -> tuple[RoundDistribution, RoundDistribution]:
    rounds = RoundDistribution.of(survival(acceptance, forced[k].logs), forced[k].num_drafted)
    return rounds, rounds


def _room(record: Record, header: Header) -> Integers:
    """Draft limit of a round beginning after each number of tokens. [n]"""
    room: Integers = header.max_new_tokens(len(record.prompt_ids)) - np.arange(len(record.token_ids)) - 1
    return room


def _replay_look_up(
    records: Sequence[Record], header: Header, drafter: Drafter, ks: Sequence[int]
) -> Iterator[ReplayedRecord]:
    """Replay a drafter with a one-hot q: under every rule a drafted token is accepted if and only if it equals the
    recorded token. (If it does, q, min(1, q/p), g and every rho are 1; if not, q is 0.)"""
    texts = [Text((*record.prompt_ids, *record.token_ids), len(record.prompt_ids)) for record in records]
    found: list[dict[int, tuple[Integers, Integers]]] = [{} for _ in records]
    for k in ks:
        wanted = [np.minimum(k, _room(record, header)).tolist() for record in records]
        proposed = proposals(drafter, texts, wanted, REJECTION, header.vocab_size)
        for record, drafts, by_k in zip(records, proposed, found, strict=True):
            num_matching = [_num_matching(ids, record.token_ids[t:]) for t, ids in enumerate(drafts)]
            num_drafted = [len(ids) for ids in drafts]
            by_k[k] = (np.array(num_matching, dtype=np.int64), np.array(num_drafted, dtype=np.int64))
    for record, by_k in zip(records, found, strict=True):
        yield ReplayedRecord(record.index, record.category, partial(_look_up_distributions, by_k), None)


def _look_up_distributions(
    found: Mapping[int, tuple[Integers, Integers]], k: int
) -> tuple[RoundDistribution, RoundDistribution]:
    num_matching, num_drafted = found[k]
    rounds = RoundDistribution.of(by_matches(num_matching, k), num_drafted)
    return rounds, rounds


def _num_matching(proposed: Sequence[int], following: Sequence[int]) -> int:
    """Number of proposed tokens before the first mismatch."""
    pairs = zip(proposed, following, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
