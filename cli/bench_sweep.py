"""`tiercel bench sweep`: the load of `bench serve` at rising rates, until the goals are missed."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiercel.cli.bench_serve import bench_serve_command, command_line, run_once
from tiercel.cli.console import warn

if TYPE_CHECKING:
    from tiercel.loadtest.results.record import RunResult
    from tiercel.loadtest.results.sweep import Point, SearchPlan
    from tiercel.loadtest.settings import BenchSettings

_PANEL = "Sweep"
_NOT_OURS = {
    *("request_rate", "num_prompts", "duration", "tenants", "isolation", "max_concurrency", "arrivals"),
    *("on_sec", "off_sec", "trace_speed", "ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps", "profile"),
    *("save_result", "append_result", "result_dir", "result_filename", "percentile_metrics", "metric_percentiles"),
    *("report",),
}


def bench_sweep_command() -> Callable[..., int]:
    """The command: flags of its own, then those of `bench serve` that are the same at every rate."""

    def sweep(**given: Any) -> int:  # typer hands over what the signature below says
        own = {name: given.pop(name) for name in _own_flags(_sweep)}
        return _sweep(given, **own)

    of_serve = inspect.signature(bench_serve_command()).parameters
    shared = [parameter for name, parameter in of_serve.items() if name not in _NOT_OURS]
    own = [inspect.signature(_sweep).parameters[name] for name in _own_flags(_sweep)]
    sweep.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    sweep.__doc__ = """Find how many requests per second a server takes within goals.

    Doubles the rate until too few requests keep the goals of --goodput, then
    closes in on the knee. Prints a table and writes a page, its picture, the
    points as JSON and every run's result to a folder.
    """
    return sweep


def _own_flags(command: Callable[..., int]) -> list[str]:
    return [name for name, parameter in inspect.signature(command).parameters.items() if parameter.kind is _KEYWORD]


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def _option(text: str, metavar: str) -> Any:  # Any: typer's own type of an option
    return typer.Option(help=text, metavar=metavar, rich_help_panel=_PANEL)


def _sweep(
    given: dict[str, Any],  # by field of BenchSettings
    *,
    first_rate: Annotated[float, _option("Rate to begin with.", "RATE")] = 1.0,
    highest_rate: Annotated[float, _option("Rate to end at.", "RATE")] = 1024.0,
    growth: Annotated[float, _option("Factor between rates until goals are missed.", "FACTOR")] = 2.0,
    precision: Annotated[float, _option("How closely to find the knee, as a part of it.", "PART")] = 0.05,
    good_share: Annotated[float, _option("Part of the requests that must keep the goals.", "PART")] = 0.95,
    step_sec: Annotated[float, _option("How long each rate is offered.", "SECONDS")] = 30.0,
    out: Annotated[Path, _option("Folder of the page, the picture and the results.", "FOLDER")] = Path("sweep"),
) -> int:
    # lazy: no other verb sweeps
    from tiercel.loadtest.plan import settings_at
    from tiercel.loadtest.results.sweep import SearchPlan
    from tiercel.loadtest.settings import BenchSettings

    plan = SearchPlan(
        first_rate=first_rate, highest_rate=highest_rate, growth=growth, precision=precision, wanted_share=good_share
    )
    plan.check()
    settings = BenchSettings(**given)
    settings_at(settings, first_rate, step_sec, 0)  # wrong flags end the sweep before it begins
    return _run(settings, plan, step_sec, out)


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
            warn("stopped: the last rate does not count")
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
    # lazy: no other verb prints this table
    from rich.console import Console
    from rich.table import Table

    # lazy: as above
    from tiercel.loadtest.report.sweep_page import COLUMNS, point_cells

    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="dim")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for point in sorted(points, key=lambda point: point.rate):
        table.add_row(*point_cells(point))
    Console(highlight=False).print(table)
