"""Wait for a restore that lands while the device still computes, so that the next plan has its sequence."""

from collections.abc import Callable, Iterable
from typing import Protocol

from tiercel.values.clock import Clock
from tiercel.values.outcome import RouteGauges
from tiercel.values.tier import Landing, Route, Transfer

_MARGIN_S = 1e-3  # before the end of the steps in flight, for a thread that wakes late
_PLANNINGS = 2.0  # the time of planning and launching that is set aside, as a multiple of the longest lately
_DECAY = 0.95  # of that longest time, with each step
_LATE_SHARE = 0.25  # of a copy's predicted time, and the margin: a copy that is later is not waited for any more


class WaitableMover(Protocol):
    """A mover whose landings can be waited for."""

    def start(self, transfers: Iterable[Transfer]) -> None: ...
    def poll(self) -> list[Landing]: ...
    def gauges(self) -> tuple[RouteGauges, ...]: ...
    def wait_landing(self, seconds: float) -> None: ...


class RestoreWait:
    """A mover that can put off a plan while a restore is about to land and the device has work.

    A plan is made while the step before it runs. A restore that lands a little later would be in no step until the one
    after the next: its sequence waits for up to two steps. There is time to wait, because planning and launching take
    less than a step. The next step is launched before the device is idle, if the prediction of the steps in flight is
    right.
    """

    def __init__(self, mover: WaitableMover, load_s: Callable[[int], float], clock: Clock) -> None:
        """`load_s` predicts the seconds to restore so many blocks."""
        self._mover = mover
        self._load_s = load_s
        self._clock = clock
        self._due_by_id: dict[int, tuple[float, float]] = {}  # in the order of landing: when, and at the latest when
        self._planning_s = 0.0
        self._planned_from_s: float | None = None  # since the last poll; None: the plan was launched

    def start(self, transfers: Iterable[Transfer]) -> None:
        """Pass transfers on, after the launch of the step that they were planned with. Restores run one by one."""
        now_s = self._clock.now_s()
        if self._planned_from_s is not None:
            self._planning_s = max(now_s - self._planned_from_s, _DECAY * self._planning_s)
            self._planned_from_s = None
        started = list(transfers)
        self._mover.start(started)
        for transfer in started:
            if transfer.route is Route.RESTORE:
                before_s = max((due_s for due_s, _ in self._due_by_id.values()), default=now_s)
                copy_s = self._load_s(len(transfer.keys))
                due_s = max(now_s, before_s) + copy_s
                self._due_by_id[transfer.id] = due_s, due_s + _LATE_SHARE * copy_s + _MARGIN_S

    def poll(self) -> list[Landing]:
        """Return what has landed; a plan is made next."""
        landings = self._mover.poll()
        for landing in landings:
            self._due_by_id.pop(landing.id, None)
        self._planned_from_s = self._clock.now_s()
        return landings

    def gauges(self) -> tuple[RouteGauges, ...]:
        """Return those of the mover."""
        return self._mover.gauges()

    def wait(self, busy_until_s: float) -> bool:
        """Sleep until a transfer has landed, if a restore is due before the next plan has to be made.

        `busy_until_s` is when the steps in flight are predicted to end. Return whether it is worth polling and calling
        again.
        """
        now_s = self._clock.now_s()
        plan_s = busy_until_s - _PLANNINGS * self._planning_s - _MARGIN_S
        latest_s = max((late_s for due_s, late_s in self._due_by_id.values() if due_s <= plan_s), default=0.0)
        left_s = min(plan_s, latest_s) - now_s
        if left_s <= 0.0:
            return False
        self._mover.wait_landing(left_s)
        return True
