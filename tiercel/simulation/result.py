"""The result of a simulated run, in total and for each tenant."""

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
from msgspec import Struct

from tiercel.simulation.histogram import LogHistogram
from tiercel.simulation.replay import Replayed
from tiercel.simulation.simulator import Simulation
from tiercel.simulation.tally import TenantTally, merged_tallies, preemption_table
from tiercel.simulation.timeline import SimTimeline
from tiercel.values.ids import TenantId
from tiercel.values.outcome import PreemptionCount

_PERCENTS = (50, 95, 99)


class Percentiles(Struct, frozen=True):
    """Percentiles of a time, in seconds."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


class SimTenantResult(Struct, frozen=True, kw_only=True):
    """The result of one tenant."""

    name: str
    weight: float
    band: int
    requests: int
    finished: int
    refused: int  # requests longer than the pool or the context
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    service_s: float  # device time charged to it
    share: float  # of all service
    weight_share: float  # of all weights
    gap_s: float | None  # largest service gap to another tenant while both could be served; None: not measured
    starved_s: float  # longest time in which a sequence waited without a slice
    queue_s: Percentiles
    ttft_s: Percentiles
    ttft_kept: float | None  # part of the finished requests within the goal; None: no goal
    tbt_s: Percentiles
    preemptions: dict[str, dict[str, int]]  # by reason and mode
    swapped_tokens: int
    recomputed_tokens: int


class SimEngineResult(Struct, frozen=True, kw_only=True):
    """The result of one engine of a fleet."""

    requests: int
    finished: int
    busy: float  # part of the time in which the machine was busy
    steps: int
    hit_rate: float  # cached part of the prompt tokens of finished requests
    output_tokens_per_s: float
    preemptions: int


class SimResult(Struct, frozen=True, kw_only=True):
    """The result of a run."""

    policy: str
    virtual_s: float
    steps: int
    busy: float  # part of the time in which the machine was busy
    requests: int
    finished: int
    output_tokens_per_s: float
    tokens_per_s: float  # prompts and outputs of finished requests
    useful_tokens_per_s: float  # computed, without those computed again after a preemption
    hit_rate: float  # cached part of the prompt tokens of finished requests
    jain: float  # Jain index of service by weight among tenants with waiting work, averaged over time
    gap_s: float | None
    gap_bound_s: float | None
    gap_tenants: int  # number of tenants that are measured, those with the most tokens
    starved_s: float
    queue_s: Percentiles
    ttft_s: Percentiles
    tbt_s: Percentiles
    preemptions: dict[str, dict[str, int]]
    swapped_tokens: int
    recomputed_tokens: int
    tenants: tuple[SimTenantResult, ...]
    engines: tuple[SimEngineResult, ...]


def figures(replay: Replayed) -> SimResult:
    """Return the result of a replay that has ended."""
    engines, timeline, meter = replay.engines, replay.timeline, replay.meter
    tallies = merged_tallies([engine.tally for engine in engines])
    served = timeline.served[-1]
    waits = _longest_waits(timeline)
    gaps = meter.by_tenant() if meter is not None else {}
    total_ms, weights = sum(served.values()), sum(tally.share.weight for tally in tallies)
    queue, ttft, tbt = (
        _all([tally.queue_s for tally in tallies]),
        _all([tally.ttft_s for tally in tallies]),
        LogHistogram(),
    )
    for tally in tallies:
        tbt.add_all(tally.gaps)
    prompt_tokens = sum(tally.prompt_tokens for tally in tallies)
    cached_tokens = sum(tally.cached_tokens for tally in tallies)
    now_s = max(replay.now_s, 1e-9)
    tokens = sum(tally.output_tokens for tally in tallies)
    each = tuple(_engine(engine, now_s) for engine in engines)
    return SimResult(
        policy=engines[0].policy.name,
        virtual_s=replay.now_s,
        steps=sum(one.steps for one in each),
        busy=sum(one.busy for one in each) / len(each),
        requests=sum(tally.submitted for tally in tallies),
        finished=sum(tally.finished for tally in tallies),
        output_tokens_per_s=tokens / now_s,
        tokens_per_s=(prompt_tokens - cached_tokens + tokens) / now_s,
        useful_tokens_per_s=sum(max(0, one.machine.tokens - one.book.recomputed_tokens) for one in engines) / now_s,
        hit_rate=cached_tokens / max(prompt_tokens, 1),
        jain=_jain(timeline, {tally.share.name: tally.share.weight for tally in tallies}),
        gap_s=meter.widest[0] / 1e3 if meter is not None else None,
        gap_bound_s=meter.widest[1] / 1e3 if meter is not None else None,
        gap_tenants=len(gaps),
        starved_s=max((max(tally.starved_s, waits.get(tally.share.name, 0.0)) for tally in tallies), default=0.0),
        queue_s=_spread(queue),
        ttft_s=_spread(ttft),
        tbt_s=_histogram_spread(tbt),
        preemptions=preemption_table(chain.from_iterable(map(_preemptions, engines))),
        swapped_tokens=sum(tally.swapped_tokens for tally in tallies),
        recomputed_tokens=sum(tally.recomputed_tokens for tally in tallies),
        tenants=tuple(
            _tenant(tally, engines, served.get(tally.share.name, 0.0), total_ms, weights, gaps, waits)
            for tally in tallies
        ),
        engines=each,
    )


def _engine(engine: Simulation, now_s: float) -> SimEngineResult:
    tallies = engine.tally.by_tenant.values()
    return SimEngineResult(
        requests=sum(tally.submitted for tally in tallies),
        finished=engine.tally.finished,
        busy=min(1.0, engine.machine.busy_s / now_s),
        steps=engine.machine.steps,
        hit_rate=sum(tally.cached_tokens for tally in tallies) / max(sum(tally.prompt_tokens for tally in tallies), 1),
        output_tokens_per_s=engine.tally.tokens / now_s,
        preemptions=sum(one.count for one in _preemptions(engine)),
    )


def _preemptions(engine: Simulation) -> Iterator[PreemptionCount]:
    counts = engine.book.preemption_counts
    return chain.from_iterable(map(counts.of_tenant, counts.tenants))


def _tenant(
    tally: TenantTally, engines: Sequence[Simulation], served_ms: float, total_ms: float, weights: float,
    gaps: dict[TenantId, float], waits: dict[TenantId, float],
) -> SimTenantResult:  # fmt: skip
    share, name = tally.share, tally.share.name
    goal_s = share.slo.ttft_s
    ttft = sorted(tally.ttft_s)
    return SimTenantResult(
        name=name,
        weight=share.weight,
        band=share.band,
        requests=tally.submitted,
        finished=tally.finished,
        refused=tally.refused,
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens,
        output_tokens=tally.output_tokens,
        service_s=served_ms / 1e3,
        share=served_ms / total_ms if total_ms else 0.0,
        weight_share=share.weight / weights,
        gap_s=gaps[name] / 1e3 if name in gaps else None,
        starved_s=max(tally.starved_s, waits.get(name, 0.0)),
        queue_s=_spread(sorted(tally.queue_s)),
        ttft_s=_spread(ttft),
        ttft_kept=None if goal_s is None or not ttft else sum(value <= goal_s for value in ttft) / len(ttft),
        tbt_s=_histogram_spread(tally.gaps),
        preemptions=preemption_table(
            chain.from_iterable(engine.book.preemption_counts.of_tenant(name) for engine in engines)
        ),
        swapped_tokens=tally.swapped_tokens,
        recomputed_tokens=tally.recomputed_tokens,
    )


def _longest_waits(timeline: SimTimeline) -> dict[TenantId, float]:
    """Return the longest waits by tenant that the samples show."""
    longest: dict[TenantId, float] = {}
    for at_s, since in zip(timeline.at_s, timeline.waiting, strict=True):
        for tenant, since_s in since.items():
            longest[tenant] = max(longest.get(tenant, 0.0), at_s - since_s)
    return longest


def _jain(timeline: SimTimeline, weights: dict[TenantId, float]) -> float:
    """Return the mean Jain index over windows, of the tenants that waited throughout a window; 1 without two such."""
    total = total_s = 0.0
    width = max(1, len(timeline.at_s) // 36)  # too short a window holds a turn or two of each
    for low in range(0, len(timeline.at_s) - width, width):
        high = low + width
        always = frozenset(timeline.waiting[low]).intersection(*timeline.waiting[low + 1 : high + 1])
        before, after = timeline.served[low], timeline.served[high]
        shares = [(after.get(one, 0.0) - before.get(one, 0.0)) / weights.get(one, 1.0) for one in sorted(always)]
        squares = sum(share * share for share in shares)
        if len(shares) > 1 and squares:
            seconds = timeline.at_s[high] - timeline.at_s[low]
            total += seconds * sum(shares) ** 2 / (len(shares) * squares)
            total_s += seconds
    return total / total_s if total_s else 1.0


def _all(lists: Sequence[Sequence[float]]) -> list[float]:
    return sorted(value for values in lists for value in values)


def _spread(ordered: Sequence[float]) -> Percentiles:
    if not ordered:
        return Percentiles()
    return Percentiles(*(float(value) for value in np.percentile(ordered, _PERCENTS)))


def _histogram_spread(histogram: LogHistogram) -> Percentiles:
    return Percentiles(*(histogram.percentile(percent) for percent in _PERCENTS))
