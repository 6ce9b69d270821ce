"""Metrics of files and batches, read at a scrape."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class BatchFigures(Protocol):
    """The numbers of files, batches and lines."""

    @property
    def num_by_status(self) -> Mapping[str, int]: ...

    @property
    def num_lines(self) -> tuple[int, int]:
        """The lines answered since the start: with status 200, and all others."""
        ...

    @property
    def held(self) -> tuple[int, int]:
        """The bytes and the number of all files."""
        ...


class BatchMetrics(Collector):
    """The families of files and batches."""

    def __init__(self, figures: BatchFigures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        batches = GaugeMetricFamily("tiercel_batches", "Batches that are remembered, by status.", labels=("status",))
        for status, count in self._figures.num_by_status.items():
            batches.add_metric((status,), count)
        yield batches
        lines = CounterMetricFamily("tiercel_batch_lines", "Answered lines of batches.", labels=("outcome",))
        for outcome, count in zip(("completed", "failed"), self._figures.num_lines, strict=True):
            lines.add_metric((outcome,), count)
        yield lines
        held_bytes, num_files = self._figures.held
        yield GaugeMetricFamily(
            "tiercel_files", "Files of all tenants, without those of unfinished batches.", num_files
        )
        yield GaugeMetricFamily(
            "tiercel_files_bytes",
            "Size of the files of all tenants, uploads and answers in progress included.",
            held_bytes,
        )
