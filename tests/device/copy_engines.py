"""Copy engines in virtual time: one for each direction, in order of arrival, whatever the priority of a stream.

A copy of any stream is carried out by the engine of its direction. The engine takes copies in the order in which they
became ready; priorities of streams order kernels only. So a copy of a step waits for the pieces of a running swap.
Speeds are published figures of an H200 and assumptions, nothing is measured.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

BYTES_PER_S = 50e9  # of a link in one direction
COPY_S = 3e-6  # to begin a copy
KERNEL_S = 3e-6  # a small kernel
LINK_S = 2e-6  # until the first byte of mapped memory arrives
PIECE_BYTES = 50 << 20  # about a millisecond, as the mover divides a transfer
PIECES_QUEUED = 2  # `CudaCopyLane.depth`


class Way(Enum):
    """The direction of a copy."""

    UP = "up"  # to the device
    DOWN = "down"  # to the host
    WITHIN = "within"  # a plain copy on the device, which the driver may give to an engine as well


@dataclass(frozen=True, slots=True)
class EngineCopy:
    """A copy on a stream."""

    way: Way
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel on a stream, or a whole graph."""

    seconds: float = KERNEL_S
    mapped_bytes: int = 0  # of host memory that it reads or writes itself


@dataclass(slots=True)
class CopyEngine:
    """The engine of one direction. Calls come in the order of time."""

    free_s: float = 0.0  # when everything queued has ended
    num_copies: int = 0  # without pieces of swaps
    _left: deque[int] = field(default_factory=deque)  # bytes of the pieces of a swap that are not queued yet
    _queued: deque[float] = field(default_factory=deque)  # ends of the queued pieces

    def begin_swap(self, now_s: float, size: int) -> None:
        """Begin a transfer of this many bytes in pieces; the next piece is queued when one has landed."""
        whole, rest = divmod(size, PIECE_BYTES)
        self._left.extend([PIECE_BYTES] * whole + [rest] * bool(rest))
        for _ in range(min(PIECES_QUEUED, len(self._left))):
            self._queue_piece(now_s)

    def is_swapping(self, now_s: float) -> bool:
        self._advance(now_s)
        return bool(self._queued)

    def copy(self, now_s: float, size: int) -> float:
        """Queue a copy of a step. Return the time of its end."""
        self._advance(now_s)
        self.num_copies += 1
        self.free_s = max(self.free_s, now_s) + COPY_S + size / BYTES_PER_S
        return self.free_s

    def _queue_piece(self, now_s: float) -> None:
        self.free_s = max(self.free_s, now_s) + self._left.popleft() / BYTES_PER_S
        self._queued.append(self.free_s)

    def _advance(self, now_s: float) -> None:
        while self._queued and self._queued[0] <= now_s:
            landed_s = self._queued.popleft()
            if self._left:
                self._queue_piece(landed_s)


def step_s(operations: list[EngineCopy | Launch], swap_bytes: int = 0) -> float:
    """Return the time of a step whose stream has these operations, beside a swap of this size in both directions."""
    engines = {way: CopyEngine() for way in (Way.UP, Way.DOWN)}
    now_s = 0.0
    if swap_bytes:
        for engine in engines.values():
            engine.begin_swap(now_s, swap_bytes)
    for operation in operations:
        match operation:
            case EngineCopy(Way.WITHIN):
                now_s += COPY_S  # assumed to be a kernel; `copies` counts it all the same
            case EngineCopy(way, size):
                now_s = engines[way].copy(now_s, size)
            case Launch(seconds, mapped_bytes):
                shared = 1 + any(engine.is_swapping(now_s) for engine in engines.values())  # a part of the link is left
                now_s += seconds + (LINK_S + mapped_bytes * shared / BYTES_PER_S if mapped_bytes else 0.0)
    return now_s


def copies(operations: list[EngineCopy | Launch]) -> list[EngineCopy]:
    """Return the operations that need a copy engine."""
    return [operation for operation in operations if isinstance(operation, EngineCopy)]
