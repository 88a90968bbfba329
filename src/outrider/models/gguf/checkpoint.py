"""Checkpoints in GGUF files: configuration, tokenizer and weights, large matrices in the file's own blocks
(kernels/blocks.py) where they may stay there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.kernels.blocks import BLOCK_FORMS
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models.block_weights import BlockWeights
from outrider.models.gguf.families import stated_model
from outrider.models.gguf.file import GgufFile, shards_of
from outrider.models.gguf.weights import Source, sources
from outrider.models.memory import skeleton
from outrider.models.quantize import require_packages
from outrider.models.registry import ModelSpec


def gguf_file(spec: ModelSpec) -> GgufFile:
    """The file of a checkpoint, all its shards at hand. Raises ModelNotFound, ModelCorrupt, MissingExtra."""
    assert spec.gguf is not None
    require_packages("gguf", spec.gguf)
    if spec.path is not None:
        return GgufFile.open(spec.path / spec.gguf)
    from huggingface_hub import hf_hub_download

    files = [Path(hf_hub_download(str(spec.hub), str(shard))) for shard in shards_of(Path(spec.gguf))]
    return GgufFile.open(files[0])


def gguf_config(spec: ModelSpec) -> Any:
    """Transformers' configuration of a checkpoint. Raises UnsupportedModel, ModelCorrupt."""
    return stated_model(gguf_file(spec), spec.name).config


def gguf_numbers(spec: ModelSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights of a checkpoint, widened; names are those in the model."""
    from transformers.utils.logging import tqdm  # whose bars can be switched off

    file = gguf_file(spec)
    model = stated_model(file, spec.name)
    with torch.device("meta"):
        bare = skeleton(model.config, dtype)
    found = tqdm(sources(file, model, bare, spec.name).items(), desc="Reading tensors")
    return {name: source.numbers().to(dtype) for name, source in found}


def gguf_weights(
    spec: ModelSpec, bare: nn.Module, large: Iterable[str], num_digits: int = 0, config: Any | None = None
) -> BlockWeights:
    """Find the matrices of a GGUF file that can stay in its blocks. They remain in the file until they are loaded.

    Args:
        bare: the skeleton.
        large: names of matrices that may stay in blocks.
        num_digits: of the integers to which rows are rounded before products (``BlockForm``).
        config: that of this file, if it was made before.
    """
    file = gguf_file(spec)
    found = sources(file, stated_model(file, spec.name, config), bare, spec.name)
    matrices = [name for name in large if _stays(found.get(name))]
    forms = {
        name: replace(BLOCK_FORMS[found[name].tensors[0].kind], num_digits=num_digits) for name in sorted(matrices)
    }

    def matrix(name: str, empty_like: Callable[[Tensor], Tensor]) -> NarrowWeight:
        source = found[name]
        rows = torch.from_numpy(source.tensors[0].raw())
        return NarrowWeight.of_blocks(
            rows if source.order is None else rows[source.order], forms[name], empty_like=empty_like
        )

    def without_bytes(name: str) -> NarrowWeight:
        stored = torch.empty(found[name].tensors[0].stored_shape, dtype=torch.uint8, device="meta")
        return NarrowWeight(stored, torch.float32, None, forms[name])

    kept = {name: without_bytes(name) for name in forms}
    return BlockWeights(kept, frozenset(found.keys() - kept.keys()), matrix, lambda name: found[name].numbers())


def _stays(source: Source | None) -> bool:
    """Whether a matrix is one tensor in blocks, whose rows are whole."""
    if source is None or source.change is not None or len(source.tensors) > 1:
        return False
    return source.tensors[0].kind in BLOCK_FORMS
