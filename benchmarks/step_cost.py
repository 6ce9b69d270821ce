"""What one engine step costs in Python: a decode batch against a device that does nothing.

    python benchmarks/step_cost.py [--sequences 256] [--steps 400] [--context 512]

Measures mail, plan, seal, building inputs, launch, commit and post of every step, in CPU time of the loop's thread,
and prints the median, the 99th percentile and the share of each part.
"""

import argparse
import gc
import statistics
import time
from array import array
from collections.abc import Callable

import numpy as np
import torch

from engine.loop import EngineLoop
from engine.rows import RowBook
from engine.runner import Runner
from engine.sampling import Sampled, Sampler
from kvcache.manager import CacheManager
from scheduler.book import SequenceBook
from scheduler.planner import Planner, StepLimits
from scheduler.policy import open_policy
from tiercel.clock import MonotonicClock
from tiercel.ids import SeqId
from tiercel.request import Request, SamplingParams
from tiercel.wire import Report, Submit, encode_frame

BLOCK_SIZE = 16


class Done:
    """A job that was never run."""

    def __init__(self, sampled: list[Sampled]) -> None:
        self._sampled = sampled

    def result(self) -> list[Sampled]:
        return self._sampled


class IdleLane:
    """A device that does nothing: every sequence says token 7."""

    def __init__(self, sequences: int) -> None:
        tokens = torch.full((sequences,), 7)
        self._sampled = [Sampled(tokens, torch.zeros(sequences, dtype=torch.bool))]

    def run(self, job: Callable[[], list[Sampled]]) -> Done:
        return Done(self._sampled)

    def close(self) -> None:
        pass


class Encoder:
    """Posts into the void, after encoding the frame as the mailbox does."""

    def post(self, message: Report) -> None:
        encode_frame(message)


def build(sequences: int, context: int, steps: int) -> EngineLoop:
    book = SequenceBook(open_policy("fcfs"), context + steps + 64, (2,))
    blocks = sequences * (-(-(context + steps + 64) // BLOCK_SIZE) + 2)
    cache = CacheManager(blocks, BLOCK_SIZE, b"benchmark")
    planner = Planner(book, StepLimits(sequences, sequences * context))
    rows = RowBook(sequences + 1, -(-(context + steps + 64) // BLOCK_SIZE))
    kv = torch.zeros(1, 1, BLOCK_SIZE, 1, 2)
    sampler = Sampler(sequences + 1, 16, torch.device("cpu"))
    runner = Runner(None, kv, sampler, IdleLane(sequences), rows, book, (2,))  # type: ignore[arg-type]
    loop = EngineLoop(book, cache, planner, runner, Encoder(), MonotonicClock())
    params = SamplingParams(temperature=0.0, max_tokens=steps + 32, ignore_eos=True)
    rng = np.random.default_rng(0)
    for number in range(1, sequences + 1):
        # Uneven lengths: sequences cross block boundaries at different steps, as they do in service.
        length = context - int(rng.integers(0, BLOCK_SIZE))
        prompt = array("I", rng.integers(3, 1000, length).tolist()).tobytes()
        loop.take([Submit(Request(id=SeqId(number), prompt=prompt, params=params, arrival_s=0.0))])
    return loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--context", type=int, default=512)
    args = parser.parse_args()
    loop = build(args.sequences, args.context, args.steps)
    for _ in range(16):
        loop.step()
    gc.collect()
    gc.freeze()
    wall: list[float] = []
    cpu: list[float] = []
    for _ in range(args.steps):
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        loop.take([])
        loop.step()
        cpu.append(1e3 * (time.thread_time() - cpu_s))
        wall.append(1e3 * (time.perf_counter() - wall_s))
    gauges = loop.gauges()
    assert gauges.num_running == args.sequences, gauges
    for name, values in (("cpu", cpu), ("wall", wall)):
        values.sort()
        print(
            f"{name:>4} ms per step: median {statistics.median(values):.3f}  "
            f"p99 {values[int(0.99 * len(values))]:.3f}  max {values[-1]:.3f}"
        )
    print(f"{args.sequences} sequences, context {args.context}..{args.context + args.steps}, {args.steps} steps")


if __name__ == "__main__":
    main()
