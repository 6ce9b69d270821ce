"""Useful work under several policies: random mixes of tenants and lengths on one small engine."""

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from tiercel.scheduler.cost import StepCosts, linear_times, work_by_payer
from tiercel.simulation.simulator import SimSettings, Simulation
from tiercel.simulation.workload import PromptPart, SimRequest, Sources
from tiercel.values.errors import InvariantError
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.plan import Plan, Slice, whole_slices
from tiercel.values.tenant import PolicyName, TenantShare

WINDOW_STEPS = 1000

_TIMES = linear_times(base_ms=2.0, prefill_ms=0.2, decode_ms=0.5, context_ms=0.0005)
_PATIENCE_STEPS = 16  # as in `engine.steering`
_MAX_STEPS = 60_000  # by then every request must have ended


class Mix(Struct, frozen=True, kw_only=True):
    """An engine and the requests of its tenants. Every sequence fits in the pool."""

    settings: SimSettings
    tenants: tuple[TenantShare, ...]
    requests: tuple[SimRequest, ...]  # in order of time


class Progress(Struct, frozen=True, kw_only=True):
    """The work that was done for a mix under a policy."""

    useful_tokens: int  # computed in the first steps, without recomputed tokens
    useful_ms: float  # device time of the useful work launched before `until_s`, without the fixed time of steps
    until_s: float  # virtual time
    ended: int  # number of requests that ended
    steps: int  # until the last request ended
    worst_window: float  # largest ratio of repeated to useful work in `WINDOW_STEPS` steps
    preemptions: int


def draw_mix(seed: int, steps: int) -> Mix:
    """Draw a mix with more work than fits in `steps` steps: one priority band, no tier below the device."""
    rng = random.Random(seed)
    batch = rng.choice([16, 32, 64])
    blocks = rng.choice([64, 256, 512])
    settings = SimSettings(
        times=_TIMES,
        blocks=blocks,
        max_num_seqs=rng.choice([4, 8, 16]),
        max_num_batched_tokens=batch,
        max_model_len=blocks * 16,
        tbt_goal_ms=rng.choice([0.0, 0.0, 20.0]),
        async_depth=rng.choice([0, 1]),
        seed=seed,
    )
    settings = replace(settings, patience_s=min(2.0, max(0.1, _PATIENCE_STEPS * settings.longest_step_ms / 1e3)))
    tenants = tuple(
        TenantShare(name=TenantId(f"t{number}"), weight=rng.choice([0.5, 1.0, 1.0, 2.0, 4.0]))
        for number in range(rng.randint(2, 6))
    )
    most = settings.max_model_len
    prompts = {tenant.name: int(most * 2 ** rng.uniform(-6.0, -0.1)) for tenant in tenants}  # mean of each tenant
    outputs = {tenant.name: int(2 ** rng.uniform(0.0, 7.0)) for tenant in tenants}
    burst = rng.random() < 0.5  # all requests at once, or spread over the time of the steps
    span_s = 0.0 if burst else 1e-3 * steps * settings.longest_step_ms * rng.uniform(0.2, 0.8)
    sources = Sources()
    requests: list[SimRequest] = []
    left = int(1.1 * steps * batch)
    while left > 0:
        name = rng.choice(tenants).name
        prompt = max(1, min(most - 2, int(prompts[name] * rng.uniform(0.5, 1.5))))
        output = max(1, min(most - prompt, int(outputs[name] * rng.uniform(0.5, 1.5))))
        requests.append(SimRequest(rng.uniform(0.0, span_s), name, (PromptPart(sources.new(), prompt),), output))
        left -= prompt + output
    requests.sort(key=lambda request: request.at_s)
    return Mix(settings=settings, tenants=tenants, requests=tuple(requests))


