"""Samples: do texts that another system has generated follow the target's law?

The statistical layer of a certificate (outrider.certify.design) for texts alone: no rounds, no seeds, no way to
generate more of them. The first texts determine the stakes and are not tested; all tokens of the others are. Texts that
claim to be greedy are compared with plain decoding, token by token (outrider.certify.divergence).

Each text must have been sampled with its own randomness: texts that share a seed, or are copies, are not n texts (and
raise an alarm where they follow one another in the file). The number of tokens may depend on the tokens, where texts
end by an end token. The sums of the tests by stakes are martingales that end with the last text, so their p-values stay
exact; those of the PIT hold up to the error of a limit theorem (docs/certify.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.certify.certificate import GreedyReport, StatisticalReport, Verdict
from outrider.certify.design import Design
from outrider.certify.divergence import against_plain, plain_batches
from outrider.certify.observed import GeneratedText, ObservedTokens, joined, observe
from outrider.drafters.base import Drafter
from outrider.errors import PromptError
from outrider.options import Sampling
from outrider.records import Request
from outrider.runtime.lm import LM
from outrider.sampling.rules import REJECTION
from outrider.text.row_text import RowText

_PILOT_SHARE = 0.1  # of the texts
_LARGEST_BLOCK = 8  # tokens in a forward of an unknown system; to distinguish rounding from faults


@dataclass(frozen=True, slots=True)
class SampledText:
    """A text that another system has generated.

    Attributes:
        line: its number in the file, for messages.
        token_ids: the output, with the end token if there was one.
        sampling: as reported; its limits, seed and stop strings do not matter.
    """

    line: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class SamplesReport:
    """All findings.

    Attributes:
        statistical: of the sampled texts; None if there are none.
        greedy: of the texts of temperature 0; empty if there are none.
        num_repeats: see the function.
    """

    statistical: StatisticalReport | None
    greedy: Sequence[GreedyReport]
    num_repeats: int

    @property
    def verdict(self) -> Verdict:
        """``failed`` if something is wrong, ``inconclusive`` if nothing is, but the texts are too few to tell."""
        is_alarm = self.statistical is not None and self.statistical.is_alarm
        if is_alarm or not all(one.is_ok for one in self.greedy):
            return "failed"
        return "passed" if self.statistical is None or self.statistical.is_enough else "inconclusive"

    @property
    def is_consistent(self) -> bool:
        return self.verdict == "passed"

    @property
    def num_tokens_needed(self) -> int | None:
        """About how many sampled tokens would decide, where these do not."""
        return self.statistical.num_tokens_needed if self.statistical and self.verdict == "inconclusive" else None

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "is_consistent": self.is_consistent,
            "num_tokens_needed": self.num_tokens_needed,
            "num_repeats": self.num_repeats,
            "statistical": self.statistical and self.statistical.to_json(),
            "greedy": [one.to_json() for one in self.greedy],
        }


def check_samples(samples: Sequence[SampledText], vocab_size: int, context_len: int) -> None:
    """Detect before the work that a text cannot be judged.

    Raises:
        PromptError: it is empty, too long, or has ids beyond the vocabulary.
    """
    for one in samples:
        whole, where = (*one.prompt_ids, *one.token_ids), f"line {one.line}"
        if not one.prompt_ids or not one.token_ids:
            raise PromptError(f"{where}: there must be at least one token of the prompt, and one of the output")
        if len(whole) > context_len:
            raise PromptError(f"{where}: {len(whole)} tokens, but a text may have at most {context_len} here: cut it")
        if max(whole) >= vocab_size or min(whole) < 0:
            raise PromptError(f"{where}: a token id outside 0..{vocab_size - 1}")


def judge(
    target: LM,
    drafter: Drafter,
    samples: Sequence[SampledText],
    *,
    level: float,
    seed: int,
    batch_size: int,
    wanted: float | None = None,
    on_texts: Callable[[int], None] = lambda done: None,
) -> StatisticalReport:
    """Compare sampled texts with the target's law.

    Args:
        drafter: deviations are tested towards its q.
        samples: at least two, of temperatures above 0.
        level: probability of a false alarm.
        seed: of the tests' own randomness.
        wanted: the total variation that must be detectable.
        on_texts: called with the number of texts just judged.
    """
    num_pilots = max(1, round(_PILOT_SHARE * len(samples)))
    num_tested = len(samples) - num_pilots
    assert num_tested > 0
    prompts = {ids: index for index, ids in enumerate(dict.fromkeys(one.prompt_ids for one in samples))}
    laws: list[Sampling] = []
    groups: list[list[GeneratedText]] = []
    for index, one in enumerate(samples):
        if one.sampling not in laws:
            laws.append(one.sampling)
            groups.append([])
        text = GeneratedText(index, prompts[one.prompt_ids], one.prompt_ids, one.token_ids, (0,) * len(one.token_ids))
        groups[laws.index(one.sampling)].append(text)

    def observed(indices: range) -> ObservedTokens:
        parts = []
        for law, group in zip(laws, groups, strict=True):
            texts = [text for text in group if text.index in indices]
            for begin in range(0, len(texts), batch_size):
                batch = texts[begin : begin + batch_size]
                parts.append(observe(target, drafter, law, batch, seed=seed, batch_size=batch_size))
                on_texts(len(batch))
        return joined(parts)

    pilot, tested = observed(range(num_pilots)), observed(range(num_pilots, len(samples)))
    num_tokens = len(pilot) * num_tested // num_pilots  # not len(tested), which may depend on the tokens
    design = Design.of(pilot, num_tokens, level, len(prompts), has_rounds=False)
    report = design.report(tested, level, num_tested, wanted)
    # Forbidden tokens cannot occur by chance, in any text.
    return replace(
        report,
        num_forbidden=report.num_forbidden + int(pilot.is_forbidden.sum()),
        num_at_edge=report.num_at_edge + int(pilot.is_at_edge.sum()),
    )


def num_repeats(samples: Sequence[SampledText]) -> int:
    """The number of sampled texts that are equal to an earlier one of the same prompt."""
    texts = [(one.prompt_ids, one.token_ids) for one in samples]
    return len(texts) - len(set(texts))


def judge_greedily(
    target: LM, samples: Sequence[SampledText], batch_size: int, on_texts: Callable[[int], None] = lambda done: None
) -> GreedyReport:
    """Compare greedy texts with plain decoding. Differences carry the number of the line in place of the prompt's."""
    requests = []
    for one in samples:
        sampling = replace(one.sampling, temperature=0.0, max_new_tokens=len(one.token_ids), seed=0)
        requests.append(Request(one.prompt_ids, sampling, RowText(None, (), ())))
    texts = [one.token_ids for one in samples]
    plain = plain_batches(target, REJECTION, requests, batch_size)
    num_tokens, differences = against_plain(
        target, requests, plain, texts, num_draft_tokens=_LARGEST_BLOCK - 1, on_texts=on_texts
    )
    differences = [replace(one, prompt=samples[one.prompt].line) for one in differences]
    return GreedyReport(len(samples), num_tokens, differences, has_noise=False)
