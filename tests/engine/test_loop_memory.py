"""The loop on a simulated machine with limited memory for forwards."""

import random
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from tests.engine.test_loop import Bench, LoopWalk, random_prompt
from tests.engine.test_loop_tiers import TierBench
from tests.seeds import fast_and_slow
from tiercel.device.sim import SimFlight, SimMachine
from tiercel.engine.loop import EngineLoop
from tiercel.engine.step.memory_relief import NO_MEMORY, MemoryRelief
from tiercel.scheduler.book import SequenceBook
from tiercel.scheduler.planner import Planner
from tiercel.scheduler.policy import open_policy
from tiercel.scheduler.step_limits import StepLimits
from tiercel.values.errors import OutOfDeviceMemoryError
from tiercel.values.ids import SeqId
from tiercel.values.outcome import FinishReason
from tiercel.values.plan import NanoBatch, Slice, StepPlan
from tiercel.wire.frames import Abort

ENDED_WELL = {FinishReason.STOP, FinishReason.LENGTH}
PLACES = pytest.mark.parametrize("is_at_launch", [False, True])


class Noting:
    """A machine that notes the tokens of the largest nano-batch of every step."""

    def __init__(self, machine: SimMachine) -> None:
        self.forwards: list[int] = []
        self.forget = machine.forget
        self._machine = machine

    def launch(self, plan: StepPlan) -> SimFlight:
        self.forwards.append(max(sum(piece.length for piece in batch.slices) for batch in plan.nano_batches))
        return self._machine.launch(plan)


class ShortBench(Bench):
    """A bench that notes the size of forwards. A part of a step that is refused for lack of memory runs."""

    def __init__(
        self, *, memory: int | None = None, is_at_launch: bool = False, blocks: int = 24, depth: int = 1,
        seqs: int = 6, tokens: int = 16,
    ) -> None:  # fmt: skip
        super().__init__(blocks=blocks, depth=depth, seqs=seqs, tokens=tokens)
        self.machine.memory_tokens = memory
        self.machine.is_short_at_launch = is_at_launch
        self.machine.begun = random.Random(depth)
        noting = Noting(self.machine)
        self.forwards = noting.forwards
        planner = Planner(self.book, StepLimits(seqs, tokens))
        self.loop = EngineLoop(self.book, self.cache, planner, noting, self.client, self.clock, depth)

    @property
    def shortages(self) -> int:
        return self.loop.gauges.read().out_of_memory

    def step(self) -> bool:
        is_busy = self.loop.step()
        self.loop.check_integrity()
        return is_busy

    def run(self, most_steps: int = 20_000) -> None:
        for _ in range(most_steps):
            if self.loop.is_idle:
                while self.loop.step():
                    pass
                return
            assert self.step(), "unfinished work, and a step that does nothing"
        raise AssertionError("never idle")

    def reasons(self) -> set[FinishReason]:
        return {finished.reason for finished in self.client.finished.values()}


@PLACES
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seed", fast_and_slow(range(3), range(3, 8)))
@pytest.mark.sampled(8)
def test_with_any_memory_every_request_gets_the_right_tokens(seed: int, depth: int, is_at_launch: bool) -> None:
    rng = random.Random(seed)
    memory = rng.randrange(1, 24)
    bench = ShortBench(
        memory=memory,
        is_at_launch=is_at_launch,
        depth=depth,
        blocks=rng.choice([24, 60]),
        seqs=rng.choice([1, 3, 8]),
        tokens=rng.choice([8, 32, 64]),
    )
    shared = [rng.randrange(11) for _ in range(40)]
    for _ in range(rng.randrange(5, 20)):
        bench.submit(random_prompt(rng, shared), max_tokens=rng.randrange(1, 40), ignore_eos=rng.random() < 0.5)
        for _ in range(rng.randrange(0, 4)):
            bench.step()
    bench.run()
    bench.assert_all_right()
    assert bench.reasons() <= ENDED_WELL
    assert bench.shortages == bench.machine.num_short or depth  # steps launched after a failed one may fail, too
    assert (bench.shortages > 0) == (max(bench.forwards) > memory)


