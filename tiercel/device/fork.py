"""A second queue of kernels beside the one that a job launches to, for two parts of a step that overlap."""

from collections.abc import Callable
from typing import Protocol

import torch


class Fork(Protocol):
    """The queue of the caller's job, and a side queue beside it.

    Memory: an allocator gives freed memory to later work of the queue that allocated it, without regard to the other
    queue. So a tensor of one queue that the other reads or writes has to stay referenced until the next `meet`.
    """

    def meet(self) -> None:
        """Have each queue wait for everything queued on the other so far.

        A job that uses the side queue begins and ends with a meeting.
        """
        ...

    def aside(self, job: Callable[[], object]) -> None:
        """Queue the kernels that a job launches on the side queue."""
        ...


class CudaFork:
    """A second stream beside the current one. In a recording, the first meeting makes it a branch of the graph.

    Not run on a GPU yet.
    Source: CUDA programming guide, cross-stream dependencies of a capture: a branch begins with an event of the
            capturing stream, and has to join it before the capture ends.
    """

    def __init__(self, side: torch.cuda.Stream) -> None:
        self._side = side

    def meet(self) -> None:
        current = torch.cuda.current_stream()
        # The other order would have a capture wait for a stream that is no branch of it yet.
        self._side.wait_stream(current)
        current.wait_stream(self._side)

    def aside(self, job: Callable[[], object]) -> None:
        with torch.cuda.stream(self._side):
            job()
