"""The loop on the simulated machine: virtual time, no torch, and every KV row that a step reads is checked."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.crossing import crossed
from tests.foreign import foreign_numbers
from tiercel.device.sim import SimMachine, expected_outputs
from tiercel.engine.loop import EngineLoop
from tiercel.kvcache.manager import CacheManager
from tiercel.scheduler.book import SequenceBook
from tiercel.scheduler.planner import Planner
from tiercel.scheduler.policy import open_policy
from tiercel.scheduler.prompt_lookup import PromptLookup
from tiercel.scheduler.step_limits import StepLimits
from tiercel.values.clock import ManualClock
from tiercel.values.ids import SeqId
from tiercel.values.outcome import Finished, FinishReason, SequenceState
from tiercel.values.request import Request, SamplingParams, pack_tokens
from tiercel.values.tenant import DEFAULT_TENANT, Slo, Tenants, TenantShare
from tiercel.wire.frames import Abort, Report, SetTenants, Submit

VOCAB = 11
END = frozenset({3})
MAX_MODEL_LEN = 96


@dataclass
class Client:
    """The reports as the HTTP process would receive them."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)
    endings: Counter[int] = field(default_factory=Counter)
    reports: list[Report] = field(default_factory=list)

    def post(self, message: Report) -> None:
        message = crossed(message)
        self.reports.append(message)
        seqs = memoryview(message.seqs).cast("Q")
        for seq, token in zip(seqs, memoryview(message.tokens).cast("I"), strict=True):
            assert seq not in self.finished, "a token after the end"
            self.tokens.setdefault(seq, []).append(token)
        for finished in message.finished:
            self.finished[finished.seq] = finished
            self.endings[finished.seq] += 1


class Bench:
    """A loop on the simulated machine, with a small pool."""

    def __init__(
        self, *, blocks: int = 24, block_size: int = 4, depth: int = 1, seqs: int = 6, tokens: int = 16,
        prefix_caching: bool = True, lookup: PromptLookup | None = None, lookup_tokens: int = 0,
    ) -> None:  # fmt: skip
        self.lookup_tokens = lookup_tokens
        self.clock = ManualClock(100.0)
        self.client = Client()
        self.book = SequenceBook(open_policy("fcfs"), MAX_MODEL_LEN, END)
        self.cache = CacheManager(blocks, block_size, b"sim", has_prefix_caching=prefix_caching)
        self.machine = SimMachine(self.book, block_size, VOCAB, self.clock, max_rows=seqs + 1)
        planner = Planner(self.book, StepLimits(seqs, tokens), lookup=lookup)
        self.loop = EngineLoop(self.book, self.cache, planner, self.machine, self.client, self.clock, depth)
        self.requests: dict[int, Request] = {}

    def submit(self, prompt: list[int], *, max_tokens: int = 20, scope: bytes = b"", ignore_eos: bool = False) -> SeqId:
        seq = SeqId(len(self.requests) + 1)
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos, prompt_lookup_num_tokens=self.lookup_tokens
        )
        self.requests[seq] = Request(
            id=seq, prompt=pack_tokens(prompt), params=params, arrival_s=self.clock.now_s(), scope=scope
        )
        self.loop.take([Submit(self.requests[seq])])
        return seq

    def expected(self, seq: int) -> list[int]:
        return expected_outputs(self.requests[seq], VOCAB, END, MAX_MODEL_LEN)

    def run(self, most_steps: int = 5000) -> None:
        for _ in range(most_steps):
            self.loop.check_integrity()
            if self.loop.is_idle:
                while self.loop.step():
                    pass
                return
            assert self.loop.step(), "unfinished work, and a step that does nothing"
        raise AssertionError("never idle")

    def assert_all_right(self) -> None:
        """Check that every request ended once with the right tokens, and that no block is held."""
        assert set(self.client.endings) == set(self.requests)
        assert set(self.client.endings.values()) <= {1}
        for seq, finished in self.client.finished.items():
            output = self.client.tokens.get(seq, [])
            if finished.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert output == self.expected(seq)
            else:
                assert output == self.expected(seq)[: len(output)]
            assert finished.num_outputs == len(output)
        assert self.cache.blocks_used == 0
        assert not foreign_numbers((self.cache, self.book))
        assert self.client.reports[-1].gauges is not None
        assert self.client.reports[-1].gauges.blocks_used == 0
        assert self.client.reports[-1].gauges.num_running == self.client.reports[-1].gauges.num_waiting == 0


