"""What the readings of /metrics tell about a run: curves over time, and what the server does not export.

Series are known by their labels rather than by one name, so that servers of other makers draw too: a tier's size is
any `..._used_bytes{tier=}`, a route's traffic any `..._bytes_total{route=}` beside the names of vLLM.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from loadtest.exposition import Series, parse_series
from loadtest.record import Sample

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
HOST_USAGE = "vllm:kv_offload_cpu_cache_usage_perc"
PREEMPTIONS = "vllm:num_preemptions_total"
PREFIX_QUERIES = "vllm:prefix_cache_queries_total"
PREFIX_HITS = "vllm:prefix_cache_hits_total"

_USED = ("used_bytes", "occupancy_bytes")
_CAPACITY = ("capacity_bytes", "limit_bytes")
_ROUTES = {"vllm:kv_offload_load_bytes": "DDR to HBM", "vllm:kv_offload_store_bytes": "HBM to DDR"}
_TIER_ORDER = ("hbm", "ddr", "ssd")


@dataclass(frozen=True, slots=True)
class Reading:
    """One quantity over time."""

    name: str
    at_s: tuple[float, ...]
    values: tuple[float | None, ...]


def gauge(samples: Sequence[Sample], name: str, label: str = "") -> Reading | None:
    """A gauge summed over its series, or None where no sample has it."""
    return _read(samples, label or name, lambda series: series.name == name)


def rate(samples: Sequence[Sample], name: str, label: str = "") -> Reading | None:
    """A counter's growth per second between samples, or None where no sample has it."""
    found = gauge(samples, name, label)
    return found and _per_second(found)


def tier_shares(samples: Sequence[Sample]) -> list[Reading]:
    """How full each tier is, as a share of one, from the fastest tier down."""
    used = _by_label(samples, "tier", _USED)
    capacity = _by_label(samples, "tier", _CAPACITY)
    shares = [_divide(used[tier], capacity[tier]) for tier in _ordered(used) if tier in capacity]
    shown = {reading.name.lower() for reading in shares}
    for tier, name in (("DDR", HOST_USAGE), ("HBM", KV_USAGE)):
        fallback = gauge(samples, name, tier)
        if tier.lower() not in shown and fallback is not None:
            shares.insert(0, fallback)
    return shares


def transfer_rates(samples: Sequence[Sample]) -> list[Reading]:
    """Bytes per second on each route between tiers."""
    named = {label: gauge(samples, f"{name}_total", label) or gauge(samples, f"{name}_sum", label)
             for name, label in _ROUTES.items()}  # fmt: skip
    found = {label: reading for label, reading in named.items() if reading is not None}
    for route, reading in _by_label(samples, "route", ("bytes_total",)).items():
        found.setdefault(route, reading)
    return [_per_second(reading) for reading in found.values()]


def hit_rate(samples: Sequence[Sample]) -> Reading | None:
    """The share of looked-up prompt tokens that the prefix cache held, between samples."""
    hits, queries = rate(samples, PREFIX_HITS, "prefix hits"), rate(samples, PREFIX_QUERIES)
    return None if hits is None or queries is None else _divide(hits, queries)


def _read(samples: Sequence[Sample], label: str, wants: Callable[[Series], bool]) -> Reading | None:
    keys = {key for sample in samples for key in sample.values if wants(parse_series(key))}
    if not keys:
        return None
    values = [[sample.values[key] for key in keys if key in sample.values] for sample in samples]
    return Reading(
        label,
        tuple(sample.at_s for sample in samples),
        tuple(sum(found) if found else None for found in values),
    )


def _by_label(samples: Sequence[Sample], label: str, endings: tuple[str, ...]) -> dict[str, Reading]:
    keys = {key for sample in samples for key in sample.values}
    names = {
        series.labels[label]
        for series in map(parse_series, keys)
        if label in series.labels and series.name.endswith(endings)
    }
    return dict(_named(samples, label, endings, sorted(names)))


def _named(
    samples: Sequence[Sample], label: str, endings: tuple[str, ...], names: Sequence[str]
) -> Iterator[tuple[str, Reading]]:
    for name in names:

        def is_wanted(series: Series, name: str = name) -> bool:
            return series.labels.get(label) == name and series.name.endswith(endings)

        reading = _read(samples, _label_words(name), is_wanted)
        if reading is not None:
            yield name, reading


def _label_words(name: str) -> str:
    """`hbm_to_ddr` as `HBM to DDR`."""
    return " ".join(word.upper() if word in _TIER_ORDER else word for word in name.replace("_", " ").split())


def _ordered(tiers: dict[str, Reading]) -> list[str]:
    known = [tier for tier in _TIER_ORDER if tier in tiers]
    return known + sorted(set(tiers) - set(known))


def _per_second(counter: Reading) -> Reading:
    """Growth per second up to the next reading; a counter that falls was reset and is not known for that step."""
    values: list[float | None] = []
    for (before_s, before), (after_s, after) in pairwise(zip(counter.at_s, counter.values, strict=True)):
        if before is None or after is None or after < before or after_s <= before_s:
            values.append(None)
        else:
            values.append((after - before) / (after_s - before_s))
    return Reading(counter.name, counter.at_s, (*values, values[-1] if values else None))


def _divide(above: Reading, below: Reading) -> Reading:
    values = (
        None if top is None or not bottom else top / bottom
        for top, bottom in zip(above.values, below.values, strict=True)
    )
    return Reading(above.name, above.at_s, tuple(values))
