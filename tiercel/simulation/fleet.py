"""Many engines in one virtual time, behind the router, the account and the index of a real front."""

import heapq
import itertools
import random
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from tiercel.fleet.balance import FleetAccount
from tiercel.fleet.moves import Moves
from tiercel.fleet.prefix_index import PrefixIndex
from tiercel.fleet.router import SHARE_QUANTUM_MS, PromptWork, RouteChoice, Router
from tiercel.scheduler.cost import StepCosts
from tiercel.scheduler.fairness import TenantBook
from tiercel.simulation.http import HttpProcess, HttpTimes
from tiercel.simulation.simulator import FINGERPRINT, SimSettings, Simulation, sharing_scope, simulated_rates
from tiercel.simulation.workload import SimRequest, prompt_bytes
from tiercel.values.block_key import namespace_key, prompt_heads
from tiercel.values.ids import EngineId, SeqId, TenantId
from tiercel.values.outcome import FinishReason
from tiercel.values.rates import EngineSpeed
from tiercel.values.tenant import TenantShare
from tiercel.wire.frames import Report

WEIGHTS_S = 0.25
"""The time between two looks at the service of the tenants, as engines report their gauges."""

Placement = Literal["router", "in_turn", "at_random"]
"""Who chooses the engine of a request: the real router, or, for comparisons, a front that knows nothing of engines."""


class FleetSimSettings(Struct, frozen=True, kw_only=True):
    """A fleet of equal engines. The last three fields switch parts of the front off, for comparisons."""

    replicas: int
    engine: SimSettings = SimSettings()
    weights_s: float = WEIGHTS_S
    quantum_ms: float = SHARE_QUANTUM_MS
    engine_by_tenant: dict[TenantId, int] = {}  # tenants that are bound to one engine
    has_weights: bool = True  # the account changes the weights of the engines
    follows_prefixes: bool = True
    placement: Placement = "router"


class _SimRouter(Router):
    """The router, with tenants that are bound to engines, or with a choice that knows nothing of the engines."""

    def __init__(self, index: PrefixIndex, draw: random.Random, settings: FleetSimSettings) -> None:
        super().__init__(index, draw, quantum_ms=settings.quantum_ms, follows=settings.follows_prefixes)
        self._settings = settings
        self._turn = itertools.count()
        self._dice = draw

    def choose(self, work: PromptWork, among: Collection[EngineId] | None = None) -> RouteChoice | None:
        match self._settings.placement:
            case "in_turn":
                return RouteChoice(EngineId(next(self._turn) % self._settings.replicas), 0, 0.0)
            case "at_random":
                return RouteChoice(EngineId(self._dice.randrange(self._settings.replicas)), 0, 0.0)
            case "router":
                pass
        bound = self._settings.engine_by_tenant.get(work.tenant)
        return super().choose(work, among if bound is None else (EngineId(bound),))


