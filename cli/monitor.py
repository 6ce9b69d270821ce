"""What a server's /metrics say about now: levels from the newest reading, rates and percentiles over a short window."""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import httpx

from tiercel.loadtest.metrics import metric
from tiercel.loadtest.metrics.exposition import Values, parse_exposition, parse_series, select, total, totals

WINDOW_S = 10.0
PERCENTS = (50, 90, 99)
_TIMEOUT_S = 5.0


class MetricsError(Exception):
    """/metrics could not be read: one line for the user."""


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """One tenant, as far as the server tells."""

    name: str
    running: float | None
    waiting: float | None
    tokens_in_per_s: float | None
    tokens_out_per_s: float | None
    share: float | None  # of the service in the window
    fair_share: float | None  # what its weight gives it among the tenants that had work
    ttft_s: tuple[float | None, ...] | None


@dataclass(frozen=True, slots=True)
class Figures:
    """What the table shows. None: the server does not export it, or nothing happened in the window."""

    model: str
    window_s: float
    running: float | None
    waiting: float | None
    kv_usage: float | None
    tiers: Mapping[str, float]  # how full, 0 to 1, the fastest first
    transfers_per_s: Mapping[str, float]  # bytes by route
    hit_rate: float | None
    tokens_in_per_s: float | None
    tokens_out_per_s: float | None
    finished_per_s: float | None
    preemptions_per_s: float | None
    preemptions: float | None
    preemptions_by_mode: Mapping[str, float]
    latencies_s: Mapping[str, tuple[float | None, ...]]  # by name: the percentiles of PERCENTS
    tenants: tuple[TenantFigures, ...]


