"""Small engines and mixes of tenants that show the guarantees of the scheduler."""

import random

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.scenarios.longest_prefix import LongestPrefix
from tiercel.scheduler.cost import linear_times
from tiercel.simulation.replay import Replay
from tiercel.simulation.result import SimResult, figures
from tiercel.simulation.simulator import SimSettings
from tiercel.simulation.workload import (
    Lengths,
    PromptPart,
    SimRequest,
    Sources,
    Workload,
    draw_requests,
    ordered_workload,
)
from tiercel.values.ids import TenantId
from tiercel.values.tenant import PolicyName, Slo, TenantShare

# A step of 40 decodes and 256 prompt tokens takes 19 ms.
SMALL = SimSettings(
    times=linear_times(base_ms=2.0, prefill_ms=0.05, decode_ms=0.1, context_ms=0.00005),
    blocks=1024,
    max_num_seqs=32,
    max_num_batched_tokens=256,
    patience_s=2.0,
)


_KINDS = ((0.5, 60, 16), (1.0, 200, 60), (2.0, 600, 120), (1.0, 60, 120), (0.5, 200, 16), (2.0, 600, 60))
"""Weight, mean tokens of a prompt and of an answer."""


# The engine of `tiercel simulate` without flags: one prompt of 100,000 tokens fits, and takes 50 steps.
LONG = SimSettings(blocks=8192, max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=131_072, patience_s=1.6)


class Shares(Struct, frozen=True):
    """Service of two tenants in windows of time."""

    parts: tuple[float, ...]  # the first tenant's part of the service of both
    preemptions: int


def run_saturated(weights: tuple[float, float], *, seconds: float, window_s: float, seed: int = 0) -> Shares:
    """Run two tenants of different shapes, both with more work than the machine can do."""
    rng = random.Random(seed)
    first = _share("first", weights[0])
    second = _share("second", weights[1])
    sources = Sources()
    many = [0.02 * number for number in range(int(seconds / 0.02))]
    requests = draw_requests(first, many, Lengths(input_len=120, output_len=30, sigma=0.5), rng, sources)
    requests += draw_requests(second, many[::2], Lengths(input_len=400, output_len=90, sigma=0.5), rng, sources)
    return _parts(_play(SMALL, ordered_workload([first, second], requests), seconds), window_s, 2.0, seconds)


def run_returning(policy: PolicyName = "fair", *, seconds: float = 60.0, away_s: float = 30.0, seed: int = 0) -> Shares:
    """Run a tenant with twice the work that the machine can do; another tenant returns after a while with as much.

    Windows start at its return. Under first come, first served it gets nothing in them, behind the other's backlog.
    """
    rng = random.Random(seed)
    flood, guest = _share("first"), _share("second")
    sources = Sources()
    times = [0.01 * number for number in range(int(seconds / 0.01))]
    lengths = Lengths(input_len=200, output_len=60, sigma=0.5)
    requests = draw_requests(guest, [at_s for at_s in times if at_s >= away_s], lengths, rng, sources)
    requests += draw_requests(flood, times, lengths, rng, sources)
    settings = replace(SMALL, policy=policy)
    replay = _play(settings, ordered_workload([guest, flood], requests), seconds)
    return _parts(replay, (seconds - away_s) / 3, away_s, seconds)


def run_long_prompts(policy: PolicyName, *, host_blocks: int = 0, seconds: float = 1800.0, seed: int = 0) -> SimResult:
    """Run six tenants with prompts of 100,000 tokens, 2.4 times as many as the machine can compute."""
    rng = random.Random(seed)
    shares, sources, requests = [_share(f"tenant-{number}") for number in range(6)], Sources(), list[SimRequest]()
    for share in shares:
        at_s = [rng.uniform(0.0, seconds) for _ in range(int(0.4 * seconds / 6))]
        lengths = Lengths(input_len=100_000, output_len=16, sigma=0.05)
        requests += draw_requests(share, sorted(at_s), lengths, rng, sources)
    settings = replace(LONG, policy=policy, host_blocks=host_blocks)
    return figures(_play(settings, ordered_workload(shares, requests), seconds))


