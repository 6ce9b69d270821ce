"""Evaluation of a run: records and readings to a `RunResult`."""

from collections import Counter as Tally
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from tiercel.loadtest.client.assignment import Load
from tiercel.loadtest.client.client_load import client_load
from tiercel.loadtest.load.mix import TenantSettings
from tiercel.loadtest.machine import machine_facts, versions
from tiercel.loadtest.plan import LoadPlan, goals_of
from tiercel.loadtest.results.distribution import Latencies, figures, quantiles
from tiercel.loadtest.results.fairness import contended, fairness, service_within
from tiercel.loadtest.results.latency import has_goals, is_good, latencies
from tiercel.loadtest.results.record import (
    STOPPED,
    ClientLoad,
    ClientRecord,
    Counter,
    Fairness,
    Goals,
    Isolation,
    RunResult,
    Sample,
    TenantResult,
)
from tiercel.loadtest.results.service_tokens import Interval, largest_gap_s, service_pieces
from tiercel.loadtest.results.timeline import (
    peak_output_tokens_per_s,
    peak_running,
    service_by_step,
    step_for,
    timeline,
)
from tiercel.loadtest.settings import BenchSettings, pairs, percentiles

_SECRET_SETTINGS = {"api_key", "header"}
_MOST_REASONS = 20  # reasons of failures that are listed
_ISOLATION_LATENCIES = ("ttft", "tpot", "itl", "e2el")


class Measured(Struct, frozen=True):
    """The measurements of one run."""

    records: list[ClientRecord]
    loads: list[Load]
    counters: dict[str, Counter]
    samples: list[Sample]
    is_stopped: bool


class RunFacts(Struct, frozen=True, kw_only=True):
    """Facts about a run that its result includes."""

    command: list[str]
    date: str
    model: str
    tokens_by: str  # what counted the tokens of prompts
    are_lengths_exact: bool
    server_version: str | None
    cores: int


def make_result(
    settings: BenchSettings, plan: LoadPlan, facts: RunFacts, measured: Measured, alone: Mapping[str, Measured]
) -> RunResult:
    """Return the result of a run. `alone` has the runs of single tenants. --save-detailed keeps the records."""
    records = measured.records
    good = [record for record in records if record.error is None]
    duration_s = max((record.end_s for record in records), default=0.0) or 1e-9
    ranks = percentiles(settings.metric_percentiles)
    values = latencies(records)
    goals_by_tenant = {tenant.name: tenant.goals or Goals() for tenant in plan.tenants}
    kept = sum(is_good(record, goals_by_tenant[record.tenant]) for record in good)
    inputs, outputs = sum(record.input_tokens for record in good), sum(record.output_tokens for record in good)
    client = client_load(measured.loads, len(records), duration_s, facts.cores)
    by_tenant = {tenant.name: [record for record in records if record.tenant == tenant.name] for tenant in plan.tenants}
    tenants = _tenants(plan, by_tenant, duration_s, ranks)
    return RunResult(
        date=facts.date,
        backend=settings.backend,
        label=settings.label,
        model_id=facts.model,
        tokenizer_id=settings.tokenizer,
        num_prompts=plan.requests,
        request_rate="inf" if settings.request_rate == float("inf") else settings.request_rate,
        burstiness=settings.burstiness,
        max_concurrency=settings.max_concurrency,
        duration=duration_s,
        completed=len(good),
        failed=len(records) - len(good),
        total_input_tokens=inputs,
        total_output_tokens=outputs,
        request_throughput=len(good) / duration_s,
        request_goodput=kept / duration_s if any(map(has_goals, goals_by_tenant.values())) else None,
        output_throughput=outputs / duration_s,
        total_token_throughput=(inputs + outputs) / duration_s,
        max_output_tokens_per_s=peak_output_tokens_per_s(records, duration_s),
        max_concurrent_requests=peak_running(records),
        command=facts.command,
        seed=settings.seed,
        versions=versions() | ({"server": facts.server_version} if facts.server_version else {}),
        machine=machine_facts(),
        settings=_settings_without_keys(settings, plan),
        goals=goals_of(settings.goodput),
        dataset="; ".join(dict.fromkeys(tenant.dataset.in_words() for tenant in plan.tenants)),
        arrivals="; ".join(dict.fromkeys(_arrivals_in_words(tenant) for tenant in plan.tenants)),
        notes=_notes(plan, facts, measured, client, is_isolation=settings.isolation),
        errors=_reasons(records),
        client=client,
        timeline=timeline(records, duration_s, step_for(duration_s)),
        quantiles=quantiles(values),
        tenants=tenants,
        fairness=_fairness(plan, by_tenant),
        isolation=_isolation(by_tenant, alone, ranks) if settings.isolation else None,
        counters=measured.counters,
        samples=measured.samples,
        requests=records if settings.save_detailed else [],
        figures=figures(values, ranks),
        metadata=pairs("--metadata", settings.metadata, "="),
    )


