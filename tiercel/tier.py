"""The shape of what lies in a tier, and how much of it fits."""

import enum

from msgspec import Struct

from tiercel.ids import BlockKey, SlotId


class KVGroup(Struct, frozen=True):
    """Layers whose cache rows are alike. Version 1 has one group; sliding windows are kept whole."""

    kind: str  # full | window | state
    layers: int
    row_bytes: int  # of one token in one layer: kv_heads * 2 * head_dim * itemsize


class KVSpec(Struct, frozen=True, kw_only=True):
    """The layout of a block: [layers, block_size, kv_heads, 2 * head_dim], keys in the first half of the last axis.

    Arenas see bytes, kernels see strides; slots of any tier hold exactly one block.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype: str  # float32 | bfloat16 | float16

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self.dtype == "float32" else 2

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        """Layers with like rows."""
        return (KVGroup("full", self.layers, self.kv_heads * 2 * self.head_dim * self.itemsize),)

    @property
    def token_bytes(self) -> int:
        """KV of one token in all layers."""
        return sum(group.layers * group.row_bytes for group in self.groups)

    @property
    def block_bytes(self) -> int:
        """KV of one block: one contiguous extent in every tier."""
        return self.block_size * self.token_bytes


class Tier(enum.Enum):
    """Where a copy of a block can lie. On the CPU one arena is HBM and DDR in one, unless they are kept apart."""

    HBM = "hbm"
    DDR = "ddr"
    SSD = "ssd"


class Route(enum.Enum):
    """The ways of a copy. SSD never touches HBM: host memory is the gateway."""

    SPILL = "hbm_ddr"
    RESTORE = "ddr_hbm"
    PERSIST = "ddr_ssd"
    PREFETCH = "ssd_ddr"
    VERIFY = "ddr_ddr"  # a copy found after a restart is compared with its checksum, in place
    SIGN = "ddr_journal"  # the checksum of a copy is journalled, so that the next engine can find it


class Purpose(enum.Enum):
    """Why a transfer runs: what is exposed goes before what only prepares."""

    RESTORE = "restore"  # a sequence waits for it
    SPILL = "spill"  # a victim's slots wait for it
    PREFETCH = "prefetch"  # a waiting sequence will need it
    BACKGROUND = "background"  # write-back and persist in idle time


class Transfer(Struct, frozen=True, gc=False):
    """Copies of whole blocks on one route. Keys, sources and targets run in parallel."""

    id: int
    route: Route
    purpose: Purpose
    keys: tuple[BlockKey, ...]
    sources: tuple[SlotId, ...]
    targets: tuple[SlotId, ...]


class Verdict(enum.Enum):
    """How a transfer came out. Memory routes land as a whole; disk routes carry one block each."""

    LANDED = "landed"
    MISS = "miss"  # the bytes are not what the key promises
    FAILED = "failed"  # an I/O error
    LATE = "late"  # the deadline passed: the result is abandoned, the buffers still belong to the call
    RETURNED = "returned"  # a late call has come back: its buffers are free


class Landing(Struct, frozen=True, gc=False):
    """News of one transfer."""

    id: int
    verdict: Verdict
    seconds: float = 0.0  # spent copying
    runs: int = 1  # copies after neighbours were merged


class Capacity(Struct, frozen=True, kw_only=True):
    """Measured room of the tiers. Slot 0 is the null block, so `blocks` slots hold KV and one more exists."""

    blocks: int  # usable, of the device tier
    block_size: int  # tokens
    max_model_len: int  # tokens, after fitting to the pool
    weights_bytes: int
    kv_bytes: int
    host_blocks: int = 0  # of a DDR tier beside the device tier; 0 = none, or the device tier is DDR itself
    disk_blocks: int = 0  # of the SSD tier; 0 = none
    reserved_bytes: int = 0  # of the device, left for what steps take beside weights and KV
