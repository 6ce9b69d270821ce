"""The protocols of a device: lanes, marks, copies, locked memory, free memory."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from tiercel.values.clock import Clock

if TYPE_CHECKING:  # these import torch or numpy, which the simulated device lives without
    from tiercel.device.extents import Extents
    from tiercel.device.fork import Fork
    from tiercel.device.graph import GraphRecorder
    from tiercel.device.timer import Timer

T = TypeVar("T", covariant=True)
R = TypeVar("R")


class Pending(Protocol[T]):
    """Work that was queued on a lane."""

    def result(self) -> T:
        """Wait for the job with the GIL released; return its result or raise its exception."""
        ...


class Mark(Protocol):
    """A position in the queue of a lane (a CUDA event)."""

    def is_past(self) -> bool:
        """Return whether everything queued before the mark has ended, without waiting. Raises if the device is lost."""
        ...

    def wait(self) -> None:
        """Sleep with the GIL released until the mark is past. Deadlocks if called in a job of the same lane."""
        ...


class Lane(Protocol):
    """A queue of jobs that run in order, concurrently with the caller (a CUDA stream, a worker thread)."""

    def run(self, job: Callable[[], R]) -> Pending[R]:
        """Queue a job, without waiting for it."""
        ...

    def mark(self) -> Mark:
        """Return a mark at the current end of the queue, without waiting."""
        ...

    def start_timer(self, clock: Clock) -> "Timer":
        """Start timing the work of a job. Call it in the job. `clock` is used if the job itself computes."""
        ...

    def is_lost(self, error: Exception) -> bool:
        """Return whether this error of a job means that all further jobs will fail."""
        ...

    def close(self) -> None:
        """Wait for queued jobs and stop."""
        ...


class CopyLane(Protocol):
    """Copies between the device and host memory, in batches that run in order, beside the compute lane.

    One thread uses a copy lane. The source bytes must be complete before a batch is queued, and nothing else may use
    the targets until it has landed, because lanes do not wait for each other.
    """

    depth: int  # number of batches to keep queued; 1 if copies run on the caller's thread

    def copy(self, extents: "Extents") -> Pending[None]:
        """Queue a batch; its result is available when the bytes have arrived. Errors: DeviceError, here or later."""
        ...

    def is_lost(self, error: Exception) -> bool:
        """Return whether this error of a copy means that all further copies will fail."""
        ...

    def close(self) -> None:
        """Wait for queued copies and stop."""
        ...


class Pinned(Protocol):
    """A range of host memory that a thread locks for copies, after `start`."""

    slab_bytes: int  # no copy may cross a multiple of this, counted from the start of the range; 0 means no limit

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are locked so far."""
        ...

    def start(self) -> None:
        """Start to lock on a thread. Cost: on that thread, the time to allocate every page."""
        ...

    def wait(self) -> None:
        """Start if necessary, and sleep until everything is locked or refused."""
        ...

    def close(self) -> None:
        """Unlock the range. No copy may be in progress."""
        ...


class Device(Protocol):
    """One accelerator, or the CPU."""

    name: str  # cpu | cuda

    @property
    def processors(self) -> int:
        """Streaming multiprocessors of a GPU, cores of a CPU."""
        ...

    @property
    def capability(self) -> tuple[int, int] | None:
        """The CUDA compute capability, (9, 0) on Hopper; None for a CPU."""
        ...

    @property
    def maps_host_memory(self) -> bool:
        """Whether kernels can address locked host memory; False on the CPU, which has no other memory."""
        ...

    def open_lane(self) -> Lane:
        """Open a lane for computing."""
        ...

    def open_copy_lane(self) -> CopyLane:
        """Open a lane for copies in one direction."""
        ...

    def open_recorder(self) -> "GraphRecorder | None":
        """Open a recorder of CUDA graphs; None on a device without them."""
        ...

    def open_fork(self) -> "Fork | None":
        """Open a second queue beside a lane or a recording; None on a device without one."""
        ...

    def pin(self, address: int, size: int, block_bytes: int) -> Pinned:
        """Prepare to lock host memory that holds blocks, so that copies to and from the device run asynchronously.

        The range starts on a page. A refusal of the system is logged; the memory is then copied more slowly.
        """
        ...

    def free_bytes(self) -> int:
        """Return the device memory that can be allocated now."""
        ...

    def host_free_bytes(self) -> int:
        """Return the host memory that can be allocated now; on the CPU the same as `free_bytes`."""
        ...

    def host_limit(self) -> str:
        """Return in words which limit `host_free_bytes` comes from."""
        ...

    def total_bytes(self) -> int:
        """Return the device memory that this process could allocate on an idle machine."""
        ...

    def give_back_cached(self) -> None:
        """Return cached memory that is not in use to the system. Waits for all queued work."""
        ...

    def reset_peak(self) -> None:
        """Restart the measurement of `peak_bytes`."""
        ...

    def peak_bytes(self) -> int:
        """Return the peak of allocated memory since `reset_peak`, minus the memory allocated then; 0 on the CPU."""
        ...
