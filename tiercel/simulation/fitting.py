"""Corrections that fit a simulation to a real server: step times, and the times of the HTTP process."""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from tiercel.scheduler.cost import StepTimes
from tiercel.simulation.fleet import FleetSimSettings
from tiercel.simulation.http import HttpTimes
from tiercel.simulation.replay import FleetReplay, Replay
from tiercel.simulation.simulator import SimSettings, Simulation
from tiercel.simulation.workload import Workload

_ROUNDS = 3
_SLOWEST, _FASTEST = 8.0, 0.25  # limits of the factor on the table's times


class Corrections(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Corrections of a table of step times, and the times of the HTTP process. Read and written as JSON."""

    step_factor: float = 1.0  # applied to every time of the table
    step_ms: float = 0.0  # added to every step: planning, committing, waking up
    http: HttpTimes = HttpTimes()

    def __post_init__(self) -> None:
        if self.step_factor <= 0 or self.step_ms < 0:
            raise ValueError(
                f"step_factor {self.step_factor}, step_ms {self.step_ms}: need step_factor > 0, step_ms >= 0"
            )

    def corrected(self, times: StepTimes) -> StepTimes:
        """Return the corrected table."""
        return StepTimes(
            prefill_tokens=times.prefill_tokens,
            decodes=times.decodes,
            context_tokens=times.context_tokens,
            ms=tuple(self.step_factor * ms + self.step_ms for ms in times.ms),
        )

    def applied(self, settings: SimSettings) -> SimSettings:
        """Return settings with a corrected table and with these HTTP times; the given table must not be corrected."""
        return replace(settings, times=self.corrected(settings.times), http=self.http)


class ClosedLoop(Struct, frozen=True, kw_only=True):
    """The measurement of a closed loop against a real server."""

    workload: Workload
    concurrency: int
    begun_s: float  # time after which no request was sent
    lasted_s: float  # time at which the last answer ended
    requests: int  # number of answers


def fit_steps(settings: SimSettings, http: HttpTimes, loops: Sequence[ClosedLoop], *, replicas: int = 1) -> Corrections:
    """Return the corrections of step times with which the simulation reaches the measured requests per second.

    `replicas`: number of engines that the loops were measured with.

    Method: least squares of the relative error of the time per request. Loops of low and of high concurrency are
    needed to tell factor and addend apart. Each round simulates every loop, because the shapes of steps depend on
    their times.
    """
    found = Corrections(http=http)
    for _ in range(_ROUNDS):
        # seconds by the table, steps and other seconds of all engines, per request and divided by the measured ones
        rows: list[tuple[float, float, float]] = []
        for loop in loops:
            corrected = found.applied(replace(settings, concurrency=loop.concurrency))
            engines, now_s = _play_loop(corrected, loop, replicas)
            machines, finished = [one.machine for one in engines], sum(one.tally.finished for one in engines)
            measured_s = replicas * loop.lasted_s / loop.requests
            steps = sum(one.steps for one in machines)
            work_s = sum(one.busy_s - one.delayed_s for one in machines)
            own_s = (work_s - 1e-3 * found.step_ms * steps) / found.step_factor
            idle_s = replicas * now_s - work_s
            rows.append(tuple(s / finished / measured_s for s in (own_s, steps, idle_s)))  # type: ignore[arg-type]
        found = replace(found, **_solve(rows))
    return found


def play(settings: SimSettings, workload: Workload, closes_s: float = float("inf")) -> Replay:
    """Run a workload to its end and return the replay."""
    replay = Replay(settings, workload, closes_s=closes_s)
    replay.run()
    return replay


def _play_loop(settings: SimSettings, loop: ClosedLoop, replicas: int) -> tuple[Sequence[Simulation], float]:
    """Run a closed loop; return the engines and the virtual seconds."""
    replay: Replay | FleetReplay = (
        Replay(settings, loop.workload, closes_s=loop.begun_s)
        if replicas == 1
        else FleetReplay(FleetSimSettings(replicas=replicas, engine=settings), loop.workload, closes_s=loop.begun_s)
    )
    replay.run()
    return replay.engines, replay.now_s


def _solve(rows: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    """Return factor and addend that bring factor * table + addend * steps + idle closest to 1 in all rows."""
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
