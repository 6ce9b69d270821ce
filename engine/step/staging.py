"""Copy the arrays of a step to the device: packed into one pinned buffer, in one copy.

A copy from pinned memory reads the buffer after it was queued, so a buffer is only refilled when the mark queued after
its copy is past.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiercel.device.base import Mark

Arrays = Sequence[NDArray[np.generic]]

_ALIGNMENT = 64  # bytes; Triton compiles a second kernel for pointers that are no multiple of 16
_MIN_BUFFER_BYTES = 1 << 16
_TORCH_BY_NUMPY = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.bool_): torch.bool,
}


class Marking(Protocol):
    """A lane, as far as staging uses it."""

    def mark(self) -> Mark: ...


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """A source of copies. Shapes: memory [bytes] uint8."""

    memory: Tensor
    mark: Mark  # queued after the last copy that reads it


class HostRing:
    """Host buffers in the order in which copies last read them.

    `take` never waits: if every buffer is being read, it allocates another one. The number of buffers is bounded by
    the copies in flight: the nano-batches of the running step, of the steps launched ahead and of the one being
    launched.
    """

    def __init__(self, *, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._given: deque[HostBuffer] = deque()

    def __len__(self) -> int:
        return len(self._given)

    def take(self, size: int) -> Tensor:
        """Return a buffer of at least `size` bytes that no copy reads. Pass it to `give` after queueing a copy.

        Shapes: returns [bytes] uint8.
        """
        if self._given and self._given[0].mark.is_past():
            memory = self._given.popleft().memory
            if len(memory) >= size:
                return memory
        capacity = max(_MIN_BUFFER_BYTES, 1 << (size - 1).bit_length())
        return torch.empty(capacity, dtype=torch.uint8, pin_memory=self._is_pinned)

    def give(self, memory: Tensor, mark: Mark) -> None:
        """Return a buffer to the ring. A copy that reads it was queued before `mark`."""
        self._given.append(HostBuffer(memory, mark))


class Staging:
    """Copies arrays to the device. Call it in jobs of one lane."""

    def __init__(self, device: torch.device, lane: Marking, ring: HostRing | None) -> None:
        """`ring`: None if the device reads host memory directly."""
        self._device = device
        self._lane = lane
        self._ring = ring

    def upload_no_sync(self, arrays: Arrays, target: Tensor | None = None) -> tuple[Tensor, ...]:
        """Queue the copy of the arrays and return views of them on the device, in `target` or in a new buffer.

        Shapes:  target [bytes] uint8 on the device, at least `packed_bytes` of the arrays. If only the last array
                 changes its size between two calls, all arrays keep their places in it.
        Cost:    one copy on the host and one to the device. On the CPU without a target there is no copy: the returned
                 tensors share the memory of the arrays.
        Effects: queued on the lane behind everything that may still read the target.
        """
        if self._ring is None:
            if target is None:
                return tuple(torch.from_numpy(array) for array in arrays)
            _pack(arrays, target.numpy())
            return unpack(target, arrays)
        size = packed_bytes(arrays)
        memory = self._ring.take(size)
        _pack(arrays, memory.numpy())
        if target is None:
            target = torch.empty(size, dtype=torch.uint8, device=self._device)
        target.narrow(0, 0, size).copy_(memory.narrow(0, 0, size), non_blocking=True)
        self._ring.give(memory, self._lane.mark())
        return unpack(target, arrays)


def open_staging(device: torch.device, lane: Marking) -> Staging:
    """Return the staging for a device, for jobs of this lane."""
    return Staging(device, lane, None if device.type == "cpu" else HostRing(is_pinned=True))


def packed_bytes(arrays: Arrays) -> int:
    """Return the bytes of the arrays in one buffer, each aligned."""
    return sum(_aligned_bytes(array) for array in arrays)


def _aligned_bytes(array: NDArray[np.generic]) -> int:
    return -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT


def _pack(arrays: Arrays, buffer: NDArray[np.uint8]) -> None:
    start = 0
    for array in arrays:
        place = buffer[start : start + array.nbytes].view(array.dtype)
        place.reshape(array.shape)[...] = array
        start += _aligned_bytes(array)


def unpack(buffer: Tensor, arrays: Arrays) -> tuple[Tensor, ...]:
    """Return views of a packed buffer with the types and shapes of the arrays."""
    tensors: list[Tensor] = []
    start = 0
    for array in arrays:
        place = buffer.narrow(0, start, array.nbytes).view(_TORCH_BY_NUMPY[array.dtype])
        tensors.append(place if array.ndim == 1 else place.view(array.shape))
        start += _aligned_bytes(array)
    return tuple(tensors)
