"""A machine that computes nothing and takes the time a table says."""

import random
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from tiercel.clock import ManualClock
from tiercel.ids import SeqId, TenantId
from tiercel.outcome import StepOutcome
from tiercel.plan import StepPlan
from tiercel.scheduler.cost import BilledSlice, StepCosts, StepTimes


class CostFlight:
    """A launched step, over when the clock says so."""

    __slots__ = ("_clock", "_end_s", "_samples", "plan")

    def __init__(self, plan: StepPlan, clock: ManualClock, end_s: float, samples: int) -> None:
        self.plan = plan
        self._clock = clock
        self._end_s = end_s
        self._samples = samples

    def result(self) -> StepOutcome:
        """Wait for it: the clock moves to its end. Every sequence says token 0."""
        self._clock.advance(max(0.0, self._end_s - self._clock.now_s()))
        return StepOutcome((0,) * self._samples)

    def delay(self, seconds: float) -> bool:
        """End so much later. Returns False when the step is over already."""
        if self._end_s <= self._clock.now_s():
            return False
        self._end_s += seconds
        return True


class CostMachine:
    """One lane. Steps run one after the other, each for as long as the table says, times noise."""

    def __init__(
        self, times: StepTimes, clock: ManualClock, *, noise: float = 0.0, seed: int = 0,
        owner: Callable[[SeqId], TenantId] | None = None,
    ) -> None:  # fmt: skip
        self.busy_s = 0.0
        self.delayed_s = 0.0  # of that time, what something else took
        self.steps = 0
        self.tokens = 0  # computed
        self.served_ms: dict[TenantId, float] = {}  # told apart only where there is an `owner`
        self._costs = StepCosts(times)
        self._clock = clock
        self._busy_until_s = 0.0
        self._flights: deque[CostFlight] = deque()  # those that may still run
        self._noise = noise
        self._owner = owner
        self._rng = random.Random(seed)  # noqa: S311 - step times, not secrets

    def launch(self, plan: StepPlan) -> CostFlight:
        """Queue a step."""
        prefill = decodes = prefill_context = decode_context = samples = 0
        for batch in plan.nano_batches:
            for piece in batch.slices:
                samples += piece.samples
                self.tokens += piece.length
                if piece.length > 1:
                    prefill += piece.length
                    prefill_context += piece.start
                else:
                    decodes += 1
                    decode_context += piece.start
        seconds = 1e-3 * self._costs.step_ms(prefill, prefill_context, decodes, decode_context)
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

    def delay(self, seconds: float) -> None:
        """Something else takes so much processor time from the steps under way; an idle machine loses nothing."""
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
            BilledSlice(owner(piece.seq), piece.length, piece.start, piece.length == 1)
            for batch in plan.nano_batches
            for piece in batch.slices
        )
        for tenant, ms in self._costs.share_ms(pieces).items():
            self.served_ms[tenant] = self.served_ms.get(tenant, 0.0) + ms

    def forget(self, seqs: Iterable[SeqId]) -> None:
        """It knows nothing of sequences."""

    def block(self, slot: int) -> tuple[int, ...]:
        """Blocks hold nothing, for a simulated mover to carry."""
        return ()

    def put_block(self, slot: int, rows: tuple[int, ...]) -> None:
        """And keep nothing."""
