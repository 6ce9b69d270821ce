"""Subsets of rows that are chosen on the host."""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tiercel.engine.sampling.upload import HostLink


class Subset:
    """A subset of M rows, chosen on the host. If it contains all rows, nothing is copied."""

    def __init__(self, mask: NDArray[np.bool_], link: HostLink) -> None:
        """Choose the rows where the mask is true. Shapes: mask [M]."""
        self.host = np.flatnonzero(mask)
        self._is_all = len(self.host) == len(mask)
        self._link = link

    def __bool__(self) -> bool:
        return len(self.host) > 0

    def take(self, values: Tensor) -> Tensor:
        """Return the rows of the subset; `values` itself if the subset contains all rows."""
        return values if self._is_all else values.index_select(0, self._ids)

    def copy(self, values: Tensor) -> Tensor:
        """Return the rows of the subset in new memory. On a GPU a kernel does it, and no copy engine."""
        return values.index_select(0, self._ids)

    def put(self, values: Tensor, changed: Tensor) -> Tensor:
        """Return `values` with the rows of the subset replaced, in place unless the subset contains all rows."""
        return changed if self._is_all else values.index_copy_(0, self._ids, changed)

    @cached_property
    def _ids(self) -> Tensor:
        return self._link.send_no_sync(self.host)
