"""The capacity of an engine: the number of KV blocks in every tier, from measured free memory and settings."""

from typing import Protocol

from msgspec.structs import replace

from tiercel.device.volume_layout import fit_layout
from tiercel.kvcache.store.memory_file import KeptMemory, blocks_within
from tiercel.settings.settings import DEFAULT_SEQUENCES, MOST_DEFAULT_SEQUENCES, EngineSettings
from tiercel.system.process_limits import show_file_limit
from tiercel.values.errors import ConfigError
from tiercel.values.tier import Capacity, KVSpec
from tiercel.values.units import GIB, show_bytes

DEFAULT_STEP_TOKENS = {"cpu": 256, "cuda": 2048}
LARGE_STEP_TOKENS = 8192  # of a GPU from `_LARGE_BYTES` on, as in vLLM
_LARGE_BYTES = 70 * GIB  # such as H100 and A100 with 80 GB
_SEQUENCES = ((130 * GIB, MOST_DEFAULT_SEQUENCES), (_LARGE_BYTES, 512))  # from this size of a GPU on; such as H200
_CPU_SHARE = 0.4  # of free memory; the rest is for other programs and the page cache
_MAX_CPU_BYTES = 4 * GIB
_HOST_SHARE = 0.25  # of free host memory, for a DDR tier without --kv-host-size
_MAX_HOST_BYTES = 16 * GIB
_SLACK_BLOCKS = 2  # beyond the longest sequence: its growth in two steps
_NOTHING_KEPT = KeptMemory()


class DeviceMemory(Protocol):
    """The memory of a device, as sizing reads it."""

    name: str  # cpu | cuda

    def free_bytes(self) -> int: ...
    def total_bytes(self) -> int: ...
    def host_free_bytes(self) -> int: ...
    def host_limit(self) -> str: ...


def for_device(settings: EngineSettings, device: DeviceMemory) -> EngineSettings:
    """Return the settings with the defaults that depend on the device: sequences, and tokens of a step.

    A GPU with much memory has the KV of more sequences, and reads its weights once for all of them. None of these
    defaults has been measured on a GPU yet.
    """
    size = device.total_bytes() if device.name == "cuda" else 0
    sequences = next((count for least, count in _SEQUENCES if size >= least), DEFAULT_SEQUENCES)
    tokens = LARGE_STEP_TOKENS if size >= _LARGE_BYTES else DEFAULT_STEP_TOKENS[device.name]
    return replace(
        settings,
        max_num_seqs=settings.max_num_seqs or sequences,
        max_num_batched_tokens=settings.max_num_batched_tokens or tokens,
    )


def step_tokens(settings: EngineSettings, device: DeviceMemory) -> int:
    """Return the token budget of a step: at least one token for every sequence that may run."""
    chosen = for_device(settings, device)
    assert chosen.max_num_batched_tokens is not None  # for the type checker
    return max(chosen.max_num_batched_tokens, chosen.sequences)


def is_unified(settings: EngineSettings, device: DeviceMemory) -> bool:
    """Return whether one arena in RAM is both the device tier and the host tier."""
    return device.name == "cpu" and not settings.cpu_device_pool


