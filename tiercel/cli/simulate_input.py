"""The workload of `tiercel simulate`, from a workload file, a recorded trace or flags."""

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import yaml
from msgspec import Struct

from tiercel.cli.simulate_flags import SimulateFlags
from tiercel.loadtest.load.arrivals import due_times
from tiercel.loadtest.load.datasets.burstgpt import answered_rows
from tiercel.loadtest.load.datasets.timed_trace import BLOCK_TOKENS, timed_lines
from tiercel.loadtest.load.mix import ArrivalSettings
from tiercel.scheduler.cost import StepTimes
from tiercel.simulation.fitting import Corrections
from tiercel.simulation.workload import (
    Lengths,
    PromptPart,
    SimRequest,
    Sources,
    Workload,
    deal_to_tenants,
    draw_requests,
    ordered_workload,
)
from tiercel.values.errors import ConfigError
from tiercel.values.ids import TenantId
from tiercel.values.tenant import Slo, TenantShare


class SimTenant(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant of a workload file, or `count` equal tenants."""

    name: str
    count: int = 1  # name-0, name-1, ...
    weight: float = 1.0
    band: int = 0
    group: str | None = None
    slo: Slo = Slo()
    arrivals: ArrivalSettings = msgspec.field(default_factory=lambda: ArrivalSettings(process="poisson", rate=1.0))
    lengths: Lengths = Lengths()

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 < self.weight < float("inf") or self.arrivals.process not in _DRAWN:
            raise ValueError(f"count is at least 1, weight above 0, the process one of {', '.join(_DRAWN)}")


class SimMix(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A workload file."""

    tenants: tuple[SimTenant, ...]


_DRAWN = ("constant", "poisson", "gamma", "on_off", "markov", "ramp_linear", "ramp_exponential")


def uniform_workload(flags: SimulateFlags) -> Workload:
    """Return the workload of equal tenants, each with its share of the rate."""
    parts = [(number + 1) ** -flags.skew for number in range(flags.tenants)]
    lengths = _lengths(flags)
    tenants = [
        SimTenant(
            name=f"tenant-{number}",
            arrivals=ArrivalSettings(
                process=flags.arrivals, rate=flags.rate * part / sum(parts), burstiness=flags.burstiness
            ),
            lengths=lengths,
        )
        for number, part in enumerate(parts)
    ]
    return _draw(tenants, flags)


def read_workload_file(path: Path, flags: SimulateFlags) -> Workload:
    """Return the workload in a YAML file of tenants. Errors: ConfigError."""
    try:
        mix = msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), SimMix)
    except OSError as exc:
        raise ConfigError("simulate.workload", f"--workload {path}: {exc.strerror}") from exc
    except (yaml.YAMLError, UnicodeDecodeError, msgspec.ValidationError) as exc:
        raise ConfigError("simulate.workload", f"--workload {path}: {' '.join(str(exc).split())}") from exc
    names = [name for tenant in mix.tenants for name in _names(tenant)]
    if not names or len(set(names)) < len(names):
        raise ConfigError("simulate.workload", f"--workload {path}: expected at least one tenant, with unique names")
    return _draw(mix.tenants, flags)


def trace_workload(path: Path, flags: SimulateFlags) -> Workload:
    """Return the workload of a recorded trace, its requests distributed over tenants. Errors: ConfigError."""
    requests = _mooncake(path, flags) if flags.trace_format == "mooncake" else _burstgpt(path, flags)
    first_s = min((request.at_s for request in requests), default=0.0)
    moved = [msgspec.structs.replace(one, at_s=(one.at_s - first_s) / flags.speed) for one in requests]
    due = [request for request in moved if request.at_s < flags.duration]
    # Requests of a trace share the blocks with equal hashes, across tenants.
    shares = [TenantShare(name=TenantId(f"tenant-{number}"), group="trace") for number in range(flags.tenants)]
    return ordered_workload(shares, deal_to_tenants(due, shares, flags.skew, random.Random(f"{flags.seed}/deal")))  # noqa: S311 - no secrets


