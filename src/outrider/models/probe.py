"""Probe of a model before use: through a SlotCache it must give the logits of one forward without a cache, and the
logits of a token must not depend on later tokens or on other rows. States must continue from their anchors.

Architectures that fail are refused by name, before they can generate wrong text. A list of architectures would be
outdated by the next release of Transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from outrider.errors import UnsupportedModel
from outrider.kernels.narrow_weight import without_rounding
from outrider.models.kinds import building
from outrider.models.quantize import method_of
from outrider.native.engine import NativeForward
from outrider.runtime.attention_mask import Visibility
from outrider.runtime.cache import STRIDE
from outrider.runtime.lm import LM
from outrider.sampling.probs import is_finite

_VIEW = 2048  # places
_NUM_COMPARED = 4  # tokens
_LENGTH = 8
_LENGTH_WITH_STATES = 3 * STRIDE + 7  # puts the anchor some tokens before those compared
_BEHIND = 0, 5  # tokens by which rows of one forward are shorter: their anchors differ
_NUM_OTHERS = 3  # rows
# For equal products of equal shape: all known kernels give equal bits.
_TOLERANCE_OF_ROWS = 1e-6
_MOST_ALONE = 10.0  # times the error when fed among several
_LEAST_LOG_PROB = -20.0  # rarer tokens are not compared
_LEAST_SPREAD = 0.01  # nats, if hardly more than one token of each row is compared
_LONGEST_WINDOW = 4096
# Parameters times tokens. The first takes a CPU thread about a second in float32, two if a window is thousands of
# tokens long. The second is an estimate, not a measurement: 80 TFLOP, a fraction of a second for a GPU of some hundred
# TFLOP/s.
_MOST_WORK_OF_THREAD, _MOST_WORK_OF_CUDA = 2e10, 2e13
_WORK_OF_SCORE = 100  # of attention, in parameters: eager code writes and reads each several times


def probe(lm: LM) -> None:
    """Probe a model with a few tokens; and, if it has a sliding window, with a sequence longer than the window, if that
    takes at most a second or two. Activations are not rounded meanwhile, so that a small difference shows a fault.
    Raises UnsupportedModel."""
    with rounding_off(lm):
        _probe(lm)


def verify(lm: LM) -> str:
    """Compare a model that the native engine runs with Transformers' code over the same weights; return the line that
    tells so. Raises UnsupportedModel: the logits differ."""
    code = f"Transformers' {type(lm.model).__name__}"
    if not isinstance(lm.backend, NativeForward):
        return f"verified: {lm.name} runs in the code of {code} itself"
    try:
        probe(lm)
    except UnsupportedModel as error:
        remedy = "run it there (--execution eager)"
        raise UnsupportedModel(f"{lm.name} does not give the logits of {code}: {remedy}; {error}") from None
    return f"verified: {lm.name} gives the logits of {code}"


@contextmanager
def rounding_off(lm: LM) -> Iterator[None]:
    """Leave activations in float32 for a while, so that a small difference shows a fault."""
    native = lm.backend.without_rounding() if isinstance(lm.backend, NativeForward) else nullcontext()
    with without_rounding(lm.model), native:
        yield


def _told(lm: LM) -> str:
    return f"{lm.name} ({lm.model.config.model_type})"


def _probe(lm: LM) -> None:
    ignored = Visibility.of(lm.model).ignored_window or lm.context_len
    if ignored < lm.context_len:
        raise UnsupportedModel(
            f"{_told(lm)} states a window of {ignored} tokens that its modelling code does not apply, but its "
            "own cache does, so that its output depends on the cache: limit its context to the window "
            "(max_position_embeddings)"
        )
    if not lm.backend.is_batch_invariant:
        _compare_rows(lm)
    with _running(lm, " with a slot cache"):
        lm.layer_shapes  # noqa: B018 - the first look at its cache
    if lm.has_states:
        _compare_with_states(lm)
    else:
        # A wide view shows dependence on the number of places in view instead of positions.
        # Rows of different lengths if convolution inputs are stored, which padding must not spoil.
        has_windows = any(state.width for shape in lm.layer_shapes for state in shape.states)
        what = "its cache cannot be rolled back, or it sees later tokens"
        _compare(lm, _LENGTH, _VIEW, what, _BEHIND if has_windows else (0,))
    window = window_of(lm)
    length = min(lm.context_len, num_tokens_across(window))
    if 0 < window < length and window <= _LONGEST_WINDOW and _is_affordable(lm, length):
        _compare(lm, length, length, f"beyond its window of {window} tokens its attention differs")


def window_of(lm: LM) -> int:
    """Sliding window or chunk that the configuration states; 0 for none."""
    config, names = lm.model.config, ("sliding_window", "window_size", "attention_chunk_size")
    windows = [getattr(config.get_text_config(decoder=True), name, None) for name in names]
    return next((window for window in windows if isinstance(window, int)), 0)


def num_tokens_across(window: int) -> int:
    """Length of a sequence that reveals a wrong window: a few tokens beyond it, differences are hardly larger than
    rounding."""
    return window + window // 4 + 8


def _is_affordable(lm: LM, num_tokens: int) -> bool:
    is_cuda = lm.device.type == "cuda"
    most_work = _MOST_WORK_OF_CUDA if is_cuda else torch.get_num_threads() * _MOST_WORK_OF_THREAD
    config: Any = lm.model.config.get_text_config(decoder=True)
    num_heads = len(lm.layer_shapes) * (getattr(config, "num_attention_heads", None) or 1)
    num_parameters = sum(int(parameter.numel()) for parameter in lm.model.parameters())
    return num_tokens * (num_parameters + _WORK_OF_SCORE * num_heads * num_tokens) <= most_work


def _compare_with_states(lm: LM) -> None:
    """If a single token that continues from a state gets other logits than among several, feed it among several from
    now on; if several do not continue correctly, feed them one at a time."""
    alone = _error(lm, _LENGTH_WITH_STATES, _VIEW)
    lm.least_columns = 2
    among = _error(lm, _LENGTH_WITH_STATES, _VIEW)
    lm.is_stepped = not among <= _tolerance_of(lm)
    if lm.is_stepped or alone <= max(_MOST_ALONE * among, _TOLERANCE_OF_ROWS):
        lm.least_columns = 1
    if lm.is_stepped:
        _compare(lm, _LENGTH_WITH_STATES, _VIEW, "its states do not continue where they were left")
    _compare(lm, _LENGTH_WITH_STATES, _VIEW, "its states depend on other rows or on padding", _BEHIND)


def _compare(lm: LM, length: int, view_len: int, what: str, behind: Sequence[int] = (0,)) -> None:
    if not _error(lm, length, view_len, behind) <= _tolerance_of(lm):  # NaN fails too
        raise UnsupportedModel(f"{_told(lm)} cannot be used: {what}")


def _tolerance_of(lm: LM) -> float:
    # Others' quantized layers may round activations to 8 bits, where a last bit becomes a step as large as those of
    # bfloat16.
    return tolerance(torch.bfloat16 if method_of(lm.model.config) else lm.dtype)


@torch.inference_mode()
def _error(lm: LM, length: int, view_len: int, behind: Sequence[int] = (0,)) -> float:
    """Compare the last tokens of sequences, fed block by block with a rollback before them, to one forward without a
    cache: the difference relative to the spread of the log-probabilities. Each sequence is shorter than ``length`` by
    as many tokens as ``behind`` says."""
    length, view_len = min(length, lm.context_len), min(view_len, lm.context_len)
    begin = max(length // 2, length - _NUM_COMPARED)
    shorter = torch.tensor(behind, device=lm.device).clamp_max(max(begin - 1, 0))
    generator = torch.Generator().manual_seed(0)
    ids, wrong = torch.randint(lm.vocab_size, (2, len(behind), length), generator=generator).to(lm.device)
    columns = torch.arange(length, device=lm.device) - shorter[:, None]  # a row begins where its column is 0
    compared = columns[:, begin:]

    def feed(tokens: Tensor, begin: int, end: int, num_committed: int) -> Tensor:
        positions = columns[:, begin:end]
        logits = lm.forward(tokens.gather(1, positions), positions, cache, view_len, keeps_finite=True)
        cache.settle(num_committed - shorter)
        return logits

    with _running(lm, " with a slot cache"):
        cache = lm.new_cache(len(behind), view_len, is_sparse=True)
        num_kept = length - int(compared.min())
        full = lm.uncached(ids, num_kept)[:, -num_kept:, : lm.vocab_size]
        rows = torch.arange(len(behind), device=full.device)[:, None]
        want = full[rows, (compared - (length - num_kept)).to(full.device)]
        ends = begin - shorter
        lm.prefill(ids, torch.zeros_like(ends), ends, cache, latest=0, num_columns=begin)
        feed(wrong, begin, length, begin)  # rejected: the next block overwrites it
        bounds = sorted({begin, min(begin + 1, length), min(begin + 2, length), length})
        got = torch.cat([feed(ids, *block, block[1]) for block in pairwise(bounds)], dim=1)
    if not bool(is_finite(want).all()):
        return 0.0  # the loop reports broken weights, with the position
    return _difference(got, want) / _spread(want)


def _difference(got: Tensor, want: Tensor) -> float:
    """Root mean square difference in nats, over tokens with more than e^-20 in either. (The others share the remaining
    probability.) Infinite if different tokens are impossible, NaN if ``got`` is broken."""
    if not torch.equal(got.isneginf(), want.isneginf()):
        return math.inf
    left, right = (_log_probs(logits) for logits in (got, want))
    is_compared = (left > _LEAST_LOG_PROB) | (right > _LEAST_LOG_PROB)
    changes = left.clamp_min(_LEAST_LOG_PROB) - right.clamp_min(_LEAST_LOG_PROB)
    return float(changes[is_compared].square().mean().sqrt())


def _spread(logits: Tensor) -> float:
    """Standard deviation of log-probabilities over tokens with more than e^-20, estimated from their median distance
    to the median, so that outliers do not dominate it."""
    compared = _log_probs(logits)
    compared = compared.masked_fill(compared <= _LEAST_LOG_PROB, torch.nan)
    distances = (compared - compared.nanquantile(0.5, dim=-1, keepdim=True)).abs()
    return max(1.4826 * float(distances.nanmedian()), _LEAST_SPREAD)


def _log_probs(logits: Tensor) -> Tensor:
    return logits.cpu().double().log_softmax(dim=-1)  # not every device has float64


def _running(lm: LM, how: str = "") -> AbstractContextManager[None]:
    return building(f"{_told(lm)} cannot run{how}", lm.model.config, UnsupportedModel)


@torch.inference_mode()
def _compare_rows(lm: LM) -> None:
    """Change the last token of one row, and all of the others: the other logits must not change. (Kernels whose rows
    depend on each other fail here: one scale for all activations, or columns treated separately because one row has an
    outlier there.)"""
    length = min(_NUM_COMPARED, lm.context_len)
    generator = torch.Generator().manual_seed(0)
    ids, changed = torch.randint(lm.vocab_size, (2, 1 + _NUM_OTHERS, length), generator=generator).to(lm.device)
    changed[0, :-1] = ids[0, :-1]

    def logits(tokens: Tensor) -> Tensor:
        return lm.uncached(tokens)[0, : length - 1, : lm.vocab_size]

    with _running(lm):
        first, other = logits(ids), logits(changed)
        if length < 2 or torch.equal(first, other) or not bool(is_finite(first).all()):
            return
        # Some kernels add in a different order each time.
        noise = 4 * _difference(logits(ids), first)
    spread = _spread(first)
    config: Any = lm.model.config.get_text_config(decoder=True)
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "ffn_config")
    has_experts = any(getattr(config, name, None) for name in names)  # whose tokens' order depends on other rows
    by_rounding = (tolerance(lm.dtype) if has_experts else _TOLERANCE_OF_ROWS) * spread
    change = _difference(other, first)
    if not change <= max(by_rounding, noise) < math.inf:
        raise UnsupportedModel(
            f"{_told(lm)} gives a token other logits when later tokens or other rows change (by "
            f"{change / spread:.1e} of their spread), so that speculation cannot be exact: if it is quantized, choose "
            "weights only, or a scale for each row of activations"
        )


def tolerance(dtype: torch.dtype) -> float:
    """Relative error that rounding may explain; an architecture that cannot be rolled back errs by far more."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 0.1
