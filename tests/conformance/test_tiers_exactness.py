"""The whole engine over three tiers against transformers' `generate`: no token depends on the tier of a block."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.bench import EngineBench
from tests.conformance.test_engine_exactness import (
    BLOCK,
    OUTPUTS,
    Compare,
    Reference,
    bench,
    exact,
    reference,
)
from tiercel.values.tier import Route, Tier

__all__ = ["exact", "reference"]  # fixtures


def route_bytes(one: EngineBench, route: Route) -> int:
    return next(gauges.bytes for gauges in one.gauges.routes if gauges.route is route)


def hit_tokens(one: EngineBench, tier: Tier) -> int:
    return next(gauges.hit_tokens for gauges in one.gauges.tiers if gauges.tier is tier)


@pytest.fixture
def arena_fd() -> Iterator[int]:
    fd = os.memfd_create("test-arena")
    yield fd
    os.close(fd)


@pytest.mark.parametrize("mode", ["swap", "auto", "recompute"])
@pytest.mark.sampled(2)
def test_preempted_and_brought_back(reference: Reference, exact: Compare, mode: str) -> None:
    scale = reference.scale
    small = bench(
        reference, num_gpu_blocks_override=scale.small, cpu_device_pool=True, kv_host_bytes=scale.tier_bytes,
        preemption_mode=mode,
        calibration_s=0.0 if mode == "recompute" else 0.1,  # with predicted steps, plans wait for restores
    )  # fmt: skip
    for _ in range(2):
        exact(small.greedy(reference.prompts, OUTPUTS))
    for _ in range(6):  # on a busy machine, steps may be predicted with which no sequence has to give way
        if small.gauges.preemptions_swap if mode == "swap" else small.gauges.preemptions:
            break
        exact(small.greedy(reference.prompts, OUTPUTS))
    assert small.gauges.preemptions > 0
    if mode == "swap":
        assert small.gauges.preemptions_swap > 0
        assert route_bytes(small, Route.RESTORE) > 0
        assert small.gauges.swapped_tokens > 0
    small.close()


@pytest.mark.sampled(2)
def test_prefixes_that_come_back_from_ddr(reference: Reference, exact: Compare) -> None:
    scale = reference.scale
    small = bench(
        reference, num_gpu_blocks_override=scale.small, cpu_device_pool=True, kv_host_bytes=scale.tier_bytes,
        preemption_mode="swap",
    )  # fmt: skip
    for _ in range(2):
        exact([small.greedy([prompt], OUTPUTS)[0] for prompt in reference.prompts])
    assert hit_tokens(small, Tier.DDR) > 0
    small.close()


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.sampled(2)
def test_prefixes_that_come_back_from_the_disk_after_a_restart(
    reference: Reference, exact: Compare, tmp_path: Path, apart: bool
) -> None:
    scale = reference.scale
    settings = {
        "kv_disk_paths": (str(tmp_path / "kv"),), "kv_disk_bytes": scale.tier_bytes, "preemption_mode": "swap",
        "cpu_device_pool": apart, "kv_host_bytes": scale.tier_bytes, "num_gpu_blocks_override": scale.large,
    }  # fmt: skip
    first = bench(reference, **settings)
    exact(first.greedy(reference.prompts, OUTPUTS))
    assert route_bytes(first, Route.PERSIST) > 0
    first.close()
    again = bench(reference, **settings)
    again.settle()  # the scan runs in the background
    exact(again.greedy(reference.prompts, OUTPUTS))
    assert hit_tokens(again, Tier.SSD) >= sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in reference.prompts[:8])
    again.close()


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.sampled(2)
def test_a_new_engine_finds_the_blocks_in_shared_memory(
    reference: Reference, exact: Compare, arena_fd: int, apart: bool
) -> None:
    settings = {
        "preemption_mode": "swap",
        "cpu_device_pool": apart,
        "kv_host_bytes": reference.scale.tier_bytes,
        "num_gpu_blocks_override": reference.scale.large,
    }
    first = bench(reference, arena_fd=arena_fd, **settings)
    exact(first.greedy(reference.prompts, OUTPUTS))
    exact(first.greedy(reference.prompts, OUTPUTS))
    # The first engine is not closed, as after a crash.
    again = bench(reference, arena_fd=arena_fd, **settings)
    again.settle()
    exact(again.greedy(reference.prompts, OUTPUTS))
    assert again.gauges.prefix_hits > 0
    again.close()
    first.close()
