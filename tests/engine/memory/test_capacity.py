"""Sizing the KV pool: capacities, errors, and the arithmetic in the log."""

import pytest

from tiercel.device.base import Lane
from tiercel.engine.memory.capacity import for_device, show_arithmetic, size_pool, step_tokens
from tiercel.kvcache.store.memory_file import KeptMemory, layout_of
from tiercel.settings.settings import EngineSettings
from tiercel.values.errors import ConfigError
from tiercel.values.tier import KVSpec
from tiercel.values.units import GIB, MIB

SPEC = KVSpec(layers=4, kv_heads=2, head_dim=32, block_size=16, dtype="float32")  # 2 KiB a token, 32 KiB a block


class Machine:
    """A device with a given amount of memory."""

    def __init__(self, name: str, free: int, total: int = 16 * GIB) -> None:
        self.name = name
        self._free = free
        self._total = total
        self.host_free = 8 * GIB

    def free_bytes(self) -> int:
        return self._free

    def host_free_bytes(self) -> int:
        return self._free if self.name == "cpu" else self.host_free

    def host_limit(self) -> str:
        return "the free memory of the test"

    def total_bytes(self) -> int:
        return self._total

    def open_copy_lane(self) -> Lane:
        raise AssertionError("sizing copies nothing")

    def pin(self, address: int, size: int) -> None:
        raise AssertionError("sizing pins nothing")

    def open_lane(self) -> Lane:
        raise AssertionError("sizing computes nothing")


def settings(**changes: object) -> EngineSettings:
    return EngineSettings(model="unused", **changes)  # type: ignore[arg-type]


def test_a_block_is_one_extent_of_all_layers() -> None:
    assert SPEC.token_bytes == 4 * 2 * 2 * 32 * 4
    assert SPEC.block_bytes == 16 * SPEC.token_bytes


def test_on_the_cpu_the_pool_takes_a_share_of_free_memory() -> None:
    capacity = size_pool(settings(max_num_seqs=4096), SPEC, Machine("cpu", 1 * GIB), 4096, 5 * MIB)
    assert capacity.kv_bytes <= 0.4 * GIB < capacity.kv_bytes + 2 * SPEC.block_bytes
    assert capacity.max_model_len == 4096


