"""The tiers: the layout of a block, the transfers between tiers, and their capacity."""

import enum

from msgspec import Struct

from tiercel.values.facts import Facts
from tiercel.values.ids import BlockKey, SlotId

SCALES_BYTES = 4
"""Bytes of the two scales, of the key and of the value, that a token has in each head of an 8-bit cache."""

_ITEMSIZE_BY_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}


class KVSpec(Struct, frozen=True, kw_only=True):
    """The layout of a block: [layers, block_size, kv_heads, width], keys in the first half of the last axis.

    The width is 2 * head_dim; in 8 bits, the scales follow the numbers of each layer: see `engine.forward.kv_cache`.
    A slot of any tier holds exactly one block.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype: str  # float32 | bfloat16 | float16 | int8 | float8_e4m3fn

    @property
    def facts(self) -> Facts:
        """The layout by names of its own: part of the identity of memory and volumes, and of the keys of blocks."""
        return {
            "layers": self.layers,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "block_size": self.block_size,
            "dtype": self.dtype,
        }

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE_BY_DTYPE[self.dtype]

    @property
    def width(self) -> int:
        """Elements of one token in one head: its key, its value, and in 8 bits the bytes of their scales."""
        return 2 * self.head_dim + (SCALES_BYTES if self.itemsize == 1 else 0)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV in all layers."""
        return self.layers * self.kv_heads * self.width * self.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, which is one contiguous extent in every tier."""
        return self.block_size * self.token_bytes


class Tier(enum.Enum):
    """A tier that can hold copies of blocks. On a CPU, without `cpu_device_pool`, one arena is both HBM and DDR."""

    HBM = "hbm"
    DDR = "ddr"
    SSD = "ssd"


class Route(enum.Enum):
    """The route of a copy. No route connects HBM and SSD directly; such copies pass through DDR."""

    SPILL = "hbm_ddr"
    RESTORE = "ddr_hbm"
    PERSIST = "ddr_ssd"
    PREFETCH = "ssd_ddr"
    VERIFY = "ddr_ddr"  # compare a copy found after a restart with its checksum, in place
    SIGN = "ddr_journal"  # write the checksum of a copy to the journal, so that the next engine can use the copy


class Purpose(enum.Enum):
    """The purpose of a transfer, in the order of urgency."""

    RESTORE = "restore"  # a sequence waits for the copies
    SPILL = "spill"  # the slots of a victim become free when the transfer lands
    PREFETCH = "prefetch"  # a waiting sequence will need the copy
    BACKGROUND = "background"  # write-back and persist in idle time


class Transfer(Struct, frozen=True, gc=False):
    """Copies of whole blocks on one route. Keys, source slots and target slots are parallel."""

    id: int
    route: Route
    purpose: Purpose
    keys: tuple[BlockKey, ...]
    sources: tuple[SlotId, ...]
    targets: tuple[SlotId, ...]


class Verdict(enum.Enum):
    """The result of a transfer. A transfer between memory tiers has one result; a disk transfer carries one block."""

    LANDED = "landed"
    MISS = "miss"  # the bytes are not those of the key
    FAILED = "failed"  # an I/O error
    LATE = "late"  # the deadline has passed: the result is discarded, and the call still uses its buffers
    RETURNED = "returned"  # a late call has ended: its buffers are free


class Landing(Struct, frozen=True, gc=False):
    """The result of a transfer, with its time."""

    id: int
    verdict: Verdict
    seconds: float = 0.0  # spent copying
    runs: int = 1  # number of copies after merging adjacent slots


class Capacity(Struct, frozen=True, kw_only=True):
    """The sizes of the tiers. Slot 0, the null block, is not counted in `blocks`."""

    blocks: int  # of the device tier
    block_size: int  # tokens
    max_model_len: int  # tokens, reduced to what the pool can hold
    weights_bytes: int
    kv_bytes: int
    host_blocks: int = 0  # of a separate DDR tier; 0: none, or the device tier is in DDR
    disk_blocks: int = 0  # of the SSD tier; 0: none
    reserved_bytes: int = 0  # device memory left free for the allocations of steps
