"""Parts of a matrix that is fused: each has the rows, the scales and the biases that are its own."""

from ctypes import c_float, c_int8

import torch
from torch import nn

from outrider.kernels.narrow_weight import NarrowWeight
from outrider.native.plan import MatrixPlan
from outrider.native.weights import Weights


def test_a_part_has_its_own_rows_scales_and_biases() -> None:
    """As of Phi's gate_up_proj in 8 bits."""
    stored, scales = torch.arange(16, dtype=torch.int8).view(4, 4), torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    weight = nn.Parameter(NarrowWeight(stored, torch.float32, scales), requires_grad=False)
    weights = Weights({"weight": weight, "bias": nn.Parameter(torch.tensor([5.0, 6.0, 7.0, 8.0]))})
    for part, (rows, own, biases) in enumerate(
        ((range(8), [1.0, 2.0], [5.0, 6.0]), (range(8, 16), [3.0, 4.0], [7.0, 8.0]))
    ):
        matrix = weights.matrix(MatrixPlan("weight", "bias", part=part, num_parts=2))
        assert [*(c_float * 2).from_address(matrix.scales)] == own
        assert [*(c_float * 2).from_address(matrix.bias)] == biases
        assert [*(c_int8 * 8).from_address(matrix.data)] == [*rows]
