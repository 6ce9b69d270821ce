"""The shape of what lies in a tier, and how much of it fits."""

from msgspec import Struct


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


class Capacity(Struct, frozen=True, kw_only=True):
    """Measured room of the device tier. Slot 0 is the sink, so `blocks` slots hold KV and one more exists."""

    blocks: int  # usable
    block_size: int  # tokens
    max_model_len: int  # tokens, after fitting to the pool
    weights_bytes: int
    kv_bytes: int
