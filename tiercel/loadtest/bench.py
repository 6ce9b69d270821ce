"""One load test from flags to result: wait for the server, plan, warm up, run the tenants alone and together."""

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from tiercel.loadtest.client.assignment import Assignment, Progress
from tiercel.loadtest.client.fleet import Fleet, Gathered
from tiercel.loadtest.evaluation import Measured, RunFacts, make_result
from tiercel.loadtest.load.mix import DatasetSettings, Mix, TenantSettings
from tiercel.loadtest.load.tokens import TextMaker
from tiercel.loadtest.machine import cores
from tiercel.loadtest.metrics import metric
from tiercel.loadtest.metrics.scrape import Scraper
from tiercel.loadtest.plan import LoadPlan, make_plan, mix_of
from tiercel.loadtest.results.record import RunResult
from tiercel.loadtest.settings import BenchSettings, pairs
from tiercel.loadtest.target import Target
from tiercel.values.clock import Clock
from tiercel.values.errors import ConfigError, TiercelError

_CHUNKS_PER_PROCESS = 10_000  # chunks per second that a client process reads without being busy
_STREAMS_PER_PROCESS = 1_000
_WARM_INPUT_TOKENS, _WARM_OUTPUT_TOKENS = 512, 16  # at most, of a request for warming up


class Observer(Protocol):
    """Shows the progress of a load test."""

    def stage(self, text: str, requests: int) -> None:
        """A stage with this many requests begins."""
        ...

    def progress(self, progress: Progress) -> None:
        """The counts of the stage have changed."""
        ...


class _BenchRun(Struct, frozen=True):
    """The values that all runs of one load test share."""

    settings: BenchSettings
    plan: LoadPlan
    assignment: Assignment
    workers: int
    clock: Clock


async def run_bench(
    settings: BenchSettings, command: Sequence[str], api_key: str | None, clock: Clock, date: str, observer: Observer
) -> RunResult:
    """Run a load test and return its result. Ctrl-C ends it early; the result then covers the requests so far.

    Errors: ConfigError for flags and files; TiercelError when the server does not answer or a client process dies.
    """
    settings.check()
    mix = mix_of(settings)
    body = _body(settings)
    headers = _headers(settings, api_key or next((tenant.key for tenant in mix.tenants if tenant.key), None))
    async with Target(settings, headers, clock) as target:
        observer.stage(f"waiting for {settings.root_url}", 0)
        model = await target.model()
        small = {**body, "model": model, "max_tokens": 1, "stream": False} | _small_prompt(settings)
        small.pop("stream_options", None)
        await target.wait_ready(small)
        counter = await target.counter(model, small)
        observer.stage("making prompts", 0)
        texts = TextMaker(counter)
        plan = await asyncio.to_thread(make_plan, mix, texts, settings.seed, headers)
        prepared = _BenchRun(
            settings, plan, _assignment(settings, plan, {**body, "model": model}), _workers(settings, plan), clock
        )
        await _warm_up(prepared, texts, headers, observer)
        alone = await _each_alone(prepared, mix, texts, headers, target, observer) if settings.isolation else {}
        async with _profiled(target) if settings.profile else nullcontext():
            measured = await _measure(prepared, plan, target, observer, "")
        facts = RunFacts(
            command=list(command), date=date, model=model, tokens_by=counter.source,
            are_lengths_exact=counter.is_exact, server_version=await target.server_version(), cores=cores(),
        )  # fmt: skip
    return make_result(settings, plan, facts, measured, alone)


async def _each_alone(
    prepared: _BenchRun, mix: Mix, texts: TextMaker, headers: Mapping[str, str], target: Target, observer: Observer
) -> dict[str, Measured]:
    """Run each tenant that is no aggressor alone, with prompts that the run together does not repeat."""
    found: dict[str, Measured] = {}
    plan = await asyncio.to_thread(make_plan, mix, texts, prepared.settings.seed, headers, "alone")
    for tenant in plan.tenants:
        if not tenant.aggressor:
            found[tenant.name] = await _measure(prepared, plan.only(tenant.name), target, observer, "alone: ")
            if found[tenant.name].is_stopped:
                raise TiercelError("bench.stopped", "stopped before the tenants ran together")
    return found


async def _measure(prepared: _BenchRun, plan: LoadPlan, target: Target, observer: Observer, title: str) -> Measured:
    """Run a plan once, reading the server's metrics."""
    names = ", ".join(tenant.name for tenant in plan.tenants)
    observer.stage(f"{title}{names}" if len(prepared.plan.tenants) > 1 else "running", plan.requests)
    scraper = Scraper(target.client, metric.PAGE, prepared.clock)
    assignment = replace(prepared.assignment, sources=plan.sources)
    fleet = Fleet(assignment, prepared.workers, prepared.clock, observer.progress)
    async with scraper.open():
        gathered, is_stopped = await _until_interrupted(fleet, scraper)
    return Measured(gathered.records, gathered.loads, scraper.counters(), scraper.samples, is_stopped)


