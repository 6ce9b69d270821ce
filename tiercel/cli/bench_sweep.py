"""`tiercel bench sweep`: the load of `bench serve` at increasing rates, until the goals are missed."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Struct

from tiercel.cli.bench_serve import command_line, run_once
from tiercel.cli.console import print_table, warn
from tiercel.cli.flags import flags_of, make_command
from tiercel.settings.option import Group, Option, options_of, read_options

if TYPE_CHECKING:
    from tiercel.loadtest.results.record import RunResult
    from tiercel.loadtest.results.sweep import Point, SearchPlan
    from tiercel.loadtest.settings import BenchSettings

_SWEEP = Group("Sweep")
_NOT_SHARED = {  # flags of `bench serve` that a sweep sets itself, or that have no meaning for it
    *("request_rate", "num_prompts", "duration", "tenants", "isolation", "max_concurrency", "arrivals"),
    *("on_sec", "off_sec", "trace_speed", "ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps", "profile"),
    *("save_result", "append_result", "result_dir", "result_filename", "percentile_metrics", "metric_percentiles"),
    *("report",),
}


class SweepFlags(Struct, frozen=True, kw_only=True):
    """The flags of a sweep beside those of `bench serve`."""

    first_rate: Annotated[float, Option(_SWEEP, "First request rate.", "RATE")] = 1.0
    highest_rate: Annotated[float, Option(_SWEEP, "Highest request rate.", "RATE")] = 1024.0
    growth: Annotated[float, Option(_SWEEP, "Factor between rates until the goals are missed.", "FACTOR")] = 2.0
    precision: Annotated[float, Option(_SWEEP, "Relative precision of the knee.", "SHARE")] = 0.05
    good_share: Annotated[float, Option(_SWEEP, "Share of the requests that must meet the goals.", "SHARE")] = 0.95
    step_sec: Annotated[float, Option(_SWEEP, "Duration of each rate.", "SECONDS")] = 30.0
    out: Annotated[Path, Option(_SWEEP, "Folder for the page, the picture and the results.", "FOLDER")] = Path("sweep")


def bench_sweep_command() -> Callable[..., int]:
    """Return the command with the flags of a sweep and those of `bench serve` that are the same at every rate."""
    # lazy: httpx and tokenizers, which other verbs do not need
    from tiercel.loadtest.settings import BenchSettings

    shared = (option for name, option in options_of(BenchSettings).items() if name not in _NOT_SHARED)
    return make_command(sweep, flags_of([*options_of(SweepFlags).values(), *shared]))


def sweep(given: dict[str, Any]) -> int:
    """Find the highest request rate at which a server meets latency goals.

    Doubles the rate until too few requests meet the goals of --goodput, then
    narrows the interval by bisection. Prints a table and writes a page, its
    picture, the points as JSON and the result of every run to a folder.
    """
    # lazy: as above
    from tiercel.loadtest.plan import settings_at
    from tiercel.loadtest.results.sweep import SearchPlan
    from tiercel.loadtest.settings import BenchSettings

    own = read_options(SweepFlags, {name: given.pop(name) for name in options_of(SweepFlags) if name in given})
    plan = SearchPlan(
        first_rate=own.first_rate,
        highest_rate=own.highest_rate,
        growth=own.growth,
        precision=own.precision,
        wanted_share=own.good_share,
    )
    plan.check()
    settings = read_options(BenchSettings, given)
    settings_at(settings, own.first_rate, own.step_sec, 0)  # fails before the sweep if a flag is wrong
    return _run(settings, plan, own.step_sec, own.out)


def _run(settings: "BenchSettings", plan: "SearchPlan", step_s: float, folder: Path) -> int:
    # lazy: no other verb sweeps
    from tiercel.loadtest.plan import settings_at
    from tiercel.loadtest.report.sweep_page import RESULTS, verdict, write_sweep
    from tiercel.loadtest.results.record import STOPPED
    from tiercel.loadtest.results.result_file import write_result
    from tiercel.loadtest.results.sweep import make_sweep, point_of, search

    (folder / RESULTS).unlink(missing_ok=True)
    results: list[RunResult] = []

    def measure(rate: float) -> "Point":
        result = run_once(settings_at(settings, rate, step_s, len(results)))
        results.append(result)
        write_result(result, folder / RESULTS, append=True)
        if result.client.saturated:
            warn(f"at {rate:g}/s the client is saturated: {result.client.reason}")
        return point_of(result, rate)

    points: list[Point] = []
    for point in search(measure, plan):
        if STOPPED in results[-1].notes:
            warn("stopped: the last rate is not counted")
            break
        points.append(point)
        print(f"{point.rate:g}/s offered: {point.good_share:.1%} good", file=sys.stderr)
    if not points:
        return 1
    sweep = make_sweep(plan, command_line(), points)
    _print_points(points)
    print(verdict(sweep))
    print(write_sweep(sweep, results[-1], folder))
    return 0


def _print_points(points: "list[Point]") -> None:
    # lazy: no other verb sweeps
    from tiercel.loadtest.report.sweep_page import COLUMNS, point_cells

    rows = [point_cells(point) for point in sorted(points, key=lambda point: point.rate)]
    print_table(COLUMNS, rows, right=COLUMNS)
