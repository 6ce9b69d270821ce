"""An invented run: three tenants of which one floods, readings of every metric, and all requests."""

import random
from collections.abc import Sequence

import msgspec

from tiercel.loadtest.results.distribution import figures, quantiles
from tiercel.loadtest.results.latency import latencies
from tiercel.loadtest.results.record import (
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
from tiercel.loadtest.results.timeline import service_by_step, timeline

DURATION_S = 60
WEIGHTS = {"interactive": 3.0, "batch": 1.0, "nightly <reports>": 1.0}


def example_run(*, seed: int = 7, slower: float = 1.0, num_requests: int = 300, is_detailed: bool = True) -> RunResult:
    """Return a complete result. `slower` is a factor on every latency."""
    draw = random.Random(seed)
    records = [_record(index, num_requests, draw, slower) for index in range(num_requests)]
    tenants = [_tenant(name, [record for record in records if record.tenant == name], draw) for name in WEIGHTS]
    tokens = sum(record.output_tokens for record in records)
    good = [record for record in records if record.error is None]
    values = latencies(records)
    return RunResult(
        date="2026-03-14T09:26:53Z", backend="openai", label=None, model_id="small-model", tokenizer_id=None,
        num_prompts=num_requests, request_rate=5.0, burstiness=1.0, max_concurrency=None, duration=float(DURATION_S),
        completed=len(good), failed=len(records) - len(good), total_input_tokens=300 * num_requests,
        total_output_tokens=tokens, request_throughput=len(good) / DURATION_S, request_goodput=4.2,
        output_throughput=tokens / DURATION_S, total_token_throughput=(tokens + 300 * num_requests) / DURATION_S,
        max_output_tokens_per_s=tokens / DURATION_S * 1.6, max_concurrent_requests=31,
        command=["tiercel", "bench", "serve", "--tenants", "mix.yaml", "--request-rate", "5", "--seed", f"{seed}"],
        seed=seed, versions={"tiercel": "0.1.0", "python": "3.11.9"},
        machine={"processor": "a fast one", "cores": "8", "memory": "32.0 GiB"}, settings={"request-rate": 5.0},
        goals=Goals(ttft=500, tpot=60), dataset="random: 300 tokens in, 40 out", arrivals="Poisson, 5 requests/s",
        notes=["Lengths of prompts were estimated: the server has no /tokenize."], errors={"503 overloaded": 3},
        client=ClientLoad(
            processes=1, cores=8, cpu_s=9.5, busiest_share=0.16, chunks=tokens, chunks_per_s=tokens / DURATION_S,
            peak_chunks_per_s=tokens / DURATION_S * 1.6, lag_p99_ms=1.8, lag_max_ms=7.2, late_sends=0, saturated=False,
        ),
        timeline=timeline(records, DURATION_S, 1.0), quantiles=quantiles(values), tenants=tenants,
        fairness=Fairness(
            jain_index=0.987, jain_index_whole_run=0.91, contended_s=44.0, largest_gap_s=2.4,
            largest_gap_tenant="batch", largest_difference_tokens=1830.0,
        ),
        isolation=[Isolation(
            tenant="interactive", alone={"p99_ttft_ms": 210.0}, together={"p99_ttft_ms": 480.0},
            ratios={"p99_ttft_ms": 2.29, "p99_itl_ms": 1.4},
        )],
        counters={
            "vllm:num_preemptions_total": Counter(3, 21), "vllm:generation_tokens_total": Counter(0, tokens),
            'tiercel_kv_transfer_bytes_total{route="hbm_ddr"}': Counter(0, 6e9),
            'tiercel_kv_transfer_seconds_total{route="hbm_ddr"}': Counter(1, 4),
        },
        samples=[_sample(at_s, draw) for at_s in range(DURATION_S + 1)], requests=records if is_detailed else [],
        figures=figures(values, (50, 90, 99)),
    )  # fmt: skip


def one_tenant_run(*, seed: int = 3) -> RunResult:
    """Return a plain result without tenants, goals, readings and single requests."""
    whole = example_run(seed=seed, num_requests=60, is_detailed=False)
    (only, *_) = whole.tenants
    return msgspec.structs.replace(
        whole, tenants=[only], fairness=None, isolation=None, samples=[], counters={}, goals=Goals(), notes=[],
        request_goodput=None, errors={}, failed=0,
    )  # fmt: skip


def _record(index: int, num_requests: int, draw: random.Random, slower: float) -> ClientRecord:
    tenant = draw.choices(list(WEIGHTS), [2, 3, 1])[0]
    due_s = index / num_requests * (DURATION_S - 6)
    sent_s = 24.0 if 21 < due_s < 24 else due_s + 0.001  # a stall
    first_s = sent_s + draw.lognormvariate(-2.1, 0.6) * slower * (1 if tenant == "interactive" else 2.5)
    chunks = [first_s]
    for _ in range(39):
        chunks.append(chunks[-1] + draw.lognormvariate(-3.4, 0.35) * slower)
    return ClientRecord(
        index=index, tenant=tenant, due_s=due_s, sent_s=sent_s, first_s=first_s, end_s=chunks[-1] + 0.002,
        chunks_s=tuple(chunks), input_tokens=300, output_tokens=40, wanted_tokens=40, status=200,
        error="503 overloaded" if index % 97 == 50 else None,
    )  # fmt: skip


def _tenant(name: str, records: Sequence[ClientRecord], draw: random.Random) -> TenantResult:
    values = latencies(records)
    service = service_by_step(records, DURATION_S, 1.0)
    return TenantResult(
        name=name, weight=WEIGHTS[name], goals=Goals(ttft=500) if name == "interactive" else Goals(),
        arrivals="Poisson, 2 requests/s", dataset="random: 300 in, 40 out", completed=len(records), failed=0,
        request_goodput=1.5,
        input_tokens=300 * len(records), output_tokens=40 * len(records), service_tokens=sum(service),
        share=len(records) / 300, fair_share=WEIGHTS[name] / sum(WEIGHTS.values()), largest_gap_s=draw.uniform(0.4, 3),
        timeline=timeline(records, DURATION_S, 1.0), service=service, figures=figures(values, (99,)),
        quantiles=quantiles(values), errors={},
    )  # fmt: skip


def _sample(at_s: int, draw: random.Random) -> Sample:
    """Return a sample with the series of a server with three tiers."""
    label = '{model_name="small-model",engine="0"}'
    fill = min(1.0, at_s / 25)
    values = {
        f"vllm:num_requests_running{label}": float(draw.randrange(6, 14)),
        f"vllm:num_requests_waiting{label}": float(draw.randrange(0, 5) if at_s > 20 else 0),
        f"vllm:kv_cache_usage_perc{label}": 0.9 * fill,
        f"vllm:prefix_cache_queries_total{label}": 1000.0 * at_s,
        f"vllm:prefix_cache_hits_total{label}": 7.0 * at_s * at_s,
        f"vllm:num_preemptions_total{label}": float(max(0, at_s - 25) // 2),
    }
    for tier, size in (("hbm", 4e9), ("ddr", 16e9), ("ssd", 64e9)):
        values[f'tiercel_kv_used_bytes{{tier="{tier}"}}'] = size * fill * draw.uniform(0.8, 0.9)
        values[f'tiercel_kv_capacity_bytes{{tier="{tier}"}}'] = size
    for route, speed in (("hbm_ddr", 2.1e8), ("ddr_hbm", 1.4e8), ("ddr_ssd", 0.6e8)):
        values[f'tiercel_kv_transfer_bytes_total{{route="{route}"}}'] = speed * at_s * (1 + at_s / 60)
    for mode, part in (("swap", 0.75), ("recompute", 0.25)):
        key = f'tiercel_preemptions_total{{mode="{mode}"}}'
        values[key] = part * max(0, at_s - 25) // 2
    for name, weight in WEIGHTS.items():
        values[f'tiercel_tenant_weight{{tenant="{name}"}}'] = weight
        values[f'tiercel_tenant_running{{tenant="{name}"}}'] = float(draw.randrange(1, 4))
        values[f'tiercel_tenant_waiting{{tenant="{name}"}}'] = 0.0
        values[f'tiercel_tenant_service_seconds_total{{tenant="{name}"}}'] = weight / 5 * at_s
    return Sample(float(at_s), values)
