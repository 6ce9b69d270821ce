"""The loop over three tiers in virtual time: every KV row that a step reads is checked."""

import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.engine.test_loop import END, MAX_MODEL_LEN, VOCAB, Client, random_prompt
from tests.foreign import foreign_numbers
from tiercel.device.sim import SimMachine, StepTime, expected_outputs, plain_step_s
from tiercel.device.sim_mover import SimMover, SimRates
from tiercel.engine.loop import EngineLoop, Mover
from tiercel.kvcache.eviction import RetentionClass
from tiercel.kvcache.manager import CacheManager
from tiercel.kvcache.tiers import TierLimits
from tiercel.scheduler.book import SequenceBook
from tiercel.scheduler.planner import Planner
from tiercel.scheduler.policy import Policy, PolicyName, open_policy
from tiercel.scheduler.step_limits import StepLimits
from tiercel.scheduler.swap_choice import SwapChooser
from tiercel.settings.settings import PreemptionMode
from tiercel.values.clock import ManualClock
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.outcome import FinishReason, SequenceState
from tiercel.values.rates import Rates
from tiercel.values.request import Request, SamplingParams, pack_tokens
from tiercel.values.tenant import DEFAULT_TENANT
from tiercel.values.tier import Route, Transfer, Verdict
from tiercel.wire.frames import Abort, Submit
from tiercel.wire.step_record import StepRecord

BLOCK = 4
BYTES = 4096
SLOW = SimRates(
    block_bytes=BYTES, spill_bytes_per_s=4e6, restore_bytes_per_s=4e6, disk_write_bytes_per_s=2e6,
    disk_read_bytes_per_s=2e6, copy_s=1e-4,
)  # fmt: skip


class TierBench:
    """A loop over simulated tiers. `disk` outlives a restart."""

    def __init__(
        self, *, blocks: int = 24, host: int = 60, disk: int = 0, depth: int = 1, seqs: int = 6, tokens: int = 16,
        mode: PreemptionMode = "swap", fate: Callable[[Transfer], Verdict] | None = None,
        limits: TierLimits | None = None, rates: SimRates = SLOW, policy: PolicyName | Policy = "fcfs", chunk: int = 0,
        block: int = BLOCK, max_len: int = MAX_MODEL_LEN, step_s: StepTime = plain_step_s,
        wrap: Callable[[SimMover, ManualClock], Mover] = lambda mover, _: mover, prefix_caching: bool = True,
        patience_s: float = 1.0, planner: type[Planner] = Planner,
    ) -> None:  # fmt: skip
        self.max_len = max_len
        self.clock = ManualClock(100.0)
        self.client = Client()
        opened = open_policy(policy, step_ms=2.0, patience_s=patience_s) if isinstance(policy, str) else policy
        self.book = SequenceBook(opened, max_len, END)
        speeds = {
            Route.SPILL: host and rates.spill_bytes_per_s,
            Route.RESTORE: host and rates.restore_bytes_per_s,
            Route.PERSIST: disk and rates.disk_write_bytes_per_s,
            Route.PREFETCH: disk and rates.disk_read_bytes_per_s,
        }
        self.known = known = Rates(
            bytes_per_s_by_route={route: speed for route, speed in speeds.items() if speed},
            prefill_token_s=1e-2,
            block_bytes=rates.block_bytes,
            block_size=block,
        )  # fmt: skip
        self.cache = CacheManager(
            blocks, block, b"sim", host_blocks=host, disk_blocks=disk, rates=lambda: known,
            limits=limits or TierLimits(always_loads=mode == "swap"), has_prefix_caching=prefix_caching,
        )  # fmt: skip
        self.machine = SimMachine(self.book, block, VOCAB, self.clock, max_rows=seqs + 1, step_s=step_s)
        self.mover = SimMover(self.machine, self.clock, has_host=host > 0, rates=rates, fate=fate)
        self.record = StepRecord.open(seqs + 1)
        chooser = SwapChooser(mode, lambda: known)
        self.planner = planner(self.book, StepLimits(seqs, tokens, chunk, block_bytes=rates.block_bytes), chooser)
        self.loop = EngineLoop(
            self.book,
            self.cache,
            self.planner,
            self.machine,
            self.client,
            self.clock,
            depth,
            mover=wrap(self.mover, self.clock),
            record=self.record,
        )
        self.requests: dict[int, Request] = {}

    def submit(
        self, prompt: list[int], *, max_tokens: int = 20, scope: bytes = b"", ignore_eos: bool = True,
        tenant: TenantId = DEFAULT_TENANT, band: int = 0, prompt_logprobs: int | None = None,
    ) -> SeqId:  # fmt: skip
        seq = SeqId(len(self.requests) + 1)
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos, prompt_logprobs=prompt_logprobs
        )
        self.requests[seq] = Request(
            id=seq, prompt=pack_tokens(prompt), params=params, arrival_s=self.clock.now_s(), scope=scope, tenant=tenant,
            band=band,
        )  # fmt: skip
        self.loop.take([Submit(self.requests[seq])])
        return seq

    def step(self) -> bool:
        """Run a step; if there was nothing to do, advance the clock to the next landing."""
        is_busy = self.loop.step()
        self.loop.check_integrity()
        due_s = self.mover.next_landing_s
        if not is_busy and due_s is not None:
            self.clock.advance(max(0.0, due_s - self.clock.now_s()) + 1e-9)
            return True
        return is_busy

    def run(self, most_steps: int = 20_000) -> None:
        for _ in range(most_steps):
            if self.loop.is_idle and not self.loop.step() and self.mover.next_landing_s is None:
                return
            assert self.step() or self.loop.is_idle, "unfinished work, and a step that does nothing"
        raise AssertionError("never idle")

    def assert_all_right(self) -> None:
        assert set(self.client.endings) == set(self.requests)
        assert set(self.client.endings.values()) <= {1}
        for seq, finished in self.client.finished.items():
            output = self.client.tokens.get(seq, [])
            expected = expected_outputs(self.requests[seq], VOCAB, END, self.max_len)
            if finished.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert output == expected
            else:
                assert output == expected[: len(output)]
        assert self.cache.blocks_used == 0
        assert not foreign_numbers((self.cache, self.book, self.mover))
        for _, pool in self.cache.tiers.pools():
            assert pool.num_owned == 0


