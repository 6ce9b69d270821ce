"""Measure times on the device."""

from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from tiercel.device.graph import CudaGraphRecorder

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16

Timer = Callable[[Callable[[], object]], float]
"""Milliseconds of a job."""

_FLUSH_BYTES = 1 << 31  # reading takes half a millisecond, in which a job of several kernels is queued
_MIN_TURNS, _MAX_TURNS = 10, 100


def median_ms(job: Callable[[], object], rep_ms: int = 60) -> float:
    """Return the times of many runs of a job that only queues kernels.

    Before each run the device reads memory until its cache holds no data of the job and no unwritten lines. The host
    queues the job meanwhile, so that the time of queueing is not included, however small the kernels are.
    """
    flush = torch.ones(_FLUSH_BYTES // 4, device=DEVICE)
    turns = min(_MAX_TURNS, max(_MIN_TURNS, int(rep_ms / max(1e-3, elapsed_ms(job, 1)))))
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(turns + turns // 4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.amax()
        begin.record()
        job()
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) for begin, end in marks[turns // 4 :])


def elapsed_ms(job: Callable[[], object], turns: int = 3) -> float:
    """Return the median time between two marks around a job of many kernels, without clearing the cache."""
    times: list[float] = []
    for turn in range(turns + 1):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        job()
        end.record()
        torch.cuda.synchronize()
        if turn:  # the first run compiles and allocates
            times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def captured(job: Callable[[], object]) -> Callable[[], object]:
    """Return the job as a CUDA graph, so that no time of the host is measured. Errors: DeviceError if it fails."""
    done = torch.zeros(1, device=DEVICE)

    def recorded() -> Tensor:
        job()
        return done

    torch.cuda.synchronize()  # the inputs of the job are complete on every stream
    with torch.cuda.stream(torch.cuda.Stream()):  # a recording that fails leaves its stream as the current one
        return CudaGraphRecorder(torch.cuda.Stream(), torch.cuda.graph_pool_handle()).record(recorded).replay
