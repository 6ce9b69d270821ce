"""The plan of a run, made from flags and tenants: every request of every tenant, with its due time."""

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from tiercel.loadtest.client.assignment import Job, Source
from tiercel.loadtest.load.arrivals import due_times
from tiercel.loadtest.load.datasets.dataset import DatasetQuery
from tiercel.loadtest.load.datasets.registry import conversations
from tiercel.loadtest.load.mix import ArrivalSettings, DatasetSettings, Mix, TenantSettings, read_mix
from tiercel.loadtest.load.tokens import TextMaker
from tiercel.loadtest.results.record import ONLY, Goals
from tiercel.loadtest.settings import BenchSettings, pairs
from tiercel.values.errors import ConfigError

_LEAST_SWEEP_PROMPTS = 20  # of one rate of a sweep
_GOALS = ("ttft", "tpot", "e2el")


class LoadPlan(Struct, frozen=True):
    """The requests of a run."""

    tenants: list[TenantSettings]
    sources: list[Source]
    duration_s: float | None

    @property
    def requests(self) -> int:
        """Number of requests."""
        return sum(len(job.conversation.turns) for source in self.sources for job in source.jobs)

    def only(self, name: str) -> "LoadPlan":
        """Return the plan of one tenant alone."""
        return replace(
            self,
            tenants=[tenant for tenant in self.tenants if tenant.name == name],
            sources=[source for source in self.sources if source.tenant == name],
        )


def mix_of(settings: BenchSettings) -> Mix:
    """Return the tenants of the tenants file, or one tenant made from the flags. Errors: ConfigError."""
    goals = goals_of(settings.goodput)
    try:
        mix = read_mix(Path(settings.tenants)) if settings.tenants else Mix(tenants=[_only_tenant(settings)])
    except ValueError as exc:
        raise ConfigError("bench.flag", str(exc)) from exc
    return replace(
        mix,
        duration_s=settings.duration or mix.duration_s,
        tenants=[_completed(tenant, settings, goals) for tenant in mix.tenants],
    )


def make_plan(mix: Mix, texts: TextMaker, seed: int, headers: Mapping[str, str], words_seed: str = "") -> LoadPlan:
    """Return a plan with arrivals and prompts drawn from the seed and the name of each tenant.

    Another `words_seed` gives other words in prompts of the same lengths at the same times. `headers` are sent with
    every request; the key of a tenant replaces the one in `headers`. Errors: ConfigError.
    """
    sources: list[Source] = []
    first = 0
    for tenant in mix.tenants:
        query = DatasetQuery(tenant.dataset, tenant.num_prompts or 1, f"{seed}/{tenant.name}", texts, words_seed)
        jobs = _jobs(tenant, query, first)
        first += len(jobs)
        own = {"authorization": f"Bearer {tenant.key}"} if tenant.key else {}
        sources.append(
            Source(
                tenant=tenant.name,
                headers={**headers, **own},
                extra_body=tenant.extra_body,
                concurrency=tenant.max_concurrency,
                jobs=jobs,
            )
        )
    return LoadPlan(mix.tenants, sources, mix.duration_s)


def settings_at(settings: BenchSettings, rate: float, step_s: float, number: int) -> BenchSettings:
    """Return the settings of run `number` of a sweep, from 0: one rate, for `step_s`.

    Every run has a seed of its own, so that its prompts are not in the prefix cache. Errors: ConfigError without goals.
    """
    if not settings.goodput:
        raise ConfigError("bench.sweep", "a sweep needs goals: --goodput ttft:500 tpot:60")
    prompts = max(_LEAST_SWEEP_PROMPTS, math.ceil(rate * step_s))
    return replace(settings, request_rate=rate, num_prompts=prompts, seed=settings.seed + number)


def goals_of(words: Sequence[str]) -> Goals:
    """Parse goals such as `ttft:500 tpot:60`, in milliseconds. Errors: ConfigError."""
    goals = Goals()
    for name, value in pairs("--goodput", list(words), ":").items():
        try:
            limit_ms = float(value)
        except ValueError:
            limit_ms = -1.0
        if name not in _GOALS or not limit_ms > 0:
            raise ConfigError("bench.flag", f"--goodput {name}:{value}: write {', '.join(_GOALS)} and milliseconds")
        goals = replace(goals, **{name: limit_ms})
    return goals


