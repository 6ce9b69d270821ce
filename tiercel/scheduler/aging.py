"""The aging share: the part of all service that is reserved for starving sequences."""

_MAX_DEBT_STEPS = 20  # longest steps


class AgingShare:
    """A fixed part of all service, given to the sequence that has waited longest, in whatever band.

    The share is a bucket of milliseconds. Each step fills the bucket by `share` of its time, and the service of aged
    sequences drains it. The bucket only decides when a starving sequence is served; its tenant is charged as for any
    other service. The bucket may run into debt, so that an aged sequence makes some progress before a higher band may
    preempt it.
    """

    def __init__(self, step_ms: float, share: float = 0.05, starve_s: float = 30.0) -> None:
        self.share = share
        self.starve_s = starve_s  # a sequence that has waited this long starves
        self._step_ms = step_ms
        self._balance_ms = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the next step may serve an aged sequence."""
        return self._balance_ms > 0

    @property
    def is_spent(self) -> bool:
        """Whether the bucket's debt is at its limit, so that aged sequences may be preempted like others."""
        return self._balance_ms <= -_MAX_DEBT_STEPS * self._step_ms

    def add(self, step_ms: float, aged_ms: float) -> None:
        """Account for a launched step of `step_ms`, of which aged sequences were served `aged_ms`.

        Service beyond the debt limit is not held against the next starving sequence.
        """
        balance_ms = self._balance_ms + self.share * step_ms - aged_ms
        self._balance_ms = min(self._step_ms, max(-_MAX_DEBT_STEPS * self._step_ms, balance_ms))
