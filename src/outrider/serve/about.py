"""Lines of the log at the start, and the fingerprint of the texts of a server."""

from __future__ import annotations

import hashlib
from importlib.metadata import version

import torch
from torch import nn

from outrider.decoder import Decoder
from outrider.decoding.schedule import Schedule
from outrider.models.weights import portable_tensors
from outrider.runtime.lm import PROMISED
from outrider.system.resources import size_text
from outrider.text.chat import ends_text

_NUM_SAMPLED = 1024  # numbers of each weight
_NUM_ROWS = 16  # of a weight in blocks, from which they are taken


def same_bytes_of(decoder: Decoder) -> str:
    """Whether the same bytes are promised, in a word, and for which prompts."""
    promise = decoder.target.same_bytes
    return f"{promise}, but for images" if decoder.processor is not None and promise == PROMISED else promise


def fingerprint_of(decoder: Decoder) -> str:
    """Fingerprint under which equal seeds give equal output, up to rounding (docs/how-it-works/same-bytes.md).

    Weights are sampled: reading all of a large model's would delay the start by a minute.
    """
    target, drafter = decoder.target, decoder.drafter
    names = f"{target.name}+{drafter.name}"
    dtype = str(target.dtype).removeprefix("torch.")
    k = decoder.num_draft_tokens
    weights = [sample_of(lm.weights) for lm in (target, *drafter.models)]
    facts: tuple[object, ...] = version("outrider"), names, dtype, decoder.acceptance, k, target.execution.name, weights
    facts += (sorted(decoder.sampling_defaults.items()),) if decoder.sampling_defaults else ()
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
    return f"outrider-{facts[0]}-{names}-{dtype}-{decoder.acceptance}-k{k}-{digest}"


def sample_of(model: nn.Module) -> str:
    """SHA-256 over names, shapes and dtypes of all weights, and evenly spaced samples of their numbers."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}\n".encode())
        for stored in portable_tensors(weight.detach(), _NUM_ROWS):
            flat = stored.flatten()
            sample = flat[:: max(1, flat.numel() // _NUM_SAMPLED)].contiguous().cpu()
            digest.update(sample.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def startup_lines(decoder: Decoder, schedule: Schedule, num_slots: int, capacity: int) -> list[str]:
    """Lines for the log. ``capacity`` is the maximum of tokens of a sequence, prompt included."""
    lms = [decoder.target, *decoder.drafter.models]
    bytes_ = 0
    for lm in lms:
        length = lm.execution.round_length(capacity)
        bytes_ += sum(shape.bytes_per_token * (length + 1) + shape.bytes_per_row for shape in lm.layer_shapes)
    dtype = str(decoder.target.dtype).removeprefix("torch.")
    return [
        f"{num_slots} slots of {capacity} tokens: {size_text(bytes_)} each, {size_text(num_slots * bytes_)} in all, "
        f"for {' and '.join(lm.name for lm in lms)}",
        f"drafts by {decoder.drafter.name}, K = {decoder.num_draft_tokens} (at most {schedule.max_k}), acceptance "
        f"{decoder.acceptance}, {dtype}, {decoder.target.execution.name}, same bytes: "
        f"{same_bytes_of(decoder)}",
        ends_text(decoder.target.name, decoder.tokenizer, decoder.eos_ids, decoder.turn_ids),
    ]
