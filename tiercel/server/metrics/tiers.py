"""Metrics of the KV tiers, from the engine's newest gauges. Names are those of vLLM's offload metrics if they exist."""

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tiercel.server.metrics.labelled import labelled_counter, labelled_gauge
from tiercel.values.outcome import DiskState, Gauges, RouteGauges, TierGauges
from tiercel.values.tier import Route, Tier

_LABELS = ("model_name", "engine")
_VERIFIED = {Route.VERIFY: Tier.DDR, Route.PREFETCH: Tier.SSD}
_FILLED = {Route.RESTORE: Tier.HBM, Route.SPILL: Tier.DDR}
_OFFLOAD = {
    Route.RESTORE: ("kv_offload_load", "From host memory to the device"),
    Route.SPILL: ("kv_offload_store", "From the device to host memory"),
}
_TIERING = {
    Route.PREFETCH: ("read", "promotion", "From disk to host memory"),
    Route.PERSIST: ("write", "cascade", "From host memory to disk"),
}
_DISK = "1:ssd"
"""The label of the disk, in vLLM's form for secondary tiers: a number and a kind."""


class TierMetrics(Collector):
    """The metrics of the tiers. Totals come from the engine and restart with it, as Prometheus allows."""

    def __init__(self, model_name: str) -> None:
        self._label_values = (model_name, "0")
        self._gauges = Gauges()

    def on_step(self, gauges: Gauges) -> None:
        """Store the newest gauges of the engine."""
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        """Yield the families of one frozen snapshot; may run in another thread."""
        gauges = self._gauges
        if gauges.tiers:
            yield from _tiers(gauges.tiers)
            yield from _disk_writes(gauges.tiers)
            yield from self._external(gauges.tiers)
        if gauges.routes:
            yield from _routes(gauges.routes)
            yield from self._offload(gauges.routes)
        if gauges.disk_state is not DiskState.NONE:
            states = [state for state in DiskState if state is not DiskState.NONE]
            yield labelled_gauge(
                "kv_disk_state",
                "State of the SSD tier: 1 for the current state.",
                "state",
                ((state.value, float(state is gauges.disk_state)) for state in states),
            )

    def _external(self, tiers: tuple[TierGauges, ...]) -> Iterator[Metric]:
        """Yield vLLM's metrics of the tiers below the device tier."""
        by_tier = {tier.tier: tier for tier in tiers}
        host, device = by_tier.get(Tier.DDR), by_tier.get(Tier.HBM)
        if host is not None and host.blocks_total:
            usage = GaugeMetricFamily(
                "vllm:kv_offload_cpu_cache_usage_perc", "Share of host blocks in use.", labels=_LABELS
            )
            usage.add_metric(self._label_values, host.blocks_used / host.blocks_total)
            yield usage
        if device is not None and len(tiers) > 1:
            hits = sum(tier.hit_tokens for tier in tiers if tier.tier is not Tier.HBM)
            yield self._vllm("external_prefix_cache_queries", "Tokens looked up beyond HBM.", device.missed_tokens)
            yield self._vllm("external_prefix_cache_hits", "Tokens found beyond HBM.", hits)

    def _offload(self, routes: tuple[RouteGauges, ...]) -> Iterator[Metric]:
        for route in routes:
            if route.route in _OFFLOAD:
                name, text = _OFFLOAD[route.route]
                yield self._vllm(f"{name}_bytes", f"{text}, bytes.", route.bytes)
                yield self._vllm(f"{name}_time", f"{text}, seconds.", route.seconds)
            elif route.route in _TIERING:
                name, job, text = _TIERING[route.route]
                yield self._tiering(f"{name}_bytes", f"{text}, bytes.", route.bytes)
                yield self._tiering(f"{name}_time", f"{text}, seconds.", route.seconds)
                yield self._tiering(f"{job}_job_failures", f"{text}, failed transfers.", route.failures)

    def _vllm(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric(self._label_values, value)
        return family

    def _tiering(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:kv_offload_tiering_{name}", text, labels=(*_LABELS, "tier"))
        family.add_metric((*self._label_values, _DISK), value)
        return family


def _tiers(tiers: tuple[TierGauges, ...]) -> Iterator[Metric]:
    def sizes(blocks: Iterable[int]) -> Iterator[tuple[str, float]]:
        return ((tier.tier.value, count * tier.block_bytes) for tier, count in zip(tiers, blocks, strict=True))

    def sums(counts: Iterable[int]) -> Iterator[tuple[str, float]]:
        return ((tier.tier.value, count) for tier, count in zip(tiers, counts, strict=True))

    yield labelled_gauge("kv_capacity_bytes", "Capacity for KV.", "tier", sizes(tier.blocks_total for tier in tiers))
    yield labelled_gauge(
        "kv_used_bytes", "KV referenced by a sequence or transfer.", "tier", sizes(tier.blocks_used for tier in tiers)
    )
    yield labelled_gauge(
        "kv_cached_bytes",
        "KV kept for a later hit; may be evicted.",
        "tier",
        sizes(tier.blocks_cached for tier in tiers),
    )
    yield labelled_counter(
        "kv_hit_tokens",
        "Prompt tokens whose fastest copy was in this tier.",
        "tier",
        sums(tier.hit_tokens for tier in tiers),
    )
    yield labelled_counter(
        "kv_missed_tokens", "Prompt tokens looked up in this tier and not found.", "tier",
        sums(tier.missed_tokens for tier in tiers),
    )  # fmt: skip
    yield labelled_counter("kv_evictions", "Blocks evicted.", "tier", sums(tier.evictions for tier in tiers))


def _disk_writes(tiers: tuple[TierGauges, ...]) -> Iterator[Metric]:
    """Yield the metrics of the daily write limit, if there is one."""
    for tier in tiers:
        if tier.daily_blocks:
            left, limit = tier.writable_blocks * tier.block_bytes, tier.daily_blocks * tier.block_bytes
            yield GaugeMetricFamily(
                "tiercel_kv_disk_writable_bytes",
                "Bytes that may be written to the SSD now; the daily limit refills evenly.",
                left,
            )
            yield GaugeMetricFamily(
                "tiercel_kv_disk_daily_write_limit_bytes", "Daily limit of bytes written to the SSD.", limit
            )


def _routes(routes: tuple[RouteGauges, ...]) -> Iterator[Metric]:
    def sums(counts: Iterable[float]) -> Iterator[tuple[str, float]]:
        return ((route.route.value, count) for route, count in zip(routes, counts, strict=True))

    yield labelled_counter(
        "kv_transfer_bytes", "Bytes copied by completed transfers.", "route", sums(route.bytes for route in routes)
    )
    yield labelled_counter(
        "kv_transfer_seconds", "Seconds spent copying.", "route", sums(route.seconds for route in routes)
    )
    yield labelled_counter(
        "kv_copies", "Copies after adjacent blocks were merged; bytes/copies is the mean size.", "route",
        sums(route.copies for route in routes),
    )  # fmt: skip
    yield labelled_counter(
        "kv_transfer_failures",
        "Transfers that failed with an error.",
        "route",
        sums(route.failures for route in routes),
    )
    yield labelled_counter(
        "kv_transfer_late", "Reads past their deadline.", "route", sums(route.late for route in routes)
    )
    yield labelled_counter(
        "kv_verify_failures",
        "Copies whose bytes did not match their key.",
        "tier",
        ((_VERIFIED[route.route].value, route.misses) for route in routes if route.route in _VERIFIED),
    )
    yield labelled_gauge(
        "kv_mean_run_blocks",
        "Mean blocks per copy into this tier, since start.",
        "tier",
        (
            (_FILLED[route.route].value, route.blocks / route.copies)
            for route in routes
            if route.route in _FILLED and route.copies
        ),
    )
