"""A CUDA GPU as a device: lanes are streams, marks are events."""

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Generic, Protocol, TypeVar

import torch

from tiercel.device import memory
from tiercel.device.base import Mark
from tiercel.device.cuda_copy import CudaCopyLane, Stream
from tiercel.device.cuda_driver import CudaDriver
from tiercel.device.fork import CudaFork
from tiercel.device.graph import CudaGraphRecorder
from tiercel.device.pinned import SLAB_BYTES, PinnedMemory
from tiercel.device.shortage import is_shortage
from tiercel.device.timer import CudaTimer
from tiercel.values.clock import Clock

R = TypeVar("R")

_COMPUTE_PRIORITY = -1  # less goes first
_COPY_PRIORITY = 0


class ComputeStream(Stream, Protocol):
    """A stream that kernels can be queued on."""

    def current(self) -> AbstractContextManager[object]:
        """Return a context in which kernels launched by this thread go to this stream."""
        ...

    def start_timer(self) -> CudaTimer: ...


class CudaPending(Generic[R]):
    """A job whose kernels were queued; its value is valid when the mark is past."""

    def __init__(self, value: R, mark: Mark) -> None:
        self._value = value
        self._mark = mark

    def result(self) -> R:
        self._mark.wait()
        return self._value


class CudaMark:
    """A CUDA event. Waiting for it blocks instead of spinning, so that other threads get the core."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def is_past(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()


class CudaStream:
    """A stream of torch."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    @property
    def handle(self) -> int:
        return self._stream.cuda_stream

    def current(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> CudaMark:
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return CudaMark(event)

    def wait(self) -> None:
        self._stream.synchronize()

    def start_timer(self) -> CudaTimer:
        start, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        start.record(self._stream)
        return CudaTimer(self._stream, start, end)


def open_stream(priority: int) -> CudaStream:
    """Open a stream of torch's pool. It starts after all work that this thread has queued, such as zeroing arenas."""
    stream = torch.cuda.Stream(priority=priority)
    stream.wait_stream(torch.cuda.current_stream())
    return CudaStream(stream)


class CudaLane:
    """A stream of high priority. A job runs at once on the caller's thread and only queues kernels."""

    def __init__(self, stream: ComputeStream, driver: CudaDriver) -> None:
        self._stream = stream
        self._driver = driver

    def run(self, job: Callable[[], R]) -> CudaPending[R]:
        with self._stream.current():
            return CudaPending(job(), self._stream.mark())

    def mark(self) -> Mark:
        return self._stream.mark()

    def start_timer(self, clock: Clock) -> CudaTimer:
        return self._stream.start_timer()

    def is_lost(self, error: Exception) -> bool:
        """Return whether the device is lost, by asking its driver.

        The error alone does not tell: libraries describe the same illegal access in different words, and torch raises
        the same class for harmless refusals. A lost context answers every call with its first error.
        """
        return not is_shortage(error) and self._driver.is_lost(self._stream.handle)

    def close(self) -> None:
        with suppress(RuntimeError):  # raised by a lost device, on which nothing is queued any more
            self._stream.wait()


class CudaDevice:
    """The first visible GPU."""

    name = "cuda"

    def __init__(
        self,
        driver: CudaDriver,
        open_stream: Callable[[int], ComputeStream] = open_stream,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        self._driver = driver
        self._open_stream = open_stream
        self._slab_bytes = slab_bytes
        self._pinned: list[PinnedMemory] = []
        self._base_bytes = 0  # allocated when the peak was last reset

    @property
    def processors(self) -> int:
        return torch.cuda.get_device_properties().multi_processor_count

    @property
    def capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability()

    @property
    def maps_host_memory(self) -> bool:
        return self._driver.maps_host_memory

    def open_lane(self) -> CudaLane:
        return CudaLane(self._open_stream(_COMPUTE_PRIORITY), self._driver)

    def open_copy_lane(self) -> CudaCopyLane:
        return CudaCopyLane(self._open_stream(_COPY_PRIORITY), self._driver, lambda: self._pinned)

    def open_recorder(self) -> CudaGraphRecorder:
        return CudaGraphRecorder(torch.cuda.Stream(priority=_COMPUTE_PRIORITY), torch.cuda.graph_pool_handle())

    def open_fork(self) -> CudaFork:
        return CudaFork(torch.cuda.Stream(priority=_COMPUTE_PRIORITY))

    def pin(self, address: int, size: int, block_bytes: int) -> PinnedMemory:
        """Prepare to lock host memory in slabs of 1 GiB (or of `slab_bytes`), rounded down to whole blocks."""
        driver = self._driver
        pinned = PinnedMemory(address, size, block_bytes, driver.register, driver.unregister, self._slab_bytes)
        self._pinned = [*(other for other in self._pinned if not other.is_closed), pinned]
        return pinned

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def host_free_bytes(self) -> int:
        return memory.available_bytes()

    def host_limit(self) -> str:
        return memory.tightest().limit

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info()[1]

    def give_back_cached(self) -> None:
        torch.cuda.synchronize()  # work that was queued before a failure may still write
        torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._base_bytes = torch.cuda.memory_allocated()

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated() - self._base_bytes


def open_cuda() -> CudaDevice:
    """Open the current GPU of torch. Errors: DeviceError if a call of the driver fails; OSError without libcuda."""
    torch.cuda.init()
    driver = CudaDriver(ctypes.CDLL("libcuda.so.1"))  # already loaded by torch
    driver.open(torch.cuda.current_device())
    return CudaDevice(driver)
