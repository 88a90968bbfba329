"""Checkpoints of MLX: matrices in groups, and names and numbers of its own, undone here.

A quantized layer has words of 32 bits in ``weight`` [O, I * bits / 32], filled from the lowest bit on with integers of
1 to 8 bits, and for each group of inputs one of ``scales`` [O, I / group]. By mode, a number is

| mode | number | scale |
|---|---|---|
| affine | integer * scale + bias, of ``biases`` | of the checkpoint's type |
| mxfp4, mxfp8 | e2m1 or e4m3 * scale | e8m0 |
| nvfp4 | e2m1 * scale | e4m3 |

Affine groups of up to four bits stay in blocks of Q4_1, those of five in Q5_1, where float16 holds scales and biases
exactly; others are widened. The experts of a layer are one tensor for each of their matrices.

Sources: documentation of MLX 0.32 (``mlx.core.quantize``); mlx-lm 0.32: ``sanitize`` of its models, which renames and
changes weights, and ``_quantize`` in utils.py; mlx-vlm: speculative/drafters/qwen3_5_mtp.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import ModelCorrupt, UnsupportedModel
from outrider.kernels.blocks import BLOCK_FORMS, BlockForm
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models.cpu_weights import StoredWeights, files_of, is_large, large_weights
from outrider.models.groups import tensors_in
from outrider.models.memory import skeleton
from outrider.models.quantize import mlx_settings, plain_config
from outrider.models.registry import ModelSpec

_LOG = logging.getLogger(__name__)
_MODES: dict[str, tuple[int, int] | None] = {"affine": None, "mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
_BITS = (1, 2, 3, 4, 5, 6, 8)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_Q4_1, _Q5_1 = BLOCK_FORMS[3], BLOCK_FORMS[7]
# Types of models whose weights are those of Transformers, but for what is undone here.
_SHIFTED = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")  # norms are larger by 1
_KNOWN = (
    *("gemma", "gemma2", "gemma3_text", "glm4", "granite", "lfm2", "llama", "ministral3", "mistral", "olmo2", "phi3"),
    *("qwen2", "qwen3", "qwen3_moe", "smollm3", "starcoder2", *_SHIFTED),
)
_SHIFTED_NORMS = ("norm.weight", "layernorm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
_OF_IMAGES = ("vision_tower.", "visual.", "multi_modal_projector.", "model.visual.")
_EXPERTS = re.compile(r"(.+)\.switch_mlp\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True, slots=True)
class MlxMatrix:
    """Matrix [..., O, I] in groups.

    Attributes:
        words: of 32 bits. [..., O, I * bits / 32]
        scales: [..., O, I / group]
        biases: likewise; None but in the mode affine.
        mode: see the module.
    """

    words: Tensor
    scales: Tensor
    biases: Tensor | None
    bits: int
    mode: str

    @property
    def width(self) -> int:
        return self.words.shape[-1] * 32 // self.bits

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.words.shape[:-1], self.width)

    def wholes(self) -> Tensor:
        """The integers. uint8 [..., O, I]"""
        data = self.words.contiguous().view(torch.uint8)
        if 8 % self.bits == 0:
            parts: Tensor = data[..., None] >> torch.arange(0, 8, self.bits, dtype=torch.uint8)
            masked: Tensor = parts & 2**self.bits - 1
            return masked.flatten(-2)
        eights = data.unflatten(-1, (-1, self.bits)).long()  # the bytes of eight integers
        joined: Tensor = (eights << 8 * torch.arange(self.bits)).sum(-1, keepdim=True)
        wholes: Tensor = joined >> self.bits * torch.arange(8) & 2**self.bits - 1
        return wholes.to(torch.uint8).flatten(-2)

    def numbers(self) -> Tensor:
        """The numbers. float32 [..., O, I]"""
        wholes, size = self.wholes(), self.width // self.scales.shape[-1]
        if self.mode == "affine":
            assert self.biases is not None
            scales, values = self.scales.float(), wholes.float()
        else:
            scales = self.scales.view(torch.float8_e4m3fn).float() if self.mode == "nvfp4" else _powers(self.scales)
            values = wholes.view(torch.float8_e4m3fn).float() if self.bits == 8 else _of_e2m1(wholes)
        groups: Tensor = values.unflatten(-1, (-1, size)) * scales[..., None]
        numbers: Tensor = groups if self.biases is None else groups + self.biases.float()[..., None]
        return numbers.flatten(-2)

    def form(self) -> BlockForm | None:
        """Form of blocks that holds the matrix exactly; None if none does."""
        size = self.width // self.scales.shape[-1]
        if self.mode != "affine" or self.bits > 5 or self.words.ndim != 2 or self.biases is None or size % 32:
            return None
        is_exact = all(torch.equal(one.half().float(), one.float()) for one in (self.scales, self.biases))
        return (_Q4_1 if self.bits <= 4 else _Q5_1) if is_exact else None

    def weight(self, form: BlockForm, empty_like: Callable[[Tensor], Tensor] = torch.empty_like) -> NarrowWeight:
        """The matrix in blocks of this form (``NarrowWeight.of_blocks``). A group may become several."""
        assert self.biases is not None
        wholes = self.wholes().unflatten(-1, (-1, 2, 16))  # [O, blocks, 2, 16]
        repeats = wholes.shape[1] // self.scales.shape[1]
        halves = [
            one.half().repeat_interleave(repeats, 1)[..., None].view(torch.uint8) for one in (self.scales, self.biases)
        ]
        low, high = wholes.unbind(2)
        parts = [*halves, (low & 15) | high << 4]
        if self.bits > 4:
            fifths = (wholes >> 4).flatten(-2).unflatten(-1, (4, 8)) << torch.arange(8, dtype=torch.uint8)
            parts.insert(2, fifths.sum(-1, dtype=torch.uint8))
        return NarrowWeight.of_blocks(torch.cat(parts, -1).flatten(1), form, None, empty_like)


def _powers(exponents: Tensor) -> Tensor:
    """Scales of e8m0."""
    return torch.exp2(exponents.float() - 127)


def _of_e2m1(codes: Tensor) -> Tensor:
    values = torch.tensor(_E2M1)
    return torch.cat((values, -values))[codes.long()]


def _matrices(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], name: str
) -> Iterator[tuple[str, Tensor | MlxMatrix]]:
    """Weights of a checkpoint by MLX's own names, matrices in groups as such.

    Args:
        settings: of its groups, those of single layers among them; empty if nothing is quantized.
        name: for errors.

    Raises:
        ModelCorrupt: settings and tensors do not agree.
        UnsupportedModel: a mode is not known here.
    """
    for key, tensor in tensors.items():
        layer, _, part = key.rpartition(".")
        if f"{layer}.scales" not in tensors:
            yield key, tensor
        elif part == "weight":
            own = settings.get(layer, settings)
            own = settings if not isinstance(own, Mapping) else own
            mode, bits, size = own.get("mode", "affine"), own.get("bits"), own.get("group_size")
            if mode not in _MODES or bits not in _BITS:
                raise UnsupportedModel(
                    f"{name}: {layer} is in groups of the mode {mode} with {bits} bits: unknown here"
                )
            found = MlxMatrix(tensor, tensors[f"{layer}.scales"], tensors.get(f"{layer}.biases"), bits, mode)
            is_fitting = (found.biases is not None) == (mode == "affine") and _MODES[mode] in (None, (bits, size))
            if not is_fitting or found.scales.shape != (*found.shape[:-1], found.width // (size or 1)):
                raise ModelCorrupt(f"{name}: the groups of {layer} are not those that its config.json states")
            yield key, found
        elif part not in ("scales", "biases"):
            yield key, tensor


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a parameter is in a checkpoint.

    Attributes:
        parts: joined along their rows if there are several.
        less: its numbers are larger by this.
        moves: its last two dimensions are in the other order.
    """

    parts: tuple[Tensor | MlxMatrix, ...]
    less: float = 0.0
    moves: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        *outer, number, width = (1, *self.parts[0].shape)
        shape = (*outer[1:], number * len(self.parts), width) if len(outer) else (width,)
        return (*shape[:-2], shape[-1], shape[-2]) if self.moves else shape

    def numbers(self) -> Tensor:
        """The parameter, float32 if its numbers are real."""
        parts = [one.numbers() if isinstance(one, MlxMatrix) else one for one in self.parts]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, -2)
        wide = joined.float() - self.less if joined.is_floating_point() else joined
        return wide.transpose(-1, -2).contiguous() if self.moves else wide


