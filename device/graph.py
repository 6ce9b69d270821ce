"""Work that a device records once and then repeats at one launch: CUDA graphs."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from tiercel.device.shortage import is_shortage
from tiercel.errors import DeviceError, OutOfDeviceMemoryError

_WARM_UPS = 2  # kernels are compiled and tuned, libraries opened and their workspaces taken: none of it is recorded


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> Tensor:
        """Queue the work once more, on the lane whose job this is called from. Never waits.

        Returns what the recorded job returned, written anew. It holds until the next replay of any graph of the same
        recorder; on one lane, what is queued in between reads it in time.
        """
        ...


class GraphRecorder(Protocol):
    """Records jobs. Its graphs share one pool of memory, so that together they take as much as the largest of them
    where that is recorded first; two of them must never run at the same time."""

    def record(self, job: Callable[[], Tensor]) -> Graph:
        """Run a job, to warm up, and record it.

        The job must not wait for the device nor copy to or from the host. It reads tensors that stay where they are,
        and whoever replays writes those before. What it computes in between belongs to the graph.

        Effects: what the job does to memory outside of it is done a few times.
        Errors:  OutOfDeviceMemoryError; DeviceError when the job cannot be recorded.
        """
        ...


class CudaGraph:
    """A CUDA graph and what it writes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor, begun: list[torch.cuda.CUDAGraph]) -> None:
        """`begun`: all graphs of the recorder, kept as long as this one."""
        self._graph = graph
        self._output = output
        self._begun = begun

    def replay(self) -> Tensor:
        self._graph.replay()
        return self._output


class CudaGraphRecorder:
    """Records on a stream of its own, as capturing asks for. Kernels of a graph keep the priority of that stream. Not
    run on a GPU yet.

    Source: torch's notes on CUDA graphs (warm-up on the stream of the capture, one pool for graphs that never run side
            by side).
    """

    def __init__(self, stream: torch.cuda.Stream, pool: Any) -> None:  # Any: torch tells no public type of a pool
        self._stream = stream
        self._pool = pool
        # With a graph torch also frees the cuBLAS workspace of the stream, to which the graphs that were recorded
        # before still write (pytorch issue 193402): so one that failed is not let go while any of them lives.
        self._begun: list[torch.cuda.CUDAGraph] = []

    def record(self, job: Callable[[], Tensor]) -> CudaGraph:
        try:
            return self._record(job)
        except RuntimeError as exc:
            self._end_allocations()
            kind = OutOfDeviceMemoryError if is_from_shortage(exc) else DeviceError
            raise kind("graph.record_failed", f"{type(exc).__name__}: {exc}") from exc

    def _record(self, job: Callable[[], Tensor]) -> CudaGraph:
        graph = torch.cuda.CUDAGraph()
        self._begun.append(graph)
        lane = torch.cuda.current_stream()
        self._stream.wait_stream(lane)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                job()
        # thread_local: the threads that copy may go on with what a capture forbids.
        with _no_collection(), torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            output = job()
        lane.wait_stream(self._stream)
        graph.replay()  # the first launch brings the graph to the device, and may find no room there
        return CudaGraph(graph, _borrow(output), self._begun)

    def _end_allocations(self) -> None:
        """A recording that the driver broke off leaves the allocator filling the pool for a graph that is no more, and
        from then on it gives nothing back to the device (torch before pull request 180395)."""
        with suppress(RuntimeError):  # what it says where the recording was ended as it should be
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's collector might meet a graph that nobody keeps, and what then is called breaks a recording off (torch
    pull request 161037)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def is_from_shortage(error: BaseException) -> bool:
    """A capture that is broken off complains as well: the shortage may stand behind what was raised last."""
    if isinstance(error, Exception) and is_shortage(error):
        return True
    return error.__context__ is not None and is_from_shortage(error.__context__)


class _Memory:
    """Memory of a tensor in the words of the CUDA array interface, which does not keep it."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__


def _borrow(tensor: Tensor) -> Tensor:
    """The same contiguous memory, but without a claim to it: the next recording may write there, too.

    The pool never gives it back to the driver while one of its graphs lives.
    """
    memory = _Memory(tensor.view(-1).view(torch.uint8))  # the interface knows no bfloat16
    return torch.as_tensor(memory, device=tensor.device).view(tensor.dtype).view(tensor.shape)
