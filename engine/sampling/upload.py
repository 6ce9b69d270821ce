"""Copies of small host arrays to the device, and subsets of rows chosen on the host."""

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload_no_sync(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Queue a copy of a host array to the device.

    Cost:    none on the CPU, where the tensor shares the array's memory; otherwise one pinned staging copy.
    Effects: the staging memory is kept by torch's host allocator until the copy has run.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


class Subset:
    """A subset of M rows, chosen on the host. If it contains all rows, nothing is copied."""

    def __init__(self, mask: NDArray[np.bool_], device: torch.device) -> None:
        """Shapes: mask [M]."""
        self.host = np.flatnonzero(mask)
        self._is_all = len(self.host) == len(mask)
        self._device = device

    def __bool__(self) -> bool:
        return len(self.host) > 0

    def take(self, values: Tensor) -> Tensor:
        """Return the rows of the subset; `values` itself if these are all."""
        return values if self._is_all else values.index_select(0, self._ids)

    def put(self, values: Tensor, changed: Tensor) -> Tensor:
        """Return `values` with the rows of the subset replaced, in place unless these are all."""
        return changed if self._is_all else values.index_copy_(0, self._ids, changed)

    @cached_property
    def _ids(self) -> Tensor:
        return upload_no_sync(self.host, self._device)
