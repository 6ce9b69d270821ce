"""CUDA graphs: work that is recorded once and then repeated with one launch."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from tiercel.device.shortage import is_shortage
from tiercel.values.errors import DeviceError, OutOfDeviceMemoryError

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

    The job with the largest result is recorded first: all graphs write their results to the memory of that one, and
    together they take as much memory as it takes alone.
    """

    def record(self, job: Callable[[], Tensor]) -> Graph:
        """Run a job for warming up, then record it.

        The job must neither wait for the device nor copy to or from the host. It reads tensors at fixed addresses,
        which the caller writes before a replay. Its intermediate tensors belong to the graph.

        Shapes:  the job returns [n, ...]; n is at most that of the first recording, everything else is equal.
        Cost:    a replay copies the result once on the device.
        Effects: the job is run a few times, including its writes to memory outside.
        Errors:  OutOfDeviceMemoryError; DeviceError if the job cannot be recorded. No graph of this recorder may be
                 replayed after an error.
        """
        ...


class CudaGraph:
    """A CUDA graph and the rows that it writes its result to."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._graph = graph
        self._output = output

    def replay(self) -> Tensor:
        self._graph.replay()
        return self._output


class CudaGraphRecorder:
    """Records on a stream of its own, as capturing requires. The kernels of a graph keep the priority of that stream.

    A tensor that outlives its recording keeps its memory in the pool. The results of all sizes would be ten times that
    of the largest: 1.4 GB for Llama-3-8B. So every graph writes its result to the same rows outside of the pool.

    A graph that fails must not be freed while others are replayed, because torch then frees the cuBLAS workspace of the
    stream, too, which the others still write (pytorch issue 193402). This is why an error ends all of them.

    Not run on a GPU yet.
    Source: torch's notes on CUDA graphs (warm-up on the capturing stream, one pool for graphs that never run
            concurrently).
    """

    def __init__(self, stream: torch.cuda.Stream, pool: Any) -> None:  # Any: torch has no public type for a pool
        self._stream = stream
        self._pool = pool
        self._results: Tensor | None = None  # of the first recording; all others write to its first rows

    def record(self, job: Callable[[], Tensor]) -> CudaGraph:
        try:
            return self._record(job)
        except RuntimeError as exc:
            self._end_allocations()
            kind = OutOfDeviceMemoryError if is_from_shortage(exc) else DeviceError
            raise kind("graph.record_failed", f"{type(exc).__name__}: {exc}") from exc

    def _record(self, job: Callable[[], Tensor]) -> CudaGraph:
        graph = torch.cuda.CUDAGraph()
        lane = torch.cuda.current_stream()
        self._stream.wait_stream(lane)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS - 1):
                job()
            output = self._rows_for(job())
        # thread_local: the threads that copy may still make calls that a capture forbids.
        with _no_collection(), torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            # A copy may be queued on a copy engine, which transfers between the tiers keep busy; a product is a kernel.
            torch.mul(job(), 1, out=output)
        lane.wait_stream(self._stream)
        graph.replay()  # the first launch uploads the graph to the device, where memory may be short
        return CudaGraph(graph, output)

    def _rows_for(self, result: Tensor) -> Tensor:
        """Return the rows that a job with this result writes to."""
        if self._results is None:
            self._results = torch.empty_like(result)
        first = self._results
        if len(result) > len(first) or (result.shape[1:], result.dtype) != (first.shape[1:], first.dtype):
            raise DeviceError("graph.result", first=tuple(first.shape), result=tuple(result.shape))
        return first[: len(result)]

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