def read_step_times(path: Path) -> StepTimes:
    """Return the step times in a file that the engine wrote. Errors: ConfigError."""
    # lazy: numpy, which nothing else here needs
    from tiercel.engine.measure.step_grid import GridLimits, StepGrid
    from tiercel.engine.measure.stored_times import StoredTimes

    try:
        stored = msgspec.json.decode(path.read_bytes(), type=StoredTimes)
    except OSError as exc:
        raise ConfigError("simulate.step_times", f"--step-times {path}: {exc.strerror}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError("simulate.step_times", f"--step-times {path}: {exc}") from exc
    if not stored.times:
        raise ConfigError("simulate.step_times", f"--step-times {path}: the file has no times")
    prefill = max(time.prefill_tokens for time in stored.times)
    decodes = max(time.decodes for time in stored.times)
    context = max(time.context_tokens for time in stored.times)
    grid = StepGrid(
        GridLimits(
            max_num_seqs=max(decodes, 1),
            step_tokens=max(prefill, 1),
            max_model_len=max(context, prefill + 1, 2),
            kv_tokens=max(context, 1),
        )
    )
    known = stored.on_grid(grid)
    if not known:
        raise ConfigError("simulate.step_times", f"--step-times {path}: no point of the file is on a grid of its size")
    return grid.table(known)


def read_corrections(path: Path) -> Corrections:
    """Return the corrections that `benchmarks/simulated.py` measured on a real server. Errors: ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Corrections)
    except OSError as exc:
        raise ConfigError("simulate.calibration", f"--calibration {path}: {exc.strerror}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError("simulate.calibration", f"--calibration {path}: {exc}") from exc


def _draw(tenants: Sequence[SimTenant], flags: SimulateFlags) -> Workload:
    sources = Sources()
    shares: list[TenantShare] = []
    requests: list[SimRequest] = []
    for tenant in tenants:
        for name in _names(tenant):
            share = TenantShare(
                name=TenantId(name), weight=tenant.weight, band=tenant.band, slo=tenant.slo, group=tenant.group
            )
            rng = random.Random(f"{flags.seed}/{name}")  # noqa: S311 - arrivals, not secrets
            times = _times(tenant.arrivals, flags.duration, rng)
            shares.append(share)
            requests += draw_requests(share, times, tenant.lengths, rng, sources)
    return ordered_workload(shares, requests)


def _times(settings: ArrivalSettings, duration_s: float, rng: random.Random) -> list[float]:
    """Return the arrival times of one tenant within the duration.

    `due_times` draws a fixed number of arrivals. To make the number within the duration random, more are drawn than
    are expected, and those after the duration are dropped.
    """
    rate = settings.rate or max(settings.start_rate or 0.0, settings.end_rate or 0.0)
    if settings.process.startswith("ramp"):
        rate = ((settings.start_rate or 0.0) + (settings.end_rate or 0.0)) / 2
        return [at_s for at_s in due_times(settings, max(1, round(rate * duration_s)), rng) if at_s < duration_s]
    count = int(2 * rate * duration_s) + 20
    return [at_s for at_s in due_times(settings, count, rng) if at_s < duration_s]


def _names(tenant: SimTenant) -> list[str]:
    return [tenant.name] if tenant.count == 1 else [f"{tenant.name}-{number}" for number in range(tenant.count)]


def _lengths(flags: SimulateFlags) -> Lengths:
    return Lengths(
        input_len=flags.input_len,
        output_len=flags.output_len,
        sigma=flags.sigma,
        prefix_len=flags.prefix_len,
        num_prefixes=flags.num_prefixes,
    )


def _mooncake(path: Path, flags: SimulateFlags) -> list[SimRequest]:
    """Return the requests of a Mooncake trace: blocks of 512 tokens by id; a shorter last block is not shared."""
    sources = Sources()
    requests: list[SimRequest] = []
    for line in timed_lines(path, flags.most_requests):
        whole = line.hash_ids[: line.input_length // BLOCK_TOKENS]
        parts = [PromptPart(sources.named(f"block {block}"), BLOCK_TOKENS) for block in whole]
        left = max(1, line.input_length) - BLOCK_TOKENS * len(whole)
        if left:
            parts.append(PromptPart(sources.new(), left))
        requests.append(SimRequest(line.timestamp / 1e3, TenantId(""), tuple(parts), max(1, line.output_length)))
    return requests


def _burstgpt(path: Path, flags: SimulateFlags) -> list[SimRequest]:
    sources = Sources()
    return [
        SimRequest(row.at_s or 0.0, TenantId(""), (PromptPart(sources.new(), row.input_tokens),), row.output_tokens)
        for row in answered_rows(path)[: flags.most_requests]
    ]
