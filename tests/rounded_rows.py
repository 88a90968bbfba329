"""What kernels/rounded_rows.h makes of rows, in PyTorch."""

import torch
from torch import Tensor
from torch.nn import functional


def rounded(x: Tensor) -> Tensor:
    """Rows whose numbers are integers of 8 bits times a scale for each 256 of them, as in rounded_rows.h. [..., I]"""
    chunks = functional.pad(x, (0, -x.shape[-1] % 256)).unflatten(-1, (-1, 256))
    most = chunks.abs().amax(-1, keepdim=True)
    # Not 127 / most: that is the product with the reciprocal, which is rounded twice.
    inverse = torch.where(most < 1e-30, 0.0, torch.full_like(most, 127) / most)
    wholes = torch.round(chunks * inverse)
    result: Tensor = (wholes * (most / 127)).flatten(-2)[..., : x.shape[-1]]
    return result
