"""What kernels/rounded_rows.h makes of rows, in PyTorch."""

import torch
from torch import Tensor
from torch.nn import functional

MOST_INTEGER = {1: 127.0, 2: 127.0 * 128}  # by the number of digits


def rounded(x: Tensor, num_digits: int = 1) -> Tensor:
    """Rows of integers of so many digits times a scale for each 32 of them, as in rounded_rows.h. [..., I]"""
    groups = functional.pad(x, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    most, largest = groups.abs().amax(-1, keepdim=True), MOST_INTEGER[num_digits]
    # Not largest / most: that is the product with the reciprocal, which is rounded twice.
    inverse = torch.where(most < 1e-30, 0.0, torch.full_like(most, largest) / most)
    wholes = torch.round(groups * inverse)
    result: Tensor = (wholes * (most / largest)).flatten(-2)[..., : x.shape[-1]]
    return result
