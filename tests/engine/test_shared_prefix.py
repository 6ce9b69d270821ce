"""A cold prefix that many requests share is computed once, whatever the order in which they are served."""

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from tests.engine.test_loop import Client
from tests.seeds import fresh_seeds
from tiercel.device.sim import SimFlight, SimMachine, expected_outputs
from tiercel.engine.loop import EngineLoop
from tiercel.kvcache.manager import CacheManager
from tiercel.scheduler.book import SequenceBook
from tiercel.scheduler.cost import StepCosts, linear_times
from tiercel.scheduler.planner import Planner
from tiercel.scheduler.policy import open_policy
from tiercel.scheduler.step_limits import StepLimits
from tiercel.values.clock import ManualClock
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.outcome import FinishReason
from tiercel.values.plan import Slice, StepPlan, whole_slices
from tiercel.values.request import Request, SamplingParams, pack_tokens
from tiercel.values.tenant import PolicyName, Slo, Tenants, TenantShare
from tiercel.wire.frames import Abort, SetTenants, Submit

VOCAB = 1000
COUNT, SHARED, OWN, OUTPUTS = 32, 512, 64, 8  # requests, and tokens
TIMES = linear_times(base_ms=27.0, prefill_ms=0.85, decode_ms=1.0, context_ms=0.0)
GOALS = StepLimits(64, 256, tbt_goal_ms=200.0, is_goal_elastic=True, min_prefill_share=0.3, yield_ms=200.0)


@dataclass(frozen=True)
class Load:
    """The requests, and the engine that serves them."""

    limits: StepLimits = GOALS
    policy: PolicyName = "fair"
    tenants: tuple[TenantShare, ...] = (TenantShare(name=TenantId("a")),)
    shared: int = SHARED
    owns: tuple[int, ...] = (OWN,)  # lengths of the requests' own tokens, drawn at random
    block_size: int = 16
    blocks: int = 8192
    depth: int = 1
    gap_s: float = 0.0  # between two arrivals


class CountingMachine:
    """The simulated machine, with a log of its steps."""

    def __init__(self, machine: SimMachine) -> None:
        self.steps: list[list[Slice]] = []
        self._machine = machine

    def launch(self, plan: StepPlan) -> SimFlight:
        self.steps.append(list(whole_slices(plan.nano_batches)))
        return self._machine.launch(plan)

    def forget(self, seqs: Iterable[SeqId]) -> None:
        self._machine.forget(seqs)


