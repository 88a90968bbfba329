"""Weights of GGUF files that stay in the file's own blocks (kernels/blocks.py).

Transformers widens a file whole. Here, its large matrices are taken as they are, and all else is widened as
Transformers does it: names of tensors, and what a file stores otherwise than Transformers does, come from its own
tables. For the architectures in ``_ARCHITECTURES`` the latter concerns rows of matrices alone (Llama's queries and keys
are in another order), and so may be applied to rows of blocks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from outrider.kernels.blocks import BLOCK_FORMS, BlockForm
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models.cpu_weights import narrow_layers
from outrider.models.memory import skeleton
from outrider.models.registry import ModelSpec

_LOG = logging.getLogger(__name__)
_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """Weights of a GGUF file.

    Attributes:
        tensors: of the package ``gguf``, by their names in the model.
        kept: forms of the matrices that stay in blocks, by the same names.
        processor: of Transformers, for the file's conventions.
    """

    tensors: dict[str, Any]
    kept: dict[str, BlockForm]
    processor: Any

    def predict(self, bare: nn.Module) -> None:
        """Give a skeleton these matrices, without their bytes."""
        for name, form in self.kept.items():
            shape = self.tensors[name].data.shape
            _set(
                bare,
                name,
                NarrowWeight(torch.empty(shape, dtype=torch.uint8, device="meta"), torch.float32, None, form),
            )

    def load(self, config: Any) -> tuple[Any, list[str]]:
        """Load the model, in float32 but for these matrices; they remain in the file, as memory that the system reads.

        Returns:
            The model, and names of weights that are missing in the file.
        """
        from accelerate import init_empty_weights

        with init_empty_weights(include_buffers=False):
            model = skeleton(config, torch.float32)
        for name in self.kept:
            _set(model, name, self._matrix(name))
        others = self.tensors.keys() - self.kept.keys()
        model.load_state_dict({name: self._widened(name) for name in others}, strict=False, assign=True)
        model.tie_weights()
        return model, sorted(name for name, weight in model.named_parameters() if weight.is_meta)

    def _matrix(self, name: str) -> NarrowWeight:
        rows = self._as_transformers_has_it(name, self.tensors[name].data)
        return NarrowWeight(torch.from_numpy(rows), torch.float32, None, self.kept[name])

    def _widened(self, name: str) -> torch.Tensor:
        from gguf import dequantize

        tensor = self.tensors[name]
        numbers = self._as_transformers_has_it(name, dequantize(tensor.data, tensor.tensor_type))
        return torch.from_numpy(np.array(numbers, dtype=np.float32))

    def _as_transformers_has_it(self, name: str, numbers: Any) -> Any:
        return self.processor.process(weights=numbers, name=self.tensors[name].name).weights


def block_weights(spec: ModelSpec, bare: nn.Module, rounds: bool = False) -> BlockWeights | None:
    """Find the matrices of a GGUF file that can stay in its blocks; None if there are none.

    Args:
        bare: the skeleton.
        rounds: whether rows are rounded to 8 bits before they are multiplied with them.
    """
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
    from transformers.utils import cached_file

    # PyTorch takes writable memory only: "c" is a private copy of each page that is written to, and none is.
    reader = GGUFReader(str(cached_file(spec.location, spec.gguf)), "c")
    architecture = _field(reader, "general.architecture")
    if architecture not in _ARCHITECTURES:
        _LOG.info("%s is widened: blocks are read for %s", spec.name, ", ".join(_ARCHITECTURES))
        return None
    heads = {"num_attention_heads": "head_count", "num_key_value_heads": "head_count_kv"}
    stated = {name: _field(reader, f"{architecture}.attention.{key}") for name, key in heads.items()}
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=stated)
    names = get_gguf_hf_weights_map(bare, processor)
    tensors = {names[tensor.name]: tensor for tensor in reader.tensors if tensor.name in names}
    matrices = tensors.keys() & {f"{name}.weight" for name in narrow_layers(bare)}
    forms = {name: BLOCK_FORMS.get(int(tensors[name].tensor_type)) for name in matrices}
    kept = {name: replace(form, rounds=rounds) for name, form in sorted(forms.items()) if form is not None}
    return BlockWeights(tensors, kept, processor) if kept else None


def _field(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _set(model: nn.Module, name: str, weight: NarrowWeight) -> None:
    """Set a weight, wherever it is shared."""
    shared, parameter = model.get_parameter(name), nn.Parameter(weight, requires_grad=False)
    if weight.shape != shared.shape:
        raise ValueError(f"the shape of {name} does not fit its configuration")
    for module in model.modules():
        for own, one in module.named_parameters(recurse=False, remove_duplicate=False):
            if one is shared:
                setattr(module, own, parameter)