@PLACES
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_request_that_does_not_fit_alone_fails_alone(depth: int, is_at_launch: bool) -> None:
    bench = ShortBench(depth=depth, is_at_launch=is_at_launch, blocks=100, seqs=8, tokens=64)
    good = [bench.submit([number, 1, 2, 4, 6], max_tokens=30, ignore_eos=True) for number in range(4)]
    for _ in range(6):
        bench.step()
    bad = bench.submit([9] * 20, max_tokens=20, ignore_eos=True)
    bench.machine.hungry.add(bad)
    good += [bench.submit([number] * 7, max_tokens=30, ignore_eos=True) for number in range(3)]
    bench.run()
    bench.assert_all_right()
    failed = bench.client.finished[bad]
    assert (failed.reason, failed.error) == (FinishReason.ERROR, NO_MEMORY)
    assert all(bench.client.finished[seq].reason is FinishReason.LENGTH for seq in good)
    # The request was the cause, so later requests get whole steps at once.
    bench.forwards.clear()
    bench.submit([5] * 60, max_tokens=2, ignore_eos=True)
    bench.run()
    assert max(bench.forwards) == 60


@PLACES
def test_a_single_stream_gets_a_second_attempt(is_at_launch: bool) -> None:
    bench = ShortBench(is_at_launch=is_at_launch, depth=0)
    seq = bench.submit([1, 2], max_tokens=10, ignore_eos=True)
    for _ in range(3):
        bench.step()
    bench.machine.hungry.add(seq)
    bench.step()
    bench.machine.hungry.clear()
    bench.run()
    bench.assert_all_right()
    assert bench.shortages == 1
    assert bench.client.finished[seq].reason is FinishReason.LENGTH


def test_decodes_that_do_not_fit_in_one_forward_are_split() -> None:
    bench = ShortBench(memory=3, blocks=200, seqs=8, tokens=64, depth=0)
    seqs = [bench.submit([number, 5], max_tokens=30, ignore_eos=True) for number in range(8)]
    for _ in range(12):  # prompts and halvings
        bench.step()
    before = {seq: len(bench.client.tokens[seq]) for seq in seqs}
    bench.step()
    assert {seq: len(bench.client.tokens[seq]) - before[seq] for seq in seqs} == dict.fromkeys(seqs, 1)
    bench.run()
    bench.assert_all_right()
    gauges = bench.loop.gauges.read()
    assert gauges.preemptions == 0
    assert gauges.nano_batches > gauges.steps