class Bench:
    """A loop whose steps take the time of the table."""

    def __init__(self, load: Load, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.load, costs = load, StepCosts(TIMES)
        self.clock = ManualClock(100.0)
        self.client = Client()
        self.book = SequenceBook(open_policy(load.policy, StepCosts(TIMES), step_ms=200.0), 8192, ())
        self.cache = CacheManager(load.blocks, load.block_size, b"sim")

        def step_s(slices: Iterable[Slice]) -> float:
            pieces = list(slices)
            decodes = sum(piece.length == 1 for piece in pieces)
            return 1e-3 * costs.step_ms(sum(piece.length for piece in pieces) - decodes, 0, decodes, 0)

        machine = SimMachine(self.book, load.block_size, VOCAB, self.clock, load.limits.max_num_seqs + 1, step_s)
        self.machine = CountingMachine(machine)
        planner = Planner(self.book, load.limits)
        self.loop = EngineLoop(self.book, self.cache, planner, self.machine, self.client, self.clock, load.depth)
        self.loop.take([SetTenants(Tenants(1, load.tenants))])
        prefix = rng.choices(range(VOCAB), k=load.shared)
        self.requests = [
            Request(
                id=SeqId(number + 1),
                prompt=pack_tokens(prefix + rng.choices(range(VOCAB), k=rng.choice(load.owns))),
                params=SamplingParams(temperature=0.0, max_tokens=OUTPUTS, ignore_eos=True),
                arrival_s=100.0 + number * load.gap_s,
                tenant=(tenant := rng.choice(load.tenants)).name,
                band=tenant.band,
                scope=b"group",
            )
            for number in range(COUNT)
        ]
        self._due = deque(self.requests)

    def step(self) -> None:
        while self._due and self._due[0].arrival_s <= self.clock.now_s() + 1e-9:
            self.loop.take([Submit(self._due.popleft())])
        if not self.loop.step():
            self.clock.advance(0.01)
        self.loop.check_integrity()

    def run(self) -> None:
        while self._due or not self.loop.is_idle:
            self.step()
        for request in self.requests:
            tokens = self.client.tokens.get(request.id, [])
            wanted = expected_outputs(request, VOCAB, frozenset(), 8192)
            is_whole = self.client.finished[request.id].reason is FinishReason.LENGTH
            assert tokens == (wanted if is_whole else wanted[: len(tokens)])

    @property
    def computed(self) -> int:
        """The prompt tokens that were computed."""
        length_by_seq = {request.id: len(request.prompt) // 4 for request in self.requests}
        pieces = (piece for step in self.machine.steps for piece in step)
        return sum(max(0, min(piece.length, length_by_seq[piece.seq] - piece.start)) for piece in pieces)

    @property
    def needed(self) -> int:
        """The prompt tokens that have to be computed if the shared blocks are computed once."""
        size = self.load.block_size
        whole = self.load.shared // size * size
        lengths = [len(request.prompt) // 4 for request in self.requests]
        return whole + sum(length - min(whole, (length - 1) // size * size) for length in lengths)


def tenants(count: int, rng: random.Random) -> tuple[TenantShare, ...]:
    return tuple(
        TenantShare(
            name=TenantId(f"tenant {number}"),
            weight=rng.choice([1.0, 3.0]),
            band=rng.choice([0, 0, 1]),
            slo=Slo(ttft_s=rng.choice([None, 0.5, 2.0])),
            group="all",
        )
        for number in range(count)
    )


EIGHT = tenants(8, random.Random(1))
SMALL_STEPS = StepLimits(64, 64, tbt_goal_ms=100.0, min_prefill_share=0.3)


@pytest.mark.parametrize(
    "load",
    [
        Load(),
        Load(depth=0),
        Load(limits=StepLimits(64, 2048)),
        Load(limits=StepLimits(64, 100)),
        Load(policy="fcfs"),
        Load(policy="priority", tenants=EIGHT),
        Load(shared=500),
        Load(shared=513, block_size=64),
        Load(gap_s=0.03),
        Load(tenants=EIGHT),
        Load(tenants=EIGHT, gap_s=0.03, depth=0),
        # A block does not fit into one step, and the others come before the sequence that has begun.
        Load(tenants=EIGHT, gap_s=0.003, block_size=64, limits=SMALL_STEPS),
        Load(tenants=EIGHT, gap_s=0.03, limits=StepLimits(64, 256)),
        # The last token of a block is computed alone.
        pytest.param(
            Load(block_size=4, limits=StepLimits(8, 16, long_prefill_token_threshold=3)), marks=pytest.mark.slow
        ),
        pytest.param(
            Load(owns=(1, 5, 64, 300, 2000), tenants=EIGHT, gap_s=0.003, block_size=32), marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.sampled(3)
def test_the_shared_prefix_is_computed_once(load: Load) -> None:
    for seed in range(3):
        bench = Bench(load, seed)
        bench.run()
        assert bench.computed == bench.needed, seed


@pytest.mark.parametrize("seed", [*range(2), *fresh_seeds(1)])
@pytest.mark.sampled(1)
def test_it_is_computed_once_in_any_order(seed: int) -> None:
    rng = random.Random(seed)
    load = Load(
        limits=rng.choice([GOALS, SMALL_STEPS, StepLimits(64, 64), StepLimits(64, 100), StepLimits(64, 512)]),
        policy=rng.choice(["fair", "priority", "fcfs"]),
        tenants=tenants(rng.choice([1, 3, 8]), rng),
        shared=rng.choice([512, 500, 513]),
        owns=rng.choice([(64,), (1, 5, 64, 300, 2000)]),
        block_size=rng.choice([8, 16, 32, 64]),
        depth=rng.choice([0, 1]),
        gap_s=rng.choice([0.0, 0.003, 0.03]),
    )
    bench = Bench(load, seed)
    bench.run()
    assert bench.computed == bench.needed, (seed, load)


def test_those_that_wait_are_admitted_together_in_full_steps() -> None:
    """From the commit of the prefix on, each step holds as many own tokens as its goal allows."""
    bench = Bench(Load())
    bench.run()
    first = next(number for number, step in enumerate(bench.machine.steps) if any(piece.seq > 1 for piece in step))
    prompts = [sum(piece.length for piece in step if piece.length > 1) for step in bench.machine.steps]
    assert first == 3, "three chunks: as long as the goal allows"
    assert all(tokens >= 150 for tokens in prompts[first : first + 9])
    assert not any(prompts[first + 13 :])
    whole = Bench(Load(limits=StepLimits(64, 4096)))
    whole.run()
    admitted = [len({piece.seq for piece in step}) for step in whole.machine.steps]
    assert admitted[:3] in ([1, 1, COUNT], [1, COUNT, COUNT]), "one step may be planned before the prefix is committed"


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_if_the_first_one_is_aborted_another_goes_on_behind_what_it_computed(steps: int) -> None:
    bench = Bench(Load(policy="fcfs", tenants=EIGHT))
    for _ in range(steps):
        bench.step()
    first = next(one for one in bench.book.running)
    kept, flying = min(first.computed, SHARED), first.scheduled
    bench.loop.take([Abort((first.id,), FinishReason.ABORT)])
    bench.run()
    of_others = bench.needed - OWN
    assert of_others <= bench.computed <= of_others + flying - kept


@pytest.mark.parametrize("seed", [*range(3), *fresh_seeds(2)])
def test_preempted_sequences_compute_again_only_what_they_lost(seed: int) -> None:
    """The pool holds the prefix and the own blocks of a few sequences."""
    bench = Bench(Load(blocks=64, tenants=EIGHT, policy="priority", gap_s=0.003, limits=StepLimits(64, 100)), seed)
    bench.run()
    assert bench.computed <= bench.needed + bench.book.recomputed_tokens


def test_the_choices_of_one_prompt_compute_it_once() -> None:
    bench = Bench(Load(owns=(0,), shared=570))
    bench.run()
    assert bench.computed == 570 + (COUNT - 1) * (570 - 35 * 16)
