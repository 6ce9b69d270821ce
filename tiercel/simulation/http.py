"""The HTTP process and its clients in virtual time: one thread that handles requests and reports in turn."""

import heapq
from collections import deque
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from tiercel.simulation.machine import CostMachine
from tiercel.simulation.workload import SimRequest


class HttpTimes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of the HTTP process and the client, in milliseconds. All zero: the engine alone."""

    request_ms: float = 0.0  # from sending a request to its submission, and from its first token to the client
    prompt_token_ms: float = 0.0  # the same, for each token of the prompt
    report_ms: float = 0.0  # each report of the engine, whatever its size
    token_ms: float = 0.0  # each token of a report
    # Part of these times by which a running step is delayed: 1 if it shares all its cores. Several engines are delayed
    # by an equal part each, and only while all of them compute: otherwise a core is free.
    contention: float = 0.0

    def __post_init__(self) -> None:
        times = (self.request_ms, self.prompt_token_ms, self.report_ms, self.token_ms, self.contention)
        if not min(times) >= 0:
            raise ValueError("times and contention must be at least 0")


class HttpProcess:
    """The path between the clients and the engine's mailbox. One thread handles everything in order of arrival.

    With a concurrency the clients form a closed loop: each sends its next request when its answer has ended, and the
    times of the requests give only their order.
    """

    def __init__(
        self,
        times: HttpTimes,
        machines: Sequence[CostMachine],
        *,
        concurrency: int | None = None,
        closes_s: float = float("inf"),
    ) -> None:
        self._times = times
        self._machines = machines
        self._closes_s = closes_s  # a closed loop sends no request from this time on
        self._busy_until_s = 0.0
        self._due: list[tuple[float, int, SimRequest]] = []  # heap of requests by the time at which they are sent
        self._ready: deque[tuple[float, SimRequest]] = deque()  # requests by the time at which the engine gets them
        self._unsent: deque[SimRequest] = deque()  # requests of a closed loop that have not been sent
        self._concurrency = concurrency
        self._count = 0

    def expect(self, requests: tuple[SimRequest, ...]) -> None:
        """Schedule the requests of a run: all at their times, or the first of a closed loop."""
        if self._concurrency is None:
            for request in requests:
                self.send(request)
            return
        self._unsent.extend(requests)
        for _ in range(self._concurrency):
            self._send_next(0.0)

    def send(self, request: SimRequest) -> None:
        """Send a request at its time."""
        self._count += 1
        heapq.heappush(self._due, (request.at_s, self._count, request))

    @property
    def next_s(self) -> float | None:
        """Earliest time at which the next request may reach the engine; None if none is sent before an answer ends."""
        if self._ready:
            return self._ready[0][0]
        return self._due[0][0] if self._due else None

    def take(self, now_s: float) -> list[SimRequest]:
        """Return the requests that have reached the engine by now."""
        self._advance(now_s)
        ready: list[SimRequest] = []
        while self._ready and self._ready[0][0] <= now_s:
            ready.append(self._ready.popleft()[1])
        return ready

    def report(self, now_s: float) -> float:
        """Handle a report of the engine. Return the time at which the handling of its first token begins."""
        self._advance(now_s)
        return self._work(now_s, self._times.report_ms)

    def token(self, now_s: float) -> float:
        """Return the time at which the client has the next token of the report."""
        return self._work(now_s, self._times.token_ms)

    def end(self, at_s: float) -> None:
        """Note the end of an answer. In a closed loop its client then sends the next request."""
        if self._concurrency is not None:
            self._send_next(at_s)

    def _send_next(self, at_s: float) -> None:
        if self._unsent and at_s < self._closes_s:
            self.send(replace(self._unsent.popleft(), at_s=at_s))

    def _advance(self, now_s: float) -> None:
        """Handle the requests that have been sent by now."""
        times = self._times
        while self._due and self._due[0][0] <= now_s:
            at_s, _, request = heapq.heappop(self._due)
            ready_s = self._work(at_s, times.request_ms + times.prompt_token_ms * request.num_prompt)
            self._ready.append((ready_s, request))

    def _work(self, from_s: float, ms: float) -> float:
        """Do work that can begin at `from_s`, and delay the engine's steps by its contention. Return when it ends."""
        self._busy_until_s = max(from_s, self._busy_until_s) + 1e-3 * ms
        if self._times.contention and ms and all(machine.is_running for machine in self._machines):
            for machine in self._machines:
                machine.delay(1e-3 * ms * self._times.contention / len(self._machines))
        return self._busy_until_s