class Monitor:
    """The readings of the last seconds."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._readings: deque[tuple[float, Values]] = deque()

    def take(self, at_s: float, text: str) -> None:
        """Add a page. Errors: MetricsError when it is none."""
        values = parse_exposition(text).values
        if not values:
            raise MetricsError("the answer is no metrics page")
        if self._readings and _has_restarted(self._readings[-1][1], values):
            self._readings.clear()
        self._readings.append((at_s, values))
        while len(self._readings) > 2 and self._readings[1][0] <= at_s - self._window_s:
            self._readings.popleft()

    def figures(self) -> Figures:
        """The newest figures. There must be a reading."""
        (began_s, before), (now_s, after) = self._readings[0], self._readings[-1]
        span = _Span(now_s - began_s, before, after)
        queries, hits = span.rate(metric.PREFIX_QUERIES), span.rate(metric.PREFIX_HITS)
        transfers = span.rates(metric.TRANSFER_BYTES, "route")
        models = {labels["model_name"] for key in after if "model_name" in (labels := parse_series(key).labels)}
        return Figures(
            model=", ".join(sorted(models)),
            window_s=span.seconds,
            running=total(after, metric.RUNNING),
            waiting=total(after, metric.WAITING),
            kv_usage=total(after, metric.KV_USAGE),
            tiers=dict(_tiers(after)),
            transfers_per_s={metric.ROUTES.get(route, route): moved for route, moved in transfers.items()},
            hit_rate=hits / queries if queries and hits is not None else None,
            tokens_in_per_s=span.rate(metric.PROMPT_TOKENS),
            tokens_out_per_s=span.rate(metric.GENERATION_TOKENS),
            finished_per_s=span.rate(metric.FINISHED),
            preemptions_per_s=span.rate(metric.PREEMPTIONS),
            preemptions=total(after, metric.PREEMPTIONS),
            preemptions_by_mode=totals(after, metric.PREEMPTIONS_BY_MODE, "mode"),
            latencies_s={
                title: found
                for title, name in metric.LATENCIES.items()
                if (found := span.percentiles(name)) is not None
            },
            tenants=tuple(_tenants(span)),
        )


def read_metrics(client: httpx.Client, url: str) -> str:
    """The page at `url`/metrics. Errors: MetricsError."""
    try:
        response = client.get(f"{url}{metric.PAGE}", timeout=_TIMEOUT_S)
    except (httpx.ConnectError, httpx.ConnectTimeout) as exc:
        raise MetricsError(f"cannot reach {url}: is `tiercel serve` running there? ({exc})") from exc
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise MetricsError(f"{url}: {exc or type(exc).__name__}") from exc
    match response.status_code:
        case 200:
            return response.text
        case 401 | 403:
            raise MetricsError(f"{url}/metrics wants a key: --api-key KEY or TIERCEL_API_KEY")
        case 404:
            raise MetricsError(f"{url} has no /metrics")
        case status:
            raise MetricsError(f"{url}/metrics answers {status} {response.reason_phrase}")


@dataclass(frozen=True, slots=True)
class _Span:
    """From one reading to another."""

    seconds: float
    before: Values
    after: Values

    def rate(self, name: str) -> float | None:
        """Growth per second, summed over series."""
        grown = total(self._grown(name), name)
        return max(grown, 0.0) / self.seconds if grown is not None and self.seconds > 0 else None

    def rates(self, name: str, label: str) -> dict[str, float]:
        """Growth per second by what a label says."""
        grown = totals(self._grown(name), name, label) if self.seconds > 0 else {}
        return {said: max(growth, 0.0) / self.seconds for said, growth in grown.items()}

    def percentiles(self, name: str, **labels: str) -> tuple[float | None, ...] | None:
        """PERCENTS of what a histogram saw in between; infinite beyond its last bound. None: it does not exist."""
        counts: dict[float, float] = {}
        for key, growth in self._grown(name, **labels).items():
            bound = float(parse_series(key).labels["le"])
            counts[bound] = counts.get(bound, 0.0) + growth
        if not counts:
            return None
        return tuple(_quantile(sorted(counts.items()), percent / 100) for percent in PERCENTS)

    def _grown(self, name: str, **labels: str) -> dict[str, float]:
        return {key: value - self.before.get(key, 0.0) for key, value in select(self.after, name, **labels).items()}


def _has_restarted(before: Values, after: Values) -> bool:
    """Counters fall only when the server started anew."""
    return (total(after, metric.GENERATION_TOKENS) or 0.0) < (total(before, metric.GENERATION_TOKENS) or 0.0)


def _quantile(buckets: list[tuple[float, float]], share: float) -> float | None:
    """The value below which `share` of the samples lie; linear within a bucket."""
    count_of_all = buckets[-1][1]
    if count_of_all <= 0:
        return None
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= share * count_of_all:
            if math.isinf(bound):
                return math.inf
            return low + (bound - low) * (share * count_of_all - below) / (count - below) if count > below else bound
        low, below = bound, count
    return math.inf


def _tiers(values: Values) -> Iterator[tuple[str, float]]:
    used, capacity = (totals(values, name, "tier") for name in (metric.KV_USED, metric.KV_CAPACITY))
    for tier in metric.TIERS:
        if tier in used and capacity.get(tier):
            yield tier.upper(), used[tier] / capacity[tier]


def _tenants(span: _Span) -> Iterator[TenantFigures]:
    running, waiting, weights = (
        totals(span.after, name, "tenant")
        for name in (metric.TENANT_RUNNING, metric.TENANT_WAITING, metric.TENANT_WEIGHT)
    )
    tokens_in, tokens_out, service = (
        span.rates(name, "tenant")
        for name in (metric.TENANT_PROMPT_TOKENS, metric.TENANT_GENERATION_TOKENS, metric.TENANT_SERVICE)
    )
    with_work = {
        name: weight for name, weight in weights.items() if running.get(name) or waiting.get(name) or service.get(name)
    }
    all_service, all_weights = math.fsum(service.values()), math.fsum(with_work.values())
    for name in sorted({*running, *waiting, *tokens_out, *service}):
        yield TenantFigures(
            name=name,
            running=running.get(name),
            waiting=waiting.get(name),
            tokens_in_per_s=tokens_in.get(name),
            tokens_out_per_s=tokens_out.get(name),
            share=service.get(name, 0.0) / all_service if all_service else None,
            fair_share=with_work[name] / all_weights if name in with_work and all_weights else None,
            ttft_s=span.percentiles(metric.TENANT_TTFT, tenant=name),
        )
