"""The engines of a cluster that live, and the work that fronts expect of them."""

LEASE_S = 10.0
"""How long an engine or a report counts after its last word."""


class EngineDirectory:
    """Addresses of engines and predicted seconds of work, each with a lease. Times are those of one monotonic clock."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._lease_s = lease_s
        self._engines: dict[str, float] = {}  # address -> when it was announced
        self._work: dict[str, tuple[float, float]] = {}  # front -> when it reported, and seconds of work

    def announce(self, address: str, now_s: float) -> None:
        """Note that an engine serves at this address. Engines repeat this every second."""
        self._engines[address] = now_s

    def withdraw(self, address: str) -> None:
        """Forget an engine that drains or has ended. An unknown address is ignored."""
        self._engines.pop(address, None)

    def report(self, front: str, work_s: float, now_s: float) -> None:
        """Note how many seconds of one engine a front expects for its unfinished sequences."""
        self._work[front] = (now_s, work_s)

    def addresses(self, now_s: float) -> tuple[str, ...]:
        """Return the addresses of the engines that live, in a fixed order."""
        self._engines = {where: at_s for where, at_s in self._engines.items() if now_s - at_s <= self._lease_s}
        return tuple(sorted(self._engines))

    def work_s(self, now_s: float) -> float | None:
        """Return the seconds of one engine that all fronts expect; None if no front has reported lately."""
        self._work = {front: one for front, one in self._work.items() if now_s - one[0] <= self._lease_s}
        return sum(work_s for _, work_s in self._work.values()) if self._work else None
