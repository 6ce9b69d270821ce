"""The figures of a soak: both processes and /metrics, read once a second."""

import asyncio
import re
import time
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.engine_pid import ProcessFigures, engine_pid, process_figures
from benchmarks.whole_answer import fetch

EVERY_S = 1.0
_LINE = re.compile(r"^([a-z_:]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_SHOWN = ("tier", "route", "state", "reason", "handler", "method", "status", "mode")  # labels that tell series apart


class Sample(NamedTuple):
    """The figures of one moment. Metrics are named as `name` or `name.label`."""

    at_s: float  # time.monotonic
    http: ProcessFigures | None
    engine_pid: int | None
    engine: ProcessFigures | None
    metrics: dict[str, float]

    def metric(self, name: str) -> float:
        """Return a metric, or 0 if the page lacks it."""
        return self.metrics.get(name, 0.0)


def read_page(page: str) -> dict[str, float]:
    """Return the values of a page of metrics by name, and by `name.label` where a series has one of our labels."""
    values: dict[str, float] = {}
    for name, labels, value in _LINE.findall(page):
        if "_bucket" in name:
            continue
        shown = [text for label, text in _LABEL.findall(labels) if label in _SHOWN]
        key = ".".join([name, *shown])
        values[key] = values.get(key, 0.0) + float(value)
    return values


async def take_sample(url: str, daemon_pid: int) -> Sample:
    """Read everything once. A page that cannot be read is empty."""
    try:
        _, page = await fetch(url, "/metrics")
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        page = b""
    engine = engine_pid(daemon_pid)
    figures = process_figures(engine) if engine is not None else None
    return Sample(time.monotonic(), process_figures(daemon_pid), engine, figures, read_page(page.decode()))


async def watch(url: str, daemon_pid: int, samples: list[Sample], is_over: Callable[[], bool]) -> None:
    """Append a sample each second until it is over."""
    due_s = time.monotonic()
    while not is_over():
        samples.append(await take_sample(url, daemon_pid))
        due_s = max(due_s + EVERY_S, time.monotonic())
        await asyncio.sleep(due_s - time.monotonic())


async def settled_sample(url: str, daemon_pid: int, patience_s: float) -> Sample:
    """Return a sample without open requests or used blocks, or the last one when the patience is over."""
    end_s = time.monotonic() + patience_s
    while True:
        sample = await take_sample(url, daemon_pid)
        if is_at_rest(sample) or time.monotonic() > end_s:
            return sample
        await asyncio.sleep(0.2)


def is_at_rest(sample: Sample) -> bool:
    """True if no sequence runs or waits, no block is in use, and the engine answers."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", *used_blocks(sample))
    return sample.engine is not None and bool(sample.metrics) and not any(sample.metric(name) for name in names)


def used_blocks(sample: Sample) -> dict[str, float]:
    """Return the used bytes by tier."""
    return {name: value for name, value in sample.metrics.items() if name.startswith("tiercel_kv_used_bytes.")}
