"""What a model is to the runner."""

from typing import Protocol

import torch
from torch import Tensor

from tiercel.engine.attention.base import ForwardState


class Model(Protocol):
    """A decoder-only transformer whose cache is paged and attention-only."""

    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int  # logits width
    max_model_len: int  # tokens, from its configuration
    dtype: torch.dtype
    impl: str  # native | transformers
    weights_bytes: int
    is_capturable: bool  # a decode launches the same kernels whatever the lengths: a CUDA graph can hold it
    fingerprint: bytes  # 32 bytes: changes when the weights, the config or the dtype do

    def forward(self, tokens: Tensor, kv: Tensor, state: ForwardState) -> Tensor:
        """Hidden states before the head.

        Shapes: tokens [T] int64; kv [slots, layers, block_size, kv_heads, 2 * head_dim]; returns [T, hidden].
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """The head. Shapes: hidden [N, hidden] -> [N, vocab_size] float32; on a GPU it may be the model's dtype."""
        ...
