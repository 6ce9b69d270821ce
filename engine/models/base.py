"""The protocol of a model."""

from typing import Protocol

import torch
from torch import Tensor

from tiercel.engine.forward.state import ForwardState
from tiercel.tier import KVSpec

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Model(Protocol):
    """A decoder-only transformer whose cache is paged and attention-only."""

    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int  # width of the logits
    max_model_len: int  # tokens, from its config.json
    dtype: torch.dtype
    impl: str  # native | transformers
    weights_bytes: int
    is_capturable: bool  # the launches of a decode depend on no length, so that a CUDA graph can hold them
    fingerprint: bytes  # 32 bytes that change with the weights, the config or the dtype

    def forward(self, tokens: Tensor, kv: Tensor, state: ForwardState) -> Tensor:
        """Return hidden states before the head, and write the KV of the tokens.

        Shapes: tokens [T] int64; kv [slots, layers, block_size, kv_heads, 2 * head_dim]; returns [T, hidden].
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states.

        Shapes: hidden [N, hidden]; returns [N, vocab_size] float32, on a GPU possibly in the model's dtype.
        """
        ...


def dtype_name(model: Model) -> str:
    """Return the name of the dtype of a model's weights, activations and KV."""
    return _DTYPE_NAMES[model.dtype]


def kv_spec(model: Model, block_size: int) -> KVSpec:
    """Return the layout of a model's KV blocks of `block_size` tokens."""
    return KVSpec(
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        block_size=block_size,
        dtype=dtype_name(model),
    )