def size_pool(
    settings: EngineSettings,
    spec: KVSpec,
    device: DeviceMemory,
    model_len: int,
    weights_bytes: int,
    kept: KeptMemory = _NOTHING_KEPT,
    reserved_bytes: int = 0,
    max_arena_bytes: int | None = None,
) -> Capacity:
    """Return the number of blocks of every tier, and the longest context that the device tier can hold.

    The device pool has the size in the settings; by default it takes free memory, but no more than all sequences at
    full length need. On the CPU one arena is both memory tiers, and --kv-host-size is added to it. An arena that an
    earlier engine left keeps its size, because its blocks would be lost otherwise. `reserved_bytes` of the free memory
    are left to steps. An arena in host memory is a file in memory of up to `max_arena_bytes`; None: of any size.
    Errors: ConfigError with the arithmetic, if not even one block fits, or if --max-model-len does not.
    """
    wanted_len = settings.max_model_len or model_len
    if wanted_len > model_len:
        raise ConfigError(
            "model.too_long", f"--max-model-len {wanted_len} is over the model's own limit of {model_len} tokens"
        )
    unified = is_unified(settings, device)
    file = _ArenaFile(max_arena_bytes, spec.block_bytes)
    kept_by_device = kept.bytes if device.name == "cpu" else 0  # kept memory is host memory
    available = device.free_bytes() + kept_by_device - reserved_bytes
    if unified and kept.blocks:
        blocks = kept.blocks
    else:
        per_sequence = -(-wanted_len // spec.block_size) + _SLACK_BLOCKS
        largest = per_sequence * settings.sequences
        if unified:
            file.check(1)
            largest = file.fit(largest)
        blocks = _device_blocks(settings, spec, device, available, largest, reserved_bytes)
        if unified and settings.kv_host_bytes:
            blocks += settings.kv_host_bytes // spec.block_bytes
            free = available - (blocks + 1) * spec.block_bytes + settings.kv_host_bytes
            _check_fits(settings.kv_host_bytes, free, device)
        if unified:
            file.check(blocks)
    fits_len = blocks * spec.block_size
    if fits_len < wanted_len and settings.max_model_len is not None:
        raise ConfigError(
            "kv.too_small",
            f"--max-model-len {wanted_len} needs {show_bytes(wanted_len * spec.token_bytes)} of KV, the pool has "
            f"{show_bytes(blocks * spec.block_bytes)}: {fits_len} tokens",
        )
    taken = (blocks + 1) * spec.block_bytes
    host_free = device.host_free_bytes() + kept.bytes - (taken if device.name == "cpu" else 0)
    return Capacity(
        blocks=blocks,
        block_size=spec.block_size,
        max_model_len=min(wanted_len, fits_len),
        weights_bytes=weights_bytes,
        kv_bytes=taken,
        host_blocks=0 if unified else kept.blocks or _host_blocks(settings, spec, device, host_free, taken, file),
        disk_blocks=_disk_blocks(settings, spec),
        reserved_bytes=reserved_bytes,
    )


def show_arithmetic(capacity: Capacity, spec: KVSpec, device: DeviceMemory) -> str:
    """Return one line for the log: how the size of the pool was computed."""
    tokens = capacity.blocks * capacity.block_size
    beside = "".join(
        f"; {name} {blocks} blocks = {show_bytes(blocks * spec.block_bytes)}"
        for name, blocks in (("DDR", capacity.host_blocks), ("SSD", capacity.disk_blocks))
        if blocks
    )
    steps = f"{show_bytes(capacity.reserved_bytes)} left to steps, " if capacity.reserved_bytes else ""
    return (
        f"weights {show_bytes(capacity.weights_bytes)}, {steps}free now {show_bytes(device.free_bytes())}; "
        f"KV pool {show_bytes(capacity.kv_bytes)} = {capacity.blocks} blocks x {capacity.block_size} tokens x "
        f"{spec.token_bytes} B; {tokens} tokens, {tokens / capacity.max_model_len:.1f} sequences of the full "
        f"{capacity.max_model_len} tokens{beside}"
    )


def _device_blocks(
    settings: EngineSettings, spec: KVSpec, device: DeviceMemory, available: int, largest: int, reserved: int
) -> int:
    """Return the blocks of the device pool. `largest`: what a pool without a size in the settings takes at most."""
    free = _free_bytes(settings, device, available, reserved)
    blocks = settings.num_gpu_blocks_override or free // spec.block_bytes - 1
    if settings.num_gpu_blocks_override is None and settings.kv_cache_memory_bytes is None:
        blocks = min(blocks, largest)
    if blocks < 1 or (settings.num_gpu_blocks_override and (blocks + 1) * spec.block_bytes > available):
        raise ConfigError(
            "kv.no_room",
            f"no room for KV: {show_bytes(max(0, free))} free for it{_beside_steps(reserved)}{_by_limit(device)}, one "
            f"block of {spec.block_size} tokens takes {show_bytes(spec.block_bytes)}; "
            + ("let steps be smaller with --max-num-batched-tokens and --max-num-seqs, " if reserved else "")
            + "give more with --kv-cache-memory-bytes or take a smaller model",
        )
    return blocks


def _host_blocks(
    settings: EngineSettings, spec: KVSpec, device: DeviceMemory, free: int, device_bytes: int, file: "_ArenaFile"
) -> int:
    """Return the blocks of a separate DDR tier: as set, otherwise a share of free host memory. 0: no tier."""
    if settings.kv_host_bytes is None:
        wanted = min(int(free * _HOST_SHARE), _MAX_HOST_BYTES)
        if settings.cpu_device_pool:
            wanted = min(wanted, device_bytes)  # for tests and trials: no larger than the device pool
    else:
        wanted = settings.kv_host_bytes
        _check_fits(wanted, free, device)
    blocks = max(0, wanted // spec.block_bytes - 1)
    if settings.kv_host_bytes is None:
        blocks = file.fit(blocks)
    else:
        file.check(blocks)
    if settings.kv_host_bytes and not blocks:
        raise ConfigError(
            "kv.host_too_small",
            f"--kv-host-size {show_bytes(wanted)} is too small: one block and the null block need "
            f"{show_bytes(2 * spec.block_bytes)}",
        )
    return blocks


def _check_fits(wanted: int, free: int, device: DeviceMemory) -> None:
    if wanted > free:
        raise ConfigError(
            "kv.no_host_memory",
            f"--kv-host-size {show_bytes(wanted)} is more than the {show_bytes(max(0, free))} of host memory that are "
            f"free beside the KV pool (by {device.host_limit()})",
        )


def _disk_blocks(settings: EngineSettings, spec: KVSpec) -> int:
    """Return the slots of the volume: with their headers and the index they stay below --kv-disk-size."""
    if not settings.kv_disk_paths:
        return 0
    layout = fit_layout(settings.kv_disk_bytes, len(settings.kv_disk_paths), spec.block_bytes)
    if layout is None:
        raise ConfigError(
            "kv.disk_too_small",
            f"--kv-disk-size {show_bytes(settings.kv_disk_bytes)} holds not one block of "
            f"{show_bytes(spec.block_bytes)} in each of {len(settings.kv_disk_paths)} folders",
        )
    return layout.slots


class _ArenaFile:
    """The file in memory that holds an arena, and the limit on its size."""

    def __init__(self, max_bytes: int | None, block_bytes: int) -> None:
        self._max_blocks = None if max_bytes is None else blocks_within(max_bytes, block_bytes)
        self._block_bytes = block_bytes

    def fit(self, blocks: int) -> int:
        """Return as many of the blocks as the file may hold."""
        return blocks if self._max_blocks is None else min(blocks, self._max_blocks)

    def check(self, blocks: int) -> None:
        """Errors: ConfigError if the file may not hold the blocks."""
        if self.fit(blocks) < blocks:
            raise ConfigError(
                "kv.file_limit",
                f"a KV pool of {blocks} blocks ({show_bytes(blocks * self._block_bytes)}) is over "
                f"{show_file_limit()}, under which {self._max_blocks} blocks fit: raise the limit, or give less with "
                "--kv-cache-memory-bytes, --num-gpu-blocks-override and --kv-host-size",
            )


def _by_limit(device: DeviceMemory) -> str:
    return f" (by {device.host_limit()})" if device.name == "cpu" else ""


def _beside_steps(reserved: int) -> str:
    return f" beside the {show_bytes(reserved)} that the largest steps take" if reserved else ""


def _free_bytes(settings: EngineSettings, device: DeviceMemory, available: int, reserved: int) -> int:
    """Return the bytes for the pool, once the weights are loaded."""
    if settings.kv_cache_memory_bytes is not None:
        if settings.kv_cache_memory_bytes > available:
            raise ConfigError(
                "kv.no_memory",
                f"--kv-cache-memory-bytes {show_bytes(settings.kv_cache_memory_bytes)} is more than the "
                f"{show_bytes(max(0, available))} that are free{_beside_steps(reserved)}{_by_limit(device)}",
            )
        return settings.kv_cache_memory_bytes
    if device.name == "cpu":
        return min(int(available * min(_CPU_SHARE, settings.gpu_memory_utilization)), _MAX_CPU_BYTES)
    used = device.total_bytes() - device.free_bytes()
    return int(device.total_bytes() * settings.gpu_memory_utilization) - used - reserved
