"""The report of a run: one self-contained HTML file, and each of its charts as a PNG file."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from tiercel.loadtest.metrics.server_series import reported
from tiercel.loadtest.report.page import KeyFigure, Table, write_page
from tiercel.loadtest.report.run_charts import latency_charts, server_charts, tenant_charts, timeline_charts
from tiercel.loadtest.report.wording import (
    LATENCY_NAMES,
    figure_words,
    show_factor,
    show_ms,
    show_number,
    show_percent,
    show_s,
)
from tiercel.loadtest.results.record import Goals, RunResult, TenantResult

FILE = "report.html"

_ROWS = (
    ("ttft", LATENCY_NAMES["ttft"]),
    ("ttft_due", "… from the due time"),
    ("tpot", LATENCY_NAMES["tpot"]),
    ("itl", LATENCY_NAMES["itl"]),
    ("e2el", LATENCY_NAMES["e2el"]),
    ("e2el_due", "… from the due time"),
    ("client_queue_time", "Waited in the client"),
)
_PERCENTS = (50, 90, 95, 99, 100)


def write_report(result: RunResult, folder: Path) -> Path:
    """Write the report of a result into `folder` and return the path of the page.

    Effects: writes report.html and PNG files; creates the folder.
    Errors: ConfigError when matplotlib is missing or the folder cannot be written.
    """
    latency, timeline = list(latency_charts(result)), list(timeline_charts(result))
    tenants = list(tenant_charts(result))
    server, missing = server_charts(result)
    name = result.label or result.model_id
    content = {
        "title": f"{name}: load test of {result.date}",
        "heading": name,
        "lead": _lead(result),
        "key_figures": list(_key_figures(result)),
        "notes": [*result.notes, *_warnings(result)],
        "latency": latency,
        "latency_table": _latency_table(result),
        "timeline": timeline,
        "has_tenants": len(result.tenants) > 1,
        "fairness": _fairness(result),
        "tenants": tenants,
        "tenant_table": _tenant_table(result),
        "isolation_table": _isolation_table(result),
        "server": server,
        "missing": missing,
        "counter_table": _counter_table(result),
        "command": shlex.join(result.command),
        "facts": _facts(result),
    }
    return write_page("report.html", content, [*latency, *timeline, *tenants, *server], folder, FILE)


def _lead(result: RunResult) -> str:
    tenants = f", {len(result.tenants)} tenants" if len(result.tenants) > 1 else ""
    parts = (f"{result.num_prompts:,} requests in {show_s(result.duration)}{tenants}", result.dataset, result.arrivals)
    return " \N{MIDDLE DOT} ".join(part for part in parts if part)


def _key_figures(result: RunResult) -> Iterator[KeyFigure]:
    yield (
        "Output",
        f"{show_number(result.output_throughput)} tok/s",
        f"best second {show_number(result.max_output_tokens_per_s)}",
    )
    yield (
        "Requests",
        f"{show_number(result.request_throughput)} /s",
        f"at most {result.max_concurrent_requests} at once",
    )
    if result.request_goodput is not None:
        yield "Goodput", f"{show_number(result.request_goodput)} /s", goal_words(result.goals)
    for metric, name in (("ttft", "First token"), ("tpot", "Per token"), ("e2el", "End to end")):
        values = result.quantiles.get(metric, [])
        if len(values) == 101:
            yield name, show_ms(values[50]), f"median; p99 {show_ms(values[99])}"
    if result.fairness is not None:
        yield "Fairness", f"{result.fairness.jain_index:.3f}", "Jain index of service by weight"
    failed = result.failed / max(1, result.failed + result.completed)
    yield "Failed", f"{result.failed:,}", f"{show_percent(failed)} of {result.failed + result.completed:,}"


def goal_words(goals: Goals) -> str:
    """Return the goals as text."""
    given = (("TTFT", goals.ttft), ("TPOT", goals.tpot), ("E2E", goals.e2el))
    words = [f"{name} {show_ms(limit)}" for name, limit in given if limit is not None]
    return f"within {', '.join(words)}" if words else "within the tenants' goals"


def _warnings(result: RunResult) -> Iterator[str]:
    if result.client.saturated and not any(result.client.reason in note for note in result.notes):
        yield f"The client was the bottleneck: {result.client.reason}. The server may be faster than shown."
    for reason, count in sorted(result.errors.items(), key=lambda item: -item[1]):
        yield f"{count:,} failed: {reason}"


def _latency_table(result: RunResult) -> Table:
    rows: list[list[str]] = []
    for metric, name in _ROWS:
        values = result.quantiles.get(metric, [])
        if len(values) == 101:
            mean = result.figures.get(f"mean_{metric}_ms")
            rows.append([name, show_ms(mean), *(show_ms(values[percent]) for percent in _PERCENTS)])
    return Table(["", "Mean", "Median", "p90", "p95", "p99", "Slowest"], rows, "All requests without an error")


def _fairness(result: RunResult) -> str:
    fairness = result.fairness
    if fairness is None:
        return ""
    when = (
        f"over the {show_s(fairness.contended_s)} in which every tenant had work"
        if fairness.contended_s
        else "over the whole run, as the tenants never all had work"
    )
    return (
        f"Jain index of service by weight: {fairness.jain_index:.3f} {when} (1 is even). Longest time with work "
        f"and nothing received: {show_s(fairness.largest_gap_s)} ({fairness.largest_gap_tenant}). Largest "
        f"difference of service by weight between two tenants: "
        f"{show_number(fairness.largest_difference_tokens)} tokens."
    )


def _tenant_table(result: RunResult) -> Table:
    columns = ["Tenant", "Weight", "Done", "Failed", "Output tok/s", "Share", "Fair share",
               "TTFT median", "TTFT p99", "TPOT p99", "Longest gap"]  # fmt: skip
    return Table(columns, [_tenant_row(tenant, result.duration) for tenant in result.tenants], "By tenant")


def _isolation_table(result: RunResult) -> Table:
    rows = [
        [
            f"{item.tenant}: {figure_words(name)}",
            show_ms(item.alone.get(name)),
            show_ms(item.together.get(name)),
            show_factor(ratio),
        ]
        for item in result.isolation or []
        for name, ratio in item.ratios.items()
    ]
    return Table(["Isolation", "Alone", "Together", "Ratio"], rows, "Each tenant alone, then beside the others")


def _tenant_row(tenant: TenantResult, duration_s: float) -> list[str]:
    def quantile(metric: str, percent: int) -> str:
        values = tenant.quantiles.get(metric, [])
        return show_ms(values[percent] if len(values) == 101 else None)

    return [
        *(tenant.name, f"{tenant.weight:g}", f"{tenant.completed:,}", f"{tenant.failed:,}"),
        show_number(tenant.output_tokens / duration_s if duration_s else None),
        *(show_percent(tenant.share), show_percent(tenant.fair_share)),
        *(quantile("ttft", 50), quantile("ttft", 99), quantile("tpot", 99), show_s(tenant.largest_gap_s)),
    ]


def _counter_table(result: RunResult) -> Table:
    rows = [[series, show_number(counter.delta)] for series, counter in reported(result.counters).items()]
    return Table(["Counter", "During the run"], rows, "What the server counted")


def _facts(result: RunResult) -> dict[str, dict[str, str]]:
    client = result.client
    return {
        "Run": {
            "date": result.date,
            "model": result.model_id,
            "seed": f"{result.seed}",
            "prompts": result.dataset,
            "arrivals": result.arrivals,
            **result.metadata,
        },
        "Machine": result.machine,
        "Versions": result.versions,
        "Client": {
            "processes": f"{client.processes}",
            "CPU": f"{show_s(client.cpu_s)}; busiest process {show_percent(client.busiest_share)} of a core",
            "chunks": f"{show_number(client.chunks_per_s)}/s, best second {show_number(client.peak_chunks_per_s)}",
            "lag": f"p99 {show_ms(client.lag_p99_ms)}, at most {show_ms(client.lag_max_ms)}",
            "sent late": f"{client.late_sends:,}",
            "saturated": f"yes: {client.reason}" if client.saturated else "no",
        },
    }
