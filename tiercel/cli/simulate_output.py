"""The output of `tiercel simulate`: tables, and pictures as PNG."""

from collections.abc import Callable, Mapping
from pathlib import Path

from tiercel.cli.console import print_table, print_tables
from tiercel.loadtest.report.chart import ChartRow, Curve, Span, range_chart, rows_chart
from tiercel.loadtest.report.drawing import Chart, drawing_style, finish
from tiercel.loadtest.report.wording import show_ms, show_number, show_percent
from tiercel.simulation.replay import Replayed
from tiercel.simulation.result import Percentiles, SimEngineResult, SimResult, SimTenantResult
from tiercel.values.ids import TenantId

_MAX_DRAWN = 8  # tenants per picture


def show(found: SimResult, most_rows: int) -> None:
    """Print the totals, and a row for each of the `most_rows` tenants with the most service."""
    print_tables({"simulated": _totals(found)})
    if len(found.engines) > 1:
        engines = list(enumerate(found.engines))[:most_rows]
        rows = [(str(number), *(cell(one) for cell in _ENGINES.values())) for number, one in engines]
        print_table(("engine", *_ENGINES), rows, right=_ENGINES)
        if len(found.engines) > most_rows:
            print(f"and {len(found.engines) - most_rows} more engines")
    tenants = sorted(found.tenants, key=lambda tenant: -tenant.service_s)
    for columns in (_SERVICE, _LATENCY):
        rows = [(one.name, *(cell(one) for cell in columns.values())) for one in tenants[:most_rows]]
        print_table(("tenant", *columns), rows, right=columns)
    if len(tenants) > most_rows:
        print(f"and {len(tenants) - most_rows} more tenants")