@pytest.mark.parametrize("mode", ["auto", "swap", "recompute"])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 10))])
@pytest.mark.sampled(4)
def test_random_work_over_three_tiers_gives_the_right_tokens(seed: int, depth: int, mode: PreemptionMode) -> None:
    rng = random.Random(seed)
    verdicts = [Verdict.LANDED] * 12 + [Verdict.FAILED, Verdict.MISS, Verdict.LATE]

    def fate(transfer: Transfer) -> Verdict:
        if transfer.route is Route.PREFETCH:
            return rng.choice(verdicts)
        return rng.choice([Verdict.LANDED] * 20 + [Verdict.FAILED])

    bench = TierBench(
        blocks=rng.choice([24, 30]), host=rng.choice([0, 12, 60]), disk=rng.choice([0, 8, 100]), depth=depth, mode=mode,
        seqs=rng.choice([2, 8]), tokens=rng.choice([8, 64]), fate=fate,
    )  # fmt: skip
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    for _ in range(rng.randrange(10, 40)):
        bench.submit(
            random_prompt(rng, shared), max_tokens=rng.randrange(1, 40), scope=rng.choice([b"", b"tenant-a"]),
            ignore_eos=rng.random() < 0.5,
        )  # fmt: skip
        for _ in range(rng.randrange(0, 4)):
            bench.step()
        if rng.random() < 0.1:
            bench.loop.take([Abort((SeqId(rng.randrange(1, len(bench.requests) + 1)),))])
        if rng.random() < 0.05:
            bench.machine.failing_launches = 1
            bench.machine.begun = random.Random(seed)
    bench.run()
    bench.assert_all_right()


def test_a_victim_is_spilled_and_restored_from_ddr() -> None:
    bench = TierBench(blocks=24, seqs=8, limits=TierLimits(always_loads=True, has_write_back=False))
    for number in range(8):
        bench.submit([number] * 12, max_tokens=50)
    bench.run()
    bench.assert_all_right()
    assert bench.book.preemption_counts.num_swaps > 0
    assert bench.mover.bytes_by_route[Route.SPILL] > 0
    assert bench.mover.bytes_by_route[Route.RESTORE] > 0
    assert bench.cache.loaded_tokens > 0


def test_write_back_in_idle_time_makes_victims_clean() -> None:
    bench = TierBench(blocks=24, seqs=8, rates=SimRates(block_bytes=BYTES))
    for number in range(8):
        bench.submit([number] * 12, max_tokens=50)
    bench.run()
    bench.assert_all_right()
    assert bench.book.preemption_counts.total > 0
    assert bench.cache.loaded_tokens > 0


