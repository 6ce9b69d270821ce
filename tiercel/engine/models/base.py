"""The protocol of a model."""

from typing import Protocol

from torch import Tensor

from tiercel.engine.forward.state import ForwardState
from tiercel.engine.models.precision import Precision, dtype_name
from tiercel.values.tier import KVSpec


class Model(Protocol):
    """A decoder-only transformer whose cache is paged and attention-only."""

    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int  # width of the logits
    max_model_len: int  # tokens, from its config.json
    precision: Precision
    impl: str  # native | transformers
    products: str  # what computes the matrix products, for people
    weights_bytes: int
    is_capturable: bool  # launches depend on tokens and rows alone, so that a CUDA graph can hold them
    fingerprint: bytes  # 32 bytes that change with the weights, the config or the types of its numbers

    def forward(self, tokens: Tensor, kv: Tensor, state: ForwardState) -> Tensor:
        """Return hidden states before the head, and write the KV of the tokens.

        Shapes: tokens [T] int64; kv [slots, layers, block_size, kv_heads, width]; returns [T, hidden].
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states, -inf for ids without a token.

        Shapes: hidden [N, hidden]; returns [N, vocab_size], in float32 or in the type of the activations.
        """
        ...


def kv_spec(model: Model, block_size: int) -> KVSpec:
    """Return the layout of a model's KV blocks of `block_size` tokens."""
    return KVSpec(
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        block_size=block_size,
        dtype=dtype_name(model.precision.kv),
    )