def _tenants(
    plan: LoadPlan, by_tenant: Mapping[str, Sequence[ClientRecord]], duration_s: float, ranks: Sequence[float]
) -> list[TenantResult]:
    whole: list[Interval] = [(float("-inf"), float("inf"))]
    shared = (contended(by_tenant) if len(by_tenant) > 1 else []) or whole
    service = {name: service_within(records, shared) for name, records in by_tenant.items()}
    all_service, weights = sum(service.values()), sum(tenant.weight for tenant in plan.tenants)
    return [
        _tenant(
            tenant,
            by_tenant[tenant.name],
            duration_s,
            ranks,
            share=service[tenant.name] / all_service if all_service else 0.0,
            fair_share=tenant.weight / weights,
        )
        for tenant in plan.tenants
    ]


def _tenant(
    tenant: TenantSettings,
    records: Sequence[ClientRecord],
    duration_s: float,
    ranks: Sequence[float],
    *,
    share: float,
    fair_share: float,
) -> TenantResult:
    good = [record for record in records if record.error is None]
    values: Latencies = latencies(records)
    goals = tenant.goals or Goals()
    step_s = step_for(duration_s)
    return TenantResult(
        name=tenant.name,
        weight=tenant.weight,
        goals=goals,
        arrivals=_arrivals_in_words(tenant),
        is_timed=tenant.arrivals.process != "at_once",
        dataset=tenant.dataset.in_words(),
        completed=len(good),
        failed=len(records) - len(good),
        input_tokens=sum(record.input_tokens for record in good),
        output_tokens=sum(record.output_tokens for record in good),
        request_goodput=sum(is_good(record, goals) for record in good) / duration_s if has_goals(goals) else None,
        service_tokens=sum(tokens for record in records for _, tokens in service_pieces(record)),
        share=share,
        fair_share=fair_share,
        largest_gap_s=largest_gap_s(records),
        timeline=timeline(records, duration_s, step_s),
        service=service_by_step(records, duration_s, step_s),
        figures=figures(values, ranks),
        quantiles=quantiles(values),
        errors=_reasons(records),
    )


def _fairness(plan: LoadPlan, by_tenant: Mapping[str, Sequence[ClientRecord]]) -> Fairness | None:
    if len(by_tenant) < 2:
        return None
    return fairness(by_tenant, {tenant.name: tenant.weight for tenant in plan.tenants})


def _isolation(
    by_tenant: Mapping[str, Sequence[ClientRecord]], alone: Mapping[str, Measured], ranks: Sequence[float]
) -> list[Isolation]:
    found: list[Isolation] = []
    for name, measured in alone.items():
        before = figures(latencies(measured.records), ranks)
        together = figures(latencies(by_tenant[name]), ranks)
        ratios = {
            key: after / value
            for key, value in before.items()
            if key.split("_")[1] in _ISOLATION_LATENCIES
            and not key.startswith("std_")
            and value
            and (after := together[key]) is not None
        }
        found.append(Isolation(tenant=name, alone=before, together=together, ratios=ratios))
    return found


def _notes(plan: LoadPlan, facts: RunFacts, measured: Measured, client: ClientLoad, *, is_isolation: bool) -> list[str]:
    notes: list[str] = []
    if client.saturated:
        notes.append(f"THE CLIENT IS SATURATED: {client.reason}; the latencies include waits in the client")
    if not facts.are_lengths_exact:
        notes.append(f"prompt lengths are not exact: {facts.tokens_by}")
    uncounted = sum(load.uncounted for load in measured.loads)
    if uncounted:
        notes.append(f"the server reports no usage in {uncounted} answers: their chunks are counted as tokens")
    repeated = [tenant.name for tenant in plan.tenants if tenant.dataset.has_own_texts and not tenant.aggressor]
    if is_isolation and repeated:
        notes.append(f"{', '.join(repeated)}: the same texts alone and together; a prefix cache helps the second run")
    if measured.is_stopped:
        notes.append(STOPPED)
    short = sum(record.output_tokens < record.wanted_tokens for record in measured.records if record.error is None)
    if short:
        notes.append(f"{short} answers are shorter than asked for (--ignore-eos asks the server not to end early)")
    unsent = plan.requests - len(measured.records)
    if unsent and not measured.is_stopped:
        notes.append(f"{unsent} planned requests were not sent: the time was up, or a turn before them failed")
    return notes


def _reasons(records: Sequence[ClientRecord]) -> dict[str, int]:
    """Return the failed requests by reason, the most frequent first; rare reasons are counted together."""
    tally = Tally(record.error for record in records if record.error is not None)
    most = dict(tally.most_common(_MOST_REASONS))
    others = tally.total() - sum(most.values())
    return most | ({"other reasons": others} if others else {})


def _arrivals_in_words(tenant: TenantSettings) -> str:
    words = tenant.arrivals.in_words()
    if tenant.max_concurrency is None:
        return words
    if tenant.arrivals.process == "at_once":
        return f"closed loop of {tenant.max_concurrency}"
    return f"{words}, at most {tenant.max_concurrency} at a time"


def _settings_without_keys(settings: BenchSettings, plan: LoadPlan) -> dict[str, object]:
    """Return every flag and the tenants, without API keys."""
    flags: dict[str, object] = {
        name: "inf" if value == float("inf") else value
        for name, value in msgspec.structs.asdict(settings).items()
        if name not in _SECRET_SETTINGS
    }
    tenants = [
        {name: value for name, value in msgspec.to_builtins(tenant).items() if name != "key"} for tenant in plan.tenants
    ]
    return flags | {"tenants_file": settings.tenants, "tenants": tenants if settings.tenants else []}
