"""How kernels are compared."""

import torch
from torch import Tensor

ROUNDING = {torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 5e-3}
"""How far a result that was rounded twice to a dtype may be from the exact one, as a relative error."""


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """The norm of what is wrong over the norm of what is right; not a number where anything is not one."""
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, none of them zero."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(numbers == 0, 1.0, numbers).to(dtype)