def draw(replay: Replayed, found: SimResult, folder: Path) -> list[Path]:
    """Draw pictures of the run. Errors: ConfigError if matplotlib is not installed."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    with drawing_style():
        for picture in (_load(replay), _service(replay, found), _latency(found)):
            if picture is not None:
                paths.append(folder / f"{picture.name}.png")
                paths[-1].write_bytes(picture.png)
    return paths


def _totals(found: SimResult) -> dict[str, str]:
    rows = {
        "policy": found.policy,
        "virtual time": f"{found.virtual_s:,.1f} s, {found.steps:,} steps, busy {show_percent(found.busy)}",
        "requests": f"{found.finished:,} of {found.requests:,} finished",
        "tokens per second": f"{found.tokens_per_s:,.0f}, of these output {found.output_tokens_per_s:,.0f}",
        "useful tokens per second": f"{found.useful_tokens_per_s:,.0f}",
        "prefix hits": show_percent(found.hit_rate),
        "Jain index": f"{found.jain:.4f}",
        "longest wait": f"{found.starved_s:.2f} s",
        "queue": _spread(found.queue_s),
        "TTFT": _spread(found.ttft_s),
        "TBT": _spread(found.tbt_s),
        "preemptions": _preemptions(found.preemptions) or "none",
        "swapped, recomputed": f"{found.swapped_tokens:,}, {found.recomputed_tokens:,} tokens",
    }
    if found.gap_s is not None and found.gap_bound_s is not None:
        rows["largest service gap"] = (
            f"{found.gap_s:.2f} s per weight of {found.gap_bound_s:.2f} s allowed, {found.gap_tenants} tenants compared"
        )
    return rows


_ENGINES: dict[str, Callable[[SimEngineResult], str]] = {
    "finished": lambda one: f"{one.finished}/{one.requests}",
    "busy": lambda one: show_percent(one.busy),
    "steps": lambda one: f"{one.steps:,}",
    "hit": lambda one: show_percent(one.hit_rate),
    "output tokens/s": lambda one: f"{one.output_tokens_per_s:,.0f}",
    "preempted": lambda one: f"{one.preemptions:,}",
}
_SERVICE: dict[str, Callable[[SimTenantResult], str]] = {
    "weight": lambda one: f"{one.weight:g}",
    "finished": lambda one: f"{one.finished}/{one.requests}",
    "prompts": lambda one: f"{one.prompt_tokens:,}",
    "hit": lambda one: show_percent(one.cached_tokens / max(one.prompt_tokens, 1)),
    "output": lambda one: f"{one.output_tokens:,}",
    "service": lambda one: f"{one.service_s:.1f} s",
    "share": lambda one: show_percent(one.share),
    "by weight": lambda one: show_percent(one.weight_share),
    "gap": lambda one: "" if one.gap_s is None else f"{one.gap_s:.2f} s",
    "preempted": lambda one: _preemptions(one.preemptions),
    "swapped": lambda one: f"{one.swapped_tokens:,}",
    "recomputed": lambda one: f"{one.recomputed_tokens:,}",
}
_LATENCY: dict[str, Callable[[SimTenantResult], str]] = {
    "longest wait": lambda one: f"{one.starved_s:.2f} s",
    "queue p50": lambda one: show_ms(1e3 * one.queue_s.p50),
    "p99": lambda one: show_ms(1e3 * one.queue_s.p99),
    "TTFT p50": lambda one: show_ms(1e3 * one.ttft_s.p50),
    "p95": lambda one: show_ms(1e3 * one.ttft_s.p95),
    " p99": lambda one: show_ms(1e3 * one.ttft_s.p99),
    "goal kept": lambda one: "" if one.ttft_kept is None else show_percent(one.ttft_kept),
    "TBT p50": lambda one: show_ms(1e3 * one.tbt_s.p50),
    " p95": lambda one: show_ms(1e3 * one.tbt_s.p95),
    "  p99": lambda one: show_ms(1e3 * one.tbt_s.p99),
}


def _spread(spread: Percentiles) -> str:
    values = (("p50", spread.p50), ("p95", spread.p95), ("p99", spread.p99))
    return ", ".join(f"{name} {show_ms(1e3 * value)}" for name, value in values)


def _preemptions(table: Mapping[str, Mapping[str, int]]) -> str:
    return ", ".join(f"{reason} {count} {mode}" for reason, modes in table.items() for mode, count in modes.items())


def _load(replay: Replayed) -> Chart:
    line = replay.timeline
    rates = [
        (after - before) / max(end_s - start_s, 1e-9)
        for before, after, start_s, end_s in zip(line.tokens, line.tokens[1:], line.at_s, line.at_s[1:], strict=False)
    ]
    rows = [
        ChartRow("Output tokens/s", [Curve(line.at_s, [*rates, *rates[-1:]], "")]),
        ChartRow("Sequences running", [Curve(line.at_s, [float(count) for count in line.num_running], "")]),
        ChartRow("Sequences waiting", [Curve(line.at_s, [float(count) for count in line.num_waiting], "")]),
        ChartRow("Blocks in use", [Curve(line.at_s, [float(count) for count in line.blocks_used], "")]),
    ]
    chart = rows_chart(rows, show_number, "virtual seconds")
    return finish(chart, "load", "Load", "", "Tokens per second, sequences and blocks over time.")


def _service(replay: Replayed, found: SimResult) -> Chart | None:
    """Draw the accumulated service by weight; equal slopes mean equal service."""
    line = replay.timeline
    if len(line.at_s) < 2:
        return None
    drawn = sorted(found.tenants, key=lambda tenant: -tenant.service_s)[:_MAX_DRAWN]
    rows = [
        ChartRow(
            f"{one.name}: seconds of service by weight",
            [Curve(line.at_s, [served.get(TenantId(one.name), 0.0) / 1e3 / one.weight for served in line.served], "")],
        )
        for one in drawn
    ]
    chart = rows_chart(rows, show_number, "virtual seconds")
    return finish(chart, "service", "Service by weight", "", "Accumulated service by weight of each tenant.")


def _latency(found: SimResult) -> Chart | None:
    drawn = sorted((one for one in found.tenants if one.ttft_s.p99 > 0), key=lambda one: -one.service_s)[
        : 2 * _MAX_DRAWN
    ]
    if not drawn:
        return None
    spans = [Span(one.name, 1e3 * one.ttft_s.p50, 1e3 * one.ttft_s.p99) for one in drawn]
    return finish(range_chart(spans, show_ms), "ttft", "TTFT", "", "Median and 99th percentile by tenant.")