def test_forwards_double_after_64_good_steps_up_to_the_configured_budget() -> None:
    bench = ShortBench(memory=10, blocks=2000, seqs=40, tokens=40, depth=0)
    for number in range(40):
        bench.submit([number % 11, number // 11], max_tokens=90, ignore_eos=True)
    for _ in range(4):
        bench.step()
    assert bench.forwards == [40, 20, 10, 10]
    bench.machine.memory_tokens = None
    bench.forwards.clear()
    for number in range(400):
        if bench.loop.is_idle:
            break
        if number % 4 == 0 and number < 300:
            bench.submit([number % 11, number // 11] * 8, max_tokens=40, ignore_eos=True)
        bench.step()
    assert bench.forwards[:62] == [10] * 62  # two good steps came before
    assert max(bench.forwards[62:126]) == 20
    assert max(bench.forwards[126:]) == 40
    bench.run()
    bench.assert_all_right()
    assert bench.shortages == 2


def nano_batch_of(tokens: int) -> tuple[NanoBatch, ...]:
    return (NanoBatch((Slice(SeqId(1), 0, tokens, True),)),)


def planner_of(tokens: int) -> Planner:
    return Planner(SequenceBook(open_policy("fcfs"), 100, ()), StepLimits(4, tokens))


def test_while_memory_stays_short_attempts_get_rare() -> None:
    relief = MemoryRelief(planner_of(256))
    size, fits, failed_at = 256, 100, list[int]()
    for step in range(20_000):
        if size > fits:
            assert relief.shrink(step, nano_batch_of(size), OutOfDeviceMemoryError("short"))
            size //= 2
            failed_at.append(step)
        else:
            relief.step_ended()
            size = relief.most_tokens or 256
    gaps = [second - first for first, second in pairwise(failed_at)]
    assert gaps[:3] == [1, 65, 129]
    assert all(gap in (2 * before - 1, before) for before, gap in pairwise(gaps[1:]))
    assert gaps[-1] == 4097


def test_the_number_of_good_steps_is_reset_after_a_quiet_time() -> None:
    relief = MemoryRelief(planner_of(64))
    error = OutOfDeviceMemoryError("short")
    for _ in range(3):
        relief.shrink(1, nano_batch_of(64), error)
        while relief.most_tokens is not None:
            relief.step_ended()
    for _ in range(1000):
        relief.step_ended()
    relief.shrink(1, nano_batch_of(64), error)
    steps = 0
    while relief.most_tokens is not None:
        relief.step_ended()
        steps += 1
    assert steps == 64


def test_memory_is_given_back_and_a_step_launched_before_the_halving_does_not_halve_again() -> None:
    given: list[int] = []
    relief = MemoryRelief(planner_of(64), lambda: given.append(1))
    error = OutOfDeviceMemoryError("short")
    assert relief.shrink(1, nano_batch_of(64), error) and relief.most_tokens == 32
    assert relief.shrink(2, nano_batch_of(40), error) and relief.most_tokens == 32
    assert relief.shrink(3, nano_batch_of(5), error) and relief.most_tokens == 2
    assert len(given) == relief.num_shortages == 3


def test_the_log_contains_the_tokens_before_and_after(caplog: pytest.LogCaptureFixture) -> None:
    relief = MemoryRelief(planner_of(64))
    relief.shrink(7, nano_batch_of(40), OutOfDeviceMemoryError("short", "64 MiB are missing"))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "step=7 nano_batch_tokens=40 most_tokens_before=64 most_tokens_after=20" in record.message
    assert "64 MiB are missing" in record.message


@PLACES
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.sampled(3)
def test_over_three_tiers_a_shortage_loses_no_block(seed: int, depth: int, is_at_launch: bool) -> None:
    rng = random.Random(seed)
    bench = TierBench(blocks=24, host=60, disk=100, depth=depth, seqs=8, tokens=64)
    bench.machine.is_short_at_launch = is_at_launch
    bench.machine.begun = random.Random(seed)
    shared = [rng.randrange(11) for _ in range(40)]
    for _ in range(20):
        bench.machine.memory_tokens = rng.choice([None, 1, 5, 20])
        bench.submit(random_prompt(rng, shared), max_tokens=rng.randrange(1, 40))
        for _ in range(rng.randrange(0, 5)):
            bench.step()
        if rng.random() < 0.1:
            bench.loop.take([Abort((SeqId(rng.randrange(1, len(bench.requests) + 1)),))])
    bench.machine.memory_tokens = rng.choice([None, 4])
    bench.machine.failing_launches = 0
    for _ in range(20_000):
        if bench.loop.is_idle and not bench.loop.step() and bench.mover.next_landing_s is None:
            break
        bench.step()
    assert bench.machine.num_short > 0
    bench.assert_all_right()
    assert FinishReason.ERROR not in {finished.reason for finished in bench.client.finished.values()}


class MemoryWalk(LoopWalk):
    """Change the memory between the steps of the walk."""

    @initialize(
        blocks=st.sampled_from([24, 26, 40]), depth=st.sampled_from([0, 1, 2]), tokens=st.sampled_from([2, 7, 32])
    )
    def start(self, blocks: int, depth: int, tokens: int) -> None:
        self.bench = ShortBench(blocks=blocks, depth=depth, tokens=tokens, seqs=4)

    @rule(tokens=st.sampled_from([None, 1, 2, 5, 11]), is_at_launch=st.booleans())
    def lose_memory(self, tokens: int | None, is_at_launch: bool) -> None:
        self.bench.machine.memory_tokens = tokens
        self.bench.machine.is_short_at_launch = is_at_launch

    @rule()
    def grow_hungry(self) -> None:
        if self.bench.requests:
            self.bench.machine.hungry.add(SeqId(len(self.bench.requests)))


TestMemoryWalk = MemoryWalk.TestCase
TestMemoryWalk.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
