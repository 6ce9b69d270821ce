"""Runs a workload through a simulation."""

from collections.abc import Callable
from itertools import islice

from tiercel.ids import TenantId
from tiercel.scheduler.account import Account
from tiercel.scheduler.fairness import TenantBook
from tiercel.simulation.gap import GapMeter
from tiercel.simulation.http import HttpProcess, HttpTimes
from tiercel.simulation.simulator import PolicyMaker, SimSettings, Simulation, make_policy
from tiercel.simulation.timeline import SimTimeline
from tiercel.simulation.workload import Workload

_METERED = 16  # tenants whose service is compared pair by pair


class Replay:
    """One run of a workload in a simulation."""

    def __init__(
        self, settings: SimSettings, workload: Workload, *, duration_s: float | None = None,
        closes_s: float = float("inf"), open_with: PolicyMaker = make_policy,
    ) -> None:  # fmt: skip
        """`duration_s` ends the run early; a closed loop sends no request from `closes_s` on."""
        self.simulation = Simulation(settings, workload.tenants, open_with=open_with)
        self.workload = workload
        self._end_s = float("inf") if duration_s is None else duration_s
        self.http = HttpProcess(
            settings.http, self.simulation.machine, concurrency=settings.concurrency, closes_s=closes_s
        )
        self.http.expect(workload.requests)
        if settings.http != HttpTimes() or settings.concurrency is not None:
            self.simulation.tally.http = self.http
        span_s = duration_s or (workload.requests[-1].at_s if workload.requests else 0.0)
        self.timeline = SimTimeline(self.simulation, span_s)
        self.meter = self._open_meter()

    def run(self, progress: Callable[[float], None] = lambda _: None) -> None:
        """Run until every request has ended or the duration is over. `progress` gets the virtual time now and then."""
        simulation, timeline, meter, http = self.simulation, self.timeline, self.meter, self.http
        while simulation.now_s < self._end_s:
            now_s = simulation.now_s
            for request in http.take(now_s):
                simulation.submit(request)
            if now_s >= timeline.next_s:
                timeline.sample()
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
        timeline.sample()

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
