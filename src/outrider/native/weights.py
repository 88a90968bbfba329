"""Weights that a native plan names, and their addresses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.library import WEIGHT_TYPES
from outrider.kernels.narrow_weight import ExpertLayout, NarrowWeight
from outrider.kernels.structures import native
from outrider.native.plan import MatrixPlan, NormPlan, NotPlanned

_NORMS = {"rms": 1, "layer": 2}
_WHOLE_VECTOR = 16  # rows: parts of a matrix in blocks begin at multiples of this, on all processors


class Weights:
    """Parameters and stored buffers of a model by name, and their addresses."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._used: set[str] = set()
        self._made: list[Tensor] = []
        self._copies: dict[str, Tensor] = {}
        self.num_digits: set[int] = set()

    def matrix(self, plan: MatrixPlan) -> Any:
        return self.matrices(plan, 1).first

    def matrices(self, plan: MatrixPlan, number: int) -> Any:
        """Matrices of so many experts, or one of a layer."""
        weight = self._named(plan.weight)
        stored: Tensor = weight
        weight_type, scales = WEIGHT_TYPES.get(stored.dtype), None
        if isinstance(weight, NarrowWeight):
            stored, weight_type = weight.stored, WEIGHT_TYPES.get(weight.stored.dtype)
            scales = None if weight.scale is None else self.keep(weight.scale[:, 0].contiguous())
            layout = ExpertLayout(number, plan.num_parts if plan.is_transposed else None) if number > 1 else None
            if weight.order is not None or weight.experts != layout or plan.is_transposed and layout is None:
                raise NotPlanned(f"{plan.weight} has rows or columns in another order")
            if weight.blocks is not None:
                weight_type = weight.blocks.number
                self.num_digits.add(weight.blocks.num_digits)
        elif type(weight) not in (Tensor, torch.nn.Parameter):  # others' types state one type and store another
            raise NotPlanned(f"{plan.weight} is stored as {type(weight).__name__}")
        width = weight.shape[-2 if plan.is_transposed else -1]
        if plan.is_transposed and number > 1:
            stored = stored if isinstance(weight, NarrowWeight) else self._rows(plan.weight, plan, number)
        elif plan.is_transposed:
            stored = stored.detach().t().contiguous()
            weight.data = stored.t()  # of the same memory
        if weight_type is None or stored.device.type != "cpu" or not stored.is_contiguous():
            raise NotPlanned(f"{plan.weight} is stored as {stored.dtype} on {stored.device}")
        stored = self.keep(stored.detach().flatten(0, -2))
        if stored.numel() == 0 or len(stored) % (number * plan.num_parts):
            raise NotPlanned(f"{plan.weight} has {len(stored)} rows for {number} matrices of {plan.num_parts} parts")
        rows_per_expert, row_bytes = len(stored) // number, stored.stride(0) * stored.itemsize
        num_channels = rows_per_expert // plan.num_parts
        first = plan.part * num_channels
        if stored.dtype == torch.uint8 and plan.num_parts * number > 1 and num_channels % _WHOLE_VECTOR:
            raise NotPlanned(f"{plan.weight} has parts of {num_channels} rows, no multiple of {_WHOLE_VECTOR}")
        if plan.output_scales:
            counts, values = zip(*plan.output_scales, strict=True)
            if sum(counts[:-1]) > len(stored):
                raise NotPlanned(f"{plan.weight} has {len(stored)} rows for {sum(counts[:-1])} output scales")
            repeats = torch.tensor((*counts[:-1], len(stored) - sum(counts[:-1])))
            by_row = torch.tensor(values, dtype=torch.float32).repeat_interleave(repeats)
            scales = self.keep(by_row if scales is None else by_row * scales)
        scales_at = None if scales is None else scales.data_ptr() + first * scales.itemsize
        bias = None if plan.bias is None else self._bias(plan, number, rows_per_expert).data_ptr() + first * 4
        data = stored.data_ptr() + first * row_bytes
        matrix = native().Matrix(data, weight_type, num_channels, width, scales_at, bias)
        return native().ExpertMatrices(matrix, rows_per_expert, rows_per_expert * row_bytes)

    def _bias(self, plan: MatrixPlan, number: int, length: int) -> Tensor:
        assert plan.bias is not None
        bias = self.vector(plan.bias, *((length,) if number == 1 else (number, length)))
        return self._rows(plan.bias, plan, number) if plan.is_transposed and number > 1 else bias

    def _rows(self, name: str, plan: MatrixPlan, number: int) -> Tensor:
        """Copy of experts' rows, or biases, in the order of parts."""
        if name not in self._copies:
            layout = ExpertLayout(number, plan.num_parts)
            self._copies[name] = layout.rows(self._named(name).detach()).contiguous()
        return self._copies[name]

    def vector(self, name: str, *shape: int) -> Tensor:
        weight = self._named(name)
        if weight.ndim == len(shape) + 1 and len(weight) == 1:
            weight = self._parameters[name][0]
        is_plain = type(self._parameters[name]) in (Tensor, torch.nn.Parameter)
        if not is_plain or weight.dtype != torch.float32 or weight.shape != shape:
            raise NotPlanned(f"{name} is {type(weight).__name__} {tuple(weight.shape)} of {weight.dtype}")
        return self.keep(weight.detach().contiguous())

    def norm(self, plan: NormPlan | None, length: int) -> Any:
        if plan is None:
            return native().Norm(0, 0.0, None, None)
        weight = self.keep(torch.ones(length)) if plan.weight is None else self.vector(plan.weight, length)
        if plan.weight_offset or plan.factor != 1:
            weight = self.keep((weight + plan.weight_offset) * plan.factor)
        bias = None if plan.bias is None else self.vector(plan.bias, length).data_ptr()
        return native().Norm(_NORMS[plan.kind], plan.epsilon, weight.data_ptr(), bias)

    def check(self, beginning: str) -> None:
        """Raises NotPlanned: there are parameters of such names that the plan does not use."""
        used = {id(self._parameters[name]) for name in self._used}
        unused = [
            name for name, weight in self._parameters.items() if name.startswith(beginning) and id(weight) not in used
        ]
        if unused:
            raise NotPlanned(f"its plan does not know {unused[0]}")

    def _named(self, name: str) -> Tensor:
        if name not in self._parameters:
            raise NotPlanned(f"it has no {name}")
        self._used.add(name)
        return self._parameters[name]

    def keep(self, tensor: Tensor) -> Tensor:
        """Keep a tensor alive for as long as the weights."""
        self._made.append(tensor)
        return tensor
