"""Arrival processes: when each request of a tenant is due, in seconds from the start, reproducible from a seed."""

import math
import random
from collections.abc import Callable, Sequence
from itertools import accumulate

from tiercel.loadtest.load.mix import ArrivalSettings
from tiercel.values.errors import ConfigError


def due_times(
    settings: ArrivalSettings, count: int, rng: random.Random, recorded_s: Sequence[float | None] = ()
) -> list[float]:
    """Return the due times of `count` requests in order.

    Random gaps are rescaled to the sum that the rates give, so that all runs at one rate last equally long.
    `recorded_s` are the times of the dataset, for traces. Errors: ConfigError.
    """
    match settings.process:
        case "at_once":
            return [0.0] * count
        case "constant" | "poisson" | "gamma":
            return list(accumulate(_gaps(settings, [_rate(settings)] * count, rng)))
        case "on_off":
            busy = list(accumulate(_gaps(settings, [_rate(settings)] * count, rng)))
            return [at_s + settings.off_s * math.floor(at_s / settings.on_s) for at_s in busy]
        case "markov":
            return _markov(settings, list(accumulate(_gaps(settings, [_rate(settings)] * count, rng))), rng)
        case "ramp_linear" | "ramp_exponential":
            return list(accumulate(_gaps(settings, _ramp(settings, count), rng)))
        case "trace":
            return _replay(settings, recorded_s)


def _rate(settings: ArrivalSettings) -> float:
    if settings.rate is None:
        raise ConfigError("bench.arrivals", f"{settings.process} arrivals need a rate")
    return settings.rate


def _gaps(settings: ArrivalSettings, rates: Sequence[float], rng: random.Random) -> list[float]:
    """Return one gap for each rate, with mean 1 / rate. The first request waits for a gap, too."""
    draw = _draw(settings, rng)
    gaps = [draw() / rate for rate in rates]
    total = sum(gaps)
    wanted = sum(1 / rate for rate in rates)
    return [gap * wanted / total for gap in gaps] if total > 0 else [1 / rate for rate in rates]


def _markov(settings: ArrivalSettings, busy: Sequence[float], rng: random.Random) -> list[float]:
    """Insert pauses of exponential length between busy spells of exponential length."""
    times: list[float] = []
    off_s, spell_ends_s = 0.0, rng.expovariate(1 / settings.on_s)
    for at_s in busy:
        while at_s > spell_ends_s:
            off_s += rng.expovariate(1 / settings.off_s) if settings.off_s else 0.0
            spell_ends_s += rng.expovariate(1 / settings.on_s)
        times.append(at_s + off_s)
    return times


def _draw(settings: ArrivalSettings, rng: random.Random) -> Callable[[], float]:
    """Return a function that draws gaps with mean 1."""
    if settings.process == "constant" or math.isinf(settings.burstiness):
        return lambda: 1.0
    shape = settings.burstiness if settings.process != "poisson" else 1.0
    return lambda: rng.gammavariate(shape, 1 / shape)


def _ramp(settings: ArrivalSettings, count: int) -> list[float]:
    """Return the rate at each request, from start_rate to end_rate."""
    start, end = settings.start_rate, settings.end_rate
    if start is None or end is None:
        raise ConfigError("bench.arrivals", "a ramp needs a start rate and an end rate")
    parts = [index / max(count - 1, 1) for index in range(count)]
    if settings.process == "ramp_linear":
        return [start + (end - start) * part for part in parts]
    return [start * (end / start) ** part for part in parts]


def _replay(settings: ArrivalSettings, recorded_s: Sequence[float | None]) -> list[float]:
    """Return the recorded times, shifted to start at zero and scaled by `speed` or to the mean rate `rate`."""
    times = [at_s for at_s in recorded_s if at_s is not None]
    if not times or len(times) != len(recorded_s):
        raise ConfigError("bench.arrivals", "the dataset has no times: trace arrivals need timed_trace or burstgpt")
    first = min(times)
    span = max(times) - first
    scale = 1 / settings.speed
    if settings.rate is not None and span > 0:
        scale = len(times) / settings.rate / span
    return [(at_s - first) * scale for at_s in times]
