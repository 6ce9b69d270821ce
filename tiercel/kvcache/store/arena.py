"""The memory that holds the blocks of one tier."""

import mmap

import torch
from torch import Tensor

from tiercel.device.host_pages import ask_for_huge_pages
from tiercel.kvcache.store.journal import RECORD_BYTES, SlotJournal
from tiercel.kvcache.store.memory_file import layout_of, map_memory
from tiercel.system.process_limits import blame
from tiercel.values.errors import ConfigError, InvariantError
from tiercel.values.ids import SlotId
from tiercel.values.tier import KVSpec
from tiercel.values.units import show_bytes

_DTYPE_BY_NAME = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


_LESS = "or give it less with --kv-cache-memory-bytes and --kv-host-size"


class Arena:
    """The slots of one tier in memory. Slot 0 is the null block.

    Shapes: kv [slots, layers, block_size, kv_heads, width], see `KVSpec`; a slot is one contiguous extent.
    """

    def __init__(
        self,
        spec: KVSpec,
        kv: Tensor,
        host_bytes: memoryview | None = None,
        journal: SlotJournal | None = None,
        *,
        is_kept: bool = False,
    ) -> None:
        self.spec = spec
        self.kv = kv
        self.journal = journal  # if the arena outlives the engine
        self.is_kept = is_kept  # the arena may hold copies of an earlier engine: the journal says which
        self._host_bytes = host_bytes

    @property
    def blocks(self) -> int:
        """Number of slots without the null block."""
        return self.kv.shape[0] - 1

    def slot_bytes(self, slot: SlotId) -> memoryview:
        """Return one slot as bytes, to read and to write; host memory only. The arena starts on a page boundary."""
        if self._host_bytes is None or not 0 <= slot <= self.blocks:
            raise InvariantError("arena.slot_bytes", slot=slot, blocks=self.blocks)
        size = self.spec.block_bytes
        return self._host_bytes[slot * size : (slot + 1) * size]


def open_arena(
    spec: KVSpec, blocks: int, device: torch.device, fd: int | None = None, fingerprint: bytes = b""
) -> Arena:
    """Open an arena of `blocks` blocks and the null block: all zero, or as an earlier engine left it in the memfd `fd`.

    Cost:    on the CPU none: pages become real when they are first written, so a large pool starts at once and a
             quiet server stays small.
    Effects: a memfd of another model, layout or size is emptied.
    Errors:  ConfigError if the machine has not enough memory.
    """
    slots = blocks + 1
    shape = (slots, spec.layers, spec.block_size, spec.kv_heads, spec.width)
    dtype = _DTYPE_BY_NAME[spec.dtype]
    try:
        if device.type != "cpu":
            return Arena(spec, torch.zeros(shape, dtype=dtype, device=device))
        journal, is_kept, start = None, False, 0
        if fd is None:
            # torch.zeros would write every page.
            pages = mmap.mmap(-1, slots * spec.block_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            layout = layout_of(spec, fingerprint, slots)
            pages, is_kept = map_memory(fd, layout)
            start = layout.arena_start
            journal = SlotJournal(pages[layout.journal_start :][: slots * RECORD_BYTES])
        raw = memoryview(pages)
        ask_for_huge_pages(raw)
        kv = torch.frombuffer(pages, dtype=dtype, count=slots * spec.block_bytes // spec.itemsize, offset=start)
    except (OSError, ValueError, RuntimeError) as exc:  # torch's OutOfMemoryError is a RuntimeError
        wanted = show_bytes(slots * spec.block_bytes)
        raise ConfigError(
            "kv.no_memory", f"no room for a KV pool of {blocks} blocks ({wanted}): {blame(exc)}; {_LESS}"
        ) from exc
    return Arena(spec, kv.view(shape), raw[start:], journal, is_kept=is_kept)
