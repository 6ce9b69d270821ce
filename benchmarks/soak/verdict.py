"""The verdict on a soak: its limits, and the arithmetic of slopes and windows."""

import itertools
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.checks import percentile
from benchmarks.soak.harm import Harm
from benchmarks.soak.sessions import SESSIONS, Traffic
from benchmarks.soak.watch import Sample, is_at_rest
from benchmarks.whole_answer import Outcome, WholeAnswer

MIB = 1 << 20
ROUTES = ("hbm_ddr", "ddr_hbm", "ddr_ssd", "ssd_ddr")
MAX_SILENCE_S = 10.0
MAX_DIFFERENCE = 2  # of descriptors, threads and tasks, before and after
MIN_OVERSUBSCRIPTION = 2.0


class Limits(NamedTuple):
    """The limits of a soak of one length."""

    window_s: float  # the first and the last part of the load, whose times to first token are compared
    warm_s: float  # memory counts from here on
    slope_bytes_per_min: float | None  # of the memory of each process; None: the soak is too short for a slope
    growth_bytes: float  # of the highest memory after `warm_s`, over the highest until then; if there is no slope
    median_factor: float
    p99_factor: float


def limits_of(seconds: float) -> Limits:
    """Return the limits of a soak of this many seconds.

    In a run of minutes a window has few requests, and memory still grows into its pools: the limits of a long soak
    would fail by chance.
    """
    if seconds >= 600:
        return Limits(300.0, 300.0, 1.0 * MIB, 0.0, 1.2, 1.5)
    return Limits(seconds / 3, seconds / 2, None, 8.0 * MIB, 2.0, 3.0)


@dataclass(frozen=True, slots=True)
class SoakRun:
    """What happened in a soak. `began_s` is the start of the load, as `time.monotonic`."""

    began_s: float
    seconds: float
    traffic: Traffic
    samples: Sequence[Sample]
    before: Sample
    after: Sample
    harm: Harm
    planned_kills: int
    has_full_disk: bool
    replays: int
    wrong: int  # replays that differ
    logged: Counter[str]  # lines of the log by request id
    pool_tokens: int  # of the device tier


