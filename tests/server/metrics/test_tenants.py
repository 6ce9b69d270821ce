"""Metrics of tenants: few lines per tenant, and only for tenants with requests."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tiercel.server.client.collector import Mailbox
from tiercel.server.client.sequences import SequenceFacts, SequenceStart
from tiercel.server.metrics.tenants import TenantMetrics, oldest_waits
from tiercel.server.tenancy.tenants import Tenant, TenantTable, make_table
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.outcome import FairGauges, Finished, FinishReason, Gauges, PreemptionCount, TenantGauges
from tiercel.values.request import SamplingParams
from tiercel.values.tenant import Slo, TenantShare

ANNA = TenantId("anna")
Found = dict[tuple[str, str], float]


def _table(*names: str, slo: Slo | None = None) -> TenantTable:
    tenants = [Tenant(TenantShare(name=TenantId(name), slo=slo or Slo())) for name in names]
    return make_table(tenants, version=1, source="file", admin_digests=())


def _metrics(*names: str, slo: Slo | None = None) -> TenantMetrics:
    metrics = TenantMetrics()
    metrics.set_table(_table(*names, slo=slo))
    return metrics


def _facts(name: str = ANNA) -> SequenceFacts:
    start = SequenceStart(prompt=b"", num_prompt=5, params=SamplingParams(max_tokens=8), n=1, tenant=TenantId(name))
    return SequenceFacts(start, 0, Mailbox(), 10.0)


def _finished(**fields: int) -> Finished:
    return Finished(
        seq=SeqId(1), reason=FinishReason.STOP, num_prompt=5, num_outputs=2, num_cached=0, queued_s=0.5, **fields
    )


def _told(name: str, **fields: object) -> TenantGauges:
    reasons = (PreemptionCount("band", "swap", 2), PreemptionCount("debt", "recompute", 1))
    return TenantGauges(tenant=TenantId(name), service_s=1.5, starving_s=0.25, preemptions=reasons)


def _samples(metrics: TenantMetrics, *, has_detail: bool = False) -> Found:
    """Values by name and the label that is not the tenant."""
    text = metrics.exposition(has_detail=has_detail)
    return {
        (
            sample.name,
            "/".join(value for label, value in sorted(sample.labels.items()) if label != "tenant"),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_thousand_tenants_have_ten_lines_each_and_those_not_seen_have_none() -> None:
    names = [f"t{index}" for index in range(1000)]
    metrics = _metrics(*names)
    for name in names[:600]:
        metrics.on_first_token(_facts(name), 11.0)
        metrics.on_finished(_facts(name), _finished())
        for reason in ("requests", "tokens", "concurrency", "queue_share", "deadline"):
            metrics.on_throttled(TenantId(name), reason)
    metrics.on_step(Gauges(fair=FairGauges(tenants=tuple(_told(name) for name in names[:600]))))
    lines = [line for line in metrics.exposition().splitlines() if not line.startswith("#")]
    by_tenant = {name: sum(f'tenant="{name}"' in line for line in lines) for name in ("t0", "t599", "t600", "t999")}
    assert by_tenant == {"t0": 10, "t599": 10, "t600": 0, "t999": 0}
    assert sum('tenant="' in line for line in lines) == 6000


def test_the_output_and_cost_of_a_tenant_are_exported() -> None:
    metrics = _metrics(ANNA)
    metrics.open(lambda _name: (1, 2), dict)
    facts = _facts()
    metrics.on_first_token(facts, 10.3)
    metrics.on_tokens(facts.start.tenant, 1, 0.1)
    metrics.on_finished(facts, _finished(swapped_tokens=7, recomputed_tokens=3))
    metrics.on_throttled(ANNA, "tokens")
    metrics.on_throttled(ANNA, "requests")
    metrics.on_step(Gauges(fair=FairGauges(tenants=(_told(ANNA),))))
    found = {name.removeprefix("tiercel_tenant_"): value for (name, _), value in _samples(metrics).items()}
    expected = {
        "weight": 1,
        "prompt_tokens_total": 5,
        "generation_tokens_total": 2,
        "queue_seconds_total": 0.5,
        "service_seconds_total": 1.5,
        "starvation_age_seconds": 0.25,
        "throttled_total": 2,
        "preemptions_total": 3,
        "ttft_seconds_sum": pytest.approx(0.3),
        "ttft_seconds_count": 1,
    }
    assert {name: found[name] for name in expected} == expected
    assert "running" not in found
    detail = _samples(metrics, has_detail=True)
    for (name, label), value in {
        ("running", ""): 1,
        ("waiting", ""): 2,
        ("swapped_tokens_total", ""): 7,
        ("recomputed_tokens_total", ""): 3,
        ("throttled_by_reason_total", "tokens"): 1,
        ("preemptions_by_reason_total", "swap/band"): 2,
        ("preemptions_by_reason_total", "recompute/debt"): 1,
        ("ttft_seconds_bucket", "0.1"): 0,
        ("ttft_seconds_bucket", "0.5"): 1,
        ("ttft_seconds_bucket", "+Inf"): 1,
        ("ttft_seconds_count", ""): 1,
    }.items():
        assert detail[f"tiercel_tenant_{name}", label] == value, (name, label)


def test_a_tenant_that_has_only_waited_has_a_starvation_age_only() -> None:
    metrics = _metrics(ANNA, "berta", "idle")
    metrics.open(lambda _name: (0, 1), lambda: {ANNA: 130.0, TenantId("gone"): 9.0})
    text = metrics.exposition()
    assert 'tiercel_tenant_starvation_age_seconds{tenant="anna"} 130.0' in text  # policies but `fair` tell nothing
    assert 'tiercel_tenant_ttft_seconds_count{tenant="anna"} 0' in text
    reported = tuple(
        TenantGauges(tenant=TenantId(name), starving_s=age) for name, age in ((ANNA, 0.0), ("berta", 150.0))
    )
    metrics.on_step(Gauges(fair=FairGauges(tenants=reported)))
    text = metrics.exposition()
    assert 'tiercel_tenant_starvation_age_seconds{tenant="anna"} 0.0' in text, "its prompt is being computed"
    assert 'tiercel_tenant_starvation_age_seconds{tenant="berta"} 150.0' in text
    assert "idle" not in text
    assert "gone" not in text


def test_the_wait_is_that_of_the_oldest_connected_request_without_a_token() -> None:
    books = [_facts() for _ in range(4)]
    for facts, arrival_s in zip(books, (1.0, 2.0, 3.0, 4.0), strict=True):
        facts.arrival_s = arrival_s
    books[0].first_token_s = 5.0
    books[1].mailbox = None
    assert oldest_waits([*books, _facts("berta")], 12.0) == {ANNA: 9.0, "berta": 2.0}


def test_a_removed_tenant_disappears_from_the_exposition() -> None:
    metrics = _metrics(ANNA, "berta")
    metrics.on_first_token(_facts(), 11.0)
    metrics.set_table(_table("berta"))
    metrics.on_tokens(_facts().start.tenant, 1, 0.1)
    assert "anna" not in metrics.exposition(has_detail=True)


def test_there_is_no_fairness_index_without_competition() -> None:
    metrics = _metrics(ANNA)
    found = _samples(metrics)
    assert found["tiercel_fairness_tenants", ""] == 0
    assert ("tiercel_fairness_jain", "") not in found
    assert ("tiercel_service_gap_seconds", "") not in found
    metrics.on_step(Gauges(fair=FairGauges(competing=2, jain=0.5, gap_s=3.0)))
    found = _samples(metrics)
    assert [found[name, ""] for name in ("tiercel_fairness_tenants", "tiercel_fairness_jain")] == [2, 0.5]
    assert found["tiercel_service_gap_seconds", ""] == 3.0
    metrics.on_step(Gauges(fair=FairGauges()))
    assert ("tiercel_fairness_jain", "") not in _samples(metrics)


def test_goals_are_counted_for_tenants_that_have_one() -> None:
    without, found = _metrics(ANNA), _metrics(ANNA, slo=Slo(ttft_s=0.5, tbt_s=0.05))
    for metrics in (without, found):
        facts = _facts()
        metrics.on_first_token(facts, 10.4)
        metrics.on_tokens(facts.start.tenant, 1, 0.1)
        metrics.on_tokens(facts.start.tenant, 1, 0.02)
        metrics.on_first_token(_facts(), 11.0)
    assert not [name for name, _ in _samples(without) if "slo" in name]
    counted = {label: value for (name, label), value in _samples(found).items() if name == "tiercel_slo_total"}
    missed = {label: value for (name, label), value in _samples(found).items() if name == "tiercel_slo_missed_total"}
    assert (counted, missed) == ({"ttft": 2, "tbt": 2}, {"ttft": 1, "tbt": 1})


def test_a_new_goal_counts_from_the_reload_on() -> None:
    metrics = _metrics(ANNA)
    facts = _facts()
    metrics.on_first_token(facts, 20.0)
    metrics.set_table(_table(ANNA, slo=Slo(tbt_s=0.05)))
    metrics.on_tokens(facts.start.tenant, 1, 0.1)
    assert _samples(metrics)["tiercel_slo_missed_total", "tbt"] == 1
