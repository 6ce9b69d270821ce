"""What an attention backend is given and what it promises."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What a layer asks of attention; the same at every step."""

    scale: float
    window: int | None = None  # sliding window: a query sees itself and the window - 1 tokens before it
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: Tensor | None = None  # [heads]: one more logit per head in the softmax's denominator (gpt-oss)


@dataclass(frozen=True, slots=True)
class ForwardState:
    """Where the tokens of one forward lie. One per nano-batch, read by every layer.

    S sequences with ragged slices lie behind each other in one row of T tokens; sequence s owns tokens
    [query_starts[s], query_starts[s + 1]) of it and sees keys [0, context_lengths[s]) of its own, the last of
    which is its own last query.

    Shapes: query_starts [S + 1] (host), context_lengths [S] (host), block_tables [S, blocks] int64 on the device
            (unused tails are 0, the sink), positions [T] int64, slot_ids [T] int64, slot_offsets [T] int64
            (token t is written to kv[slot_ids[t], layer, slot_offsets[t]]).
    """

    query_starts: tuple[int, ...]
    context_lengths: tuple[int, ...]
    block_tables: Tensor
    positions: Tensor
    slot_ids: Tensor
    slot_offsets: Tensor

    @property
    def num_sequences(self) -> int:
        return len(self.context_lengths)

    @property
    def is_decode(self) -> bool:
        """Every sequence has exactly one query token."""
        return self.query_starts[-1] == len(self.context_lengths)


class Attention(Protocol):
    """Paged attention over one layer of the arena."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, state: ForwardState, params: AttentionParams
    ) -> Tensor:
        """Write the new keys and values into the cache, then attend causally over it.

        Shapes:  query [T, heads, head_dim]; key, value [T, kv_heads, head_dim];
                 kv [slots, block_size, kv_heads, 2 * head_dim], a strided view of one layer;
                 returns [T, heads, head_dim].
        Effects: kv is written at the state's slots before it is read.
        Source:  PagedAttention (arXiv 2309.06180) section 4.
        """
        ...
