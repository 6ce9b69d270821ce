"""The charts of a run. A chart without data is left out."""

from collections.abc import Iterator, Sequence

from tiercel.loadtest.metrics import metric
from tiercel.loadtest.metrics.server_series import (
    History,
    Share,
    gauge,
    hit_rate,
    preemption_rates,
    service_shares,
    tier_shares,
    transfer_rates,
    transfer_speeds,
)
from tiercel.loadtest.report.chart import ChartRow, Curve, Quantiles, Span, quantile_chart, range_chart, rows_chart
from tiercel.loadtest.report.drawing import Chart, drawing_style, finish
from tiercel.loadtest.report.wording import LATENCY_NAMES, show_bytes_per_s, show_ms, show_number, show_percent
from tiercel.loadtest.results.record import RunResult, Sample, TenantResult, Timeline

TENANTS_DRAWN = 8
_WINDOWS = 60  # of a share over time; shorter windows would be noisy
_STEPS = 240  # of a timeline; more cannot be told apart
_MIN_DUE_RATIO = 1.02  # latencies from the due time are drawn if they are larger by more than this factor
_PREFIX_HITS = "Share of the prompt tokens looked up that the cache held."
_PREEMPTIONS = "Running sequences that were preempted."
_SERVICE = "Each tenant's share of the seconds of service. Grey: the fair share among the tenants that have work."
_CAPTIONS = {
    "ttft": "From sending a request to its first token.",
    "tpot": "Mean time between the tokens of a request, its first token left out.",
    "itl": "Every gap between two chunks of a stream.",
    "e2el": "From sending a request to its last token.",
}


def latency_charts(result: RunResult) -> Iterator[Chart]:
    """Yield the distribution of each latency, also from the due time if that differs."""
    for latency, title in LATENCY_NAMES.items():
        caption = _CAPTIONS[latency]
        values = result.quantiles.get(latency, [])
        if len(values) != 101 or max(values) <= 0:
            continue
        due = result.quantiles.get(f"{latency}_due", [])
        differs = (
            len(due) == 101 and max(due[50] / max(values[50], 1e-9), due[99] / max(values[99], 1e-9)) > _MIN_DUE_RATIO
        )
        lines = [Quantiles("sent: " if differs else "", values)]
        if differs:
            lines.append(Quantiles("due: ", due, is_main=False))
            caption += f" Grey: from when it was due; median {show_ms(due[50])}, p99 {show_ms(due[99])}."
        elif len(due) == 101:
            caption += " From when it was due: the same within 2 %."
        alt = (
            f"{title} by percentile: median {show_ms(values[50])}, p90 {show_ms(values[90])}, p99 {show_ms(values[99])}"
        )
        with drawing_style():
            yield finish(quantile_chart(lines, show_ms), f"latency-{latency}", title, caption, alt)


def timeline_charts(result: RunResult) -> Iterator[Chart]:
    """Yield throughput and requests in flight, as the client saw them."""
    line = result.timeline
    if not line.output_tokens:
        return
    line = _thinned(line)
    at_s = _ends(line)
    tokens = [count / line.step_s for count in line.output_tokens]
    rows = [
        ChartRow("Output tokens/s", [Curve(at_s, _held(tokens), "")]),
        ChartRow("Requests finished/s", [Curve(at_s, _held([count / line.step_s for count in line.finished]), "")]),
    ]
    best, mean = show_number(result.max_output_tokens_per_s), show_number(result.output_throughput)
    caption = f"Mean {mean} tokens/s, best second {best}."
    if any(line.failed):
        rows.append(
            ChartRow("Requests failed/s", [Curve(at_s, _held([count / line.step_s for count in line.failed]), "")])
        )
        caption += f" {sum(line.failed)} requests failed."
    with drawing_style():
        alt = f"Output tokens and finished requests per second over time. {caption}"
        yield finish(rows_chart(rows, show_number), "throughput", "Throughput", caption, alt)
    curves = [Curve(at_s, _held(line.running), "sent")]
    caption = f"Sent and not ended: at most {max(line.running):.0f}."
    if any(line.queued):
        curves.append(Curve(at_s, _held(line.queued), "not sent", is_main=False))
        caption += f" Due and not yet sent (grey): at most {max(line.queued):.0f}."
    with drawing_style():
        figure = rows_chart([ChartRow("Requests", curves)], show_number)
        yield finish(figure, "in-flight", "Requests under way", caption, f"Requests under way over time. {caption}")


