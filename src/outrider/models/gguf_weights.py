"""Weights of GGUF files that stay in the file's own blocks (kernels/blocks.py).

Transformers widens a file whole. Here, its large matrices are taken as they are, and all else is widened as
Transformers does it: names of tensors, and what a file stores otherwise than Transformers does, come from its own
tables. For the architectures in ``_ARCHITECTURES`` the latter concerns rows of matrices alone (Llama's queries and keys
are in another order), and so may be applied to rows of blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outrider.kernels.blocks import BLOCK_FORMS
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models.block_weights import BlockWeights
from outrider.models.cpu_weights import narrow_layers
from outrider.models.registry import ModelSpec

_LOG = logging.getLogger(__name__)
_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")


def gguf_weights(spec: ModelSpec, bare: nn.Module, rounds: bool = False) -> BlockWeights | None:
    """Find the matrices of a GGUF file that can stay in its blocks; None if there are none. They remain in the file
    until they are loaded.

    Args:
        bare: the skeleton.
        rounds: whether rows are rounded to 8 bits before they are multiplied with them.
    """
    from gguf import dequantize
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
    from transformers.utils import cached_file

    from outrider.models.gguf_reader import FastReader

    file = str(cached_file(spec.location, spec.gguf))
    reader = FastReader(file)
    architecture = _field(reader, "general.architecture")
    if architecture not in _ARCHITECTURES:
        _LOG.info("%s is widened: blocks are read for %s", spec.name, ", ".join(_ARCHITECTURES))
        return None
    heads = {"num_attention_heads": "head_count", "num_key_value_heads": "head_count_kv"}
    stated = {name: _field(reader, f"{architecture}.attention.{key}") for name, key in heads.items()}
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=stated)
    # Without its parts: the whole has all names, and the table of names is made anew, in 10 ms, for each part.
    whole = SimpleNamespace(config=bare.config, state_dict=bare.state_dict, named_children=lambda: ())
    names = get_gguf_hf_weights_map(whole, processor)
    tensors = {names[tensor.name]: tensor for tensor in reader.tensors if tensor.name in names}
    matrices = tensors.keys() & {f"{name}.weight" for name in narrow_layers(bare)}
    forms = {name: BLOCK_FORMS.get(int(tensors[name].tensor_type)) for name in matrices}
    kept = {name: replace(form, rounds=rounds) for name, form in sorted(forms.items()) if form is not None}
    if not kept:
        return None

    def as_transformers_has_it(name: str, numbers: Any) -> Any:
        return processor.process(weights=numbers, name=tensors[name].name).weights

    def matrix(name: str, empty_like: Callable[[Tensor], Tensor]) -> NarrowWeight:
        # PyTorch takes writable memory only: "c" is a private copy of each page that is written to, and none is.
        data, begin = tensors[name].data, int(tensors[name].data_offset)
        rows = as_transformers_has_it(name, np.memmap(file, data.dtype, "c", begin, data.shape))
        return NarrowWeight.of_blocks(torch.from_numpy(rows), kept[name], empty_like=empty_like)

    def numbers(name: str) -> Tensor:
        tensor = tensors[name]
        wide = as_transformers_has_it(name, dequantize(tensor.data, tensor.tensor_type))
        return torch.from_numpy(np.array(wide, dtype=np.float32))

    bytes_of = {name: torch.empty(tensors[name].data.shape, dtype=torch.uint8, device="meta") for name in kept}
    without_bytes = {name: NarrowWeight(bytes_of[name], torch.float32, None, form) for name, form in kept.items()}
    return BlockWeights(without_bytes, frozenset(tensors.keys() - kept.keys()), matrix, numbers)


def _field(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()
