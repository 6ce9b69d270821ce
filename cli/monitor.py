"""What a server's /metrics say about now: levels from the newest reading, rates and percentiles over a short window."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import httpx

from loadtest.exposition import Series, parse_exposition, parse_series

WINDOW_S = 10.0
PERCENTS = (50, 90, 99)
_TIMEOUT_S = 5.0
_RESTARTED_BY = "vllm:generation_tokens_total"  # falls only when the server started anew

Labels = Mapping[str, str]


class MetricsError(Exception):
    """/metrics could not be read: one line for the user."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One page of /metrics."""

    at_s: float
    values: Mapping[str, float] = field(repr=False)  # by series, as the page writes it


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """One tenant, as far as the server tells."""

    name: str
    running: float | None
    waiting: float | None
    tokens_in_per_s: float | None
    tokens_out_per_s: float | None
    share: float | None
    ttft_s: tuple[float | None, ...] | None


@dataclass(frozen=True, slots=True)
class Figures:
    """What the table shows. None: the server does not export it, or nothing happened in the window."""

    model: str
    window_s: float
    running: float | None
    waiting: float | None
    kv_usage: float | None
    tiers: Mapping[str, float]  # other tiers: how full, 0 to 1
    hit_rate: float | None
    tokens_in_per_s: float | None
    tokens_out_per_s: float | None
    finished_per_s: float | None
    preemptions_per_s: float | None
    preemptions: float | None
    latencies_s: Mapping[str, tuple[float | None, ...]]  # by name: the percentiles of PERCENTS
    tenants: tuple[TenantFigures, ...]


class Monitor:
    """The readings of the last seconds."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._readings: deque[Reading] = deque()

    def take(self, at_s: float, text: str) -> None:
        """Add a page. Errors: MetricsError when it is none."""
        values = parse_exposition(text)
        if not values:
            raise MetricsError("the answer is no metrics page")
        reading = Reading(at_s, values)
        if self._readings and _total(reading, _RESTARTED_BY) < _total(self._readings[-1], _RESTARTED_BY):
            self._readings.clear()
        self._readings.append(reading)
        while len(self._readings) > 2 and self._readings[1].at_s <= at_s - self._window_s:
            self._readings.popleft()

    def figures(self) -> Figures:
        """The newest figures. There must be a reading."""
        span = _Span(self._readings[0], self._readings[-1])
        models = span.labels("model_name")
        queries = span.rate(_named("vllm:prefix_cache_queries_total"))
        hits = span.rate(_named("vllm:prefix_cache_hits_total"))
        return Figures(
            model=", ".join(models),
            window_s=span.seconds,
            running=span.level(_named("vllm:num_requests_running")),
            waiting=span.level(_named("vllm:num_requests_waiting")),
            kv_usage=span.level(_named("vllm:kv_cache_usage_perc")),
            tiers=dict(_tiers(span)),
            hit_rate=hits / queries if queries and hits is not None else None,
            tokens_in_per_s=span.rate(_named("vllm:prompt_tokens_total")),
            tokens_out_per_s=span.rate(_named("vllm:generation_tokens_total")),
            finished_per_s=span.rate(_named("vllm:request_success_total")),
            preemptions_per_s=span.rate(_named("vllm:num_preemptions_total")),
            preemptions=span.level(_named("vllm:num_preemptions_total")),
            latencies_s={
                title: found
                for title, name in _LATENCIES.items()
                if (found := span.percentiles(_named(f"{name}_bucket"))) is not None
            },
            tenants=tuple(_tenants(span)),
        )


def read_metrics(client: httpx.Client, url: str) -> str:
    """The page at `url`/metrics. Errors: MetricsError."""
    try:
        response = client.get(f"{url}/metrics", timeout=_TIMEOUT_S)
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


_LATENCIES = {
    "time to first token": "vllm:time_to_first_token_seconds",
    "between tokens": "vllm:inter_token_latency_seconds",
    "end to end": "vllm:e2e_request_latency_seconds",
    "in the queue": "vllm:request_queue_time_seconds",
}

Wanted = Callable[[Series], bool]


@dataclass(frozen=True, slots=True)
class _Span:
    """From one reading to another."""

    before: Reading
    after: Reading

    @property
    def seconds(self) -> float:
        return self.after.at_s - self.before.at_s

    def labels(self, name: str) -> list[str]:
        """Every value of a label."""
        return sorted(
            {series.labels[name] for key in self.after.values if name in (series := parse_series(key)).labels}
        )

    def level(self, wanted: Wanted) -> float | None:
        """The newest value, summed over series."""
        found = [value for key, value in self.after.values.items() if wanted(parse_series(key))]
        return math.fsum(found) if found else None

    def rate(self, wanted: Wanted) -> float | None:
        """Growth per second."""
        grown = [
            value - self.before.values.get(key, 0.0)
            for key, value in self.after.values.items()
            if wanted(parse_series(key))
        ]
        return max(math.fsum(grown), 0.0) / self.seconds if grown and self.seconds > 0 else None

    def percentiles(self, wanted: Wanted) -> tuple[float | None, ...] | None:
        """PERCENTS of what a histogram saw in between; infinite beyond its last bound. None: it does not exist."""
        counts: dict[float, float] = {}
        for key, value in self.after.values.items():
            series = parse_series(key)
            if wanted(series) and "le" in series.labels:
                bound = float(series.labels["le"])
                counts[bound] = counts.get(bound, 0.0) + value - self.before.values.get(key, 0.0)
        if not counts:
            return None
        return tuple(_quantile(sorted(counts.items()), percent / 100) for percent in PERCENTS)


def _quantile(buckets: list[tuple[float, float]], share: float) -> float | None:
    """The value below which `share` of the samples lie; linear within a bucket."""
    total = buckets[-1][1]
    if total <= 0:
        return None
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= share * total:
            if math.isinf(bound):
                return math.inf
            return low + (bound - low) * (share * total - below) / (count - below) if count > below else bound
        low, below = bound, count
    return math.inf


def _named(name: str) -> Wanted:
    return lambda series: series.name == name


def _of_tenant(tenant: str, *endings: str) -> Wanted:
    return lambda series: series.labels.get("tenant") == tenant and series.name.endswith(endings)


def _tenants(span: _Span) -> Iterator[TenantFigures]:
    """Whatever the server labels with a tenant, known by the ends of the names."""
    for name in span.labels("tenant"):
        yield TenantFigures(
            name=name,
            running=span.level(_of_tenant(name, "_running")),
            waiting=span.level(_of_tenant(name, "_waiting")),
            tokens_in_per_s=span.rate(_of_tenant(name, "prompt_tokens_total", "input_tokens_total")),
            tokens_out_per_s=span.rate(_of_tenant(name, "generation_tokens_total", "output_tokens_total")),
            share=span.level(_of_tenant(name, "service_share")),
            ttft_s=span.percentiles(_of_tenant(name, "time_to_first_token_seconds_bucket", "ttft_seconds_bucket")),
        )


def _tiers(span: _Span) -> Iterator[tuple[str, float]]:
    for tier in span.labels("tier"):
        used = span.level(_of_tier(tier, "used_bytes", "occupancy_bytes"))
        capacity = span.level(_of_tier(tier, "capacity_bytes", "limit_bytes"))
        if used is not None and capacity:
            yield tier.upper(), used / capacity


def _of_tier(tier: str, *endings: str) -> Wanted:
    return lambda series: series.labels.get("tier") == tier and series.name.endswith(endings)


def _total(reading: Reading, name: str) -> float:
    return math.fsum(value for key, value in reading.values.items() if parse_series(key).name == name)
