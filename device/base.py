"""What the engine needs from a machine."""

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T", covariant=True)
R = TypeVar("R")


class Pending(Protocol[T]):
    """Work that was queued on a lane."""

    def result(self) -> T:
        """Wait, with the GIL free, and return what the job returned. Raises what the job raised."""
        ...


class Lane(Protocol):
    """A queue of jobs that run one after the other, beside the caller (a CUDA stream, a worker thread)."""

    def run(self, job: Callable[[], R]) -> Pending[R]:
        """Queue a job. Never waits for it."""
        ...

    def is_lost(self, error: Exception) -> bool:
        """Whether this error of a job means that no job will succeed any more."""
        ...

    def close(self) -> None:
        """Let queued jobs end and stop."""
        ...


class Device(Protocol):
    """One accelerator, or the CPU."""

    name: str  # cpu | cuda

    def open_lane(self) -> Lane:
        """A lane for computing."""
        ...

    def open_copy_lane(self) -> Lane:
        """A lane for copies in one direction, driven by a thread that waits for each job."""
        ...

    def pin(self, address: int, size: int) -> None:
        """Lock host memory, page-aligned, so that copies to and from the device run beside everything else.

        Cost: seconds a gigabyte-slab. Errors: DeviceError when the machine refuses.
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
