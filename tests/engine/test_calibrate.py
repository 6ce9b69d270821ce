"""Sizing the KV pool: what fits, what is refused, and the arithmetic that is shown."""

import pytest

from device.base import Lane
from engine.calibrate import show_arithmetic, size_pool, step_tokens
from tiercel.errors import ConfigError
from tiercel.settings import EngineSettings
from tiercel.tier import KVSpec
from tiercel.units import GIB, MIB

SPEC = KVSpec(layers=4, kv_heads=2, head_dim=32, block_size=16, dtype="float32")  # 2 KiB a token, 32 KiB a block


class Machine:
    """So much memory and no lanes."""

    def __init__(self, name: str, free: int, total: int = 16 * GIB) -> None:
        self.name = name
        self._free = free
        self._total = total

    def free_bytes(self) -> int:
        return self._free

    def total_bytes(self) -> int:
        return self._total

    def open_lane(self) -> Lane:
        raise AssertionError("sizing computes nothing")


def settings(**changes: object) -> EngineSettings:
    return EngineSettings(model="unused", **changes)  # type: ignore[arg-type]


def test_a_block_is_one_extent_of_all_layers() -> None:
    assert SPEC.token_bytes == 4 * 2 * 2 * 32 * 4
    assert SPEC.block_bytes == 16 * SPEC.token_bytes


def test_on_the_cpu_the_pool_takes_a_share_of_what_is_free() -> None:
    capacity = size_pool(settings(max_num_seqs=4096), SPEC, Machine("cpu", 1 * GIB), 4096, 5 * MIB)
    assert capacity.kv_bytes <= 0.4 * GIB < capacity.kv_bytes + 2 * SPEC.block_bytes
    assert capacity.max_model_len == 4096


def test_no_more_is_taken_than_all_sequences_at_full_length_need() -> None:
    capacity = size_pool(settings(max_num_seqs=2), SPEC, Machine("cpu", 8 * GIB), 160, 0)
    assert capacity.blocks == 2 * (160 // 16 + 2)


def test_on_a_gpu_the_utilisation_counts_what_others_and_the_weights_take() -> None:
    device = Machine("cuda", free=10 * GIB, total=20 * GIB)
    capacity = size_pool(settings(gpu_memory_utilization=0.9, max_num_seqs=10000), SPEC, device, 4096, 0)
    assert capacity.kv_bytes == pytest.approx(8 * GIB, rel=1e-3)


def test_the_context_shrinks_to_the_pool_unless_it_was_asked_for() -> None:
    device = Machine("cpu", 1 * GIB)
    assert size_pool(settings(num_gpu_blocks_override=10), SPEC, device, 4096, 0).max_model_len == 160
    with pytest.raises(ConfigError, match="--max-model-len 1000 needs"):
        size_pool(settings(num_gpu_blocks_override=10, max_model_len=1000), SPEC, device, 4096, 0)


@pytest.mark.parametrize(
    ("changes", "free", "message"),
    [
        ({}, 0, "no room for KV"),
        ({"kv_cache_memory_bytes": 2 * GIB}, 1 * GIB, "is more than the 1.0 GiB that are free"),
        ({"max_model_len": 8192}, 1 * GIB, "over the model's own limit of 4096"),
        ({"num_gpu_blocks_override": 10**6}, 1 * GIB, "no room for KV"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(changes: dict[str, object], free: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        size_pool(settings(**changes), SPEC, Machine("cpu", free), 4096, 0)


def test_the_arithmetic_is_shown() -> None:
    device = Machine("cpu", 1 * GIB)
    line = show_arithmetic(size_pool(settings(num_gpu_blocks_override=512), SPEC, device, 4096, 5 * MIB), SPEC, device)
    assert "512 blocks x 16 tokens x 2048 B" in line
    assert "8192 tokens, 2.0 sequences of the full 4096 tokens" in line


def test_every_decode_fits_into_a_step() -> None:
    device = Machine("cpu", 1 * GIB)
    assert step_tokens(settings(max_num_seqs=300), device) == 300
    assert step_tokens(settings(max_num_seqs=4, max_num_batched_tokens=64), device) == 64
