"""Small host arrays on their way to the device, and sub-sets of rows that the host knows."""

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload_no_sync(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Queue a copy of a host array to the device.

    Cost:    on the CPU none, the tensor shares the array; else one pinned staging copy.
    Effects: the staging memory is kept by torch's host allocator until the copy has run.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


class Subset:
    """Some of M rows, chosen on the host; all of them costs no copy, nor does asking whether there are any."""

    def __init__(self, mask: NDArray[np.bool_], device: torch.device) -> None:
        """Shapes: mask [M]."""
        self.host = np.flatnonzero(mask)
        self._is_all = len(self.host) == len(mask)
        self._device = device

    def __bool__(self) -> bool:
        return len(self.host) > 0

    def take(self, values: Tensor) -> Tensor:
        """The sub-set's rows; `values` itself when they are all."""
        return values if self._is_all else values.index_select(0, self._ids)

    def put(self, values: Tensor, changed: Tensor) -> Tensor:
        """`values` with the sub-set's rows replaced; in place unless they are all."""
        return changed if self._is_all else values.index_copy_(0, self._ids, changed)

    @cached_property
    def _ids(self) -> Tensor:
        return upload_no_sync(self.host, self._device)
