"""The last token of every row, which the next step computes."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiercel.engine.sampling import Sampled
from tiercel.engine.step.inputs import BatchInputs, DeviceInputs
from tiercel.engine.step.staging import Staging


class LastTokens:
    """The last sampled token of every row, on the device: step n + 1 runs before the host has seen step n's tokens.

    On a device that reads host memory directly numpy reads and writes them. Every operator of torch releases the GIL.
    When a step has ended, the loop's thread waits for the GIL to commit it, and the next forward would wait for that
    thread.
    """

    def __init__(self, tokens: Tensor, staging: Staging) -> None:
        """Shapes: tokens [rows] int64."""
        self._tokens = tokens
        self._staging = staging
        self._on_host = tokens.numpy() if staging.is_direct else None

    def fill_no_sync(self, batch: BatchInputs, on_device: DeviceInputs) -> Tensor:
        """Return the tokens of a batch, with those filled in that were unknown when it was built. Shapes: [T]."""
        if not batch.is_unknown.any():
            return on_device.tokens
        if self._on_host is not None:
            return torch.from_numpy(np.where(batch.is_unknown, self._on_host[batch.token_rows], batch.tokens))
        said = self._tokens.index_select(0, on_device.token_rows)
        return torch.where(on_device.is_unknown, said, on_device.tokens)

    def note_no_sync(self, rows: NDArray[np.int64], device_rows: Tensor, sampled: Sampled) -> Sampled:
        """Note the tokens that were sampled for rows. Return the results on the host, once the lane has passed.

        Shapes: rows and device_rows [N], the same rows on the host and on the device.
        """
        if self._on_host is not None:
            self._on_host[rows] = sampled.tokens.numpy()
            return sampled
        found = self._staging.report_no_sync(sampled.tokens, sampled.bad_rows, device_rows, self._tokens)
        return sampled.with_rest_no_sync(*found, self._staging)
