"""When those who starve get a part of a step, in whatever band they are."""

_LENT_STEPS = 20  # longest ones


class AgingShare:
    """The part of all service that goes to whoever has starved longest, in whatever band: no band is lifted for it.

    A bucket of milliseconds: filled by its share of each step, drained by what aged sequences were given. It is the
    starving tenant itself that pays, as for any other service; the bucket only says when. It lends, so that a sequence
    that was let in gets somewhere before a higher band may preempt it.
    """

    def __init__(self, step_ms: float, share: float = 0.05, starve_s: float = 30.0) -> None:
        self.share = share
        self.starve_s = starve_s  # waiting for so long is starving
        self._step_ms = step_ms
        self._balance_ms = 0.0

    @property
    def is_due(self) -> bool:
        """Aged work may have a part of the next step."""
        return self._balance_ms > 0

    @property
    def is_spent(self) -> bool:
        """So much was lent that aged sequences are victims like others again."""
        return self._balance_ms <= -_LENT_STEPS * self._step_ms

    def add(self, step_ms: float, aged_ms: float) -> None:
        """A step was launched: all it was charged, and how much of it went to aged sequences.

        What they get beyond what is lent they get like others, and the next who starves does not pay for it.
        """
        balance_ms = self._balance_ms + self.share * step_ms - aged_ms
        self._balance_ms = min(self._step_ms, max(-_LENT_STEPS * self._step_ms, balance_ms))
