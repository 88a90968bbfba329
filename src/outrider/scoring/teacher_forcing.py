"""Teacher forcing: a model's logits for each token of existing texts.

One forward scores a whole text, while generation takes a forward per token. The logits equal those of the loop up
to rounding (docs/internals/numerics.md). This module does not know where the texts come from, nor how many models
are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.errors import NumericsError
from outrider.runtime.lm import LM
from outrider.sampling.history import NO_HISTORY, History
from outrider.sampling.probs import Settings, is_finite, to_probs

# Limits of one forward: logits B x T x V, and columns T. Results derived from them may be several times as large.
_MOST_LOGITS, _MOST_COLUMNS = 2**25, 128


@dataclass(frozen=True, slots=True)
class Text:
    """A text whose tokens from ``num_given`` (at least 1) on are scored.

    Attributes:
        num_prompt: tokens from here on count as output for penalties; None for ``num_given``.
        before: tokens before it, which the model does not read; penalties count them. ``num_prompt`` counts them, too.
    """

    ids: Sequence[int]
    num_given: int = 1
    num_prompt: int | None = None
    before: Sequence[int] = ()

    def __post_init__(self) -> None:
        assert 1 <= self.num_given <= len(self.ids)


@dataclass(frozen=True, slots=True)
class ForcedTokens:
    """M tokens of texts, with the model's logits before each.

    Attributes:
        rows: index of each token's text. [M]
        ids: the tokens. [M]
        logits: [M, V]
        history: before each, as far as the options need it. M positions
    """

    rows: Tensor
    ids: Tensor
    logits: Tensor
    history: History

    def probs(self, settings: Settings) -> Tensor:
        """Probabilities under the sampling options of one row, on the device of the settings. [M, V]"""
        device = settings.temperature.device
        history = self.history.map(lambda values: values[None].to(device))
        return to_probs(self.logits[None].to(device), settings, history)[0]

    def logprobs(self) -> Tensor:
        """Log-probability of each token, natural, from the raw logits, in float32 or better. [M]"""
        x = self.logits if self.logits.dtype == torch.float64 else self.logits.to(torch.float32)
        chosen: Tensor = x.gather(-1, self.ids[:, None]).squeeze(-1)
        return chosen - x.logsumexp(dim=-1)

    def best_ids(self) -> Tensor:
        """The most probable token at each position. [M]"""
        return self.logits.argmax(dim=-1)


@torch.inference_mode()
def force(lm: LM, texts: Sequence[Text], settings: Sequence[Settings] = ()) -> Iterator[ForcedTokens]:
    """Score texts, chunk by chunk of columns; chunks without a token to score are left out.

    Within a chunk tokens are ordered by text and position; so are the chunks. For the same texts two models give the
    same tokens in the same chunks.

    Args:
        texts: each at most one token longer than the model's context: the last token is scored, and not fed.
        settings: sampling options for ``ForcedTokens.probs``.

    Raises:
        NumericsError: the model has no distribution for a token to score. As in plain decoding, that depends on the
            tokens before it alone.
    """
    device = lm.device
    length = max(len(text.ids) for text in texts)
    assert length <= lm.context_len + 1
    ids = torch.zeros(len(texts), length + 1, dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, : len(text.ids)] = torch.as_tensor(text.ids)
    ids = ids.to(device)
    ends = torch.tensor([len(text.ids) for text in texts], device=device)[:, None]
    num_given = torch.tensor([text.num_given for text in texts], device=device)[:, None]
    num_prompts = [text.num_given if text.num_prompt is None else text.num_prompt - len(text.before) for text in texts]
    num_prompt = torch.tensor(num_prompts, device=device)[:, None]
    cache = lm.new_cache(len(texts), length)
    is_spoilt = torch.zeros_like(ends, dtype=torch.bool)
    history = NO_HISTORY
    for one in settings:
        history = one.with_room(history, len(texts), lm.vocab_size)
    history = history.map(lambda values: values.to(device))
    for row, text in enumerate(texts):
        if text.before:
            num_earlier = min(len(text.before), len(text.before) + num_prompts[row])
            history.begin(row, torch.as_tensor(text.before, device=device), num_earlier)
    width = max(1, min(_MOST_COLUMNS, _MOST_LOGITS // (len(texts) * lm.vocab_size)))
    for begin in range(0, length - 1, width):
        columns = torch.arange(begin, min(begin + width, length - 1), device=device).expand(len(texts), -1)
        fed, following = ids.gather(1, columns), ids.gather(1, columns + 1)
        is_scored = (columns + 1 >= num_given) & (columns + 1 < ends)  # [B, T]
        has_any = bool(is_scored.any())
        view_len = lm.view_len(min(begin + width, length), cache)
        positions = torch.where(columns < ends, columns, -1)
        logits = lm.forward(fed, positions, cache, view_len, num_logits=0 if has_any else 1, keeps_finite=True)
        cache.settle(ends[:, 0])
        is_bad = is_scored & (is_spoilt | ~is_finite(logits))
        if has_any and bool(is_bad.any()):
            raise NumericsError.at(lm.name, begin + 1 + int(is_bad.any(dim=0).nonzero()[0]))
        broken = cache.find_broken()
        if broken is not None:  # they are replaced by zeros, so that the forward continues
            is_spoilt |= broken.any(dim=1, keepdim=True)
        steps = history.along(fed, is_output=columns >= num_prompt).map(lambda values: values[:, 1:])
        history = steps.map(lambda values: values[:, -1])
        if has_any:
            rows = torch.arange(len(texts), device=device)[:, None].expand_as(is_scored)
            yield ForcedTokens(
                rows=rows[is_scored],
                ids=following[is_scored],
                logits=logits[is_scored],
                history=_places(steps, is_scored),
            )


def _places(steps: History, is_scored: Tensor) -> History:
    return steps.map(lambda values: values[is_scored])


@torch.inference_mode()
def sums_by_text(
    lms: Sequence[LM],
    texts: Sequence[Text],
    measure: Callable[..., Tensor],
    *,
    batch_size: int,
    settings: Sequence[Settings] = (),
    on_done: Callable[[int], None] | None = None,
) -> Tensor:
    """Score texts by one model or several, and sum measurements over their tokens.

    Args:
        texts: each with a token to score; no longer than ``force`` takes.
        measure: from a ``ForcedTokens`` of each model for the same M tokens, S numbers for each token. [S, M]
        settings: the sampling options that ``measure`` uses.
        on_done: called with the number of texts just done, for a progress bar.

    Returns:
        Sums over the tokens of each of the N texts, in float64, on the CPU. [S, N]
    """
    sums: list[Tensor] = []
    for begin in range(0, len(texts), batch_size):
        batch = texts[begin : begin + batch_size]
        rows: list[Tensor] = []
        values: list[Tensor] = []
        for forced in zip(*(force(lm, batch, settings) for lm in lms), strict=True):
            rows.append(forced[0].rows.cpu())
            values.append(measure(*forced).to("cpu", torch.float64))
            del forced  # before the next chunk: for a large vocabulary they take most of the memory
        numbers = torch.cat(values, dim=1)  # [S, M]
        sums.append(numbers.new_zeros(len(numbers), len(batch)).index_add_(1, torch.cat(rows), numbers))
        if on_done is not None:
            on_done(len(batch))
    return torch.cat(sums, dim=1)
