"""Metric families of the engine with one label, for prometheus_client."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


def labelled_gauge(name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    """Return the gauge `tiercel_<name>` with a sample per value of `label`."""
    family = GaugeMetricFamily(f"tiercel_{name}", text, labels=(label,))
    for value, number in values:
        family.add_metric((value,), number)
    return family


def labelled_counter(name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    """Return the counter `tiercel_<name>` with a sample per value of `label`."""
    family = CounterMetricFamily(f"tiercel_{name}", text, labels=(label,))
    for value, number in values:
        family.add_metric((value,), number)
    return family