def tenant_charts(result: RunResult) -> Iterator[Chart]:
    """Yield each tenant's service against its fair share, and its time to first token, for two tenants or more."""
    if len(result.tenants) < 2:
        return
    drawn = sorted(result.tenants, key=lambda tenant: -tenant.service_tokens)[:TENANTS_DRAWN]
    rest = len(result.tenants) - len(drawn)
    more = f" The {rest} tenants with less service are in the table only." if rest else ""
    rows = [_share_row(tenant, result.tenants) for tenant in drawn]
    with drawing_style():
        shares = ", ".join(
            f"{tenant.name} {show_percent(tenant.share)} of {show_percent(tenant.fair_share)}" for tenant in drawn
        )
        yield finish(
            rows_chart(rows, show_percent), "service-share", "Service against fair share",
            f"Share of the tokens served in each window. Grey: the fair share among the tenants that have work.{more}",
            f"Service of each tenant over time against its fair share. While all had work: {shares}.",
        )  # fmt: skip
    spans = [
        Span(tenant.name, tenant.quantiles["ttft"][50], tenant.quantiles["ttft"][99], tenant.goals.ttft)
        for tenant in drawn
        if len(tenant.quantiles.get("ttft", [])) == 101
    ]
    if not spans:
        return
    goals = " The tick is the tenant's goal." if any(span.goal is not None for span in spans) else ""
    words = "; ".join(f"{span.label}: median {show_ms(span.low)}, p99 {show_ms(span.high)}" for span in spans)
    with drawing_style():
        yield finish(
            range_chart(spans, show_ms), "tenant-ttft", "Time to first token by tenant",
            f"From the median (grey) to the 99th percentile.{goals}{more}", f"Time to first token by tenant. {words}.",
        )  # fmt: skip


