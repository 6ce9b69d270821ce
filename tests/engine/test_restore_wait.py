"""A restore that lands while a step runs is in the next plan, on a device that computes beside the host."""

import random
from collections.abc import Iterable

import pytest

from tests.engine.test_loop import VOCAB, random_prompt
from tests.engine.test_loop_tiers import BYTES, TierBench
from tiercel.device.sim import SimFlight, SimMachine
from tiercel.device.sim_mover import SimMover, SimRates
from tiercel.engine.loop import EngineLoop
from tiercel.engine.restore_wait import RestoreWait
from tiercel.kvcache.tiers import TierLimits
from tiercel.scheduler.cost import StepCosts, linear_times
from tiercel.scheduler.planner import Planner
from tiercel.scheduler.policy import open_policy
from tiercel.scheduler.step_limits import StepLimits
from tiercel.scheduler.swap_choice import SwapChooser
from tiercel.values.clock import ManualClock
from tiercel.values.ids import BlockKey, SeqId, SlotId
from tiercel.values.outcome import StepOutcome
from tiercel.values.plan import StepPlan
from tiercel.values.tier import Landing, Purpose, Route, Transfer, Verdict

STEP_S = 0.010
PLANNING_S = 0.0005
RATES = SimRates(copy_s=0.0)  # 50 GB/s and blocks of 2 MiB
PREFIX_BLOCKS = 260  # 10.9 ms at that speed: they land while the second step after the plan runs


class PacedFlight:
    """A step that ends at a time of the clock, as one on a stream does."""

    def __init__(self, flight: SimFlight, clock: ManualClock, end_s: float) -> None:
        self.plan = flight.plan
        self._flight = flight
        self._clock = clock
        self._end_s = end_s

    def result(self) -> StepOutcome:
        self._clock.advance(max(0.0, self._end_s - self._clock.now_s()))
        return self._flight.result()


class PacedMachine:
    """A `SimMachine` that computes beside the host: steps run one after another, each for `step_s`."""

    def __init__(self, machine: SimMachine, clock: ManualClock, step_s: float) -> None:
        self.idle_s = 0.0  # between two steps
        self._machine = machine
        self._clock = clock
        self._step_s = step_s
        self._busy_until_s: float | None = None

    def launch(self, plan: StepPlan) -> PacedFlight:
        flight = self._machine.launch(plan)
        self._clock.advance(PLANNING_S)
        now_s = self._clock.now_s()
        begin_s = max(now_s, self._busy_until_s or now_s)
        self.idle_s += begin_s - (self._busy_until_s or begin_s)
        self._busy_until_s = begin_s + self._step_s
        return PacedFlight(flight, self._clock, self._busy_until_s)

    def forget(self, seqs: Iterable[SeqId]) -> None:
        self._machine.forget(seqs)


class PacedBench(TierBench):
    """A `TierBench` on a paced machine, whose loop may wait for restores."""

    def __init__(
        self, *, waits: bool, blocks: int = 400, depth: int = 1, seqs: int = 4, rates: SimRates = RATES,
        max_len: int = 2000,
    ) -> None:  # fmt: skip
        times = linear_times(base_ms=1e3 * STEP_S, prefill_ms=0.0, decode_ms=0.0, context_ms=0.0)
        super().__init__(
            blocks=blocks, host=2000, depth=depth, seqs=seqs, rates=rates, limits=TierLimits(always_loads=True),
            max_len=max_len, step_s=lambda slices: 0.0, policy=open_policy("fcfs", StepCosts(times)),
        )  # fmt: skip
        planner = Planner(self.book, StepLimits(seqs, 2048), SwapChooser("swap", lambda: self.known))
        mover = self.mover
        if waits:
            mover = RestoreWait(mover, lambda blocks: self.known.load_s(Route.RESTORE, blocks), self.clock)
        self.paced = PacedMachine(self.machine, self.clock, STEP_S)
        self.loop = EngineLoop(
            *(self.book, self.cache, planner, self.paced, self.client, self.clock, depth, mover),
            record=self.record,
        )


