"""Measure in a fraction of a second how fast this machine reads memory and multiplies matrices."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_READ_BYTES = 256 << 20  # more than the caches of most processors hold
_SIDE = 1024  # of the multiplied matrices
_SECONDS = 0.25  # for each of the two


@dataclass(frozen=True, slots=True)
class MachineRates:
    """The rates of the CPU with a number of threads, the best of several repetitions."""

    read_bytes_per_s: float
    flops_per_s: float  # multiplications and additions in the type of a model's activations


def measure_machine(dtype: torch.dtype, threads: int, seconds: float = _SECONDS) -> MachineRates:
    """Measure this machine with torch's operators, on `threads` threads.

    Cost:    about 2 * `seconds`, and 256 MiB of memory meanwhile.
    Effects: the number of threads of torch is changed meanwhile.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        read_s = _fastest_s(torch.ones(_READ_BYTES // 4).sum, seconds)
        matrix = torch.ones(_SIDE, _SIDE, dtype=dtype)
        product_s = _fastest_s(lambda: matrix @ matrix, seconds)
    finally:
        torch.set_num_threads(before)
    return MachineRates(_READ_BYTES / read_s, 2 * _SIDE**3 / product_s)


def _fastest_s(job: Callable[[], object], seconds: float) -> float:
    """Return the shortest time of a job that is repeated for about `seconds`, after one run that does not count."""
    job()
    fastest_s = float("inf")
    end_s = time.perf_counter() + seconds
    while (start_s := time.perf_counter()) < end_s:
        job()
        fastest_s = min(fastest_s, time.perf_counter() - start_s)
    return fastest_s
