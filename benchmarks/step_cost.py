"""Python time of one engine step: a decode batch on a device that does nothing.

    python benchmarks/step_cost.py [--sequences 256] [--steps 400] [--context 512] [--blocks 1000000]

Measures mail, plan, seal, building inputs, launch, commit and post of every step, with the default policy and goals,
in CPU time of the loop's thread, and prints the median and the 99th percentile. Exit code 1 if they are above 1 and
2 ms, with `--blocks` above 3 and 6 ms; `--most-ms` and `--most-p99-ms` set other limits.

`--blocks`: three full tiers hold this many indexed blocks together. In every second step a sequence ends and another
one starts, half of them with a prompt that was seen before; copies between tiers land at once.
"""

import argparse
import gc
import statistics
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch

from tiercel.device.cpu import InlineLane
from tiercel.device.timer import WallTimer
from tiercel.engine.loop import EngineLoop
from tiercel.engine.sampling import Sampled, Sampler
from tiercel.engine.steering import step_limits
from tiercel.engine.step.held import Drawn, HeldStep
from tiercel.engine.step.inputs import BatchInputs
from tiercel.engine.step.rows import RowBook
from tiercel.engine.step.runner import BatchResult, Runner
from tiercel.kvcache.manager import CacheManager
from tiercel.scheduler.book import SequenceBook
from tiercel.scheduler.planner import Planner
from tiercel.scheduler.policy import open_policy
from tiercel.settings.settings import EngineSettings
from tiercel.values.clock import MonotonicClock
from tiercel.values.ids import BlockKey, SeqId, SlotId
from tiercel.values.outcome import RouteGauges
from tiercel.values.rates import Rates
from tiercel.values.request import Request, SamplingParams
from tiercel.values.tier import Landing, Route, Transfer, Verdict
from tiercel.wire.frames import Abort, Report, Submit, encode_frame

BLOCK_SIZE = 16
SPREAD = 128  # tokens by which the lengths of prompts differ
WARM_STEPS = 128  # more than it takes to compute all prompts


class IdleRunner(Runner):
    """A runner that builds the inputs of every step and computes nothing; every sampled token is 7."""

    def __init__(self, rows: RowBook, book: SequenceBook, sampler: Sampler) -> None:
        kv = torch.zeros(1, 1, BLOCK_SIZE, 1, 2)
        super().__init__(None, kv, sampler, InlineLane(), rows, book, (2,))  # type: ignore[arg-type]
        self._sampled = torch.full((len(rows.tables),), 7), torch.zeros(len(rows.tables), dtype=torch.bool)

    def _run_batch(self, batch: BatchInputs, held: HeldStep | None) -> BatchResult:
        count = len(batch.seqs)
        tokens, bad_rows = self._sampled
        sampled = Sampled(tokens[:count], bad_rows[:count])
        return BatchResult(Drawn(batch.seqs, sampled), None, WallTimer(MonotonicClock(), 0.0))