def server_charts(result: RunResult) -> tuple[list[Chart], list[str]]:
    """Return the charts of /metrics over time, and sentences about the metrics that are missing or always zero."""
    if len(result.samples) < 2:
        return [], ["The server's /metrics were not read: there are no charts of its queue, tiers and transfers."]
    samples = result.samples[:: -(-len(result.samples) // _STEPS)]
    charts: list[Chart] = []
    missing: list[str] = []
    constant: list[str] = []
    parts = [
        (_queue_rows(samples), show_number, "server-queue", "The server's queue", "Sequences running or waiting."),
        (_share_rows(tier_shares(samples)), show_percent, "tiers", "Tier occupancy", "How full each tier is."),
        (_plain_rows(transfer_rates(samples)), show_bytes_per_s, "transfers", "Transfers", _moved(result)),
        (_share_rows([hit_rate(samples)]), show_percent, "prefix-hits", "Prefix hits", _PREFIX_HITS),
        (_plain_rows(preemption_rates(samples)), show_number, "preemptions", "Preemptions", _PREEMPTIONS),
    ]
    if len(result.tenants) > 1:
        rows = _service_rows(service_shares(samples))
        parts.append((rows, show_percent, "server-service", "Service by the server's clock", _SERVICE))
    for rows, show, name, title, caption in parts:
        if not rows:
            missing.append(title.lower())
            continue
        if not any(value for row in rows for curve in row.curves for value in curve.values):
            constant.append(title.lower())
            continue
        with drawing_style():
            names = ", ".join(row.title for row in rows)
            charts.append(finish(rows_chart(rows, show), name, title, caption, f"{title} over time: {names}."))
    sentences = [f"The server does not export: {', '.join(missing)}."] if missing else []
    return charts, sentences + ([f"Zero all the time: {', '.join(constant)}."] if constant else [])


def _moved(result: RunResult) -> str:
    speeds = [f"{route} {show_bytes_per_s(speed)}" for route, speed in transfer_speeds(result.counters).items()]
    moving = f" While moving: {', '.join(speeds)}." if speeds else ""
    return f"Bytes per second by route.{moving}"


def _queue_rows(samples: Sequence[Sample]) -> list[ChartRow]:
    running = gauge(samples, metric.RUNNING)
    waiting = gauge(samples, metric.WAITING)
    curves = [_curve(running, "running")] if running else []
    if waiting:
        curves.append(_curve(waiting, "waiting", is_main=running is None))
    return [ChartRow("Sequences", curves)] if curves else []


def _share_rows(readings: Sequence[History | None]) -> list[ChartRow]:
    return [ChartRow(reading.name, [_curve(reading, "")], top=1.0) for reading in readings if reading is not None]


def _service_rows(shares: Sequence[Share]) -> list[ChartRow]:
    return [
        ChartRow(share.got.name, [_curve(share.got, ""), _curve(share.fair, "", is_main=False)], top=1.0)
        for share in shares[:TENANTS_DRAWN]
    ]


def _plain_rows(readings: Sequence[History | None]) -> list[ChartRow]:
    return [ChartRow(reading.name, [_curve(reading, "")]) for reading in readings if reading is not None]


def _curve(reading: History, label: str, *, is_main: bool = True) -> Curve:
    return Curve(reading.at_s, reading.values, label, is_main)


def _share_row(tenant: TenantResult, everyone: Sequence[TenantResult]) -> ChartRow:
    """Return a tenant's share of the service in each window, and its fair share among the tenants with work."""
    line = tenant.timeline
    width = max(1, -(-len(tenant.service) // _WINDOWS))
    starts = range(0, len(tenant.service), width)
    got: list[float | None] = []
    fair: list[float | None] = []
    for start in starts:
        window = slice(start, start + width)
        total = sum(sum(other.service[window]) for other in everyone)
        weights = sum(other.weight for other in everyone if _has_work(other.timeline, window))
        has_work = _has_work(line, window)
        got.append(sum(tenant.service[window]) / total if total else None)
        fair.append(tenant.weight / weights if has_work and weights else None)
    at_s = [start * line.step_s for start in (*starts, len(tenant.service))]
    curves = [Curve(at_s, _held(got), ""), Curve(at_s, _held(fair), "", is_main=False)]
    title = f"{tenant.name}: {show_percent(tenant.share)}, fair {show_percent(tenant.fair_share)}"
    return ChartRow(title, curves, top=1.0)


def _thinned(line: Timeline) -> Timeline:
    """Return the timeline with at most `_STEPS` steps: counts are added up, levels keep their highest value."""
    width = -(-len(line.output_tokens) // _STEPS)
    if width == 1:
        return line
    starts = range(0, len(line.output_tokens), width)

    def sums(values: Sequence[float]) -> list[float]:
        return [sum(values[start : start + width]) for start in starts]

    return Timeline(
        step_s=line.step_s * width,
        output_tokens=sums(line.output_tokens),
        finished=[round(count) for count in sums(line.finished)],
        failed=[round(count) for count in sums(line.failed)],
        running=[max(line.running[start : start + width]) for start in starts],
        queued=[max(line.queued[start : start + width]) for start in starts],
    )


def _has_work(line: Timeline, window: slice) -> bool:
    return any(line.running[window]) or any(line.queued[window])


def _ends(line: Timeline) -> list[float]:
    return [step * line.step_s for step in range(len(line.output_tokens) + 1)]


def _held(values: Sequence[float | None]) -> list[float | None]:
    """Repeat the last value, so that its step is drawn as wide as the others."""
    return [*values, *values[-1:]]