def time_to_first_token(*, waits: bool) -> float:
    """Return the seconds from the arrival of a prompt whose prefix is in DDR until its first token, beside a stream."""
    bench = PacedBench(waits=waits)
    prompt = [number % 7 for number in range(4 * PREFIX_BLOCKS)]
    bench.submit(prompt, max_tokens=2)
    bench.run()
    for number in range(4):  # evict it from HBM
        bench.submit([7 + number] * 396, max_tokens=2)
        bench.run()
    bench.submit([1, 2, 3], max_tokens=200)  # a stream
    for _ in range(20):
        bench.step()
    asked = bench.submit([*prompt, 5], max_tokens=2)
    start_s = bench.clock.now_s()
    bench.paced.idle_s = 0.0
    while asked not in bench.client.tokens:
        bench.step()
    assert bench.client.finished.get(asked) is None
    found_s, idle_s = bench.clock.now_s() - start_s, bench.paced.idle_s
    bench.run()
    bench.assert_all_right()
    assert bench.cache.loaded_tokens >= 4 * PREFIX_BLOCKS
    assert idle_s == pytest.approx(0.0, abs=1e-9), "the device waited for the host"
    return found_s


def test_a_restored_sequence_is_in_the_next_step_if_its_blocks_land_before_the_step_in_flight_ends() -> None:
    saved_s = time_to_first_token(waits=False) - time_to_first_token(waits=True)

    assert saved_s == pytest.approx(STEP_S, abs=1e-3)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sampled(5)
def test_random_swaps_give_the_right_tokens_with_waiting(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    slow = SimRates(block_bytes=BYTES, spill_bytes_per_s=4e6, restore_bytes_per_s=rng.choice([1e6, 4e6]))
    bench = PacedBench(waits=True, blocks=24, depth=depth, seqs=6, rates=slow, max_len=96)
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    for _ in range(rng.randrange(5, 20)):
        bench.submit(random_prompt(rng, shared), max_tokens=rng.randrange(1, 40))
        for _ in range(rng.randrange(0, 4)):
            bench.step()
    bench.run()
    bench.assert_all_right()


# ---- when it waits, and how long


class SleepingMover(SimMover):
    """Notes the seconds of every wait; each lasts `took` of them. Nothing lands unless `landings` has it."""

    def __init__(self, clock: ManualClock, took: float = 1.0) -> None:
        self.asked: list[float] = []
        self.landings: list[Landing] = []
        self._own_clock = clock
        self._took = took

    def start(self, transfers: Iterable[Transfer]) -> None:
        pass

    def poll(self) -> list[Landing]:
        return self.landings

    def wait_landing(self, seconds: float) -> None:
        self.asked.append(seconds)
        self._own_clock.advance(self._took * seconds)


def restore(number: int, blocks: int, route: Route = Route.RESTORE) -> Transfer:
    slots = tuple(SlotId(slot) for slot in range(1, blocks + 1))
    return Transfer(number, route, Purpose.RESTORE, (BlockKey(bytes(32)),) * blocks, slots, slots)


def open_wait(took: float = 1.0) -> tuple[RestoreWait, SleepingMover, ManualClock]:
    """A block takes a millisecond."""
    clock = ManualClock(50.0)
    mover = SleepingMover(clock, took)
    return RestoreWait(mover, lambda blocks: 1e-3 * blocks, clock), mover, clock


def test_it_waits_for_the_restores_that_are_due_before_the_plan_and_no_others() -> None:
    wait, mover, clock = open_wait()
    wait.start([restore(1, 4), restore(2, 5, Route.SPILL), restore(3, 8), restore(4, 100)])

    assert wait.wait(clock.now_s() + 0.02)

    # The third transfer is due after 4 + 8 ms, and late after 2 ms and the margin of 1 ms more.
    assert mover.asked == [pytest.approx(0.015)]
    assert not wait.wait(clock.now_s() + 0.005)  # nothing that is not late yet is due


def test_it_leaves_time_for_planning() -> None:
    wait, mover, clock = open_wait()
    wait.poll()
    clock.advance(0.004)  # a plan and its launch
    wait.start([restore(1, 8)])
    clock.advance(0.5)
    wait.start([restore(2, 8)])  # beside the steps: no plan
    wait.start([restore(3, 8)])

    assert wait.wait(clock.now_s() + 0.018)
    assert mover.asked == [pytest.approx(0.018 - 2 * 0.004 - 0.001)]
    assert not wait.wait(clock.now_s())


def test_a_landed_restore_is_not_waited_for() -> None:
    wait, mover, clock = open_wait()
    wait.start([restore(1, 4)])
    mover.landings = [Landing(1, Verdict.FAILED), Landing(7, Verdict.LANDED)]
    wait.poll()

    assert not wait.wait(clock.now_s() + 1.0)
    assert not mover.asked


def test_a_landing_of_something_else_ends_the_wait_early() -> None:
    wait, mover, clock = open_wait(took=0.1)
    wait.start([restore(1, 4)])
    end_s = clock.now_s() + 1.0

    assert wait.wait(end_s)
    assert wait.wait(end_s)

    assert mover.asked[1] == pytest.approx(0.9 * mover.asked[0])
