"""The report of a run as text: the rows that other load tests print, too, then tenants, counters and client."""

from collections.abc import Iterator, Mapping, Sequence

from tiercel.loadtest.metrics.server_series import reported
from tiercel.loadtest.report.wording import show_number
from tiercel.loadtest.results.record import Counter, Isolation, RunResult, TenantResult

_WIDTH = 50
_TITLES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
    "client_queue_time": ("Client Queue Time", "CQT"),
    "ttft_due": ("Time to First Token, from due time", "TTFT due"),
    "e2el_due": ("End-to-end Latency, from due time", "E2EL due"),
}


def summary(result: RunResult, metrics: str, ranks: Sequence[float]) -> str:
    """Return the report. `metrics` is the value of --percentile-metrics, `ranks` of --metric-percentiles."""
    wanted = [name.strip() for name in metrics.split(",") if name.strip() in _TITLES]
    if any(tenant.is_timed for tenant in result.tenants):
        wanted += [f"{name}_due" for name in ("ttft", "e2el") if name in wanted]
    lines = [*_head(result)]
    for metric in wanted:
        lines += _latency(metric, result.figures, ranks)
    lines += _tenants(result)
    lines += _isolation(result.isolation or [])
    lines += _counters(result.counters)
    lines += _client(result)
    lines += [f"  {count:>6} x {reason}" for reason, count in result.errors.items()]
    lines += [f"note: {note}" for note in result.notes]
    return "\n".join([*lines, "=" * _WIDTH])


def _head(result: RunResult) -> Iterator[str]:
    yield _title("Serving Benchmark Result", "=")
    yield _row("Successful requests", result.completed)
    yield _row("Failed requests", result.failed)
    if result.max_concurrency is not None:
        yield _row("Maximum request concurrency", result.max_concurrency)
    if result.request_rate != "inf":
        yield _row("Request rate configured (RPS)", float(result.request_rate))
    yield _row("Benchmark duration (s)", result.duration)
    yield _row("Total input tokens", result.total_input_tokens)
    yield _row("Total generated tokens", result.total_output_tokens)
    yield _row("Request throughput (req/s)", result.request_throughput)
    if result.request_goodput is not None:
        yield _row("Request goodput (req/s)", result.request_goodput)
    yield _row("Output token throughput (tok/s)", result.output_throughput)
    yield _row("Peak output token throughput (tok/s)", result.max_output_tokens_per_s)
    yield _row("Peak concurrent requests", result.max_concurrent_requests)
    yield _row("Total token throughput (tok/s)", result.total_token_throughput)


def _latency(metric: str, figures: Mapping[str, float | None], ranks: Sequence[float]) -> Iterator[str]:
    title, short = _TITLES[metric]
    yield _title(title, "-")
    yield _row(f"Mean {short} (ms)", figures.get(f"mean_{metric}_ms"))
    yield _row(f"Median {short} (ms)", figures.get(f"median_{metric}_ms"))
    for rank in ranks:
        yield _row(f"P{rank:g} {short} (ms)", figures.get(f"p{rank:g}_{metric}_ms"))


def _tenants(result: RunResult) -> Iterator[str]:
    if result.fairness is None:
        return
    yield _title("Tenants", "-")
    columns = ("tenant", "weight", "ok", "failed", "out tok/s", "good/s", "share", "fair", "TTFT p50", "p99", "gap s")
    rows = [_tenant_row(tenant, result.duration) for tenant in result.tenants]
    yield from _table(columns, rows)
    fair = result.fairness
    scope = f"in {fair.contended_s:.1f} s with work for all" if fair.contended_s else "whole run"
    yield _row(f"Jain index, {scope}", round(fair.jain_index, 4), places=4)
    yield _row("Jain index, whole run", round(fair.jain_index_whole_run, 4), places=4)
    yield _row("Largest service gap (s)", fair.largest_gap_s) + f" {fair.largest_gap_tenant}"
    yield _row("Largest service difference (tok/weight)", fair.largest_difference_tokens)


def _tenant_row(tenant: TenantResult, duration_s: float) -> tuple[str, ...]:
    return (
        tenant.name,
        f"{tenant.weight:g}",
        str(tenant.completed),
        str(tenant.failed),
        f"{tenant.output_tokens / duration_s:.1f}",
        _shown(tenant.request_goodput),
        f"{tenant.share:.1%}",
        f"{tenant.fair_share:.1%}",
        _shown(tenant.figures.get("median_ttft_ms"), 1),
        _shown(tenant.figures.get("p99_ttft_ms"), 1),
        f"{tenant.largest_gap_s:.2f}",
    )


def _isolation(isolation: list[Isolation]) -> Iterator[str]:
    if not isolation:
        return
    yield _title("Isolation (together / alone)", "-")
    keys = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_itl_ms", "p99_e2el_ms")
    columns = ("tenant", "TTFT p50", "TTFT p99", "TPOT p50", "ITL p99", "E2EL p99")
    yield from _table(
        columns, [(entry.tenant, *(_shown(entry.ratios.get(key)) for key in keys)) for entry in isolation]
    )


def _counters(counters: Mapping[str, Counter]) -> Iterator[str]:
    """Yield the growth of the server's counters over the run."""
    if shown := reported(counters):
        yield _title("Server counters, over the run", "-")
        for series, counter in shown.items():
            yield f"{show_number(counter.delta):>14}  {series}"


def _client(result: RunResult) -> Iterator[str]:
    client = result.client
    yield _title("Client", "-")
    yield _row("Processes", client.processes)
    yield _row("CPU (cores)", client.cpu_s / result.duration)
    yield _row("Busiest process (share of a core)", client.busiest_share)
    yield _row("Stream chunks per second", client.chunks_per_s)
    yield _row("Event loop late, P99 (ms)", client.lag_p99_ms)
    yield _row("Saturated", "YES" if client.saturated else "no")


def _title(text: str, mark: str) -> str:
    return f" {text} ".center(_WIDTH, mark)


def _row(name: str, value: float | str | None, places: int = 2) -> str:
    shown = value if isinstance(value, str) else str(value) if isinstance(value, int) else _shown(value, places)
    return f"{f'{name}:':<40} {shown:<10}"


def _shown(value: float | None, places: int = 2) -> str:
    return "-" if value is None else f"{value:.{places}f}"


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[place]) for row in (columns, *rows)) for place in range(len(columns))]
    for row in (columns, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield "  ".join(cells)
