"""The protocols of attention backends."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from tiercel.engine.forward.state import AttentionParams, ForwardState


class Attention(Protocol):
    """Paged attention over one layer of the arena."""

    name: str
    """As `--attention-backend` calls it."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, state: ForwardState, params: AttentionParams
    ) -> Tensor:
        """Write the new keys and values into the cache, then attend causally over it.

        Shapes:  query [T, heads, head_dim]; key, value [T, kv_heads, head_dim];
                 kv [slots, block_size, kv_heads, width], a strided view of one layer;
                 returns [T, heads, head_dim].
        Effects: kv is written at the state's slots before it is read.
        Source:  PagedAttention (arXiv 2309.06180) section 4.
        """
        ...


@runtime_checkable
class PagedReader(Protocol):
    """A backend that can also attend over keys and values that a kernel has already written to the cache."""

    is_capturable: bool  # launches depend on tokens and rows alone, so that a CUDA graph can hold them

    def read(self, query: Tensor, kv: Tensor, state: ForwardState, params: AttentionParams) -> Tensor:
        """Attend causally over the cache, which already holds the keys and values of this forward.

        Shapes: query [T, heads, head_dim]; kv [slots, block_size, kv_heads, width], a strided view of one
                layer; returns [T, heads, head_dim].
        """
        ...