def slope_per_min(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line through (seconds, value), per minute; 0 for fewer than two points."""
    if len(points) < 2:
        return 0.0
    return 60 * statistics.linear_regression([at_s for at_s, _ in points], [value for _, value in points]).slope


def growth(points: Sequence[tuple[float, float]], from_s: float) -> float:
    """Return by how much the highest value from a time on exceeds the highest before it; at least 0."""
    before = [value for at_s, value in points if at_s < from_s]
    after = [value for at_s, value in points if at_s >= from_s]
    return max(max(after, default=0.0) - max(before, default=0.0), 0.0)


def longest_silence_s(samples: Sequence[Sample]) -> float:
    """Return the longest time in which sequences waited in every sample and no token came."""
    longest_s, since_s = 0.0, None
    for before, now in itertools.pairwise(samples):
        tokens = [one.metric("vllm:generation_tokens_total") for one in (before, now)]
        waits = all(one.metric("vllm:num_requests_waiting") > 0 for one in (before, now))
        if not waits or tokens[0] != tokens[1]:
            since_s = None
            continue
        since_s = before.at_s if since_s is None else since_s
        longest_s = max(longest_s, now.at_s - since_s)
    return longest_s


def increase(samples: Iterable[Sample], name: str) -> float:
    """Return the sum of the increases of a counter between samples; it may have started from 0 again."""
    values = [sample.metric(name) for sample in samples if name in sample.metrics]
    return sum(now - before if now >= before else now for before, now in itertools.pairwise(values))


def names_of(samples: Sequence[Sample], family: str) -> set[str]:
    """Return the names of all series of a family."""
    return {name for sample in samples for name in sample.metrics if name == family or name.startswith(f"{family}.")}


def cpu_per_token_s(samples: Sequence[Sample]) -> float:
    """Return the CPU seconds of both processes per output token. Unlike a wait it tells little of other programs."""
    processes = ("process_cpu_seconds_total", "tiercel_engine_process_cpu_seconds_total")
    tokens = increase(samples, "vllm:generation_tokens_total")
    return sum(increase(samples, name) for name in processes) / max(tokens, 1.0)


def ttfts(answers: Iterable[WholeAnswer], from_s: float, to_s: float) -> list[float]:
    """Return the times to first token of the requests sent in a window."""
    return [one.ttft_s for one in answers if from_s <= one.sent_s < to_s and one.ttft_s is not None]


def count_lines(log: str) -> Counter[str]:
    """Return the number of `request_done` lines by request id."""
    lines = [line for line in log.splitlines() if '"request_done"' in line]
    return Counter(str(json.loads(line)["request_id"]) for line in lines)


def checks_of(run: SoakRun) -> list[tuple[str, bool]]:
    """Return the checks of a run: a text with the figure and its limit, and whether the limit is kept."""
    limits = limits_of(run.seconds)
    return [
        *_outcomes(run),
        (f"{run.wrong} of {run.replays} replayed requests differ from the reference: 0", run.replays > 0 == run.wrong),
        *_memory(run, limits),
        *_returned(run),
        *_tiers(run),
        *_latency(run, limits),
        *_harm(run),
    ]


def _outcomes(run: SoakRun) -> list[tuple[str, bool]]:
    counts = Counter(one.outcome for one in run.traffic.answers)
    failed = sum(counts[one] for one in (Outcome.FAILED, Outcome.REFUSED, Outcome.BROKEN, Outcome.SILENT))
    answers = [*run.traffic.answers, *run.traffic.wrong]
    unlike = sum(run.logged[one.request_id] != 1 for one in answers)
    accepted = sum(one.outcome is not Outcome.REFUSED for one in run.traffic.wrong)
    text = ", ".join(
        f"{count} {outcome.value}" for outcome, count in sorted(counts.items(), key=lambda one: one[0].value)
    )
    return [
        (f"{len(answers)} requests ({text}): none failed, broken or silent", failed == 0 < counts[Outcome.ANSWERED]),
        (f"{counts[Outcome.OPEN]} requests without an outcome: 0", counts[Outcome.OPEN] == 0),
        (f"{unlike} requests without exactly one line in the log: 0", unlike == 0),
        (f"{accepted} of {len(run.traffic.wrong)} requests with a mistake not refused: 0", accepted == 0),
    ]


def _memory(run: SoakRun, limits: Limits) -> list[tuple[str, bool]]:
    http = [(one.at_s - run.began_s, one.http.private_bytes) for one in run.samples if one.http]
    engine = [(one.at_s - run.began_s, one.engine.private_bytes) for one in run.samples if one.engine]
    checks: list[tuple[str, bool]] = []
    for name, points in (("HTTP process", http), ("engine", engine)):
        size = f"memory of the {name}, {points[-1][1] / MIB:.0f} MiB at the end"
        if limits.slope_bytes_per_min is not None:
            slope = slope_per_min([point for point in points if point[0] >= limits.warm_s])
            limit = limits.slope_bytes_per_min
            text = f"{size}: {slope / MIB:+.2f} MiB/min after minute {limits.warm_s / 60:g}, under {limit / MIB:g}"
            checks.append((text, slope < limit))
        else:
            more = growth(points, limits.warm_s)
            text = f"{size}: {more / MIB:.1f} MiB more in the second half, at most {limits.growth_bytes / MIB:g}"
            checks.append((text, more <= limits.growth_bytes))
    return checks


def _returned(run: SoakRun) -> list[tuple[str, bool]]:
    """Return the checks of what must be as before the load."""
    pairs: list[tuple[str, float, float]] = []
    for name, before, after in (
        ("HTTP process", run.before.http, run.after.http),
        ("engine", run.before.engine, run.after.engine),
    ):
        if before is None or after is None:
            return [(f"the {name} is there before and after", False)]
        pairs.append((f"descriptors of the {name}", before.descriptors, after.descriptors))
        pairs.append((f"threads of the {name}", before.threads, after.threads))
    tasks = [one.metric("tiercel_http_tasks") for one in (run.before, run.after)]
    pairs.append(("tasks of the HTTP process", *tasks))
    return [
        (f"{name}: {before:g} before, {after:g} after, +-{MAX_DIFFERENCE}", abs(after - before) <= MAX_DIFFERENCE)
        for name, before, after in pairs
    ]


def _tiers(run: SoakRun) -> list[tuple[str, bool]]:
    capacities = {
        tuple(one.metric(f"tiercel_kv_capacity_bytes.{tier}") for tier in ("hbm", "ddr", "ssd"))
        for one in run.samples
        if any(name.startswith("tiercel_kv_capacity_bytes") for name in one.metrics)
    }
    over = [
        f"{one.at_s - run.began_s:.0f} s"
        for one in run.samples
        for tier in ("hbm", "ddr", "ssd")
        if one.metric(f"tiercel_kv_used_bytes.{tier}") + one.metric(f"tiercel_kv_cached_bytes.{tier}")
        > one.metric(f"tiercel_kv_capacity_bytes.{tier}")
    ]
    moved = {route: increase(run.samples, f"tiercel_kv_transfer_bytes_total.{route}") for route in ROUTES}
    text = ", ".join(f"{route} {size / MIB:.0f}" for route, size in moved.items())
    wanted = sum(run.traffic.contexts.values()) / run.pool_tokens
    return [
        ("blocks: the capacity of each tier is constant, and never exceeded", len(capacities) == 1 and not over),
        ("blocks: none is in use after the load, no sequence runs or waits", is_at_rest(run.after)),
        (f"MiB moved: {text}; all above 0", all(moved.values())),
        (
            f"contexts of {SESSIONS} sessions: {wanted:.1f} times the device pool, at least {MIN_OVERSUBSCRIPTION:g}",
            wanted >= MIN_OVERSUBSCRIPTION,
        ),
    ]


def _latency(run: SoakRun, limits: Limits) -> list[tuple[str, bool]]:
    end_s = run.began_s + run.seconds
    first = ttfts(run.traffic.answers, run.began_s, run.began_s + limits.window_s)
    last = ttfts(run.traffic.answers, end_s - limits.window_s, end_s)
    checks: list[tuple[str, bool]] = []
    for name, share, limit in (("median", 0.5, limits.median_factor), ("P99", 0.99, limits.p99_factor)):
        before_s, after_s = percentile(first, share), percentile(last, share)
        text = (
            f"{name} time to first token: {after_s:.3f} s in the last {limits.window_s:.0f} s, {before_s:.3f} s in the "
            f"first, at most {limit:g} times"
        )
        checks.append((text, 0 < after_s <= limit * before_s))
    silence_s = longest_silence_s(run.samples)
    text = f"longest time with waiting sequences and no token: {silence_s:.1f} s, under {MAX_SILENCE_S:g}"
    return [*checks, (text, silence_s < MAX_SILENCE_S)]


def _harm(run: SoakRun) -> list[tuple[str, bool]]:
    kills = len(run.harm.kills_s)
    restarts = sum(increase(run.samples, name) for name in names_of(run.samples, "tiercel_engine_restarts_total"))
    text = f"{kills} kills of the engine, {restarts:g} restarts: {run.planned_kills} each"
    checks = [(text, kills == restarts == run.planned_kills)]
    if run.has_full_disk:
        states = [one.metric("tiercel_kv_disk_state.read_only") > 0 for one in run.samples]
        checks.append(("the full disk was noticed: the tier was read-only", any(states)))
        is_later = run.harm.full_s is not None and any(at_s > run.harm.full_s[1] for at_s in run.harm.kills_s)
        if is_later:
            is_on = run.after.metric("tiercel_kv_disk_state.on") > 0
            checks.append(("the engine that started after the full disk writes again", is_on))
    return checks
