"""A CUDA GPU as a device: the compute lane is a stream."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from device import memory
from tiercel.errors import DeviceError

R = TypeVar("R")


class CudaPending(Generic[R]):
    """A job whose kernels were queued; its value is ready when the event has fired."""

    def __init__(self, value: R, mark: torch.cuda.Event) -> None:
        self._value = value
        self._mark = mark

    def result(self) -> R:
        self._mark.synchronize()
        return self._value


class CudaLane:
    """A stream. The job runs at once on the caller's thread and only queues kernels."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, job: Callable[[], R]) -> CudaPending[R]:
        with torch.cuda.stream(self._stream):
            value = job()
            # blocking: the waiting thread sleeps instead of spinning, so that the other threads get the core
            mark = torch.cuda.Event(blocking=True)
            mark.record(self._stream)
        return CudaPending(value, mark)

    def is_lost(self, error: Exception) -> bool:
        # After an illegal access or a device assert the CUDA context answers everything with the same error.
        return isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError)

    def close(self) -> None:
        self._stream.synchronize()


class CudaDevice:
    """The first visible GPU."""

    name = "cuda"

    def open_lane(self) -> CudaLane:
        return CudaLane(torch.cuda.Stream())

    def open_copy_lane(self) -> CudaLane:
        return CudaLane(torch.cuda.Stream())

    def pin(self, address: int, size: int) -> None:
        """Not measured yet. Errors: DeviceError when the driver refuses; copies then go through its own buffers."""
        runtime = torch.cuda.cudart()
        status = -1 if runtime is None else int(runtime.cudaHostRegister(address, size, 0))
        if status != 0:
            raise DeviceError("cuda.host_register", bytes=size, status=status)

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def host_free_bytes(self) -> int:
        return memory.available_bytes()

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info()[1]
