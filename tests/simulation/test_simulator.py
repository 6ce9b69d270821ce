"""The simulation: every request ends once, results depend on the seed alone, tiers take time."""

import random

import numpy as np
import pytest

from tiercel.simulation.histogram import LogHistogram, bucket_of
from tiercel.simulation.profile import profile
from tiercel.simulation.replay import Replay
from tiercel.simulation.result import figures
from tiercel.simulation.simulator import SimSettings
from tiercel.simulation.workload import (
    Lengths,
    PromptPart,
    SimRequest,
    Sources,
    Workload,
    deal_to_tenants,
    draw_requests,
    ordered_workload,
    prompt_bytes,
)
from tiercel.values.ids import TenantId
from tiercel.values.tenant import TenantShare

A, B = (TenantShare(name=TenantId(name)) for name in "ab")
SMALL = SimSettings(blocks=128, max_num_seqs=8, max_num_batched_tokens=128)


def workload(requests: int = 40, seed: int = 0) -> Workload:
    rng, sources = random.Random(seed), Sources()
    lengths = Lengths(input_len=100, output_len=30, sigma=0.5, prefix_len=40)
    requests = [
        request
        for share in (A, B)
        for request in draw_requests(share, [rng.uniform(0, 5) for _ in range(requests // 2)], lengths, rng, sources)
    ]
    return ordered_workload((A, B), requests)


@pytest.mark.parametrize("policy", ["fair", "priority", "fcfs"])
@pytest.mark.parametrize("depth", [0, 1])
def test_every_request_ends_once_with_the_expected_output(policy: str, depth: int) -> None:
    asked = workload()
    replay = Replay(SimSettings(blocks=128, max_num_seqs=8, policy=policy, async_depth=depth), asked)  # type: ignore[arg-type]
    replay.run()
    replay.simulation.loop.check_integrity()
    found = figures(replay)
    assert found.finished == found.requests == len(asked.requests)
    assert sum(tenant.output_tokens for tenant in found.tenants) == sum(request.outputs for request in asked.requests)
    prompt_tokens = sum(request.num_prompt for request in asked.requests)
    assert sum(tenant.prompt_tokens for tenant in found.tenants) == prompt_tokens
    assert sum(tenant.share for tenant in found.tenants) == pytest.approx(1.0)


def test_a_seed_gives_the_same_figures_again() -> None:
    def play() -> object:
        replay = Replay(SimSettings(blocks=128, max_num_seqs=8, host_blocks=64, noise=0.2, seed=7), workload())
        replay.run()
        return figures(replay)

    assert play() == play()


def test_swapped_sequences_are_restored_from_ddr() -> None:
    settings = SimSettings(blocks=40, host_blocks=400, max_num_seqs=8, preemption_mode="swap")
    requests = [SimRequest(0.0, A.name, (PromptPart(number, 64),), 200) for number in range(1, 9)]
    replay = Replay(settings, ordered_workload((A,), requests))
    replay.run()
    found = figures(replay)
    assert found.finished == 8
    assert found.preemptions["growth"]["swap"] > 0
    assert found.swapped_tokens > 0


def test_a_request_that_never_fits_is_refused_and_counted() -> None:
    replay = Replay(SMALL, ordered_workload((A,), [SimRequest(0.0, A.name, (PromptPart(1, 128 * 16),), 10)]))
    replay.run()
    assert figures(replay).tenants[0].refused == 1


def test_prompts_share_their_prefix_within_a_group_only() -> None:
    first = prompt_bytes((PromptPart(1, 32), PromptPart(2, 9)))
    second = prompt_bytes((PromptPart(1, 32), PromptPart(3, 9)))
    assert len(first) == 4 * 41
    assert first[:128] == second[:128]
    assert first[128:] != second[128:]


def test_the_deal_of_a_trace_follows_the_skew() -> None:
    nameless = [SimRequest(0.0, TenantId(""), (PromptPart(1, 5),), 1)] * 3000
    requests = deal_to_tenants(nameless, (A, B), 1.0, random.Random(0))
    assert sum(request.tenant == "a" for request in requests) == pytest.approx(2000, abs=100)


def test_percentiles_are_right_within_a_percent() -> None:
    histogram = LogHistogram()
    values = sorted(random.Random(0).expovariate(10.0) for _ in range(5000))
    for value in values:
        counts = histogram.count_by_bucket
        counts[bucket_of(value)] = counts.get(bucket_of(value), 0) + 1
    for percent in (50, 95, 99):
        assert histogram.percentile(percent) == pytest.approx(np.percentile(values, percent), rel=0.02)


def test_an_h200_decodes_faster_than_the_default_machine() -> None:
    fast, slow = profile("h200"), profile("default")
    assert max(fast.ms[:4]) > 0
    assert fast.ms[0] < 10
    assert slow.ms[0] == pytest.approx(5.0)


def crowd(requests_of_a: int, prompt: int) -> Workload:
    """Return a workload in which one tenant fills the rows before a hundred others send one request each."""
    others = [TenantShare(name=TenantId(f"other-{number}")) for number in range(100)]
    requests = [SimRequest(0.0, A.name, (PromptPart(number + 1, prompt),), 4) for number in range(requests_of_a)]
    requests += [
        SimRequest(0.02, share.name, (PromptPart(1000 + number, 40),), 4) for number, share in enumerate(others)
    ]
    return ordered_workload((A, *others), requests)


def test_prompts_under_way_get_on_though_many_others_wait_before_them() -> None:
    settings = SimSettings(blocks=512, max_num_seqs=4, max_num_batched_tokens=16, patience_s=1000.0)
    replay = Replay(settings, crowd(4, 400), duration_s=3.0)
    replay.run()
    assert figures(replay).tenants[0].finished == 4


def test_full_rows_are_no_reason_to_take_from_tenants_that_hold_one() -> None:
    settings = SimSettings(blocks=512, max_num_seqs=4, max_num_batched_tokens=64, patience_s=0.01)
    replay = Replay(settings, crowd(1, 400))
    replay.run()
    found = figures(replay)
    assert found.finished == found.requests
    assert "share" not in found.preemptions