def test_blocks_spilled_one_by_one_are_restored_in_few_copies() -> None:
    bench = TierBench(blocks=26, host=600, seqs=8, tokens=64, rates=SimRates(block_bytes=BYTES))
    for number in range(8):
        bench.submit([number] * 12, max_tokens=60)
    bench.run()
    bench.assert_all_right()
    restored = bench.mover.bytes_by_route[Route.RESTORE]
    assert restored > 0
    ddr = bench.cache.tiers.host
    assert ddr is not None
    assert ddr.taken_slots / ddr.taken_runs > 2


def test_a_finished_prefix_is_restored_from_the_disk() -> None:
    bench = TierBench(blocks=24, host=0, disk=100, limits=TierLimits(wanted_share=0.5))
    prompt = list(range(9)) * 5
    bench.submit(prompt, max_tokens=2)
    bench.run()
    for number in range(4):  # evict it from memory
        bench.submit([number + 5] * 60, max_tokens=2)
        bench.run()
    bench.submit(prompt, max_tokens=2)
    bench.run()
    bench.assert_all_right()
    assert bench.client.finished[6].num_cached == 44
    assert bench.mover.bytes_by_route[Route.PREFETCH] > 0


def test_a_prefix_longer_than_the_concurrent_reads_comes_back_from_the_disk() -> None:
    bench = TierBench(blocks=24, host=0, disk=100, limits=TierLimits(wanted_share=0.5, fetch_blocks=2))
    prompt = list(range(9)) * 5
    bench.submit(prompt, max_tokens=2)
    bench.run()
    for number in range(4):
        bench.submit([number + 5] * 60, max_tokens=2)
        bench.run()
    bench.submit(prompt, max_tokens=2)  # deferred during the first two reads, and then the other reads are started
    bench.run()
    bench.assert_all_right()
    assert bench.client.finished[6].num_cached == 44


def test_a_wrong_block_on_the_disk_is_a_miss_and_is_dropped() -> None:
    bench = TierBench(
        blocks=24, host=0, disk=100,
        fate=lambda transfer: Verdict.MISS if transfer.route is Route.PREFETCH else Verdict.LANDED,
    )  # fmt: skip
    prompt = list(range(9)) * 5
    for _ in range(2):
        bench.submit(prompt, max_tokens=2)
        bench.run()
        for number in range(4):
            bench.submit([number + 5] * 60, max_tokens=2)
            bench.run()
    bench.assert_all_right()
    assert bench.cache.misses > 0
    assert bench.client.finished[6].num_cached < 44


@pytest.mark.slow
def test_abort_while_restoring_frees_everything() -> None:
    seen = 0
    for steps in range(5, 120, 12):
        bench = TierBench(blocks=24, seqs=8, limits=TierLimits(always_loads=True, has_write_back=False))
        seqs = [bench.submit([number] * 12, max_tokens=50) for number in range(8)]
        for _ in range(steps):
            bench.step()
        restoring = [seq for seq in seqs if seq in bench.book and bench.book[seq].state is SequenceState.RESTORING]
        seen += len(restoring)
        bench.loop.take([Abort(tuple(restoring))])
        bench.run()
        bench.assert_all_right()
    assert seen > 0


def test_the_daily_budget_of_the_disk_is_kept() -> None:
    bench = TierBench(blocks=40, host=0, disk=100, limits=TierLimits(daily_blocks=7))
    for number in range(6):
        bench.submit([number] * 40, max_tokens=2)
        bench.run()
    bench.assert_all_right()
    assert bench.mover.bytes_by_route[Route.PERSIST] == 7 * BYTES


def test_without_reuse_a_victim_is_written_every_time() -> None:
    written: dict[bool, int] = {}
    for has_reuse in (True, False):
        bench = TierBench(
            blocks=24, seqs=8, limits=TierLimits(always_loads=True, has_write_back=False, has_reuse=has_reuse)
        )
        for number in range(8):
            bench.submit([number] * 12, max_tokens=60)
        bench.run()
        bench.assert_all_right()
        written[has_reuse] = bench.mover.bytes_by_route[Route.SPILL]
    assert written[True] < written[False]


def test_a_disk_call_that_hangs_for_ever_stops_no_request() -> None:
    late_s = 1e3
    bench = TierBench(
        blocks=48, host=0, disk=100, rates=SimRates(block_bytes=BYTES, late_s=late_s),
        fate=lambda transfer: Verdict.LATE if transfer.route is Route.PREFETCH else Verdict.LANDED,
    )  # fmt: skip
    prompt = list(range(9)) * 5
    bench.submit(prompt, max_tokens=2)
    bench.run()
    for number in range(8):  # evict it from memory
        bench.submit([number + 5] * 60, max_tokens=2)
        bench.run()
    for number in range(8):
        bench.submit([*prompt, number], max_tokens=30)
    while not bench.loop.is_idle:
        if not bench.loop.step():
            bench.clock.advance(0.01)
        bench.loop.check_integrity()
        assert bench.clock.now_s() < 200, "somebody waits for a call that hangs"
    assert bench.cache.tiers.transfers.flying()
    assert {finished.reason for finished in bench.client.finished.values()} == {FinishReason.LENGTH}