def test_the_pool_is_not_larger_than_all_sequences_at_full_length() -> None:
    capacity = size_pool(settings(max_num_seqs=2), SPEC, Machine("cpu", 8 * GIB), 160, 0)
    assert capacity.blocks == 2 * (160 // 16 + 2)


def test_on_a_gpu_the_utilisation_includes_weights_and_other_programs() -> None:
    device = Machine("cuda", free=10 * GIB, total=20 * GIB)
    capacity = size_pool(settings(gpu_memory_utilization=0.9, max_num_seqs=10000), SPEC, device, 4096, 0)
    assert capacity.kv_bytes == pytest.approx(8 * GIB, rel=1e-3)


def test_the_context_shrinks_to_the_pool_unless_it_was_set() -> None:
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
def test_impossible_sizes_are_rejected_with_the_numbers(changes: dict[str, object], free: int, message: str) -> None:
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


def test_on_the_cpu_one_arena_is_both_memory_tiers_and_the_host_size_comes_on_top() -> None:
    device = Machine("cpu", 8 * GIB)
    alone = size_pool(settings(kv_cache_memory_bytes=64 * MIB), SPEC, device, 4096, 0)
    both = size_pool(settings(kv_cache_memory_bytes=64 * MIB, kv_host_bytes=32 * MIB), SPEC, device, 4096, 0)
    assert both.blocks - alone.blocks == 32 * MIB // SPEC.block_bytes
    assert (both.host_blocks, both.disk_blocks) == (0, 0)


def test_a_device_pool_apart_has_a_host_tier_beside_it() -> None:
    device = Machine("cpu", 8 * GIB)
    sizes = {"kv_cache_memory_bytes": 64 * MIB, "cpu_device_pool": True}
    capacity = size_pool(settings(kv_host_bytes=128 * MIB, **sizes), SPEC, device, 4096, 0)
    assert capacity.kv_bytes == 64 * MIB
    assert (capacity.host_blocks + 1) * SPEC.block_bytes == 128 * MIB
    assert size_pool(settings(**sizes), SPEC, device, 4096, 0).host_blocks == capacity.blocks
    assert size_pool(settings(kv_host_bytes=0, **sizes), SPEC, device, 4096, 0).host_blocks == 0


def test_a_gpu_has_a_host_tier_of_a_share_of_free_host_memory() -> None:
    device = Machine("cuda", free=10 * GIB, total=20 * GIB)
    capacity = size_pool(settings(), SPEC, device, 4096, 0)
    assert (capacity.host_blocks + 1) * SPEC.block_bytes == 2 * GIB
    assert size_pool(settings(kv_host_bytes=0), SPEC, device, 4096, 0).host_blocks == 0


def test_slots_on_disk_leave_room_for_headers_and_the_index() -> None:
    device = Machine("cpu", 8 * GIB)
    capacity = size_pool(settings(kv_disk_paths=("a", "b"), kv_disk_bytes=256 * MIB), SPEC, device, 4096, 0)
    assert 0.7 * 256 * MIB < capacity.disk_blocks * SPEC.block_bytes < 256 * MIB * 32 / 36
    assert "SSD" in show_arithmetic(capacity, SPEC, device)


def test_a_limit_on_files_bounds_the_pool_and_is_named() -> None:
    device = Machine("cpu", 8 * GIB)
    automatic = size_pool(settings(max_num_seqs=4096), SPEC, device, 4096, 0, max_arena_bytes=64 * MIB)
    size = layout_of(SPEC, b"", automatic.blocks + 1).size_bytes
    assert size <= 64 * MIB < size + 4 * MIB
    for changes in (
        {"kv_cache_memory_bytes": 64 * MIB},
        {"num_gpu_blocks_override": 4096},
        {"kv_host_bytes": 64 * MIB},
    ):
        with pytest.raises(ConfigError, match="blocks fit: raise the limit, or give less with --kv-cache-memory-bytes"):
            size_pool(settings(**changes), SPEC, device, 4096, 0, max_arena_bytes=64 * MIB)
    apart = settings(cpu_device_pool=True, kv_cache_memory_bytes=256 * MIB)
    host = size_pool(apart, SPEC, device, 4096, 0, max_arena_bytes=64 * MIB).host_blocks
    assert layout_of(SPEC, b"", host + 1).size_bytes <= 64 * MIB
    with pytest.raises(ConfigError, match="a KV pool of 1 blocks"):
        size_pool(settings(), SPEC, device, 4096, 0, max_arena_bytes=MIB)


def test_the_limit_that_leaves_no_room_is_named() -> None:
    for changes in ({}, {"kv_cache_memory_bytes": GIB}, {"kv_host_bytes": GIB, "num_gpu_blocks_override": 1}):
        with pytest.raises(ConfigError, match="by the free memory of the test"):
            size_pool(settings(**changes), SPEC, Machine("cpu", 64 * 1024 if not changes else MIB), 4096, 0)


def test_a_kept_arena_defines_the_size_and_is_not_counted_twice() -> None:
    device = Machine("cpu", 1 * MIB)
    kept = KeptMemory(blocks=100, bytes=101 * SPEC.block_bytes)
    assert size_pool(settings(), SPEC, device, 4096, 0, kept).blocks == 100
    other = KeptMemory(blocks=0, bytes=64 * MIB)  # an arena of another model, which is emptied
    assert size_pool(settings(kv_cache_memory_bytes=32 * MIB), SPEC, device, 4096, 0, other).kv_bytes == 32 * MIB


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_host_bytes": 2 * GIB}, "--kv-host-size 2.0 GiB is more than the .* of host memory that are free"),
        (
            {"kv_host_bytes": 2 * GIB, "cpu_device_pool": True},
            "--kv-host-size 2.0 GiB is more than the .* of host memory that are free beside the KV pool",
        ),
        ({"kv_host_bytes": 4096, "cpu_device_pool": True}, "--kv-host-size 4.0 KiB is too small: one block"),
        ({"kv_disk_paths": ("a",), "kv_disk_bytes": MIB // 16}, "--kv-disk-size 64.0 KiB holds not one block"),
    ],
)
def test_impossible_tiers_are_rejected_with_the_numbers(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        size_pool(settings(kv_cache_memory_bytes=64 * MIB, **changes), SPEC, Machine("cpu", 1 * GIB), 4096, 0)


@pytest.mark.parametrize(
    ("name", "total_gib", "tokens", "sequences"),
    [
        ("cpu", 500, 256, 256),
        ("cuda", 24, 2048, 256),
        ("cuda", 69.9, 2048, 256),
        ("cuda", 79.1, 8192, 512),  # H100, A100
        ("cuda", 140.4, 8192, 1024),  # H200
    ],
)
def test_a_gpu_with_much_memory_has_larger_defaults(name: str, total_gib: float, tokens: int, sequences: int) -> None:
    device = Machine(name, GIB, int(total_gib * GIB))
    chosen = for_device(settings(), device)
    assert (chosen.max_num_batched_tokens, chosen.max_num_seqs) == (tokens, sequences)
    assert step_tokens(settings(), device) == max(tokens, sequences)
    assert for_device(chosen, Machine("cpu", GIB)) == chosen  # chosen once, for all parts of the engine


def test_values_that_were_given_are_no_defaults() -> None:
    given = settings(max_num_seqs=3, max_num_batched_tokens=100)
    assert for_device(given, Machine("cuda", GIB, 140 * GIB)) == given


def test_the_record_of_steps_has_room_for_every_default() -> None:
    for total in (1, 80, 140, 1000):
        chosen = for_device(settings(), Machine("cuda", GIB, total * GIB))
        assert chosen.record_rows <= settings().record_rows
    assert settings(max_num_seqs=3).record_rows == 4