def play(mix: Mix, policy: PolicyName, steps: int, until_s: float | None = None) -> Progress:
    """Run a mix to its end. `until_s` is by default the end of step number `steps`.

    Policies are compared by device time at the same virtual time: one may serve decodes first and another prompts, and
    neither their tokens nor their steps take the same time. Errors: InvariantError if the mix does not end.
    """
    simulation = Simulation(replace(mix.settings, policy=policy), mix.tenants)
    watch = _Watch(simulation)
    simulation.planner.listener = watch.note
    waiting = list(reversed(mix.requests))
    useful_tokens, ended_s = 0, 0.0
    while waiting or not simulation.loop.is_idle:
        while waiting and waiting[-1].at_s <= simulation.now_s:
            simulation.submit(waiting.pop())
        next_s = waiting[-1].at_s if waiting else float("inf")
        if not simulation.step(next_s) and waiting:
            simulation.pass_time(next_s)
        if simulation.machine.steps <= steps:
            useful_tokens = simulation.machine.tokens - simulation.book.recomputed_tokens
            ended_s = simulation.now_s
        if simulation.machine.steps > _MAX_STEPS:
            raise InvariantError("progress.endless", policy=policy, left=len(simulation.book))
    until_s = ended_s if until_s is None else until_s
    return Progress(
        useful_tokens=useful_tokens,
        useful_ms=watch.work_ms(until_s),
        until_s=until_s,
        ended=sum(tally.finished for tally in simulation.tally.by_tenant.values()),
        steps=simulation.machine.steps,
        worst_window=_worst_window(watch.useful_ms, watch.repeated_ms),
        preemptions=simulation.book.preemption_counts.total,
    )


class _Watch:
    """The work of every step, and the part that was repeated after a preemption for debt or share."""

    def __init__(self, simulation: Simulation) -> None:
        self.useful_ms: list[float] = []  # by step
        self.repeated_ms: list[float] = []  # by step
        self._whole_ms: list[float] = []  # all work, by step
        self._at_s: list[float] = []  # when it was planned, by step
        self._step_ms = simulation.settings.times.ms[0]  # of a step that computes nothing
        self._simulation = simulation
        self._book = simulation.book
        self._costs = StepCosts(simulation.settings.times)
        self._taken: set[SeqId] = set()

    def note(self, plan: Plan) -> None:
        """Note a plan that is about to be launched."""
        if plan.nano_batches:
            pieces = [(self._kind(piece), piece.length, piece.start) for piece in whole_slices(plan.nano_batches)]
            ms_by_kind = self._costs.share_ms(work_by_payer(pieces))
            self.useful_ms.append(ms_by_kind.get("useful", 0.0))
            self.repeated_ms.append(ms_by_kind.get("taken", 0.0))
            self._at_s.append(self._simulation.now_s)
            self._whole_ms.append(sum(ms_by_kind.values()))
        self._taken.update(one.victim for one in plan.preemptions if one.reason in ("debt", "share"))

    def work_ms(self, until_s: float) -> float:
        """Return the useful work of the steps planned up to a time, without the fixed time of each step."""
        steps = zip(self._at_s, self.useful_ms, self._whole_ms, strict=True)
        return sum(useful * (1 - self._step_ms / whole) for at_s, useful, whole in steps if at_s <= until_s and whole)

    def _kind(self, piece: Slice) -> Literal["useful", "taken", "repeated"]:
        if piece.start >= self._book[piece.seq].repeated_until:
            return "useful"
        return "taken" if piece.seq in self._taken else "repeated"


def _worst_window(useful_ms: Sequence[float], repeated_ms: Sequence[float]) -> float:
    """Return the largest ratio of repeated to useful work in any window of steps."""
    useful, repeated = [0.0, *accumulate(useful_ms)], [0.0, *accumulate(repeated_ms)]
    width = min(WINDOW_STEPS, len(useful_ms))
    parts = (
        (repeated[end] - repeated[end - width]) / max(1e-9, useful[end] - useful[end - width])
        for end in range(width, len(useful))
    )
    return max(parts, default=0.0)
