"""Copies between a GPU and host memory, on a stream of their own beside the computing."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Protocol

from tiercel.device.base import Mark
from tiercel.device.cuda_driver import CudaDriver, SourceOrder
from tiercel.device.extents import Extents
from tiercel.device.pinned import PinnedMemory


class Stream(Protocol):
    """A CUDA stream: a queue of the device."""

    @property
    def handle(self) -> int:
        """The driver's handle of the stream."""
        ...

    def mark(self) -> Mark: ...
    def wait(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CudaCopy:
    """A queued batch of copies."""

    mark: Mark

    def result(self) -> None:
        """Sleep with the GIL released until the bytes have arrived."""
        self.mark.wait()


class CudaCopyLane:
    """A stream for copies in one direction, driven by one thread.

    Copy lanes and the compute lane do not wait for each other. The mover starts a spill after the step that wrote its
    source was committed, so the writes have ended. A restore writes slots that no launched step uses; they are read by
    steps that are planned after it has landed.
    """

    depth = 2  # one batch is copied while the next one is queued

    def __init__(self, stream: Stream, driver: CudaDriver, pinned: Callable[[], Sequence[PinnedMemory]]) -> None:
        self._stream = stream
        self._driver = driver
        self._pinned = pinned

    def copy(self, extents: Extents) -> CudaCopy:
        """Queue the batch. Waits only for memory that is not locked, which the driver stages synchronously.

        Errors: DeviceError. After any exception no copy of the batch is in progress.
        """
        with ExitStack() as failing:
            failing.callback(self._drain)
            self._driver.enter()
            for part, order in self._parts(extents):
                self._queue(part, order)
            copy = CudaCopy(self._stream.mark())
            failing.pop_all()
        return copy

    def is_lost(self, error: Exception) -> bool:
        return self._driver.is_lost(self._stream.handle)

    def close(self) -> None:
        self._drain()

    def _drain(self) -> None:
        with suppress(RuntimeError):  # raised by a lost device
            self._stream.wait()

    def _parts(self, extents: Extents) -> Iterator[tuple[Extents, SourceOrder | None]]:
        """Divide the copies into batches, each with the order of reading its sources; None for unlocked memory.

        Device memory is read in the order of the stream. Host bytes were complete before this call, so they may be
        read at any time. Usually the first locked memory holds one side of all copies.
        """
        left = extents
        for memory in self._pinned() if len(extents) else ():
            for order in (SourceOrder.ANY, SourceOrder.STREAM):
                mask = memory.are_pinned(left.sources if order is SourceOrder.ANY else left.targets)
                if mask.all():
                    yield left, order
                    return
                if mask.any():
                    yield left.chosen(mask), order
                    left = left.chosen(~mask)
        yield left, None

    def _queue(self, extents: Extents, order: SourceOrder | None) -> None:
        if order is not None and self._driver.copy_batch(extents, order, self._stream.handle):
            return
        for source, target, size in extents:
            self._driver.copy(source, target, size, self._stream.handle)