def _jobs(tenant: TenantSettings, query: DatasetQuery, first: int) -> list[Job]:
    found = conversations(query)
    if tenant.arrivals.process == "at_once" and tenant.max_concurrency is not None:
        times: Sequence[float | None] = [None] * len(found)
    else:
        rng = random.Random(f"{query.seed}/arrivals")  # noqa: S311 - arrivals, not secrets
        times = due_times(tenant.arrivals, len(found), rng, [conversation.recorded_s for conversation in found])
    if times and tenant.arrivals.process == "trace":
        together = sorted(zip(times, found, strict=True), key=lambda pair: pair[0] or 0.0)
        times, found = [at_s for at_s, _ in together], [conversation for _, conversation in together]
    return [
        Job(first + number, due_s, conversation)
        for number, (due_s, conversation) in enumerate(zip(times, found, strict=True))
    ]


def _completed(tenant: TenantSettings, settings: BenchSettings, goals: Goals) -> TenantSettings:
    dataset = tenant.dataset
    return replace(
        tenant,
        num_prompts=tenant.num_prompts or settings.num_prompts,
        goals=goals if tenant.goals is None else tenant.goals,
        dataset=replace(
            dataset,
            input_len=dataset.input_len if settings.input_len is None else settings.input_len,
            output_len=dataset.output_len if settings.output_len is None else settings.output_len,
        ),
    )


def _only_tenant(settings: BenchSettings) -> TenantSettings:
    return TenantSettings(
        name=ONLY,
        max_concurrency=settings.max_concurrency,
        arrivals=_arrivals(settings),
        dataset=_dataset(settings),
    )


def _arrivals(settings: BenchSettings) -> ArrivalSettings:
    rate = None if settings.request_rate == float("inf") else settings.request_rate
    if settings.ramp_up_strategy is not None:
        return ArrivalSettings(
            process="ramp_linear" if settings.ramp_up_strategy == "linear" else "ramp_exponential",
            burstiness=settings.burstiness,
            start_rate=settings.ramp_up_start_rps,
            end_rate=settings.ramp_up_end_rps,
        )
    process = settings.arrivals
    if process == "auto" and settings.dataset_name == "timed_trace":
        process = "trace"
    if process == "auto":
        process = "at_once" if rate is None else "poisson" if settings.burstiness == 1 else "gamma"
    return ArrivalSettings(
        process=process,
        rate=rate,
        burstiness=settings.burstiness,
        on_s=settings.on_sec,
        off_s=settings.off_sec,
        speed=settings.trace_speed,
    )


def _dataset(settings: BenchSettings) -> DatasetSettings:
    shared = DatasetSettings(
        name="random",
        path=settings.dataset_path,
        input_len=settings.random_input_len,
        output_len=settings.random_output_len,
        range_ratio=settings.random_range_ratio,
        prefix_len=settings.random_prefix_len,
        suffix_len=settings.prefix_repetition_suffix_len,
        num_prefixes=settings.prefix_repetition_num_prefixes,
        turns=settings.multi_turn_num_turns,
        think_s=settings.multi_turn_think_sec,
    )
    name = settings.dataset_name
    match name:
        case "random" | "multi_turn":
            return replace(shared, name=name)
        case "prefix_repetition":
            return replace(
                shared, name=name, input_len=None, prefix_len=settings.prefix_repetition_prefix_len,
                output_len=settings.prefix_repetition_output_len,
            )  # fmt: skip
        case "sonnet":
            return replace(
                shared, name=name, input_len=settings.sonnet_input_len, output_len=settings.sonnet_output_len,
                prefix_len=settings.sonnet_prefix_len,
            )  # fmt: skip
        case "sharegpt" | "burstgpt" | "custom" | "timed_trace":
            by_name = {"sharegpt": settings.sharegpt_output_len, "custom": settings.custom_output_len}
            return replace(shared, name=name, input_len=None, output_len=by_name.get(name))