def test_a_victim_that_is_clean_keeps_its_copies_below() -> None:
    bench = TierBench(blocks=24, seqs=8, rates=SimRates(block_bytes=BYTES))
    for number in range(8):
        bench.submit([number] * 12, max_tokens=50)
    host = bench.cache.tiers.host
    assert host is not None
    kept = 0
    while not bench.loop.is_idle:
        bench.step()
        kept = max(kept, host.copies.num_retained(RetentionClass.PREEMPTED))
    bench.run()
    bench.assert_all_right()
    assert kept > 0
    assert host.copies.num_retained(RetentionClass.PREEMPTED) == host.copies.num_retained(RetentionClass.WANTED) == 0


def test_aborts_during_copies_leave_no_block_held() -> None:
    bench = TierBench(blocks=24, host=60, disk=100, seqs=8)
    host = bench.cache.tiers.host
    assert host is not None
    for round_ in range(6):
        seqs = [bench.submit([number + round_] * 16, max_tokens=50) for number in range(8)]
        for _ in range(20 + 3 * round_):
            bench.step()
        bench.loop.take([Abort(tuple(seqs))])
    bench.run()
    bench.assert_all_right()
    assert host.copies.num_retained(RetentionClass.PREEMPTED) == host.copies.num_retained(RetentionClass.WANTED) == 0


class TierWalk(RuleBasedStateMachine):
    """Submits, steps, waits, aborts, refuses and fails copies in any order, and checks every invariant."""

    @initialize(
        blocks=st.sampled_from([24, 26, 40]),
        host=st.sampled_from([0, 8, 60]),
        disk=st.sampled_from([0, 6, 100]),
        depth=st.sampled_from([0, 1, 2]),
        tokens=st.sampled_from([3, 32]),
        mode=st.sampled_from(["auto", "swap", "recompute"]),
    )
    def start(self, blocks: int, host: int, disk: int, depth: int, tokens: int, mode: PreemptionMode) -> None:
        self.verdict = Verdict.LANDED
        self.bench = TierBench(
            blocks=blocks, host=host, disk=disk, depth=depth, tokens=tokens, seqs=4, mode=mode, fate=self.fate
        )

    def fate(self, transfer: Transfer) -> Verdict:
        if self.verdict is Verdict.LATE and transfer.route is not Route.PREFETCH:
            return Verdict.LANDED  # only reads have a deadline
        return self.verdict

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=40) | st.just([1, 2]),
        max_tokens=st.integers(1, 40),
        scope=st.sampled_from([b"", b"abcd"]),
    )
    def submit(self, prompt: list[int], max_tokens: int, scope: bytes) -> None:
        self.bench.submit(prompt, max_tokens=max_tokens, scope=scope)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.bench.step()

    @rule(seconds=st.floats(0, 0.05))
    def pass_time(self, seconds: float) -> None:
        self.bench.clock.advance(seconds)

    @rule(verdict=st.sampled_from(Verdict).filter(lambda verdict: verdict is not Verdict.RETURNED))
    def change_fate(self, verdict: Verdict) -> None:
        self.verdict = verdict

    @rule(pick=st.integers(0, 50))
    def abort(self, pick: int) -> None:
        if self.bench.requests:
            self.bench.loop.take([Abort((SeqId(pick % len(self.bench.requests) + 1),))])

    @rule(begun=st.none() | st.integers(0, 9).map(random.Random))
    def refuse(self, begun: random.Random | None) -> None:
        self.bench.machine.failing_launches += 1
        self.bench.machine.begun = begun

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "bench"):
            self.bench.loop.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.run()
            if self.bench.requests:
                self.bench.assert_all_right()


TestTierWalk = TierWalk.TestCase
TestTierWalk.settings = settings(max_examples=8, stateful_step_count=100, deadline=None)


class ManyTierWalks(TierWalk):
    """The same walks in a larger number, for `make test-slow`."""


TestManyTierWalks = pytest.mark.slow(ManyTierWalks.TestCase)
TestManyTierWalks.settings = settings(max_examples=300, stateful_step_count=100, deadline=None)
