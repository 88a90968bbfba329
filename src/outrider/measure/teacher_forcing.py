"""Teacher forcing: a model's logits for each token of existing texts.

One forward scores a whole text, while generation takes a forward per token. The logits equal those of the loop up
to rounding (docs/how-it-works/same-bytes.md). This module does not know where the texts come from, nor how many models
are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.errors import NumericsError
from outrider.records import Constraint
from outrider.runtime.lm import LM
from outrider.sampling.history import NO_HISTORY, History
from outrider.sampling.probs import Settings, is_finite, to_probs

# Limits of one forward: logits B x T x V, and columns T. Results derived from them may be several times as large.
_MOST_LOGITS, _MOST_COLUMNS = 2**25, 128


@dataclass(frozen=True, slots=True)
class Text:
    """A text whose tokens from ``num_given`` (at least 1) on are scored. ``num_prompt``: tokens from here on count as
    output for penalties; None for ``num_given``."""

    ids: Sequence[int]
    num_given: int = 1
    num_prompt: int | None = None

    def __post_init__(self) -> None:
        assert 1 <= self.num_given <= len(self.ids)


@dataclass(frozen=True, slots=True)
class ForcedTokens:
    """M tokens of texts, with the model's logits before each.

    Attributes:
        rows, places: index of each token's text, and number of its scored tokens before this one. [M]
        ids: the tokens. [M]
        logits: [M, V]
        history: before each, as far as the options need it. M positions
    """

    rows: Tensor
    places: Tensor
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


@torch.inference_mode()
def force(
    lm: LM,
    texts: Sequence[Text],
    settings: Sequence[Settings] = (),
    constraints: Sequence[Constraint] | None = None,
    most_columns: int = _MOST_COLUMNS,
) -> Iterator[ForcedTokens]:
    """Score texts, chunk by chunk of columns; chunks without a token to score are left out. Tokens are ordered by text
    and position in a chunk; so are the chunks. For the same texts two models give the same tokens in the same chunks.

    Args:
        texts: each at most one token longer than the model's context: the last token is scored, and not fed.
        settings: sampling options for ``ForcedTokens.probs``.
        constraints: of each text, advanced to its first scored token; their effects are masks. The logits of tokens
            that they forbid are minus infinity, which logits processors leave as they are.
        most_columns: of one chunk.

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
    num_prompt = torch.tensor([text.num_prompt or text.num_given for text in texts], device=device)[:, None]
    cache = lm.new_cache(len(texts), length)
    is_spoilt = torch.zeros_like(ends, dtype=torch.bool)
    history = NO_HISTORY
    for one in settings:
        history = one.with_room(history, len(texts), lm.vocab_size)
    history = history.map(lambda values: values.to(device))
    width = max(1, min(most_columns, _MOST_LOGITS // (len(texts) * lm.vocab_size)))
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
            rows = torch.arange(len(texts), device=device)[:, None].expand_as(is_scored)[is_scored]
            scored, next_ids = logits[is_scored], following[is_scored]
            if constraints is not None:
                scored.masked_fill_(_forbidden(constraints, rows, next_ids, lm.vocab_size), -torch.inf)
            places = (columns + 1 - num_given)[is_scored]
            yield ForcedTokens(rows, places, next_ids, scored, steps.map(itemgetter(is_scored)))


def _forbidden(constraints: Sequence[Constraint], rows: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """Mask of the tokens forbidden in the place of each of M tokens, over which the constraints advance. [M, V]"""
    allowed = np.ones((len(rows), vocab_size), dtype=np.bool_)
    for place, row, token_id in zip(allowed, rows.tolist(), ids.tolist(), strict=True):
        place[:] = allowed_tokens(constraints[row], vocab_size)
        constraints[row].push(token_id)
    return torch.from_numpy(~allowed).to(rows.device)


def allowed_tokens(constraint: Constraint, vocab_size: int) -> NDArray[np.bool_]:
    """Mask of the next tokens that a constraint allows, where its effect is a mask. [V]"""
    effect = constraint.effect()
    if effect is None:
        return np.ones(vocab_size, np.bool_)
    assert isinstance(effect, np.ndarray) and effect.dtype == np.bool_, "a processor, which is refused"
    return effect.astype(np.bool_, copy=False)