class IdleMover:
    """A mover whose transfers land by the next step."""

    def __init__(self) -> None:
        self._landings: list[Landing] = []
        self.blocks: Counter[str] = Counter()

    def start(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            self._landings.append(Landing(transfer.id, Verdict.LANDED, 1e-4))
            self.blocks[transfer.route.value] += len(transfer.keys)

    def poll(self) -> list[Landing]:
        landed, self._landings = self._landings, []
        return landed

    def gauges(self) -> tuple[RouteGauges, ...]:
        return ()


class Encoder:
    """A receiver that encodes each frame as the mailbox does and drops it."""

    def post(self, message: Report) -> None:
        encode_frame(message)


RATES = Rates(
    bytes_per_s_by_route={Route.SPILL: 5e9, Route.RESTORE: 5e9, Route.PERSIST: 1e9, Route.PREFETCH: 1e9},
    prefill_token_s=1e-3, block_bytes=1 << 16, block_size=BLOCK_SIZE,
)  # fmt: skip


class Load:
    """The loop, with sequences that start and end."""

    def __init__(self, sequences: int, context: int, steps: int, blocks: int) -> None:
        self._rng = np.random.default_rng(0)
        self._context, self._steps = context, steps
        self._heard: list[bytes] = []
        self._next = 1
        longest = context + steps + 2 * WARM_STEPS
        settings = EngineSettings(model="", max_num_seqs=sequences)
        book = SequenceBook(open_policy(settings.scheduling_policy), longest, (2,))
        most = sequences * (-(-longest // BLOCK_SIZE) + 2)
        tiers = (most, blocks // 4, blocks - blocks // 4 - most) if blocks else (most, 0, 0)
        self.cache = CacheManager(
            tiers[0], BLOCK_SIZE, b"benchmark", host_blocks=tiers[1], disk_blocks=tiers[2], rates=lambda: RATES
        )
        for _, pool in self.cache.tiers.pools() if blocks else ():
            for slot in range(1, pool.blocks + 1):
                pool.adopt(SlotId(slot), BlockKey(self._rng.bytes(32)))
        planner = Planner(book, step_limits(settings, sequences * context, RATES.block_bytes))
        rows = RowBook(sequences + 1, -(-longest // BLOCK_SIZE))
        self.mover = IdleMover()
        runner = IdleRunner(rows, book, Sampler(sequences + 1, 16, torch.device("cpu")))
        self.loop = EngineLoop(book, self.cache, planner, runner, Encoder(), MonotonicClock(), mover=self.mover)
        for _ in range(sequences):
            self.come()

    def come(self) -> None:
        """Submit a sequence."""
        # Uneven lengths: sequences cross block boundaries at different steps, as they do in service.
        length = self._context - int(self._rng.integers(0, SPREAD))
        prompt = array("I", self._rng.integers(3, 1000, length).tolist()).tobytes()
        if self._heard and self._rng.random() < 0.5:
            prompt = self._heard[int(self._rng.integers(len(self._heard)))]
        self._heard.append(prompt)
        params = SamplingParams(temperature=0.0, max_tokens=self._steps + WARM_STEPS, ignore_eos=True)
        self.loop.take([Submit(Request(id=SeqId(self._next), prompt=prompt, params=params, arrival_s=0.0))])
        self._next += 1

    def go(self, sequences: int) -> None:
        """Abort the oldest sequence."""
        self.loop.take([Abort((SeqId(self._next - sequences),))])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=0, help="in all tiers together; 0 = one tier")
    parser.add_argument("--most-ms", type=float, default=0, help="CPU time of a step in the median; 0 = 1, or 3 ms")
    parser.add_argument("--most-p99-ms", type=float, default=0, help="and at 99 %%; 0 = 2, or 6 ms")
    args = parser.parse_args()
    load = Load(args.sequences, args.context, args.steps, args.blocks)
    loop = load.loop
    while len(loop.book.waiting) or any(one.want > 1 for one in loop.book.running):
        loop.step()
    gc.collect()
    gc.freeze()
    wall: list[float] = []
    cpu: list[float] = []
    for step in range(args.steps):
        if args.blocks and step % 2:
            load.go(args.sequences)
            load.come()
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        loop.take([])
        loop.step()
        cpu.append(1e3 * (time.thread_time() - cpu_s))
        wall.append(1e3 * (time.perf_counter() - wall_s))
    gauges = loop.gauges.read()
    assert gauges.num_running >= 0.9 * args.sequences, gauges
    for name, values in (("cpu", cpu), ("wall", wall)):
        values.sort()
        print(
            f"{name:>4} ms per step: median {statistics.median(values):.3f}  "
            f"p99 {values[int(0.99 * len(values))]:.3f}  max {values[-1]:.3f}"
        )
    print(
        f"{args.sequences} sequences, context {args.context - SPREAD}..{args.context + args.steps}, {args.steps} steps"
    )
    for _, pool in load.cache.tiers.pools() if args.blocks else ():
        print(f"{pool.blocks} blocks, {len(pool.slot_by_key)} indexed, {pool.evictions} evicted")
    if args.blocks:
        print(f"blocks moved: {dict(load.mover.blocks)}, prefix hits {gauges.prefix_hits} tokens")
    limits = (args.most_ms or (3.0 if args.blocks else 1.0), args.most_p99_ms or (6.0 if args.blocks else 2.0))
    return int(statistics.median(cpu) > limits[0] or cpu[int(0.99 * len(cpu))] > limits[1])


if __name__ == "__main__":
    sys.exit(main())