async def _until_interrupted(fleet: Fleet, scraper: Scraper) -> tuple[Gathered, bool]:
    loop = asyncio.get_running_loop()
    running = asyncio.ensure_future(fleet.run(scraper.begin))
    interrupted = asyncio.Event()
    with suppress(RuntimeError, ValueError):  # only the main thread can handle signals
        loop.add_signal_handler(signal.SIGINT, interrupted.set)
    watching = asyncio.ensure_future(interrupted.wait())
    try:
        await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
        if interrupted.is_set() and not running.done():
            await fleet.stop()
        return await running, interrupted.is_set()
    finally:
        watching.cancel()
        with suppress(RuntimeError, ValueError):
            loop.remove_signal_handler(signal.SIGINT)


async def _warm_up(prepared: _BenchRun, texts: TextMaker, headers: Mapping[str, str], observer: Observer) -> None:
    """Send short requests of the first tenant with words that the run does not use.

    Errors: TiercelError when all of them fail.
    """
    settings = prepared.settings
    if settings.num_warmups < 1:
        return
    observer.stage("warming up", settings.num_warmups)
    first = prepared.plan.sources[0].jobs[0].conversation.turns[0]
    like = TenantSettings(
        name=prepared.plan.tenants[0].name,
        key=prepared.plan.tenants[0].key,
        num_prompts=settings.num_warmups,
        max_concurrency=2,
        dataset=DatasetSettings(
            input_len=min(max(first.input_tokens, 1), _WARM_INPUT_TOKENS),
            output_len=min(first.output_tokens, _WARM_OUTPUT_TOKENS),
        ),
    )
    plan = await asyncio.to_thread(make_plan, Mix(tenants=[like]), texts, settings.seed, headers, "warm-up")
    assignment = replace(prepared.assignment, sources=plan.sources, stop_sending_s=None)
    gathered = await Fleet(assignment, 1, prepared.clock, observer.progress).run(lambda _start_s: None)
    errors = [record.error for record in gathered.records if record.error is not None]
    if errors and len(errors) == len(gathered.records):
        raise TiercelError("bench.warm_up", f"every warm-up request failed: {errors[0]}")


@asynccontextmanager
async def _profiled(target: Target) -> AsyncIterator[None]:
    await target.post("/start_profile")
    try:
        yield
    finally:
        await target.post("/stop_profile")


def _assignment(settings: BenchSettings, plan: LoadPlan, body: dict[str, object]) -> Assignment:
    return Assignment(
        worker=0,
        workers=1,
        url=f"{settings.root_url}{settings.path}",
        is_chat=settings.is_chat,
        is_stream=not settings.no_stream,
        verify=not settings.insecure,
        body=body,
        sources=plan.sources,
        counters="",
        request_id_prefix=settings.request_id_prefix,
        stop_sending_s=plan.duration_s,
        timeout_s=settings.request_timeout_sec,
        keep_text=settings.save_detailed,
    )


def _workers(settings: BenchSettings, plan: LoadPlan) -> int:
    """Return the number of client processes: what the load needs, at most one for each core.

    With a server on the same machine at most half of the cores are used.
    """
    if settings.client_processes != "auto":
        return int(settings.client_processes)
    chunks_per_s = 0.0
    streams = 0
    for tenant, source in zip(plan.tenants, plan.sources, strict=True):
        turns = [turn for job in source.jobs for turn in job.conversation.turns]
        rate = tenant.arrivals.rate or tenant.arrivals.end_rate
        if rate is not None:
            chunks_per_s += rate * sum(turn.output_tokens for turn in turns) / max(1, len(source.jobs))
        else:
            streams += min(source.concurrency or len(source.jobs), len(source.jobs))
    is_local = any(name in settings.root_url for name in ("//127.", "//localhost", "//[::1]"))
    most = max(1, cores() // 2) if is_local else cores()
    wanted = chunks_per_s / _CHUNKS_PER_PROCESS + streams / _STREAMS_PER_PROCESS
    return max(1, min(most, round(wanted + 0.5)))


def _body(settings: BenchSettings) -> dict[str, object]:
    """Return the fields of every request. None removes a field. Errors: ConfigError."""
    fields: dict[str, object] = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "stream": not settings.no_stream,
    }
    if not settings.no_stream:
        fields["stream_options"] = {"include_usage": True}
    if settings.ignore_eos:
        fields["ignore_eos"] = True
    if settings.logprobs is not None:
        chat_fields: dict[str, object] = {"logprobs": True, "top_logprobs": settings.logprobs}
        fields |= chat_fields if settings.is_chat else {"logprobs": settings.logprobs}
    if settings.extra_body is not None:
        try:
            fields |= msgspec.json.decode(settings.extra_body, type=dict[str, object])
        except msgspec.MsgspecError as exc:
            raise ConfigError("bench.flag", f"--extra-body is not a JSON object: {exc}") from exc
    return fields


def _headers(settings: BenchSettings, key: str | None) -> Mapping[str, str]:
    headers = {name.lower(): value for name, value in pairs("--header", settings.header, "=").items()}
    return {**headers, "authorization": f"Bearer {key}"} if key else headers


def _small_prompt(settings: BenchSettings) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "hello"}]} if settings.is_chat else {"prompt": "hello"}
