"""Move small arrays between the host and the device."""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class HostLink(Protocol):
    """Moves small arrays between the host and the device, in jobs of one lane."""

    def send_no_sync(self, array: NDArray[np.generic]) -> Tensor:
        """Return the array on the device, to be read by work that is queued on the lane later."""
        ...

    def fetch_no_sync(self, values: Tensor) -> Tensor:
        """Return the values on the host, to be read when the lane has passed this point."""
        ...


class CopyLink:
    """Moves arrays by the copy engines. On the CPU arrays and tensors share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send_no_sync(self, array: NDArray[np.generic]) -> Tensor:
        """Queue a copy of a host array to the device.

        Cost:    none on the CPU, where the tensor shares the array's memory; otherwise one pinned staging copy.
        Effects: the staging memory is kept by torch's host allocator until the copy has run.
        """
        host = torch.from_numpy(np.ascontiguousarray(array))
        if self._device.type == "cpu":
            return host
        return host.pin_memory().to(self._device, non_blocking=True)

    def fetch_no_sync(self, values: Tensor) -> Tensor:
        """Queue a copy into pinned memory; a copy into pageable memory would wait for the device."""
        if self._device.type == "cpu":
            return values
        return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
