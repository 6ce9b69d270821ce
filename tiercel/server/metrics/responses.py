"""Metrics of the stored responses, chat completions and conversations."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_KINDS = "responses, chat completions and conversations"
_REASONS = ("expired", "full")


class ResponseMetrics(Collector):
    """The number and the memory of stored objects, read at a scrape, and the number of forgotten ones."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._forgotten = Counter(
            "tiercel_forgotten_responses",
            f"Stored {_KINDS} that expired or gave way to others.",
            ("reason",),
            registry=registry,
        )
        for reason in _REASONS:
            self._forgotten.labels(reason)
        self._num_objects: Callable[[], int] = lambda: 0
        self._num_bytes: Callable[[], int] = lambda: 0

    def open(self, num_objects: Callable[[], int], num_bytes: Callable[[], int]) -> None:
        """Set the sources of the gauges."""
        self._num_objects = num_objects
        self._num_bytes = num_bytes
        self._registry.register(self)

    def on_forgotten(self, reason: str, count: int) -> None:
        """Count objects that were forgotten."""
        self._forgotten.labels(reason).inc(count)

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges."""
        yield GaugeMetricFamily("tiercel_stored_responses", f"Stored {_KINDS}.", self._num_objects())
        yield GaugeMetricFamily(
            "tiercel_stored_response_bytes",
            f"Memory of stored {_KINDS}.",
            self._num_bytes(),
        )
