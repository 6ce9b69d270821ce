"""Metrics of steps and tiers from the gauges of the engine."""

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tiercel.server.metrics.steps import StepMetrics
from tiercel.server.metrics.tiers import TierMetrics
from tiercel.values.outcome import DiskState, ExpertGauges, Gauges, GrammarGauges, RouteGauges, SwitchGauges, TierGauges
from tiercel.values.tier import Route, Tier

GAUGES = Gauges(
    preemptions_swap=3,
    preemptions_recompute=1,
    swapped_tokens=640,
    recomputed_tokens=50,
    steps=10,
    nano_batches=14,
    out_of_memory=2,
    grammars=GrammarGauges(compiled=5, failed=1, compile_s=0.25, hits=9, masks=70, mask_s=0.5),
    experts=ExpertGauges(
        experts=64,
        slots=32,
        memory_bytes=4096,
        hits=80,
        misses=20,
        fetched_ahead=15,
        fetched_bytes=2560,
        evictions=7,
        stalls=6,
        stall_s=0.75,
    ),
    threads=3,
    preemptions_by_reason={"band": 3, "growth": 1},
    switches=(SwitchGauges("swap", 2, 0.5, 0.75), SwitchGauges("recompute", 1, 1.5, 1.25)),
    disk_state=DiskState.READ_ONLY,
    tiers=(
        TierGauges(
            tier=Tier.HBM,
            block_bytes=1000,
            blocks_total=10,
            blocks_used=4,
            blocks_cached=5,
            hit_tokens=160,
            missed_tokens=480,
        ),
        TierGauges(tier=Tier.DDR, block_bytes=1000, blocks_total=40, blocks_used=8, hit_tokens=320, evictions=2),
        TierGauges(
            tier=Tier.SSD,
            block_bytes=1000,
            blocks_total=90,
            blocks_cached=7,
            hit_tokens=16,
            daily_blocks=60,
            writable_blocks=12,
        ),
    ),
    routes=(
        RouteGauges(route=Route.SPILL, bytes=64_000, seconds=0.5, copies=8, blocks=64),
        RouteGauges(route=Route.RESTORE, bytes=32_000, seconds=0.25, copies=16, blocks=32, failures=1),
        RouteGauges(route=Route.PREFETCH, bytes=16_000, seconds=0.1, copies=16, blocks=16, late=2, misses=3),
        RouteGauges(route=Route.VERIFY, misses=1),
    ),
)


