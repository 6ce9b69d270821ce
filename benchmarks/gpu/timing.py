"""Time on the device."""

from collections.abc import Callable

import torch
from triton.testing import do_bench

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16

Timer = Callable[[Callable[[], object]], float]
"""Milliseconds of a job."""


def median_ms(job: Callable[[], object], rep_ms: int = 60) -> float:
    """Of many runs of a job that only queues kernels; the cache of the device is emptied before each."""
    return float(do_bench(job, warmup=max(10, rep_ms // 3), rep=rep_ms, return_mode="median"))


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
    """The job as a CUDA graph: nothing of what is timed is then the host's. Errors: RuntimeError when it cannot be."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        job()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        job()
    return graph.replay
