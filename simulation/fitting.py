"""What a real server takes beyond its table of step times: measured once, with loads of its own, and kept as a file."""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from tiercel.scheduler.cost import StepTimes
from tiercel.simulation.http import HttpTimes
from tiercel.simulation.replay import Replay
from tiercel.simulation.simulator import SimSettings
from tiercel.simulation.workload import Workload

_ROUNDS = 3
_SLOWEST, _FASTEST = 8.0, 0.25  # of the table's times


class Calibration(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Corrections of a table of step times, and the times of the HTTP process."""

    step_factor: float = 1.0  # on every time of the table
    step_ms: float = 0.0  # of every step beside that: planning, committing, waking up
    http: HttpTimes = HttpTimes()

    def __post_init__(self) -> None:
        if self.step_factor <= 0 or self.step_ms < 0:
            raise ValueError("step_factor is above 0, step_ms at least 0")

    def corrected(self, times: StepTimes) -> StepTimes:
        """Return the table as steps really last."""
        return StepTimes(
            prefill_tokens=times.prefill_tokens,
            decodes=times.decodes,
            context_tokens=times.context_tokens,
            ms=tuple(self.step_factor * ms + self.step_ms for ms in times.ms),
        )

    def applied(self, settings: SimSettings) -> SimSettings:
        """Return the settings of an engine whose table was not corrected, corrected."""
        return replace(settings, times=self.corrected(settings.times), http=self.http)


class ClosedLoop(Struct, frozen=True, kw_only=True):
    """A closed loop that a real server has run."""

    workload: Workload
    concurrency: int
    begun_s: float  # no request was begun afterwards
    lasted_s: float  # until the last answer had ended
    requests: int  # answered


def fit_steps(settings: SimSettings, http: HttpTimes, loops: Sequence[ClosedLoop]) -> Calibration:
    """Return the factor and the addend of step times with which the simulation answers as many requests a second.

    Loops of little and of much concurrency tell the two apart. Least squares of the relative error of the time a
    request takes; each round simulates every loop, since steps change their shapes with their times.
    """
    found = Calibration(http=http)
    for _ in range(_ROUNDS):
        rows: list[
            tuple[float, float, float]
        ] = []  # table seconds, steps and other seconds a request, in measured ones
        for loop in loops:
            replay = play(found.applied(replace(settings, concurrency=loop.concurrency)), loop.workload, loop.begun_s)
            machine, finished = replay.simulation.machine, replay.simulation.tally.finished
            measured_s = loop.lasted_s / loop.requests
            own_s = (machine.busy_s - machine.delayed_s - 1e-3 * found.step_ms * machine.steps) / found.step_factor
            idle_s = replay.simulation.now_s - machine.busy_s + machine.delayed_s
            rows.append(tuple(s / finished / measured_s for s in (own_s, machine.steps, idle_s)))  # type: ignore[arg-type]
        found = replace(found, **_solve(rows))
    return found


def play(settings: SimSettings, workload: Workload, closes_s: float = float("inf")) -> Replay:
    """Return a replay that has run to its end."""
    replay = Replay(settings, workload, closes_s=closes_s)
    replay.run()
    return replay


def _solve(rows: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    """Factor and addend for which factor * table + addend * steps + idle is nearest to 1 in every row."""
    aa = sum(own * own for own, _, _ in rows)
    ab = sum(own * steps for own, steps, _ in rows)
    bb = sum(steps * steps for _, steps, _ in rows)
    ar = sum(own * (1 - idle) for own, _, idle in rows)
    br = sum(steps * (1 - idle) for _, steps, idle in rows)
    determinant = aa * bb - ab * ab
    step_s = (aa * br - ab * ar) / determinant if determinant > 1e-12 * aa * bb else 0.0
    step_s = max(step_s, 0.0)
    factor = (ar - step_s * ab) / aa
    return {"step_factor": min(max(factor, _FASTEST), _SLOWEST), "step_ms": 1e3 * step_s}
