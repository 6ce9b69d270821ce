"""The memory that holds the blocks of one tier."""

import mmap

import torch
from torch import Tensor

from tiercel.errors import ConfigError
from tiercel.tier import KVSpec
from tiercel.units import show_bytes

_DTYPE_BY_NAME = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Arena:
    """Slots of one tier. Slot 0 is the sink.

    Shapes: kv [slots, layers, block_size, kv_heads, 2 * head_dim]; a slot is one contiguous extent.
    """

    def __init__(self, spec: KVSpec, kv: Tensor) -> None:
        self.spec = spec
        self.kv = kv


def open_arena(spec: KVSpec, blocks: int, device: torch.device) -> Arena:
    """Allocate room for `blocks` blocks and the sink, all zero.

    Cost:   on the CPU none: pages become real when they are first written, so a large pool starts at once and a
            quiet server stays small.
    Errors: ConfigError when the memory is not there.
    """
    shape = (blocks + 1, spec.layers, spec.block_size, spec.kv_heads, 2 * spec.head_dim)
    dtype = _DTYPE_BY_NAME[spec.dtype]
    try:
        if device.type == "cpu":
            # torch.zeros would write every page.
            pages = mmap.mmap(-1, (blocks + 1) * spec.block_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            kv = torch.frombuffer(pages, dtype=dtype).view(shape)
        else:
            kv = torch.zeros(shape, dtype=dtype, device=device)
    except (OSError, RuntimeError) as exc:  # torch's OutOfMemoryError is a RuntimeError
        wanted = show_bytes((blocks + 1) * spec.block_bytes)
        raise ConfigError("kv.no_memory", f"no room for a KV pool of {blocks} blocks ({wanted})") from exc
    return Arena(spec, kv)
