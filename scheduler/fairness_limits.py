"""How far service may drift from the weights."""

from collections.abc import Iterable

from msgspec import Struct

from tiercel.scheduler.preemption_budget import WORTH


class FairLimits(Struct, frozen=True, kw_only=True):
    """How far service may drift from the weights.

    Two accounts i and j of one band that both have dispatchable work differ by at most `bound_ms` of service per
    weight: the sum, over both, of quantum_ms + debt_ms + (step_ms + 1e3 * patience_s + worth * price_ms) / weight.
    `price_ms` is what preempting a sequence of the account costs. A sequence whose price exceeds what the
    `PreemptionBudget` leaves is not preempted: until it ends, its account may be served more than that.
    """

    step_ms: float  # U: the most that one step charges
    quantum_ms: float  # Q: a refill gives an account this times its weight, and it never holds more
    debt_ms: float  # D: a debt beyond this times the weight may be preempted
    patience_s: float = 0.5  # tau: how long an eligible account waits before others are preempted for it
    worth: float = WORTH  # a debt beyond D is preempted when it is so many times the price

    def bound_ms(self, weights: Iterable[float], price_ms: float = 0.0) -> float:
        """The most by which two accounts with these weights may differ in service per weight."""
        return sum(self.lead_ms(weight, price_ms) for weight in weights)

    def lead_ms(self, weight: float, price_ms: float = 0.0) -> float:
        """The most by which one account may be ahead of another in service per weight."""
        contested_ms = self.step_ms + 1e3 * self.patience_s + self.worth * price_ms
        return self.quantum_ms + self.debt_ms + contested_ms / weight


def fair_limits(
    step_ms: float, patience_s: float = 0.5, *, quantum_steps: float = 0.5, debt_steps: float = 4.0
) -> FairLimits:
    """The limits for a machine whose longest step charges `step_ms`: Q = U / 2, D = 4 U.

    A tenant that comes back waits up to two quanta of each tenant that floods, so a small quantum isolates better; a
    large one leaves more of the order to deadlines. Sequences that run make debts and others pay them back by
    themselves: a D below what they owe on the way makes them pause, or give way, all the time; a larger D buys no
    throughput and is paid by others' waiting (docs/decisions/0014).
    """
    return FairLimits(
        step_ms=step_ms, quantum_ms=quantum_steps * step_ms, debt_ms=debt_steps * step_ms, patience_s=patience_s
    )
