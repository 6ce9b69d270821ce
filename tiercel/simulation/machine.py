"""A machine that computes nothing; its steps last as long as a table of step times says."""

import random
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from tiercel.scheduler.cost import StepCosts, StepTimes, work_by_payer
from tiercel.values.clock import ManualClock
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.outcome import StepOutcome
from tiercel.values.plan import StepPlan


class CostFlight:
    """A launched step, which ends at a time of the clock."""

    __slots__ = ("_clock", "_end_s", "_samples", "plan")

    def __init__(self, plan: StepPlan, clock: ManualClock, end_s: float, samples: int) -> None:
        self.plan = plan
        self._clock = clock
        self._end_s = end_s
        self._samples = samples

    def result(self) -> StepOutcome:
        """Advance the clock to the end of the step. Every sampled token is 0."""
        self._clock.advance(max(0.0, self._end_s - self._clock.now_s()))
        return StepOutcome((0,) * self._samples)

    def delay(self, seconds: float) -> bool:
        """End later by `seconds`. Return False if the step has ended already."""
        if self._end_s <= self._clock.now_s():
            return False
        self._end_s += seconds
        return True


class CostMachine:
    """A device with one lane. Steps run one after another, each for the time of the table, with noise."""

    def __init__(
        self, times: StepTimes, clock: ManualClock, *, noise: float = 0.0, seed: int = 0,
        owner: Callable[[SeqId], TenantId] | None = None,
    ) -> None:  # fmt: skip
        self.busy_s = 0.0
        self.delayed_s = 0.0  # part of `busy_s` that was added by `delay`
        self.steps = 0
        self.tokens = 0  # tokens computed
        self.served_ms: dict[TenantId, float] = {}  # filled only with an `owner`
        self._costs = StepCosts(times)
        self._clock = clock
        self._busy_until_s = 0.0
        self._flights: deque[CostFlight] = deque()  # flights that may not have ended
        self._noise = noise
        self._owner = owner
        self._rng = random.Random(seed)  # noqa: S311 - step times, not secrets

    def launch(self, plan: StepPlan) -> CostFlight:
        """Queue a step."""
        prefill = decodes = reads = decode_context = samples = 0
        for batch in plan.nano_batches:
            for piece in batch.slices:
                samples += piece.num_sampled
                self.tokens += piece.length
                if piece.length > 1:
                    prefill += piece.length
                    reads += piece.length * piece.start
                else:
                    decodes += 1
                    decode_context += piece.start
        seconds = 1e-3 * self._costs.step_ms(prefill, reads / max(1, prefill), decodes, decode_context)
        if self._noise:
            seconds *= 1 + self._noise * self._rng.uniform(-1.0, 1.0)
        self._busy_until_s = max(self._clock.now_s(), self._busy_until_s) + seconds
        self.busy_s += seconds
        self.steps += 1
        if self._owner is not None:
            self._share(plan, self._owner)
        flight = CostFlight(plan, self._clock, self._busy_until_s, samples)
        self._flights.append(flight)
        return flight

    @property
    def is_running(self) -> bool:
        """Whether a step has been launched that has not ended."""
        return self._busy_until_s > self._clock.now_s()

    def delay(self, seconds: float) -> None:
        """Delay the running steps by processor time that something else uses. An idle machine is not delayed."""
        while self._flights and not self._flights[0].delay(seconds):
            self._flights.popleft()
        if self._flights:
            for flight in islice(self._flights, 1, None):
                flight.delay(seconds)
            self._busy_until_s += seconds
            self.busy_s += seconds
            self.delayed_s += seconds

    def _share(self, plan: StepPlan, owner: Callable[[SeqId], TenantId]) -> None:
        pieces = (
            (owner(piece.seq), piece.length, piece.start) for batch in plan.nano_batches for piece in batch.slices
        )
        for tenant, ms in self._costs.share_ms(work_by_payer(pieces)).items():
            self.served_ms[tenant] = self.served_ms.get(tenant, 0.0) + ms

    def forget(self, seqs: Iterable[SeqId]) -> None:
        """Do nothing: the machine keeps no state of sequences."""

    def block(self, slot: int) -> tuple[int, ...]:
        """Return an empty block, for the simulated mover."""
        return ()

    def put_block(self, slot: int, rows: tuple[int, ...]) -> None:
        """Do nothing: blocks have no content."""
