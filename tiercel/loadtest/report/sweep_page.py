"""The page of a sweep of the request rate, which shows the knee."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tiercel.loadtest.report.chart import latency_chart, rate_chart
from tiercel.loadtest.report.drawing import Chart, drawing_style, finish
from tiercel.loadtest.report.page import Table, write_page
from tiercel.loadtest.report.run_page import goal_words
from tiercel.loadtest.report.wording import LATENCY_NAMES, NONE, show_ms, show_number, show_percent
from tiercel.loadtest.results.record import RunResult
from tiercel.loadtest.results.sweep import Point, Sweep
from tiercel.values.errors import ConfigError
from tiercel.wire.encoding import plain_value

PAGE, FILE, RESULTS = "sweep.html", "sweep.json", "results.jsonl"
COLUMNS = ("Offered /s", "Good", "Good /s", "Output tok/s", "TTFT median", "TTFT p99", "TPOT p99", "E2E p99")


def point_cells(point: Point) -> list[str]:
    """Return the cells of a point under COLUMNS."""
    names = ("median_ttft_ms", "p99_ttft_ms", "p99_tpot_ms", "p99_e2el_ms")
    numbers = (point.goodput, point.output_throughput)
    return [
        *(show_number(point.rate), show_percent(point.good_share), *map(show_number, numbers)),
        *(show_ms(point.figures.get(name)) for name in names),
    ]


def verdict(sweep: Sweep) -> str:
    """Return the conclusion of a sweep in one line."""
    share = show_percent(sweep.plan.wanted_share)
    if sweep.knee is None:
        return f"At no rate did {share} of the requests keep their goals."
    at_end = sweep.knee.rate >= max(point.rate for point in sweep.points)
    more = " It may be higher: the sweep ended at this rate." if at_end else ""
    return (
        f"The knee is at {show_number(sweep.knee.rate)} requests/s: up to there {share} or more keep their goals."
        f"{more} "
        f"Most good requests: {show_number(sweep.best.goodput)}/s at {show_number(sweep.best.rate)}/s offered."
    )


def write_sweep(sweep: Sweep, facts: RunResult, folder: Path) -> Path:
    """Write the points as JSON, then the page. `facts` is any run of the sweep.

    Errors: ConfigError if the folder cannot be written, or without matplotlib, after the points have been written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(sweep, enc_hook=plain_value), indent=2))
    except OSError as exc:
        raise ConfigError("bench.report", f"{folder}: {exc.strerror}") from exc
    charts = list(_charts(sweep, facts))
    knee_words = NONE if sweep.knee is None else f"{show_number(sweep.knee.rate)} /s"
    content = {
        "title": f"{facts.model_id}: rate sweep",
        "heading": f"{facts.label or facts.model_id}: how much load it takes",
        "lead": verdict(sweep),
        "key_figures": [
            ("Knee", knee_words, f"{show_percent(sweep.plan.wanted_share)} good, {goal_words(facts.goals)}"),
            ("Most goodput", f"{show_number(sweep.best.goodput)} /s", f"at {show_number(sweep.best.rate)}/s"),
        ],
        "charts": charts,
        "rate_table": Table(
            COLUMNS,
            [point_cells(point) for point in sweep.points],
            marked=None if sweep.knee is None else sweep.points.index(sweep.knee),
        ),
        "command": shlex.join(sweep.command),
        "facts": {
            "Run": {"date": facts.date, "model": facts.model_id, "seed": f"{facts.seed}", "prompts": facts.dataset},
            "Machine": facts.machine,
            "Versions": facts.versions,
        },
    }
    return write_page("sweep.html", content, charts, folder, PAGE)


def _charts(sweep: Sweep, facts: RunResult) -> Iterator[Chart]:
    rates = [point.rate for point in sweep.points]
    good = [point.goodput for point in sweep.points]
    caption = f"Good requests per second, {goal_words(facts.goals)}."
    with drawing_style():
        figure = rate_chart(rates, good, sweep.knee.rate if sweep.knee else None, show_number)
        yield finish(figure, "goodput", "Goodput", caption, verdict(sweep))
    for metric in ("ttft", "tpot", "e2el"):
        known = [
            (point.rate, high, low)
            for point in sweep.points
            if (high := point.figures.get(f"p99_{metric}_ms")) and (low := point.figures.get(f"median_{metric}_ms"))
        ]
        if len(known) < 2:
            continue
        with drawing_style():
            offered, highs, lows = zip(*known, strict=True)
            figure = latency_chart(offered, highs, lows, show_ms)
            title = LATENCY_NAMES[metric]
            alt = f"{title} by offered rate, from {show_ms(known[0][1])} to {show_ms(known[-1][1])} at p99."
            yield finish(figure, f"sweep-{metric}", title, "The slowest hundredth, and the median (grey).", alt)
