"""Loads on a simulated fleet: conversations, tenants bound to one replica, and a saturated closed loop."""

import random

from msgspec import Struct
from msgspec.structs import replace

from tiercel.fleet.router import SHARE_QUANTUM_MS
from tiercel.scheduler.cost import linear_times
from tiercel.simulation.fleet import FleetSimSettings, FleetSimulation, Placement
from tiercel.simulation.simulator import SimSettings
from tiercel.simulation.workload import PromptPart, SimRequest, Sources
from tiercel.values.ids import TenantId
from tiercel.values.tenant import TenantShare

# A step of 8 decodes and 128 prompt tokens takes 30 ms.
ENGINE = SimSettings(
    times=linear_times(base_ms=21.0, prefill_ms=0.055, decode_ms=1.0, context_ms=0.0),
    blocks=512,
    max_num_seqs=8,
    max_num_batched_tokens=256,
)

# Prompts are what costs here, as with a large model: 8 decodes and 128 prompt tokens take 34 ms.
TALKING = replace(
    ENGINE, times=linear_times(base_ms=4.0, prefill_ms=0.2, decode_ms=0.5, context_ms=0.0), max_num_seqs=16
)

TURNS, SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 6, 512, 400, 48
_USERS = 24  # of the conversations, over all replicas
_THINK_S = 6.0  # mean time between an answer and the next question
_GROUPS = 8  # tenants of the conversations, each with a system prompt


class HitRate(Struct, frozen=True):
    """The prefix hits of conversations."""

    hit_rate: float  # cached part of all prompt tokens
    requests: int
    virtual_s: float
    step_ms: float
    busy: float  # part of the time in which the machines were busy


