"""How much fits: from measured free memory to blocks of KV."""

from device.base import Device
from tiercel.errors import ConfigError
from tiercel.settings import EngineSettings
from tiercel.tier import Capacity, KVSpec
from tiercel.units import GIB, show_bytes

DEFAULT_STEP_TOKENS = {"cpu": 256, "cuda": 2048}
_CPU_SHARE = 0.4  # of free memory: the machine's other programs and the page cache live there too
_CPU_MOST_BYTES = 4 * GIB
_SLACK = 2  # blocks beyond one longest sequence: two steps of growth


def step_tokens(settings: EngineSettings, device: Device) -> int:
    """The token budget of a step; never less than the sequences that may decode in it."""
    budget = settings.max_num_batched_tokens or DEFAULT_STEP_TOKENS[device.name]
    return max(budget, settings.max_num_seqs)


def size_pool(settings: EngineSettings, spec: KVSpec, device: Device, model_len: int, weights_bytes: int) -> Capacity:
    """Blocks of the device tier, and the context that they can hold.

    The pool is what the operator said, else what is free, and never more than all sequences at full length need.
    Errors: ConfigError, with the arithmetic, when not even one block fits or --max-model-len does not.
    """
    wanted_len = settings.max_model_len or model_len
    if wanted_len > model_len:
        raise ConfigError(
            "model.too_long", f"--max-model-len {wanted_len} is over the model's own limit of {model_len} tokens"
        )
    free = _free_bytes(settings, device)
    blocks = settings.num_gpu_blocks_override or free // spec.block_bytes - 1
    per_sequence = -(-wanted_len // spec.block_size) + _SLACK
    if settings.num_gpu_blocks_override is None and settings.kv_cache_memory_bytes is None:
        blocks = min(blocks, per_sequence * settings.max_num_seqs)
    if blocks < 1 or (settings.num_gpu_blocks_override and (blocks + 1) * spec.block_bytes > device.free_bytes()):
        raise ConfigError(
            "kv.no_room",
            f"no room for KV: {show_bytes(free)} free for it, one block of {spec.block_size} tokens takes "
            f"{show_bytes(spec.block_bytes)}; give more with --kv-cache-memory-bytes or take a smaller model",
        )
    fits_len = blocks * spec.block_size
    if fits_len < wanted_len and settings.max_model_len is not None:
        raise ConfigError(
            "kv.too_small",
            f"--max-model-len {wanted_len} needs {show_bytes(wanted_len * spec.token_bytes)} of KV, the pool has "
            f"{show_bytes(blocks * spec.block_bytes)}: {fits_len} tokens",
        )
    return Capacity(
        blocks=blocks,
        block_size=spec.block_size,
        max_model_len=min(wanted_len, fits_len),
        weights_bytes=weights_bytes,
        kv_bytes=(blocks + 1) * spec.block_bytes,
    )


def show_arithmetic(capacity: Capacity, spec: KVSpec, device: Device) -> str:
    """One line: how the pool came about."""
    tokens = capacity.blocks * capacity.block_size
    return (
        f"weights {show_bytes(capacity.weights_bytes)}, free now {show_bytes(device.free_bytes())}; "
        f"KV pool {show_bytes(capacity.kv_bytes)} = {capacity.blocks} blocks x {capacity.block_size} tokens x "
        f"{spec.token_bytes} B; {tokens} tokens, {tokens / capacity.max_model_len:.1f} sequences of the full "
        f"{capacity.max_model_len} tokens"
    )


def _free_bytes(settings: EngineSettings, device: Device) -> int:
    """Memory for the pool, after the weights were loaded."""
    if settings.kv_cache_memory_bytes is not None:
        if settings.kv_cache_memory_bytes > device.free_bytes():
            raise ConfigError(
                "kv.no_memory",
                f"--kv-cache-memory-bytes {show_bytes(settings.kv_cache_memory_bytes)} is more than the "
                f"{show_bytes(device.free_bytes())} that are free",
            )
        return settings.kv_cache_memory_bytes
    if device.name == "cpu":
        return min(int(device.free_bytes() * min(_CPU_SHARE, settings.gpu_memory_utilization)), _CPU_MOST_BYTES)
    used = device.total_bytes() - device.free_bytes()
    return int(device.total_bytes() * settings.gpu_memory_utilization) - used
