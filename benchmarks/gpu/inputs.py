"""The inputs of a step on their way to the device, beside large transfers.

64 KiB of locked memory are copied on a stream of high priority, once by a copy engine and once by a small kernel that
reads the memory itself. Copy engines are said to ignore the priority of a stream: if so, the first waits for a piece of
a transfer, and the second does not.
"""

# Triton rewrites decorated functions, so a type checker cannot check their calls.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from collections.abc import Callable
from contextlib import nullcontext
from statistics import median

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.copies import Ends
from benchmarks.gpu.timing import DEVICE
from benchmarks.gpu.traffic import PIECE_GROUPS, Traffic
from tiercel.device.base import Device

BYTES = 64 << 10
WHOLE_GROUPS = 32  # of a transfer of 512 MiB that is not cut into pieces
KINDS = {"pieces": PIECE_GROUPS, "whole": WHOLE_GROUPS}
SAMPLES = 200
_HIGH = -1  # the priority of the compute lane
_BLOCK = 1024  # words of a program
_LEAD_BYTES = 256 << 20  # read before each sample, in which the host queues it

Samples = Callable[[Callable[[], object]], list[float]]
"""Times of many runs of a job, in microseconds."""


@triton.jit
def read_kernel(source, target, count, BLOCK: tl.constexpr):
    """Copy words of mapped host memory to the device."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


def read_mapped(source: Tensor, target: Tensor) -> None:
    """Copy locked host memory to the device with a kernel. Shapes: both [n] int64."""
    read_kernel[(triton.cdiv(len(source), _BLOCK),)](source, target, len(source), BLOCK=_BLOCK)


def sample_us(job: Callable[[], object]) -> list[float]:
    """Time a job on a stream of high priority, between two marks, after work that lasts while the host queues both."""
    lead = torch.ones(_LEAD_BYTES // 4, device=DEVICE)
    stream = torch.cuda.Stream(priority=_HIGH)
    stream.wait_stream(torch.cuda.current_stream())
    times: list[float] = []
    with torch.cuda.stream(stream):
        for turn in range(SAMPLES + 3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            lead.amax()
            begin.record()
            job()
            end.record()
            end.synchronize()
            if turn >= 3:  # the first runs compile and allocate
                times.append(1e3 * begin.elapsed_time(end))
    return times


def run(bench: Bench, device: Device, ends: Ends, total: int) -> None:
    """Record `inputs.copy.*` and `inputs.mapped.*`, idle and beside both kinds of transfers, and their waits."""
    source = torch.arange(BYTES // 8).pin_memory()
    measure(bench, device, ends, total, source, torch.zeros_like(source, device=DEVICE), sample_us)


def measure(
    bench: Bench, device: Device, ends: Ends, total: int, source: Tensor, target: Tensor, samples: Samples
) -> None:
    """Measure both ways, idle and beside both kinds of transfers. `inputs.WAY.KIND.wait_us`: median, less that of idle.

    Errors: AssertionError if the target differs from the source.
    """

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    ways = {"copy": copy, "mapped": lambda: read_mapped(source, target)}
    traffics = {kind: Traffic(device, ends, total, groups) for kind, groups in KINDS.items()}
    for way, job in ways.items():
        idle_us = 0.0
        for kind, traffic in {"idle": None, **traffics}.items():
            target.zero_()
            with nullcontext() if traffic is None else traffic:
                times = samples(job)
            assert torch.equal(target.cpu(), source), f"{way} {kind}: the target differs"
            middle = median(times)
            idle_us = middle if traffic is None else idle_us
            rates = {} if traffic is None else {f"{name}_gb_per_s": rate for name, rate in traffic.gb_per_s.items()}
            bench.record(f"inputs.{way}.{kind}_us", middle, "us", worst_us=max(times), kib=BYTES >> 10, **rates)
            if traffic is not None:
                bench.record(f"inputs.{way}.{kind}.wait_us", middle - idle_us, "us", worst_us=max(times) - idle_us)
    for traffic in traffics.values():
        traffic.close()
