"""What the engine needs from a machine."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from tiercel.clock import Clock

if TYPE_CHECKING:  # these import torch or numpy, which the simulated device lives without
    from tiercel.device.extents import Extents
    from tiercel.device.graph import GraphRecorder
    from tiercel.device.timer import Timer

T = TypeVar("T", covariant=True)
R = TypeVar("R")


class Pending(Protocol[T]):
    """Work that was queued on a lane."""

    def result(self) -> T:
        """Wait, with the GIL free, and return what the job returned. Raises what the job raised."""
        ...


class Mark(Protocol):
    """A place in the queue of a lane (a CUDA event)."""

    def is_past(self) -> bool:
        """Whether everything that was queued before has ended. Never waits. Raises what a lost device answers."""
        ...

    def wait(self) -> None:
        """Sleep, with the GIL free, until it is past. Not from a job of the same lane: that would wait for itself."""
        ...


class Lane(Protocol):
    """A queue of jobs that run one after the other, beside the caller (a CUDA stream, a worker thread)."""

    def run(self, job: Callable[[], R]) -> Pending[R]:
        """Queue a job. Never waits for it."""
        ...

    def mark(self) -> Mark:
        """The end of the queue as of now. Never waits."""
        ...

    def start_timer(self, clock: Clock) -> "Timer":
        """Time what a job does from here on; `clock` tells where jobs work themselves. To be called in a job."""
        ...

    def is_lost(self, error: Exception) -> bool:
        """Whether this error of a job means that no job will succeed any more."""
        ...

    def close(self) -> None:
        """Let queued jobs end and stop."""
        ...


class CopyLane(Protocol):
    """Copies between the device and host memory, one batch after the other, beside the compute lane.

    One thread drives it. Bytes that a batch reads must be there before it is queued, and nothing else may touch what
    it writes until it has landed: no lane waits for another.
    """

    depth: int  # batches to keep queued: 1 where the caller's thread copies

    def copy(self, extents: "Extents") -> Pending[None]:
        """Queue a batch; its result comes when the bytes are there. Errors: DeviceError, here or with the result."""
        ...

    def is_lost(self, error: Exception) -> bool:
        """Whether this error of a copy means that none will succeed any more."""
        ...

    def close(self) -> None:
        """Let queued copies end and stop."""
        ...


class Pinned(Protocol):
    """A range of host memory that is locked in the background, once that was begun."""

    slab_bytes: int  # no copy may reach over a multiple of it, counted from the start of the range; 0: any may

    @property
    def pinned_bytes(self) -> int:
        """Locked so far."""
        ...

    def start(self) -> None:
        """Begin to lock. Cost: on a thread of its own, which makes every page real."""
        ...

    def wait(self) -> None:
        """Begin if nobody has, and sleep until everything is locked or refused."""
        ...

    def close(self) -> None:
        """Unlock. No copy may be under way."""
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
        """What a GPU's instructions can do, (9, 0) on Hopper; None for a CPU."""
        ...

    def open_lane(self) -> Lane:
        """A lane for computing."""
        ...

    def open_copy_lane(self) -> CopyLane:
        """A lane for copies in one direction."""
        ...

    def open_recorder(self) -> "GraphRecorder | None":
        """For work that is repeated at one launch; None where launching costs next to nothing."""
        ...

    def pin(self, address: int, size: int, block_bytes: int) -> Pinned:
        """Host memory that holds blocks, to be locked, so that copies to and from the device run beside everything.

        The range starts on a page. What the machine refuses is logged, and copied the slow way.
        """
        ...

    def free_bytes(self) -> int:
        """Memory that a new allocation could take now."""
        ...

    def host_free_bytes(self) -> int:
        """Host memory that a new allocation could take now; on the CPU the same memory."""
        ...

    def total_bytes(self) -> int:
        """Memory that this process could ever take."""
        ...

    def give_back_cached(self) -> None:
        """Memory that nothing of ours uses any more is free for everybody. Waits for all that was queued."""
        ...

    def reset_peak(self) -> None:
        """Count anew what `peak_bytes` tells."""
        ...

    def peak_bytes(self) -> int:
        """The most that was taken at once since `reset_peak`, beyond what was taken then. 0 where nobody counts."""
        ...
