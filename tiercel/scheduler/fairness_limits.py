"""The limits on how far service may drift from the tenants' weights."""

from msgspec import Struct

from tiercel.scheduler.preemption_budget import WORTH


class FairLimits(Struct, frozen=True, kw_only=True):
    """The limits on the drift of service from the weights.

    While two accounts of one band both have waiting work that could start, they differ in service per weight by at most
    the sum of their `lead_ms`. Its price is the largest price of preempting a sequence of the account. A sequence whose
    price exceeds what the `PreemptionBudget` leaves is not preempted: its account may be served more than the bound
    until the sequence ends.
    """

    step_ms: float  # U: the maximum that one step charges; these three are device milliseconds
    quantum_ms: float  # Q, per unit of weight: a refill adds this times the weight, which is also the maximum deficit
    debt_ms: float  # D, per unit of weight: a debt beyond this times the weight may be settled by preemption
    patience_s: float = 0.5  # tau: the time for which an eligible account waits before others are preempted for it
    worth: float = WORTH  # a preemption for debt must settle at least this many times its price

    def lead_ms(self, weight: float, price_ms: float = 0.0) -> float:
        """Return the largest lead in service per weight of an account over another one."""
        contested_ms = self.step_ms + 1e3 * self.patience_s + self.worth * price_ms
        return self.quantum_ms + self.debt_ms + contested_ms / weight


def fair_limits(
    step_ms: float, patience_s: float = 0.5, *, quantum_steps: float = 0.5, debt_steps: float = 4.0
) -> FairLimits:
    """Return the limits for a machine whose longest step takes `step_ms`: Q = U / 2, D = 4 U.

    A tenant that returns from idle waits for up to two quanta of each flooding tenant, so a small quantum isolates
    better; a large quantum leaves more of the order to deadlines. Running sequences make debts that the service of
    others pays back by itself. With a D below these debts, sequences are paused or preempted all the time. A larger D
    gains no throughput and makes other tenants wait longer (docs/decisions/0014).
    """
    return FairLimits(
        step_ms=step_ms, quantum_ms=quantum_steps * step_ms, debt_ms=debt_steps * step_ms, patience_s=patience_s
    )