def mlx_weights(
    spec: ModelSpec, config: Any, settings: Mapping[str, Any], bare: nn.Module, *, keeps: bool, num_digits: int
) -> StoredWeights:
    """The weights of a checkpoint.

    Args:
        config: of the model.
        settings: of its groups (``mlx_settings``).
        bare: the skeleton.
        keeps: whether matrices may stay in blocks; else all are widened.
        num_digits: of the integers to which rows are rounded before products (``BlockForm``).

    Raises:
        UnsupportedModel: MLX's form of this model, or of a weight, is not known here.
        ModelCorrupt: a weight is missing, or does not fit.
    """
    if config.model_type not in _KNOWN:
        known = ", ".join(_KNOWN)
        raise UnsupportedModel(f"{spec.name}: MLX's form of {config.model_type} models is not read: {known} are")
    parameters = dict(bare.named_parameters(remove_duplicate=False))
    found = _sources(spec, config, settings, parameters)
    shared = {parameters[name] for name in found}
    if missing := sorted(name for name, one in parameters.items() if one not in shared):
        raise ModelCorrupt(f"{spec.name} lacks {len(missing)} of the model's weights, {missing[0]} among them")
    large = large_weights(bare) if keeps else {}
    forms: dict[str, BlockForm] = {}
    widened = []
    for name in sorted(found.keys() & large.keys()):
        part = found[name].parts[0]  # of experts there may be two, and no form
        if isinstance(part, MlxMatrix) and (form := part.form()) is not None:
            forms[name] = replace(form, num_digits=num_digits)
        elif isinstance(part, MlxMatrix):
            widened.append(f"{name} ({part.mode}, {part.bits} bits)")
    if widened:
        _LOG.warning("%s: %d matrices are widened, %s among them", spec.name, len(widened), widened[0])
    kept = {name: form.num_bytes * parameters[name].numel() // form.num_numbers for name, form in forms.items()}

    def read(name: str, empty_like: Callable[[Tensor], Tensor]) -> Tensor:
        part = found[name].parts[0]
        return (
            part.weight(forms[name], empty_like)
            if name in forms and isinstance(part, MlxMatrix)
            else found[name].numbers()
        )

    return StoredWeights(kept, frozenset(found.keys() - kept.keys()), read)


def mlx_numbers(spec: ModelSpec, config: Any, settings: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights of a checkpoint, widened; names are those in the model."""
    with torch.device("meta"):
        bare = skeleton(plain_config(config), dtype)
    found = mlx_weights(spec, config, settings, bare, keeps=False, num_digits=0).read_all()
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in found.items()}


def _sources(
    spec: ModelSpec, config: Any, settings: Mapping[str, Any], parameters: Mapping[str, Tensor]
) -> dict[str, _Source]:
    """Sources of parameters, by name; of shared ones, under one of their names."""
    found = {}
    is_shifted = config.model_type in _SHIFTED
    for name, source in _named(tensors_in(files_of(spec)), settings, spec.name, is_shifted=is_shifted).items():
        if name not in parameters:
            if name.startswith(_OF_IMAGES):  # the model is that of text alone
                continue
            raise UnsupportedModel(
                f"{spec.name} has a weight {name}, for which {config.model_type} models have no place"
            )
        expected = tuple(parameters[name].shape)
        if source.shape != expected and len(expected) == 3:  # of a convolution
            source = replace(source, moves=True)
        if source.shape != expected:
            raise ModelCorrupt(f"{spec.name}: {name} has the shape {list(source.shape)}, not {list(expected)}")
        found[name] = source
    return found


def _named(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], name: str, *, is_shifted: bool
) -> dict[str, _Source]:
    """Sources of parameters, by Transformers' names."""
    parts: dict[str, list[tuple[str, Tensor | MlxMatrix]]] = {}
    for key, value in _matrices(tensors, settings, name):
        own = key.removeprefix("language_model.")
        if (experts := _EXPERTS.fullmatch(own)) is not None:
            own = f"{experts[1]}.experts.{'down_proj' if experts[2] == 'down' else 'gate_up_proj'}"
        parts.setdefault(own, []).append((key, value))
    return {
        own: _Source(
            tuple(value for _, value in sorted(some, key=itemgetter(0))),  # a gate before "up"
            1.0 if is_shifted and own.endswith(_SHIFTED_NORMS) and "linear_attn" not in own else 0.0,
        )
        for own, some in parts.items()
    }


def mlx_head(
    stated: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str, num_digits: int | None
) -> dict[str, Tensor]:
    """Weights of a head as in other layouts; as they are if its config.json is not MLX's.

    Args:
        stated: its config.json.
        num_digits: of the integers to which rows are rounded before products with blocks; None to widen all matrices.

    Raises:
        UnsupportedModel, ModelCorrupt: see ``_matrices``.
    """
    settings, is_mtp = mlx_settings(stated), stated.get("model_type") == "qwen3_5_mtp"
    if settings is None and not is_mtp:
        return dict(tensors)
    found: dict[str, Tensor] = {}
    for key, source in _named(tensors, settings or {}, name, is_shifted=is_mtp).items():
        first = source.parts[0]
        form = first.form() if isinstance(first, MlxMatrix) and is_large(source.shape) else None
        is_kept = form is not None and num_digits is not None and len(source.parts) == 1
        if isinstance(first, MlxMatrix) and form is not None and is_kept:
            found[key] = first.weight(replace(form, num_digits=num_digits or 0))
        else:
            found[key] = first if isinstance(first, Tensor) and not first.is_floating_point() else source.numbers()
    return found
