"""Memory for packed weights in pages of 2 MiB.

Every step reads all weights. With pages of 4 KiB the processor translates 256 times as many addresses, on a virtual
machine twice each: products take 3 to 5 % longer.
"""

import contextlib
import mmap

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_CHUNK = 64 << 20  # of addresses; pages become real when they are written
_LINE = 64  # weights start at a line of the cache


class WeightMemory:
    """Chunks of memory from which weights are cut, one after another.

    A chunk is freed when the last of its weights is.
    """

    def __init__(self) -> None:
        self._chunk: Tensor | None = None
        self._used = 0

    def take(self, size: int) -> Tensor:
        """Return `size` bytes, uint8, that no other weight has. Errors: OSError if there is no memory."""
        if size > _CHUNK // 2:
            return _map_chunk(size)
        if self._chunk is None or self._used + size > self._chunk.numel():
            self._chunk, self._used = _map_chunk(_CHUNK), 0
        start = self._used
        self._used += -(-size // _LINE) * _LINE
        return self._chunk[start : start + size]


def _map_chunk(size: int) -> Tensor:
    pages = mmap.mmap(-1, size + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + size]