class FleetSimulation:
    """Engines to which a front sends requests at their times.

    The engine whose clock is behind all others makes the next step, and requests and reports are taken in the order of
    their times, so nothing acts on what happens later. A request reaches its engine in the step after its time; the
    front learns at the end of a step of its tokens and keys.
    """

    def __init__(
        self, settings: FleetSimSettings, tenants: Iterable[TenantShare], *, closes_s: float = float("inf")
    ) -> None:
        """A closed loop sends no request from `closes_s` on."""
        self.settings = settings
        self.shares = tuple(tenants)
        self.engines = [
            Simulation(replace(settings.engine, seed=settings.engine.seed + number), self.shares)
            for number in range(settings.replicas)
        ]
        times, concurrency = settings.engine.http, settings.engine.concurrency
        machines = [engine.machine for engine in self.engines]
        self.http = HttpProcess(times, machines, concurrency=concurrency, closes_s=closes_s)
        self._has_http = times != HttpTimes() or concurrency is not None
        draw = random.Random(settings.engine.seed)  # noqa: S311 - ties, not secrets
        self.router: Router = _SimRouter(PrefixIndex(), draw, settings)
        self.account = FleetAccount()
        self.moves = Moves(self.router, lambda seq: self._work(self._live[seq]))
        self.on_end: Callable[[SimRequest, float], None] = lambda request, now_s: None  # may send another request
        self.now_s = 0.0  # no engine is behind
        self._share_by_tenant = {share.name: share for share in self.shares}
        self._reports: list[tuple[float, int, EngineId, Report]] = []  # heap of the reports that the front has not read
        self._busy: list[tuple[float, int]] = []  # heap of engines with work by their clocks
        self._is_busy = [False] * settings.replicas
        self._live: dict[SeqId, SimRequest] = {}
        self._ids = itertools.count(1)
        self._order = itertools.count()  # of reports with equal times
        self._news = [engine.cache.tiers.tell_keys() for engine in self.engines]
        self._weighed_s = 0.0
        self._open()

    @property
    def num_unfinished(self) -> int:
        """Number of requests at engines."""
        return len(self._live)

    def served_ms(self) -> dict[TenantId, float]:
        """Return the service of each tenant over all engines, in milliseconds of a machine."""
        served: dict[TenantId, float] = {}
        for engine in self.engines:
            for tenant, ms in engine.policy.fair.served_ms.items():
                served[tenant] = served.get(tenant, 0.0) + ms
        return served

    @property
    def is_idle(self) -> bool:
        """Whether no request is at an engine or expected."""
        return not self._live and self.http.next_s is None

    def send(self, request: SimRequest) -> None:
        """Send a request at its time, or now if that is past."""
        self.http.send(request)

    def run(self, until_s: float = float("inf")) -> None:
        """Run until a time, or until every request has ended."""
        reports, busy, http = self._reports, self._busy, self.http
        while True:
            step_s = busy[0][0] if busy else float("inf")
            report_s = reports[0][0] if reports else float("inf")
            due_s = float("inf") if http.next_s is None else http.next_s
            next_s = min(step_s, report_s, due_s)
            if next_s >= until_s:
                break
            self.now_s = max(self.now_s, next_s)
            if report_s <= next_s:
                self._take_report(*heapq.heappop(reports))
            elif due_s <= next_s:
                for request in http.take(self.now_s):
                    self._submit(SeqId(next(self._ids)), request)
            else:
                if self.now_s >= self._weighed_s + self.settings.weights_s:
                    self._weigh()
                _, number = heapq.heappop(busy)
                self._step(number)
        if not self.is_idle:
            self.now_s = max(self.now_s, until_s)

    # ---- inside

    def _open(self) -> None:
        weights = {share.name: share.weight for share in self.shares}
        self.router.set_weights(weights)
        self.account.set_weights(weights)
        speed = simulated_speed(self.settings.engine)
        for number, engine in enumerate(self.engines):
            self.moves.join(EngineId(number), speed)
            self.account.join(EngineId(number))
            engine.tally.receiver = partial(self._post, EngineId(number))
            if self._has_http:
                engine.tally.http = self.http

    def _work(self, request: SimRequest) -> PromptWork:
        share = self._share_by_tenant.get(request.tenant) or TenantShare(name=request.tenant)
        root = namespace_key(FINGERPRINT, sharing_scope(share))
        heads = prompt_heads(root, prompt_bytes(request.prompt), self.settings.engine.block_size)
        return PromptWork(
            tenant=request.tenant, num_tokens=request.num_prompt, max_outputs=request.outputs, heads=heads
        )

    def _submit(self, seq: SeqId, request: SimRequest) -> None:
        self._live[seq] = request
        number = self.moves.submit((seq,))
        assert number is not None, "no engine ever leaves"
        engine = self.engines[number]
        if not self._is_busy[number]:
            engine.pass_time(self.now_s)
            self._is_busy[number] = True
            heapq.heappush(self._busy, (engine.now_s, number))
        engine.submit(request, seq)

    def _step(self, number: int) -> None:
        engine = self.engines[number]
        if engine.step():
            heapq.heappush(self._busy, (engine.now_s, number))
        else:
            self._is_busy[number] = False

    def _post(self, engine: EngineId, report: Report) -> None:
        heapq.heappush(self._reports, (self.engines[engine].now_s, next(self._order), engine, report))

    def _take_report(self, at_s: float, _: int, engine: EngineId, report: Report) -> None:
        changes = self._news[engine].take()
        if changes.stored:
            self.router.index.store(engine, changes.stored)
        if changes.dropped:
            self.router.index.drop(engine, changes.dropped)
        for first in report.firsts:
            self.moves.note_first_token(first.seq)
        for finished in report.finished:
            is_whole = finished.reason is FinishReason.LENGTH
            self.moves.end(finished.seq, finished.num_outputs if is_whole else None)
            self.on_end(self._live.pop(finished.seq), at_s)
        self.engines[engine].tally.count(report, at_s)

    def _weigh(self) -> None:
        """Take the counters of all engines, and give them weights, as the gauges of real engines are taken."""
        self._weighed_s = self.now_s
        for number in range(len(self.engines)):
            self.account.note_work(EngineId(number), self.router.tenants_at(EngineId(number)))
        for number, engine in enumerate(self.engines):
            self.account.note_service(EngineId(number), engine.policy.fair.served_ms)
        if not self.settings.has_weights or len(self.engines) == 1:
            return  # a single engine has the configured weights
        self.account.balance()
        for number, engine in enumerate(self.engines):
            fair = engine.policy.fair
            if isinstance(fair, TenantBook):
                for tenant, weight in self.account.effective_weights(EngineId(number)).items():
                    fair.set_weight(tenant, weight, engine.now_s)


def simulated_speed(settings: SimSettings) -> EngineSpeed:
    """Return the speed of a simulated engine in full steps, as an engine would report it."""
    rates, costs, rows = simulated_rates(settings), StepCosts(settings.times), max(1, settings.max_num_seqs // 2)
    return EngineSpeed(
        prefill_ms=1e3 * rates.prefill_token_s,
        prefill_context_ms=1e3 * rates.prefill_context_s,
        decode_ms=costs.predict_ms(0, rows, rows * 512) / rows,
    )
