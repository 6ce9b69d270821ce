"""Sequences of very many blocks: the tokens are right, and no step does work for each block."""

import random
import sys
from array import array
from collections.abc import Callable
from types import FrameType

import pytest

from benchmarks.step_bounds import Copies, Device, ReportSink
from tests.engine.test_loop import VOCAB
from tests.engine.test_loop_tiers import BYTES, TierBench
from tests.seeds import fresh_seeds
from tiercel.device.sim_mover import SimRates
from tiercel.engine.loop import EngineLoop
from tiercel.kvcache.manager import CacheManager
from tiercel.kvcache.tiers import TierLimits
from tiercel.scheduler.book import SequenceBook
from tiercel.scheduler.planner import Planner
from tiercel.scheduler.policy import open_policy
from tiercel.scheduler.step_limits import StepLimits
from tiercel.scheduler.swap_choice import SwapChooser
from tiercel.settings.settings import PreemptionMode
from tiercel.values.clock import ManualClock
from tiercel.values.ids import SeqId
from tiercel.values.outcome import SequenceState
from tiercel.values.rates import Rates
from tiercel.values.request import Request, SamplingParams
from tiercel.values.tier import Route, Transfer, Verdict
from tiercel.wire.frames import Abort, Submit, ToEngine


@pytest.mark.parametrize("mode", ["auto", "swap"])
@pytest.mark.parametrize(
    "seed", [*range(3), 275, *fresh_seeds(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 8))]
)
@pytest.mark.sampled(2)
def test_random_work_in_blocks_of_one_token_gives_the_right_tokens(seed: int, mode: PreemptionMode) -> None:
    """The books work on arrays of blocks, over tiers whose transfers are divided and partly fail."""
    rng = random.Random(seed)
    verdicts = [Verdict.LANDED] * 12 + [Verdict.FAILED, Verdict.MISS, Verdict.LATE]

    def fate(transfer: Transfer) -> Verdict:
        if transfer.route is Route.PREFETCH:
            return rng.choice(verdicts)
        return rng.choice([Verdict.LANDED] * 12 + [Verdict.FAILED])

    bench = TierBench(
        blocks=rng.choice([260, 400]), host=rng.choice([0, 150, 900]), disk=rng.choice([0, 0, 300]), mode=mode,
        seqs=rng.choice([3, 8]), tokens=rng.choice([32, 256]), fate=fate, block=1, max_len=200,
        depth=rng.choice([0, 1, 2]), rates=SimRates(block_bytes=BYTES, copy_s=1e-4),
        limits=TierLimits(
            always_loads=mode == "swap", carried_blocks=rng.choice([7, 40, 2048]), has_write_back=rng.random() < 0.5
        ),
    )  # fmt: skip
    shared = [rng.randrange(VOCAB) for _ in range(120)]
    try:
        for _ in range(rng.randrange(8, 20)):
            prompt = shared[: rng.randrange(120)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))]
            bench.submit(prompt, max_tokens=rng.randrange(1, 40))
            for _ in range(rng.randrange(0, 6)):
                bench.step()
            if rng.random() < 0.15:
                bench.loop.take([Abort((SeqId(rng.randrange(1, len(bench.requests) + 1)),))])
        bench.run()
        bench.assert_all_right()
    except BaseException:
        print(f"failing seed {seed}")
        raise


# ---- the number of calls of a step

BLOCKS = 1 << 16  # of one sequence: a million tokens
SIZE = 16
MAX_CALLS = 50_000  # of Python and C functions in one step: less than one per block


