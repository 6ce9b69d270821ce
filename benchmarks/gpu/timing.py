"""Time on the device."""

from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from tiercel.device.graph import CudaGraphRecorder

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16

Timer = Callable[[Callable[[], object]], float]
"""Milliseconds of a job."""

_FLUSH_BYTES = 1 << 31  # half a millisecond of reading: a job of several kernels is queued meanwhile
_LEAST_TURNS, _MOST_TURNS = 10, 100


def median_ms(job: Callable[[], object], rep_ms: int = 60) -> float:
    """Of many runs of a job that only queues kernels.

    Before each one the device reads until its cache holds nothing of the job's, and no unwritten lines either. The host
    queues the job meanwhile, so that what it takes for that is not in the time, however small the kernels are.
    """
    flush = torch.ones(_FLUSH_BYTES // 4, device=DEVICE)
    turns = min(_MOST_TURNS, max(_LEAST_TURNS, int(rep_ms / max(1e-3, elapsed_ms(job, 1)))))
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
    """Median of the times between two marks round a job that queues much, cache as it is."""
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
    """The job as a CUDA graph: nothing of what is timed is then the host's. Errors: DeviceError when it cannot be."""
    done = torch.zeros(1, device=DEVICE)

    def recorded() -> Tensor:
        job()
        return done

    torch.cuda.synchronize()  # what the job reads is there, whatever stream it was queued on
    with torch.cuda.stream(torch.cuda.Stream()):  # a recording that fails leaves its own stream the current one
        return CudaGraphRecorder(torch.cuda.Stream(), torch.cuda.graph_pool_handle()).record(recorded).replay
