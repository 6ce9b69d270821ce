"""Run a model's code on tensors without memory, where only shapes count."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten


class ShapeRun(TorchDispatchMode):
    """Answers the operators that read the numbers of a tensor on the device `meta`, which has none.

    A single number that the code asks for is `number`, and no element is other than zero. Rotary embeddings that grow
    with the longest position ask for one number, mixtures of experts for the experts that some token chose. Shapes of
    grouped products: [T, K] by [experts, K, N] gives [T, N].
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],  # Any: of an operator
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return what an operator returns."""
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.device.type == "meta":
            if func is _aten._local_scalar_dense.default:
                return float(self._number) if first.dtype.is_floating_point else self._number
            if func is _aten.nonzero.default:
                return torch.empty((0, first.dim()), dtype=torch.int64, device="meta")
            if func is _aten._grouped_mm.default and first.dim() == 2:  # on `meta` it is defined for bfloat16 only
                return first.new_empty((first.shape[0], args[1].shape[-1]))
        return func(*args, **(kwargs or {}))
