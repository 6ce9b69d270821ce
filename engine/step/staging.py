"""The way of a step's arrays to the device: behind each other in one pinned buffer, in one copy.

A copy from pinned memory is queued and reads the buffer later, so a buffer is filled anew only once the mark behind its
copy is past.
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

_ALIGNMENT = 64  # bytes: a kernel is compiled once more for pointers that are no multiple of 16
_LEAST_BYTES = 1 << 16  # of a buffer
_TORCH_BY_NUMPY = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.bool_): torch.bool,
}


class Marking(Protocol):
    """What staging needs of a lane."""

    def mark(self) -> Mark: ...


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """Memory that is copied from. Shapes: memory [bytes] uint8."""

    memory: Tensor
    mark: Mark  # behind the last copy that reads it


class HostRing:
    """Buffers in the order in which they were last copied from.

    Nobody ever waits for one: where all are being read the ring grows, up to as many as there are copies in flight.
    The loop waits for steps, so that is the nano-batches of the steps launched ahead, of the one that runs and of the
    one that is being launched.
    """

    def __init__(self, *, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._given: deque[HostBuffer] = deque()

    def __len__(self) -> int:
        return len(self._given)

    def take(self, size: int) -> Tensor:
        """A buffer of at least so many bytes that no copy reads, to be filled and given back. Shapes: [bytes] uint8."""
        if self._given and self._given[0].mark.is_past():
            memory = self._given.popleft().memory
            if len(memory) >= size:
                return memory
        room = max(_LEAST_BYTES, 1 << (size - 1).bit_length())
        return torch.empty(room, dtype=torch.uint8, pin_memory=self._is_pinned)

    def give(self, memory: Tensor, mark: Mark) -> None:
        """A copy out of this buffer is queued before the mark."""
        self._given.append(HostBuffer(memory, mark))


class Staging:
    """Brings arrays to the device. Called in jobs of one lane."""

    def __init__(self, device: torch.device, lane: Marking, ring: HostRing | None) -> None:
        """`ring`: None where the device reads host memory itself."""
        self._device = device
        self._lane = lane
        self._ring = ring

    def upload_no_sync(self, arrays: Arrays, target: Tensor | None = None) -> tuple[Tensor, ...]:
        """The arrays on the device, views of one buffer: of `target`, else of a new one.

        Shapes:  target [bytes] uint8 on the device, at least `packed_bytes` of the arrays. Where all but the last array
                 keep their sizes, they keep their places in it, too.
        Cost:    one copy on the host and one to the device; on the CPU none, the tensors are the arrays, unless there
                 is a target.
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
    """The way to this device, for jobs of this lane. It costs nothing on the CPU."""
    return Staging(device, lane, None if device.type == "cpu" else HostRing(is_pinned=True))


def packed_bytes(arrays: Arrays) -> int:
    """What the arrays take behind each other."""
    return sum(_room(array) for array in arrays)


def _room(array: NDArray[np.generic]) -> int:
    return -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT


def _pack(arrays: Arrays, buffer: NDArray[np.uint8]) -> None:
    start = 0
    for array in arrays:
        place = buffer[start : start + array.nbytes].view(array.dtype)
        place.reshape(array.shape)[...] = array
        start += _room(array)


def unpack(buffer: Tensor, arrays: Arrays) -> tuple[Tensor, ...]:
    """Views of the buffer with the types and shapes of the arrays."""
    tensors: list[Tensor] = []
    start = 0
    for array in arrays:
        place = buffer.narrow(0, start, array.nbytes).view(_TORCH_BY_NUMPY[array.dtype])
        tensors.append(place if array.ndim == 1 else place.view(array.shape))
        start += _room(array)
    return tuple(tensors)
