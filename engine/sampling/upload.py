"""Copy small host arrays to the device."""

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