def samples(gauges: Gauges) -> dict[tuple[str, str], float]:
    """Values by name and its one label of interest."""
    registry = CollectorRegistry()
    for metrics in (StepMetrics(), TierMetrics("model")):
        registry.register(metrics)
        metrics.on_step(gauges)
    text = generate_latest(registry).decode()
    return {
        (sample.name, sample.labels.get("engine") or next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_tiers_and_routes_are_reported_in_bytes_tokens_and_seconds() -> None:
    found = samples(GAUGES)
    expected = {
        ("tiercel_kv_capacity_bytes", "ssd"): 90_000,
        ("tiercel_kv_used_bytes", "hbm"): 4000,
        ("tiercel_kv_cached_bytes", "ssd"): 7000,
        ("tiercel_kv_hit_tokens_total", "ddr"): 320,
        ("tiercel_kv_evictions_total", "ddr"): 2,
        ("tiercel_kv_transfer_bytes_total", "hbm_ddr"): 64_000,
        ("tiercel_kv_transfer_seconds_total", "ddr_hbm"): 0.25,
        ("tiercel_kv_copies_total", "ssd_ddr"): 16,
        ("tiercel_kv_transfer_failures_total", "ddr_hbm"): 1,
        ("tiercel_kv_transfer_late_total", "ssd_ddr"): 2,
        ("tiercel_kv_verify_failures_total", "ddr"): 1,
        ("tiercel_kv_verify_failures_total", "ssd"): 3,
        ("tiercel_kv_mean_run_blocks", "hbm"): 2,
        ("tiercel_kv_mean_run_blocks", "ddr"): 8,
        ("tiercel_kv_disk_state", "read_only"): 1,
        ("tiercel_kv_disk_state", "on"): 0,
        ("tiercel_preemptions_total", "swap"): 3,
        ("tiercel_preemptions_total", "recompute"): 1,
        ("tiercel_switches_over_total", "swap"): 2,
        ("tiercel_switch_predicted_seconds_total", "recompute"): 1.5,
        ("tiercel_switch_realised_seconds_total", "swap"): 0.75,
        ("tiercel_swapped_tokens_total", ""): 640,
        ("tiercel_recomputed_tokens_total", ""): 50,
        ("vllm:kv_offload_store_bytes_total", "0"): 64_000,
        ("vllm:kv_offload_load_bytes_total", "0"): 32_000,
        ("vllm:kv_offload_load_time_total", "0"): 0.25,
        ("vllm:kv_offload_tiering_read_bytes_total", "0"): 16_000,
        ("vllm:kv_offload_tiering_promotion_job_failures_total", "0"): 0,
        ("tiercel_kv_disk_writable_bytes", ""): 12_000,
        ("tiercel_kv_disk_daily_write_limit_bytes", ""): 60_000,
        ("tiercel_preemptions_by_reason_total", "band"): 3,
        ("tiercel_preemptions_by_reason_total", "debt"): 0,
        ("tiercel_preemptions_by_reason_total", "growth"): 1,
        ("tiercel_steps_total", ""): 10,
        ("tiercel_nano_batches_total", ""): 14,
        ("tiercel_engine_out_of_memory_total", ""): 2,
        ("tiercel_engine_threads", ""): 3,
        ("tiercel_grammars_total", "compiled"): 5,
        ("tiercel_grammars_total", "failed"): 1,
        ("tiercel_grammar_compile_seconds_total", ""): 0.25,
        ("tiercel_grammar_hits_total", ""): 9,
        ("tiercel_grammar_masks_total", ""): 70,
        ("tiercel_grammar_mask_seconds_total", ""): 0.5,
        ("tiercel_expert_slots", ""): 32,
        ("tiercel_experts_tiered", ""): 64,
        ("tiercel_expert_memory_bytes", ""): 4096,
        ("tiercel_expert_uses_total", "hit"): 80,
        ("tiercel_expert_uses_total", "miss"): 20,
        ("tiercel_experts_fetched_ahead_total", ""): 15,
        ("tiercel_expert_fetched_bytes_total", ""): 2560,
        ("tiercel_expert_evictions_total", ""): 7,
        ("tiercel_expert_stalls_total", ""): 6,
        ("tiercel_expert_stall_seconds_total", ""): 0.75,
        ("vllm:kv_offload_cpu_cache_usage_perc", "0"): 0.2,
        ("vllm:external_prefix_cache_queries_total", "0"): 480,
        ("vllm:external_prefix_cache_hits_total", "0"): 336,
    }
    assert {name: found[name] for name in expected} == expected


def test_one_arena_alone_has_no_offload_family() -> None:
    found = samples(msgspec.structs.replace(GAUGES, tiers=GAUGES.tiers[:1], routes=(), disk_state=DiskState.NONE))
    assert not [name for name, _ in found if "offload" in name or "external" in name or "disk" in name]
    assert found["tiercel_kv_capacity_bytes", "hbm"] == 10_000


def test_without_a_limit_of_writes_there_is_no_budget() -> None:
    disk = msgspec.structs.replace(GAUGES.tiers[2], daily_blocks=0)
    found = samples(msgspec.structs.replace(GAUGES, tiers=(*GAUGES.tiers[:2], disk)))
    assert not [name for name, _ in found if "writable" in name or "daily" in name]


def test_before_the_first_step_there_is_nothing_but_zeros() -> None:
    assert set(samples(Gauges()).values()) == {0}


def test_gauges_travel() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(GAUGES), type=Gauges) == GAUGES
