"""Time of sampling: medians per call, by the sampling parameters of the rows.

    python benchmarks/sampler.py [--rows 256] [--vocab-size 2000 32000] [--device cpu] [--threads 1]

`call_ms` is one whole `sample_no_sync`, on a GPU with the wait for it. `host_us` is the Python time of a call beyond
its kernels: the call with a vocabulary of 8, for which kernels take almost no time, minus the three kernels that greedy
sampling needs. It is meaningful for greedy rows only."""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from tiercel.engine.sampling import Sampler, open_sampler
from tiercel.values.request import SamplingParams, pack_tokens

CASES = {
    "greedy": {"temperature": 0.0},
    "greedy + logprobs 5": {"temperature": 0.0, "logprobs": 5},
    "greedy + penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "temperature": {},
    "min_p": {"min_p": 0.05},
    "top_k 20": {"top_k": 20},
    "top_k 20 + top_p 0.8": {"top_k": 20, "top_p": 0.8},
    "top_p 0.9": {"top_p": 0.9},
    "everything": {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "logprobs": 5},
}


def median_s(call: Callable[[], object], device: torch.device, budget_s: float = 1.5) -> float:
    """Return the median seconds of a call over 5 to 200 calls, after two to warm up."""
    seconds: list[float] = []
    end_s = time.perf_counter() + budget_s
    for attempt in range(202):
        if attempt >= 7 and time.perf_counter() > end_s:
            break
        start_s = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds[2:])


def filled(params: list[SamplingParams], vocab_size: int, device: torch.device) -> Sampler:
    """Return a sampler whose rows have a prompt of 100 tokens."""
    sampler = open_sampler(len(params), vocab_size, device, torch.float32)
    prompt = pack_tokens(token % vocab_size for token in range(100))
    for row, each in enumerate(params):
        sampler.set_row(row, each, prompt, b"", (0,))
    return sampler


def measured_s(params: list[SamplingParams], vocab_size: int, device: torch.device) -> float:
    """Return the median seconds of one `sample_no_sync` of these rows, without building its host arrays."""
    sampler = filled(params, vocab_size, device)
    logits = torch.randn(len(params), vocab_size, generator=torch.Generator().manual_seed(1)).mul_(3).to(device)
    rows = np.arange(len(params))
    positions, output_index = rows + 100, rows
    return median_s(lambda: sampler.sample_no_sync(logits, rows, positions, output_index), device)


def host_s(num_rows: int, device: torch.device, as_lists: bool) -> float:
    """Return the Python seconds for greedy rows: a call minus its kernels maximum, subtraction and comparison."""
    sampler = filled([SamplingParams(temperature=0.0)] * num_rows, 8, device)
    logits = torch.randn(num_rows, 8, device=device)
    rows = np.arange(num_rows)
    order = rows.tolist() if as_lists else rows

    def kernels() -> object:
        largest, tokens = logits.max(dim=-1)
        return tokens, (largest - largest) != 0

    return median_s(lambda: sampler.sample_no_sync(logits, order, order, order), device) - median_s(kernels, device)


def main() -> None:
    parser = argparse.ArgumentParser(description="What sampling costs.")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, nargs="+", default=[2000, 32000])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    print(f"rows={args.rows} device={device} threads={args.threads} torch={torch.__version__}")
    for as_lists in (False, True):
        kind = "lists" if as_lists else "arrays"
        print(f"host_us={host_s(args.rows, device, as_lists) * 1e6:.1f} rows greedy, given as {kind}")
    for vocab_size in args.vocab_size:
        for name, fields in CASES.items():
            params = [SamplingParams(**fields, seed=row) for row in range(args.rows)]
            call_s = measured_s(params, vocab_size, device)
            print(
                f"vocab={vocab_size:<6} {name:<22} call_ms={call_s * 1e3:8.3f} row_us={call_s / args.rows * 1e6:8.2f}"
            )


if __name__ == "__main__":
    main()
