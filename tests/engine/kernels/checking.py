"""Comparison of kernels."""

import torch
from torch import Tensor

ROUNDING = {torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 5e-3}
"""The largest relative error of a result that was rounded twice to a dtype."""


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Return the norm of the error over the norm of the expected values; NaN if any value is NaN."""
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw normal numbers without zeros."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(numbers == 0, 1.0, numbers).to(dtype)
