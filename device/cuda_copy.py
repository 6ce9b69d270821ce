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
        """What the driver calls it."""
        ...

    def mark(self) -> Mark: ...
    def wait(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CudaCopy:
    """Copies that were queued."""

    mark: Mark

    def result(self) -> None:
        """Sleep, with the GIL free, until the bytes are there."""
        self.mark.wait()


class CudaCopyLane:
    """A stream for copies in one direction, driven by one thread.

    Nothing here waits for the compute lane, nor the other way round: the mover starts a spill when the step that wrote
    its source has been committed, so the host has seen those writes end; a restore writes slots that no launched step
    knows, and is read by steps that are planned after it landed.
    """

    depth = 2  # the engine copies one batch while the next is queued

    def __init__(self, stream: Stream, driver: CudaDriver, pinned: Callable[[], Sequence[PinnedMemory]]) -> None:
        self._stream = stream
        self._driver = driver
        self._pinned = pinned

    def copy(self, extents: Extents) -> CudaCopy:
        """Queue the batch. Waits only for memory that is not locked yet: the driver stages that here and now.

        Errors: DeviceError. Whatever is raised, nothing of the batch is under way any more then.
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
        with suppress(RuntimeError):  # what a lost device answers
            self._stream.wait()

    def _parts(self, extents: Extents) -> Iterator[tuple[Extents, SourceOrder | None]]:
        """What goes together, and when its sources may be read; None for what touches no locked memory.

        Live KV is read in the order of the stream; the host's bytes lie there since before this call. As a rule the
        first memory holds one side of all.
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
