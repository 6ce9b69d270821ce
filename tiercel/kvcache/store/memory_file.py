"""The layout of a memfd that outlives the engine: a header page, the journal, the arena.

The HTTP process makes the memfd and hands it to every engine that it starts. An engine may have died at any point while
it wrote, so nothing in the memfd is used before it is checked.
"""

import mmap
import os
import struct
import zlib
from dataclasses import dataclass

from tiercel.device.host_pages import HUGE_PAGE_BYTES, map_file
from tiercel.kvcache.store.journal import RECORD_BYTES
from tiercel.values.facts import identity_of_facts
from tiercel.values.tier import KVSpec

_MAGIC = b"TIERCEL\0"
VERSION = 2
_HEADER = struct.Struct("<8sIIQQ32sI")  # magic, version, record bytes, slots, block bytes, identity, crc


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """The positions in the memfd. `identity` names weights, block layout and everything else that keys depend on."""

    slots: int
    block_bytes: int
    identity: bytes

    @property
    def journal_start(self) -> int:
        return mmap.PAGESIZE

    @property
    def arena_start(self) -> int:
        """The first page of 2 MiB behind the journal; the hole between them takes no memory."""
        journal_end = self.journal_start + self.slots * RECORD_BYTES
        return -(-journal_end // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES

    @property
    def size_bytes(self) -> int:
        return self.arena_start + self.slots * self.block_bytes


def identity_of(spec: KVSpec, fingerprint: bytes) -> bytes:
    """Return 32 bytes that change with the model and with the layout of its blocks."""
    return identity_of_facts({"model": fingerprint.hex(), "layout": spec.facts})


def layout_of(spec: KVSpec, fingerprint: bytes, slots: int) -> MemoryLayout:
    """Return the layout for the blocks of one model."""
    return MemoryLayout(slots, spec.block_bytes, identity_of(spec, fingerprint))


def blocks_within(size_bytes: int, block_bytes: int) -> int:
    """Return the number of blocks, without the null block, whose memfd is no larger than this."""
    front = mmap.PAGESIZE + HUGE_PAGE_BYTES  # at most, see `arena_start`
    return max(0, (size_bytes - front) // (block_bytes + RECORD_BYTES) - 1)


@dataclass(frozen=True, slots=True)
class KeptMemory:
    """The memory that an earlier engine of the same model left. The new arena gets this size and reuses the memory."""

    blocks: int = 0  # without the null block; 0: nothing that can be used
    bytes: int = 0  # taken by the memfd, whatever its content


def kept_memory(fd: int | None, spec: KVSpec, fingerprint: bytes) -> KeptMemory:
    """Return what the memfd holds before it is opened."""
    if fd is None:
        return KeptMemory()
    return KeptMemory(kept_blocks(fd, spec, fingerprint), os.fstat(fd).st_blocks * 512)


def kept_blocks(fd: int, spec: KVSpec, fingerprint: bytes) -> int:
    """Return the size in blocks, without the null block, of a kept arena of the same model; 0: there is none."""
    header = _read_header(fd)
    if header is None or header != layout_of(spec, fingerprint, header.slots):
        return 0
    return header.slots - 1


def map_memory(fd: int, layout: MemoryLayout) -> tuple[memoryview, bool]:
    """Map the memfd. Return the mapping, and whether it holds what an earlier engine of the same layout left.

    Effects: any other content of the memfd is dropped; only one engine may live at a time.
    Errors:  OSError, ValueError if the memfd cannot be mapped.
    """
    is_kept = _read_header(fd) == layout
    if not is_kept:
        os.ftruncate(fd, 0)
        os.ftruncate(fd, layout.size_bytes)
    pages = map_file(fd, layout.size_bytes)
    if not is_kept:
        pages[: _HEADER.size] = pack_header(layout)
    return pages, is_kept


def pack_header(layout: MemoryLayout) -> bytes:
    """Return the header of a memfd with this layout."""
    body = _HEADER.pack(_MAGIC, VERSION, RECORD_BYTES, layout.slots, layout.block_bytes, layout.identity, 0)
    return body[:-4] + zlib.crc32(body[:-4]).to_bytes(4, "little")


def _read_header(fd: int) -> MemoryLayout | None:
    """Return the layout in the memfd's header; None if it has no header, or one that does not fit the memfd."""
    raw = os.pread(fd, _HEADER.size, 0)
    if len(raw) < _HEADER.size:
        return None
    _, _, _, slots, block_bytes, identity, _ = _HEADER.unpack(raw)
    layout = MemoryLayout(slots, block_bytes, identity)
    if raw != pack_header(layout) or os.fstat(fd).st_size != layout.size_bytes:
        return None
    return layout
