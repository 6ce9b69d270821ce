"""CUDA graphs: work that is recorded once and then repeated with one launch."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from tiercel.device.shortage import is_shortage
from tiercel.errors import DeviceError, OutOfDeviceMemoryError

_WARM_UPS = 2  # runs that compile and tune kernels and allocate the workspaces of libraries, which cannot be recorded


class Graph(Protocol):
    """A recorded job."""

    def replay(self) -> Tensor:
        """Queue the job again, on the lane whose job calls this, without waiting. Return the job's result.

        The result is valid until the next replay of any graph of the same recorder. Work that is queued on the same
        lane before that replay reads it in time.
        """
        ...


class GraphRecorder(Protocol):
    """Records jobs as graphs that share one pool of memory; two of them must never run at the same time.

    If the largest graph is recorded first, all graphs together take as much memory as that one.
    """

    def record(self, job: Callable[[], Tensor]) -> Graph:
        """Run a job for warming up, then record it.

        The job must neither wait for the device nor copy to or from the host. It reads tensors at fixed addresses,
        which the caller writes before a replay. Its intermediate tensors belong to the graph.

        Effects: the job is run a few times, including its writes to memory outside.
        Errors:  OutOfDeviceMemoryError; DeviceError if the job cannot be recorded.
        """
        ...


class CudaGraph:
    """A CUDA graph and its output tensor."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor, begun: list[torch.cuda.CUDAGraph]) -> None:
        """`begun`: all graphs of the recorder, which must live as long as this one."""
        self._graph = graph
        self._output = output
        self._begun = begun

    def replay(self) -> Tensor:
        self._graph.replay()
        return self._output


class CudaGraphRecorder:
    """Records on a stream of its own, as capturing requires. The kernels of a graph keep the priority of that stream.

    Not run on a GPU yet.
    Source: torch's notes on CUDA graphs (warm-up on the capturing stream, one pool for graphs that never run
            concurrently).
    """

    def __init__(self, stream: torch.cuda.Stream, pool: Any) -> None:  # Any: torch has no public type for a pool
        self._stream = stream
        self._pool = pool
        # When torch frees a graph, it also frees the cuBLAS workspace of the stream, which graphs recorded before
        # still write (pytorch issue 193402). So a graph whose recording failed is kept as long as the others.
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
        # thread_local: the threads that copy may still make calls that a capture forbids.
        with _no_collection(), torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            output = job()
        lane.wait_stream(self._stream)
        graph.replay()  # the first launch uploads the graph to the device, where memory may be short
        return CudaGraph(graph, _borrow(output), self._begun)

    def _end_allocations(self) -> None:
        """End the allocations to the pool after a recording that the driver aborted.

        Otherwise the allocator would keep filling the pool, and never return memory to the device (torch before pull
        request 180395).
        """
        with suppress(RuntimeError):  # raised if the recording was ended properly
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection: collecting a graph aborts a recording in progress (torch pull request 161037)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def is_from_shortage(error: BaseException) -> bool:
    """Return whether a shortage of memory is among the causes: an aborted capture raises an error of its own, too."""
    if isinstance(error, Exception) and is_shortage(error):
        return True
    return error.__context__ is not None and is_from_shortage(error.__context__)


class _Memory:
    """The memory of a tensor as a CUDA array interface, which does not keep the tensor alive."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__


def _borrow(tensor: Tensor) -> Tensor:
    """Return a tensor with the same contiguous memory that does not keep it allocated.

    The next recording may then use the memory, too. The pool does not return it to the driver while one of its graphs
    lives.
    """
    memory = _Memory(tensor.view(-1).view(torch.uint8))  # the interface has no bfloat16
    return torch.as_tensor(memory, device=tensor.device).view(tensor.dtype).view(tensor.shape)