class Counted:
    """An engine that counts the function calls of every step."""

    def __init__(self, *, host: int = 0) -> None:
        self.clock = ManualClock(100.0)
        rates = Rates(
            bytes_per_s_by_route={Route.SPILL: 4e9, Route.RESTORE: 4e9} if host else {},
            prefill_token_s=1e-4, block_bytes=4096, block_size=SIZE,
        )  # fmt: skip
        self.book = SequenceBook(open_policy("priority", step_ms=50), BLOCKS * SIZE + 4000, frozenset[int]())
        self.cache = CacheManager(
            BLOCKS + 200, SIZE, b"sim", host_blocks=host, rates=lambda: rates, limits=TierLimits(always_loads=True)
        )
        chooser = SwapChooser("swap" if host else "recompute", lambda: rates)
        planner = Planner(self.book, StepLimits(8, 8192), chooser)
        device, copies = Device(self.clock), Copies()
        self.loop = EngineLoop(self.book, self.cache, planner, device, ReportSink(), self.clock, 1, mover=copies)
        self.most_calls = 0
        self.where = ""
        self._calls = 0

    def turn(self, *mail: ToEngine, note: str) -> None:
        self._calls = 0
        sys.setprofile(self._count)
        try:
            self.loop.take(mail)
            self.loop.step()
        finally:
            sys.setprofile(None)
        if self._calls > self.most_calls:
            self.most_calls, self.where = self._calls, note

    def until(self, is_so: Callable[[], bool], note: str) -> None:
        for _ in range(1500):
            if is_so():
                return
            self.turn(note=note)
        raise AssertionError(f"{note}: not reached")

    def submit(self, seq: int, first: int, blocks: int, *, band: int = 0, max_tokens: int = 2000) -> Submit:
        prompt = array("I", range(first, first + blocks * SIZE)).tobytes()
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        now_s = self.clock.now_s()
        return Submit(Request(id=SeqId(seq), prompt=prompt, params=params, arrival_s=now_s, scope=b"", band=band))

    def decodes(self, seq: int) -> bool:
        sequence = self.book[SeqId(seq)]
        return sequence.state is SequenceState.RUNNING and sequence.want <= 1

    def is_away(self, seq: int) -> bool:
        return self.book[SeqId(seq)].state in (SequenceState.PREEMPTED, SequenceState.DRAINING)

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        self._calls += event in ("call", "c_call")


@pytest.mark.parametrize("host", [0, pytest.param(BLOCKS + 500, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_no_step_does_work_for_each_block_of_a_million_tokens(host: int) -> None:
    """Submitted, computed, aborted, admitted onto the cached prefix, preempted, spilled, restored, evicted, ended."""
    engine = Counted(host=host)
    engine.turn(engine.submit(1, 0, BLOCKS, band=1), note="submit")
    engine.until(lambda: engine.decodes(1), "prefill")
    engine.turn(Abort((SeqId(1),)), note="abort")
    engine.turn(engine.submit(2, 0, BLOCKS, band=1), note="submit again")
    engine.until(lambda: engine.decodes(2), "admission onto the cached prefix")
    engine.turn(engine.submit(3, 5_000_000, BLOCKS // 2, max_tokens=3), note="submit to a higher band")
    engine.until(lambda: engine.is_away(2), "preemption")
    engine.until(lambda: SeqId(3) not in engine.book, "prefill over what was evicted")
    engine.until(lambda: engine.decodes(2), "back")
    engine.turn(engine.submit(4, 9_000_000, BLOCKS // 2, max_tokens=3), note="submit to a higher band again")
    engine.until(lambda: engine.is_away(2), "second preemption")
    engine.turn(Abort((SeqId(2),)), note="abort while it is away")
    engine.until(lambda: engine.loop.is_idle, "end")
    for _ in range(5):
        engine.turn(note="idle")
    if host:
        assert engine.book.preemption_counts.num_swaps == 2
        assert engine.cache.loaded_tokens > BLOCKS * SIZE // 4
    assert engine.most_calls < MAX_CALLS, engine.where
    engine.loop.check_integrity()


def test_hashing_has_one_budget_for_all_prompts_of_a_step() -> None:
    engine = Counted()
    for seq in range(1, 17):
        engine.turn(engine.submit(seq, seq * 10_000_000, 4000, max_tokens=2), note="submit")
    for _ in range(30):
        engine.turn(note="hashing")
    assert engine.most_calls < MAX_CALLS, engine.where
    engine.until(lambda: engine.loop.is_idle, "end")