def run_shared_prefixes(*, is_yardstick: bool = False, seconds: float = 60.0, seed: int = 0) -> SimResult:
    """Run four tenants of one group with overload and with more documents than fit in the cache.

    The yardstick is pure longest-prefix-match.
    """
    rng = random.Random(seed)
    shares = [_share(f"t{number}", group="all") for number in range(4)]
    sources = Sources()
    lengths = Lengths(input_len=60, output_len=24, prefix_len=512, num_prefixes=24, range_ratio=0.5)
    requests: list[SimRequest] = []
    for share in shares:
        requests += draw_requests(
            share, sorted(rng.uniform(0, seconds) for _ in range(int(14 * seconds))), lengths, rng, sources
        )
    workload = ordered_workload(shares, requests)
    if not is_yardstick:
        return figures(_play(SMALL, workload, None))
    replay = Replay(SMALL, workload, open_with=lambda _, costs: LongestPrefix(costs))
    simulation = replay.simulation
    assert isinstance(simulation.policy, LongestPrefix)
    simulation.policy.watch(simulation.book, simulation.cache)
    replay.run()
    return figures(replay)


def run_mixed(policy: PolicyName, *, seconds: float = 60.0, seed: int = 0) -> SimResult:
    """Run many kinds of tenants with 1.5 times the work that the machine can do, until all of it is done."""
    rng = random.Random(seed)
    sources = Sources()
    shares: list[TenantShare] = []
    requests: list[SimRequest] = []
    for number, (weight, prompt, outputs) in enumerate(_KINDS):
        share = _share(f"t{number}", weight)
        lengths = Lengths(input_len=prompt, output_len=outputs, sigma=0.6, prefix_len=64, num_prefixes=3)
        count = int(seconds * 56 / len(_KINDS))
        requests += draw_requests(share, sorted(rng.uniform(0, seconds) for _ in range(count)), lengths, rng, sources)
        shares.append(share)
    return figures(_play(replace(SMALL, policy=policy), ordered_workload(shares, requests), None))


def run_overload(*, seconds: float = 60.0, seed: int = 0) -> SimResult:
    """Run 1.5 times the work that the machine can do; a third is interactive, in a band before the batch work."""
    rng = random.Random(seed)
    slo = Slo(kind="interactive", ttft_s=0.5)
    shares = [
        TenantShare(name=TenantId("chat"), band=0, slo=slo),
        TenantShare(name=TenantId("help"), band=0, slo=slo),
        TenantShare(name=TenantId("nightly"), band=10, slo=Slo(kind="batch")),
    ]
    sources = Sources()
    requests: list[SimRequest] = []
    for share, rate, lengths in (
        (shares[0], 7.0, Lengths(input_len=150, output_len=60, sigma=0.5)),
        (shares[1], 7.0, Lengths(input_len=150, output_len=60, sigma=0.5)),
        (shares[2], 22.0, Lengths(input_len=400, output_len=120, sigma=0.5)),
    ):
        at_s, times = 0.0, list[float]()
        while (at_s := at_s + rng.expovariate(rate)) < seconds:
            times.append(at_s)
        requests += draw_requests(share, times, lengths, rng, sources)
    return figures(_play(SMALL, ordered_workload(shares, requests), seconds))


def run_waiting(policy: PolicyName = "fair", *, seconds: float = 120.0) -> SimResult:
    """Run more work in band 0 than the machine can do, with one request of band 5."""
    rng = random.Random(0)
    flood = _share("flood")
    last = TenantShare(name=TenantId("last"), band=5)
    sources = Sources()
    times = [0.02 * number for number in range(int(seconds / 0.02))]
    requests = draw_requests(flood, times, Lengths(input_len=200, output_len=60, sigma=0.5), rng, sources)
    requests += [SimRequest(30.0, last.name, (PromptPart(sources.new(), 300),), 40)]
    return figures(_play(SMALL, ordered_workload([flood, last], requests), seconds))


def _share(name: str, weight: float = 1.0, group: str | None = None) -> TenantShare:
    return TenantShare(name=TenantId(name), weight=weight, group=group)


def _play(settings: SimSettings, workload: Workload, seconds: float | None) -> Replay:
    replay = Replay(settings, workload, duration_s=seconds)
    replay.run()
    return replay


def _parts(replay: Replay, window_s: float, from_s: float, until_s: float) -> Shares:
    """Return the first tenant's part of the service in overlapping windows, one from each sample."""
    timeline = replay.timeline
    names = [share.name for share in replay.workload.tenants]
    parts: list[float] = []
    for low, began_s in enumerate(timeline.at_s):
        high = next((place for place, at_s in enumerate(timeline.at_s) if at_s >= began_s + window_s), None)
        if began_s < from_s or high is None or timeline.at_s[high] > until_s + 1:
            continue
        first, second = (timeline.served[high].get(name, 0.0) - timeline.served[low].get(name, 0.0) for name in names)
        parts.append(first / (first + second))
    return Shares(tuple(parts), replay.simulation.book.preemption_counts.total)
