"""Runs a workload through a simulated engine, or through a fleet of them."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

from tiercel.scheduler.account import Account
from tiercel.scheduler.fairness import TenantBook
from tiercel.simulation.fleet import FleetSimSettings, FleetSimulation
from tiercel.simulation.gap import GapMeter
from tiercel.simulation.http import HttpProcess, HttpTimes
from tiercel.simulation.simulator import PolicyMaker, SimSettings, Simulation, make_policy
from tiercel.simulation.timeline import SimTimeline
from tiercel.simulation.workload import Workload
from tiercel.values.ids import TenantId

_METERED = 16  # tenants whose service is compared pair by pair


class Replayed(Protocol):
    """One run of a workload, on any number of engines."""

    @property
    def engines(self) -> Sequence[Simulation]:
        """The engines."""
        ...

    @property
    def timeline(self) -> SimTimeline:
        """Samples over all engines."""
        ...

    @property
    def meter(self) -> GapMeter | None:
        """The gaps of service; None: they are not measured."""
        ...

    def run(self, progress: Callable[[float], None] = ...) -> None:
        """Run until every request has ended or the duration is over. `progress` gets the virtual time now and then."""
        ...

    @property
    def now_s(self) -> float:
        """Virtual seconds since the start."""
        ...


class Replay:
    """One run of a workload in an engine."""

    def __init__(
        self, settings: SimSettings, workload: Workload, *, duration_s: float | None = None,
        closes_s: float = float("inf"), open_with: PolicyMaker = make_policy,
    ) -> None:  # fmt: skip
        """`duration_s` ends the run early; a closed loop sends no request from `closes_s` on."""
        self.simulation = Simulation(settings, workload.tenants, open_with=open_with)
        self.engines = (self.simulation,)
        self.workload = workload
        self._end_s = float("inf") if duration_s is None else duration_s
        self.http = HttpProcess(
            settings.http, [self.simulation.machine], concurrency=settings.concurrency, closes_s=closes_s
        )
        self.http.expect(workload.requests)
        if settings.http != HttpTimes() or settings.concurrency is not None:
            self.simulation.tally.http = self.http
        self.timeline = SimTimeline(self.engines, _span_s(workload, duration_s))
        self.meter = self._open_meter()

    @property
    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return self.simulation.now_s

    def run(self, progress: Callable[[float], None] = lambda _: None) -> None:
        """Run until every request has ended or the duration is over. `progress` gets the virtual time now and then."""
        simulation, timeline, meter, http = self.simulation, self.timeline, self.meter, self.http
        while simulation.now_s < self._end_s:
            now_s = simulation.now_s
            for request in http.take(now_s):
                simulation.submit(request)
            if now_s >= timeline.next_s:
                timeline.sample(now_s)
                progress(now_s)
            if meter is not None:
                meter.look()
            due_s = http.next_s
            next_s = self._end_s if due_s is None else due_s
            if not simulation.step(next_s):
                if due_s is None and simulation.loop.is_idle:
                    break
                if (
                    http.next_s is not None
                ):  # the step may have ended an answer, after which its client sends its next request
                    next_s = min(next_s, http.next_s)
                simulation.pass_time(min(next_s, self._end_s))
        timeline.sample(simulation.now_s)

    def _open_meter(self) -> GapMeter | None:
        """Return a meter of the tenants with the most tokens; None if the policy is not fair."""
        fair = self.simulation.policy.fair
        if not isinstance(fair, TenantBook):
            return None
        tokens: dict[TenantId, int] = {}
        for request in self.workload.requests:
            tokens[request.tenant] = tokens.get(request.tenant, 0) + request.num_prompt + request.outputs
        band = {share.name: share.band for share in self.workload.tenants}
        most = sorted(tokens, key=lambda name: (-tokens[name], name))
        accounts = [Account(band.get(name, 0), name) for name in islice(most, _METERED)]
        return GapMeter(fair, accounts, self.simulation.planner.preemptor.largest_price_ms)


class FleetReplay:
    """One run of a workload in a fleet of engines behind one front."""

    meter = None  # the guarantee is one of single engines; the account balances a fleet

    def __init__(
        self, settings: FleetSimSettings, workload: Workload, *, duration_s: float | None = None,
        closes_s: float = float("inf"),
    ) -> None:  # fmt: skip
        """`duration_s` ends the run early; a closed loop sends no request from `closes_s` on."""
        self.fleet = FleetSimulation(settings, workload.tenants, closes_s=closes_s)
        self.engines = self.fleet.engines
        self.fleet.http.expect(workload.requests)
        self._end_s = float("inf") if duration_s is None else duration_s
        self.timeline = SimTimeline(self.engines, _span_s(workload, duration_s))

    @property
    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return self.fleet.now_s

    def run(self, progress: Callable[[float], None] = lambda _: None) -> None:
        """Run until every request has ended or the duration is over. `progress` gets the virtual time now and then."""
        fleet, timeline = self.fleet, self.timeline
        while not fleet.is_idle and fleet.now_s < self._end_s:
            timeline.sample(fleet.now_s)
            progress(fleet.now_s)
            fleet.run(min(timeline.next_s, self._end_s))
        timeline.sample(fleet.now_s)


def _span_s(workload: Workload, duration_s: float | None) -> float:
    return duration_s or (workload.requests[-1].at_s if workload.requests else 0.0)
