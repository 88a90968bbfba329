"""Which tokens a draft with few tokens drafts: the most frequent ones, by a file of outputs or by their ids.

Tokenizers number tokens in the order in which their training found them, so that low ids are frequent: merges of BPE,
scores of Unigram. Counts of the target's own outputs are better (``outrider generate --output`` writes these).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outrider.drafters.corpus import OUTPUTS, read_sequences
from outrider.drafters.draft_options import DraftOptions
from outrider.errors import OptionError
from outrider.models.few_tokens import with_few_tokens
from outrider.runtime.lm import LM


def with_vocab(
    lm: LM,
    options: DraftOptions,
    tokenizer: Any | None,
    end_ids: Iterable[int],
    quantization: str | None = None,
) -> tuple[LM, DraftOptions]:
    """A draft with the tokens that ``options.vocab`` states, and the other options. Its name states them, too, a file
    by the digest of its tokens. Raises OptionError, FileError, UnsupportedModel.

    Args:
        lm: a model with the target's vocabulary, or a head whose execution is not chosen yet.
        tokenizer: the target's; None if it has none.
        end_ids: tokens that are always among them.
        quantization: of the model's weights.
    """
    if not options.vocab:
        return lm, options
    number, path = options.vocab_parts
    size = lm.vocab_size
    if number is not None and number >= size:
        raise OptionError("vocab of the draft", number, f"fewer than the {size} tokens of the target, or leave it out")
    label = str(number)
    if path is None:
        ids = torch.arange(number or 0)
    else:
        sequences = read_sequences([Path(path)], tokenizer, size, OUTPUTS)
        counts = torch.bincount(torch.tensor([i for ids in sequences for i in ids]), minlength=size)
        order = counts.argsort(descending=True, stable=True)  # of equally frequent ones the lower id first
        ids = order[: int((counts > 0).sum()) if number is None else number]
    ids = torch.cat((ids, torch.tensor([*end_ids], dtype=torch.long))).unique()
    if path is not None:
        label = f"{len(ids)}@{hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:8]}"
    return with_few_tokens(lm, ids, quantization).with_name(f"{lm.name}:vocab={label}"), replace(options, vocab="")
