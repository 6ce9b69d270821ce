"""Metrics of each engine of a front, with the engine's address as the label `engine`."""

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tiercel.values.outcome import Gauges

_LABEL = ("engine",)


class RemoteEngine(Protocol):
    """The facts and counters of an engine."""

    address: str
    gauges: Gauges
    num_deaths: int
    num_late_frames: int
    received_bytes: int
    sent_bytes: int
    key_bytes: int
    round_trip_s: float

    @property
    def state(self) -> enum.Enum: ...
    @property
    def num_unfinished(self) -> int: ...
    @property
    def work_s(self) -> float: ...


class FleetMetrics(Collector):
    """The metrics of the engines that a front uses now."""

    def __init__(self, engines: Callable[[], Sequence[RemoteEngine]]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        """Yield the families, read now; may run in another thread."""
        engines = self._engines()
        states = GaugeMetricFamily(
            "tiercel_fleet_engine_state", "State of each engine: 1 for the current state.", labels=(*_LABEL, "state")
        )
        for engine in engines:
            for state in type(engine.state):
                states.add_metric((engine.address, str(state.value)), float(state is engine.state))
        yield states
        yield from self._gauges(engines)
        yield from self._counters(engines)

    def _gauges(self, engines: Sequence[RemoteEngine]) -> Iterator[Metric]:
        families: dict[str, tuple[str, Callable[[RemoteEngine], float]]] = {
            "unfinished": ("Unfinished sequences of this front at each engine.", lambda one: one.num_unfinished),
            "running": ("Running sequences of all fronts at each engine.", lambda one: one.gauges.num_running),
            "waiting": ("Waiting sequences of all fronts at each engine.", lambda one: one.gauges.num_waiting),
            "blocks_used": ("Used KV blocks of each engine.", lambda one: one.gauges.blocks_used),
            "blocks": ("KV blocks of each engine.", lambda one: one.gauges.blocks_total),
            "work_seconds": (
                "Predicted time that each engine needs for the unfinished sequences of this front.",
                lambda one: one.work_s,
            ),
            "round_trip_seconds": ("Shortest round trip to each engine.", lambda one: one.round_trip_s),
        }
        for name, (help_text, read) in families.items():
            family = GaugeMetricFamily(f"tiercel_fleet_engine_{name}", help_text, labels=_LABEL)
            for engine in engines:
                family.add_metric((engine.address,), read(engine))
            yield family

    def _counters(self, engines: Sequence[RemoteEngine]) -> Iterator[Metric]:
        families: dict[str, tuple[str, Callable[[RemoteEngine], float]]] = {
            "steps": ("Steps of each engine since its start.", lambda one: one.gauges.steps),
            "losses": ("Losses of each engine: it died, hung or could not be reached.", lambda one: one.num_deaths),
            "late_frames": ("Frames of a dead engine that were dropped.", lambda one: one.num_late_frames),
            "received_bytes": ("Bytes received from each engine.", lambda one: one.received_bytes),
            "key_bytes": ("Bytes received from each engine about keys stored and dropped.", lambda one: one.key_bytes),
            "sent_bytes": ("Bytes sent to each engine.", lambda one: one.sent_bytes),
        }
        for name, (help_text, read) in families.items():
            family = CounterMetricFamily(f"tiercel_fleet_engine_{name}", help_text, labels=_LABEL)
            for engine in engines:
                family.add_metric((engine.address,), read(engine))
            yield family