def random_prompt(rng: random.Random, shared: list[int]) -> list[int]:
    own = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))]
    return shared[: rng.randrange(0, len(shared))] + own if rng.random() < 0.6 else own


def walk(bench: Bench, seed: int, rng: random.Random, refusals: float) -> None:
    """Run random requests that share prefixes, with aborts, refused launches and poisoned requests."""
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    for _ in range(rng.randrange(5, 30)):
        bench.submit(random_prompt(rng, shared), max_tokens=rng.randrange(1, 40), ignore_eos=rng.random() < 0.5)
        for _ in range(rng.randrange(0, 4)):
            bench.loop.step()
            bench.loop.check_integrity()
        if rng.random() < 0.3:
            bench.loop.take([Abort((SeqId(rng.randrange(1, len(bench.requests) + 1)),))])
        if rng.random() < refusals:
            bench.machine.failing_launches = 1
            bench.machine.begun = random.Random(seed)
        if rng.random() < 0.05:
            bench.machine.poisoned.add(SeqId(len(bench.requests)))
    bench.run()
    bench.assert_all_right()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seed", range(25))
@pytest.mark.sampled(10)
def test_random_work_gives_exactly_the_right_tokens(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    bench = Bench(
        blocks=rng.choice([24, 30, 60]),
        depth=depth,
        seqs=rng.choice([1, 3, 8]),
        tokens=rng.choice([3, 8, 64]),
        prefix_caching=rng.random() < 0.8,
    )
    bench.machine.begun = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    for _ in range(rng.randrange(5, 30)):
        bench.submit(
            random_prompt(rng, shared),
            max_tokens=rng.randrange(1, 40),
            scope=rng.choice([b"", b"tenant-a"]),
            ignore_eos=rng.random() < 0.5,
        )
        for _ in range(rng.randrange(0, 4)):
            bench.loop.step()
            bench.loop.check_integrity()
        if rng.random() < 0.1:
            bench.loop.take([Abort((SeqId(rng.randrange(1, len(bench.requests) + 1)),))])
        if rng.random() < 0.05:
            bench.machine.failing_launches = 1
        if rng.random() < 0.05:
            bench.machine.poisoned.add(SeqId(len(bench.requests)))
    bench.run()
    bench.assert_all_right()


def test_preemption_changes_no_token() -> None:
    bench = Bench(blocks=24, seqs=8)
    for number in range(8):
        bench.submit([number] * 12, max_tokens=50, ignore_eos=True)
    bench.run()
    bench.assert_all_right()
    assert bench.loop.gauges.read().preemptions > 0
    assert {finished.reason for finished in bench.client.finished.values()} == {FinishReason.LENGTH}


def test_a_shared_prefix_is_computed_once() -> None:
    bench = Bench(blocks=200, seqs=8, tokens=64)
    shared = [5, 1, 2, 4] * 8
    for number in range(8):
        bench.submit([*shared, number], max_tokens=4, ignore_eos=True)
    bench.run()
    bench.assert_all_right()
    computed = sum(report.gauges.step_tokens for report in bench.client.reports if report.gauges)
    output = sum(len(tokens) for tokens in bench.client.tokens.values())
    # One sequence computes the 32 shared tokens; the other seven, submitted at the same time, compute only their own.
    assert computed - output == 33 + 7
    assert all(bench.client.finished[seq].num_cached == 32 for seq in list(bench.requests)[1:])


def test_no_hit_crosses_scopes() -> None:
    bench = Bench(blocks=100)
    shared = [5, 1, 2, 4] * 5
    first = bench.submit(shared, max_tokens=2, ignore_eos=True, scope=b"aaaa")
    bench.run()
    other = bench.submit(shared, max_tokens=2, ignore_eos=True, scope=b"bbbb")
    same = bench.submit(shared, max_tokens=2, ignore_eos=True, scope=b"aaaa")
    bench.run()
    bench.assert_all_right()
    cached = {seq: bench.client.finished[seq].num_cached for seq in (first, other, same)}
    assert cached == {first: 0, other: 0, same: 16}  # one token is always computed


def test_a_poisoned_request_fails_alone() -> None:
    bench = Bench(blocks=100)
    good = [bench.submit([number, 1, 2, 4, 6], max_tokens=20, ignore_eos=True) for number in range(3)]
    bad = bench.submit([9, 9, 9], max_tokens=20, ignore_eos=True)
    bench.machine.poisoned.add(bad)
    more = bench.submit([2, 1], max_tokens=20, ignore_eos=True)
    bench.run()
    bench.assert_all_right()
    assert bench.client.finished[bad].reason is FinishReason.ERROR
    assert all(bench.client.finished[seq].reason is FinishReason.LENGTH for seq in (*good, more))
    assert bench.machine.num_failed >= 2  # once with others, once alone


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("step", range(1, 40))
def test_a_refused_launch_beside_a_merged_block_keeps_tables_whole(step: int, depth: int) -> None:
    """Equal blocks of two sequences are merged at commit; a table that is sent again must have the merged block."""
    bench = Bench(blocks=60, depth=depth)
    for _ in range(2):
        bench.submit([1, 2], max_tokens=20, ignore_eos=True)
    for _ in range(step):
        bench.loop.step()
    bench.machine.failing_launches = 1
    bench.machine.begun = random.Random(step)
    bench.run()
    bench.assert_all_right()


@pytest.mark.parametrize("step", range(1, 16))
def test_a_voided_step_beside_a_merged_block_keeps_tables_whole(step: int) -> None:
    bench = Bench(blocks=60)
    for _ in range(2):
        bench.submit([1, 2], max_tokens=12, ignore_eos=True)
    for _ in range(step):
        bench.loop.step()
    bench.machine.poisoned.add(bench.submit([7], max_tokens=1))
    bench.run()
    bench.assert_all_right()


def test_permanently_refused_launches_hold_no_rows() -> None:
    bench = Bench(blocks=60, seqs=2)
    bench.machine.begun = random.Random(1)
    for number in range(8):
        bench.submit([number, 1], max_tokens=4, ignore_eos=True)
        bench.machine.failing_launches = 1
        bench.loop.step()
        bench.run()
    bench.assert_all_right()
    assert {finished.reason for finished in bench.client.finished.values()} == {FinishReason.ERROR}


@pytest.mark.parametrize("begun", [None, *range(8)])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_refused_launch_changes_no_token(depth: int, begun: int | None) -> None:
    bench = Bench(blocks=100, depth=depth)
    bench.machine.begun = None if begun is None else random.Random(begun)
    for number in range(4):
        bench.submit([number, 1, 2], max_tokens=10, ignore_eos=True)
    for _ in range(3):
        bench.loop.step()
    bench.machine.failing_launches = 1
    bench.run()
    bench.assert_all_right()
    assert {finished.reason for finished in bench.client.finished.values()} == {FinishReason.LENGTH}


@pytest.mark.parametrize("begun", range(4))
def test_a_block_overwritten_by_a_refused_step_is_never_a_prefix_hit(begun: int) -> None:
    """A refused sequence has overwritten an evicted prefix; later sequences must not find the prefix there."""
    bench = Bench(blocks=24, tokens=96)
    first = [5, 1, 2, 4] * 8
    bench.submit(first, max_tokens=1)
    bench.run()
    large = bench.submit([3] * 90, max_tokens=1)
    bench.machine.failing_launches = 1
    bench.machine.begun = random.Random(begun)
    bench.loop.step()
    bench.loop.take([Abort((large,))])
    bench.submit([*first, 1], max_tokens=4, ignore_eos=True)
    bench.run()
    bench.assert_all_right()


def test_abort_in_every_state_frees_everything() -> None:
    aborted_in: set[SequenceState] = set()
    for steps in range(60):
        bench = Bench(blocks=24, seqs=4, tokens=8, depth=2)
        seqs = [bench.submit([number] * 15, max_tokens=60, ignore_eos=True) for number in range(5)]
        for _ in range(steps):
            bench.loop.step()
        aborted_in |= {bench.book[seq].state for seq in seqs if seq in bench.book}
        bench.loop.take([Abort(tuple(seqs))])
        bench.run()
        bench.assert_all_right()
    assert aborted_in == set(SequenceState) - {SequenceState.DONE, SequenceState.RESTORING}


def test_a_budget_smaller_than_a_block_does_not_stall() -> None:
    bench = Bench(blocks=60, block_size=16, tokens=12, seqs=4)
    bench.submit([1] * 50, max_tokens=4, ignore_eos=True)
    bench.submit([2] * 50, max_tokens=4, ignore_eos=True)
    bench.run()
    bench.assert_all_right()


def test_a_request_that_can_never_fit_fails_at_once() -> None:
    bench = Bench(blocks=5)
    seq = bench.submit([1] * 30, max_tokens=30, ignore_eos=True)
    fits = bench.submit([1] * 10, max_tokens=11, ignore_eos=True)
    bench.run()
    assert bench.client.finished[seq].reason is FinishReason.ERROR
    assert "20" in str(bench.client.finished[seq].error) or "pool has 5" in str(bench.client.finished[seq].error)
    assert bench.client.finished[fits].reason is FinishReason.LENGTH


def test_a_request_with_nothing_to_compute_is_failed() -> None:
    bench = Bench()
    empty = bench.submit([], max_tokens=3)
    full = bench.submit([1] * MAX_MODEL_LEN, max_tokens=3)
    bench.run()
    assert {bench.client.finished[seq].reason for seq in (empty, full)} == {FinishReason.ERROR}


def test_resumed_outputs_are_not_sent_again() -> None:
    bench = Bench(blocks=60)
    seq = bench.submit([1, 2, 4, 5], max_tokens=12, ignore_eos=True)
    bench.run()
    whole = bench.client.tokens[seq]
    resumed = Request(
        id=SeqId(77),
        prompt=bench.requests[seq].prompt,
        outputs=pack_tokens(whole[:5]),
        params=bench.requests[seq].params,
        arrival_s=0.0,
    )
    bench.loop.take([Submit(resumed)])
    bench.run()
    assert bench.client.tokens[77] == whole[5:]
    assert bench.client.finished[77].num_outputs == 12


def test_new_settings_of_tenants_apply_to_existing_sequences() -> None:
    bench = Bench()
    seq = bench.submit([1, 2, 4], ignore_eos=True)
    bench.loop.step()
    bench.loop.take([SetTenants(Tenants(2, (TenantShare(name=DEFAULT_TENANT, band=3, slo=Slo(tbt_s=0.5)),)))])
    assert bench.book[seq].band == 3
    assert bench.book[seq].tbt_goal_s == 0.5
    bench.run()
    bench.assert_all_right()


class LoopWalk(RuleBasedStateMachine):
    """Submits, steps, aborts, poisons and refuses in any order, and checks every invariant."""

    @initialize(
        blocks=st.sampled_from([24, 26, 40]), depth=st.sampled_from([0, 1, 2]), tokens=st.sampled_from([2, 7, 32])
    )
    def start(self, blocks: int, depth: int, tokens: int) -> None:
        self.bench = Bench(blocks=blocks, depth=depth, tokens=tokens, seqs=4)

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=40) | st.just([1, 2]),
        max_tokens=st.integers(1, 40),
        scope=st.sampled_from([b"", b"abcd"]),
    )
    def submit(self, prompt: list[int], max_tokens: int, scope: bytes) -> None:
        self.bench.submit(prompt, max_tokens=max_tokens, scope=scope, ignore_eos=True)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.bench.loop.step()

    @rule(pick=st.integers(0, 50))
    def abort(self, pick: int) -> None:
        if self.bench.requests:
            self.bench.loop.take([Abort((SeqId(pick % len(self.bench.requests) + 1),))])

    @rule()
    def poison(self) -> None:
        if self.bench.requests:
            self.bench.machine.poisoned.add(SeqId(len(self.bench.requests)))

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


TestLoopWalk = LoopWalk.TestCase
TestLoopWalk.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)


class ManyLoopWalks(LoopWalk):
    """The same walks in a larger number, for `make test-slow`."""


TestManyLoopWalks = pytest.mark.slow(ManyLoopWalks.TestCase)
TestManyLoopWalks.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