def run_conversations(
    replicas: int, blocks: int, *, placement: Placement = "router", follows: bool = True, speedup: int = 1,
    quantum_ms: float = SHARE_QUANTUM_MS, seconds: float = 180.0, seed: int = 0,
) -> HitRate:  # fmt: skip
    """Run six-turn conversations, each turn's prompt being all that was said before and a new question.

    `blocks`: of each replica; `speedup`: of its steps, so that one replica does the work of several.
    """
    rng = random.Random(seed)
    times = replace(ENGINE.times, ms=tuple(ms / speedup for ms in TALKING.times.ms))
    engine = replace(TALKING, times=times, blocks=blocks, seed=seed)
    names = [TenantId(f"group{number}") for number in range(_GROUPS)]
    settings = FleetSimSettings(
        replicas=replicas, engine=engine, placement=placement, follows_prefixes=follows, quantum_ms=quantum_ms
    )
    fleet = FleetSimulation(settings, [TenantShare(name=name) for name in names])
    sources = Sources()
    turn_by_source: dict[int, int] = {}  # of the last question

    def question(before: tuple[PromptPart, ...], at_s: float, tenant: TenantId, turn: int) -> SimRequest:
        source = sources.new()
        turn_by_source[source] = turn
        part = PromptPart(source, 2 * rng.randint(QUESTION_TOKENS // 4, 3 * QUESTION_TOKENS // 4))
        outputs = 2 * rng.randint(ANSWER_TOKENS // 4, 3 * ANSWER_TOKENS // 4)
        return SimRequest(at_s, tenant, (*before, part), outputs)

    def opening(at_s: float) -> SimRequest:
        tenant = rng.choice(names)
        return question((PromptPart(sources.named(tenant), SYSTEM_TOKENS),), at_s, tenant, 1)

    def go_on(request: SimRequest, now_s: float) -> None:
        at_s = now_s + rng.expovariate(1 / _THINK_S)
        if at_s >= seconds:
            return
        turn = turn_by_source.pop(request.prompt[-1].source)
        if turn == TURNS:
            fleet.send(opening(at_s))
        else:
            answer = PromptPart(0, request.outputs)  # every simulated token is 0, as those of source 0
            fleet.send(question((*request.prompt, answer), at_s, request.tenant, turn + 1))

    fleet.on_end = go_on
    for _ in range(_USERS):
        fleet.send(opening(rng.uniform(0.0, 2 * _THINK_S)))
    fleet.run()
    tallies = [tally for engine in fleet.engines for tally in engine.tally.by_tenant.values()]
    prompt = sum(tally.prompt_tokens for tally in tallies)
    return HitRate(
        hit_rate=sum(tally.cached_tokens for tally in tallies) / max(prompt, 1),
        requests=sum(tally.finished for tally in tallies),
        virtual_s=fleet.now_s,
        step_ms=mean_step_ms(fleet),
        busy=sum(engine.machine.busy_s for engine in fleet.engines) / fleet.now_s / replicas,
    )


class BoundShares(Struct, frozen=True):
    """The service of tenants that are bound to one replica each, beside one that is everywhere."""

    least_part: float  # of a bound tenant's share of all replicas, the least of all of them
    jain: float  # of service by weight, of all tenants
    bound: int  # tenants
    step_ms: float


def run_bound(
    replicas: int, *, has_weights: bool = True, begin_s: float = 5.0, seconds: float = 15.0, seed: int = 0
) -> BoundShares:
    """Run tenant A with work everywhere and, for each four replicas, a tenant that is bound to one of them.

    The share of a bound tenant is half a replica. Service is counted from `begin_s` on.
    """
    count = max(1, replicas // 4)
    first = TenantId("a")
    engine_by_tenant = {TenantId(f"b{number}"): 4 * number for number in range(count)}
    weights = {first: float(2 * replicas - count)} | dict.fromkeys(engine_by_tenant, 1.0)
    settings = FleetSimSettings(
        replicas=replicas,
        engine=replace(ENGINE, seed=seed),
        engine_by_tenant=engine_by_tenant,
        has_weights=has_weights,
    )
    fleet = FleetSimulation(settings, [TenantShare(name=name, weight=weight) for name, weight in weights.items()])
    load = _ClosedLoop(fleet, random.Random(seed), shares_prefixes=False)
    load.open(first, replicas * ENGINE.max_num_seqs * 3 // 2)
    for name in engine_by_tenant:
        load.open(name, ENGINE.max_num_seqs * 3 // 2)
    fleet.run(begin_s)
    before = fleet.served_ms()
    fleet.run(seconds)
    after = fleet.served_ms()
    service = {name: after[name] - before.get(name, 0.0) for name in weights}
    whole, total = sum(weights.values()), sum(service.values())
    parts = {name: service[name] / total / (weights[name] / whole) for name in weights}
    values = list(parts.values())
    return BoundShares(
        least_part=min(parts[name] for name in engine_by_tenant),
        jain=sum(values) ** 2 / (len(values) * sum(value * value for value in values)),
        bound=count,
        step_ms=mean_step_ms(fleet),
    )


class Throughput(Struct, frozen=True):
    """Output tokens per second of a saturated fleet."""

    tokens_per_s: float
    steps: int
    step_ms: float


def run_saturated_fleet(
    replicas: int, *, placement: Placement = "router", seconds: float = 30.0, begin_s: float = 10.0, seed: int = 0
) -> Throughput:
    """Run a closed loop of 10 requests for each replica of 8 rows, of 8 tenants with a prefix each.

    Tokens are counted from `begin_s` on.
    """
    settings = FleetSimSettings(replicas=replicas, engine=replace(ENGINE, seed=seed), placement=placement)
    names = [TenantId(f"tenant{number}") for number in range(8)]
    fleet = FleetSimulation(settings, [TenantShare(name=name) for name in names])
    load = _ClosedLoop(fleet, random.Random(seed), shares_prefixes=True)
    for number in range(10 * replicas):
        load.open(names[number % len(names)], 1)
    fleet.run(begin_s)
    before = sum(engine.tally.tokens for engine in fleet.engines)
    fleet.run(seconds)
    after = sum(engine.tally.tokens for engine in fleet.engines)
    return Throughput(
        tokens_per_s=(after - before) / (seconds - begin_s),
        steps=sum(engine.machine.steps for engine in fleet.engines),
        step_ms=mean_step_ms(fleet),
    )


def mean_step_ms(fleet: FleetSimulation) -> float:
    """Return the mean time of a step of a fleet."""
    machines = [engine.machine for engine in fleet.engines]
    return 1e3 * sum(one.busy_s for one in machines) / max(1, sum(one.steps for one in machines))


class _ClosedLoop:
    """Clients that send their next request as soon as the last one has ended."""

    def __init__(self, fleet: FleetSimulation, rng: random.Random, *, shares_prefixes: bool) -> None:
        self._fleet = fleet
        self._rng = rng
        self._sources = Sources()
        self._shares_prefixes = shares_prefixes
        fleet.on_end = lambda request, now_s: fleet.send(self._request(request.tenant, now_s))

    def open(self, tenant: TenantId, clients: int) -> None:
        """Start clients of a tenant, within the first half second."""
        for _ in range(clients):
            self._fleet.send(self._request(tenant, self._rng.uniform(0.0, 0.5)))

    def _request(self, tenant: TenantId, at_s: float) -> SimRequest:
        own = PromptPart(self._sources.new(), self._rng.randint(60, 180))
        prompt = (own,)
        if self._shares_prefixes:
            prompt = (PromptPart(self._sources.named(tenant), 256), own)
        return SimRequest(at_s, tenant, prompt, self._rng.randint(30, 90))
