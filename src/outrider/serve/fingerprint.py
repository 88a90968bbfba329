"""Everything that determines a seed's output, as one string (``system_fingerprint``)."""

from __future__ import annotations

import hashlib
from importlib.metadata import version

import torch
from torch import Tensor, nn

from outrider.decoder import Decoder
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.runtime.tensor_parts import stored_tensors

_NUM_SAMPLED = 1024  # numbers of each weight
_NUM_ROWS = 16  # of a weight in blocks, from which they are taken


def fingerprint_of(decoder: Decoder) -> str:
    """Fingerprint under which equal seeds give equal output, up to rounding (docs/internals/numerics.md).

    Weights are sampled: reading all of a large model's would delay the start by a minute.
    """
    target, drafter = decoder.target, decoder.drafter
    names = f"{target.name}+{drafter.name}"
    dtype = str(target.dtype).removeprefix("torch.")
    k = decoder.num_draft_tokens
    weights = [sample_of(lm.model) for lm in (target, *drafter.models)]
    facts: tuple[object, ...] = version("outrider"), names, dtype, decoder.acceptance, k, target.execution.name, weights
    if decoder.sampling_defaults:
        facts = *facts, sorted(decoder.sampling_defaults.items())
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
    return f"outrider-{facts[0]}-{names}-{dtype}-{decoder.acceptance}-k{k}-{digest}"


def sample_of(model: nn.Module) -> str:
    """SHA-256 over names, shapes and dtypes of all weights, and evenly spaced samples of their numbers."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}\n".encode())
        for stored in _sampled(weight.detach()):
            flat = stored.flatten()
            sample = flat[:: max(1, flat.numel() // _NUM_SAMPLED)].contiguous().cpu()
            digest.update(sample.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sampled(weight: Tensor) -> list[Tensor]:
    """Tensors with the numbers of a weight; some rows of one in blocks, whose order in memory depends on the
    processor."""
    if isinstance(weight, NarrowWeight) and weight.blocks is not None:
        return [weight.stored_rows(torch.arange(0, len(weight), max(1, len(weight) // _NUM_ROWS)))]
    return stored_tensors(weight)
