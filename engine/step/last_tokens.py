"""The last token of every row, which the next step computes."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiercel.engine.step.inputs import BatchInputs, DeviceInputs


class LastTokens:
    """The last sampled token of every row, on the device: step n + 1 runs before the host has seen step n's tokens.

    On the CPU numpy reads and writes them. Every operator of torch releases the GIL. When a step has ended, the loop's
    thread waits for the GIL to commit it, and the next forward would wait for that thread.
    """

    def __init__(self, tokens: Tensor) -> None:
        """Shapes: tokens [rows] int64."""
        self._tokens = tokens
        self._on_host = tokens.numpy() if tokens.device.type == "cpu" else None

    def fill_no_sync(self, batch: BatchInputs, on_device: DeviceInputs) -> Tensor:
        """Return the tokens of a batch, with those filled in that were unknown when it was built. Shapes: [T]."""
        if not batch.is_unknown.any():
            return on_device.tokens
        if self._on_host is not None:
            return torch.from_numpy(np.where(batch.is_unknown, self._on_host[batch.token_rows], batch.tokens))
        said = self._tokens.index_select(0, on_device.token_rows)
        return torch.where(on_device.is_unknown, said, on_device.tokens)

    def note_no_sync(self, rows: NDArray[np.int64], device_rows: Tensor, sampled: Tensor) -> None:
        """Note the tokens that were sampled for rows. Shapes: all [N]; `device_rows` are `rows` on the device."""
        if self._on_host is not None:
            self._on_host[rows] = sampled.numpy()
        else:
            self._tokens.index_copy_(0, device_rows, sampled)
