"""The native decoder: Llama 2 and 3, Mistral, Qwen2, Qwen2.5 and Qwen3 from one parametric description."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.base import Attention, AttentionParams, ForwardState
from engine.models.config import DecoderConfig
from engine.models.layers import GatedMLP, Linear, RMSNorm, Target, can_pack
from engine.models.rope import Rotary, rotate

_TIED_SHARE = 0.1  # of the weights: a tied head is copied into the packed layout up to this size


class SelfAttention:
    """Projections, norms and rotation around the paged attention of one layer."""

    def __init__(
        self, config: DecoderConfig, layer: int, attention: Attention, dtype: torch.dtype, device: torch.device
    ) -> None:
        heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
        self._attention = attention
        self._params = AttentionParams(scale=head_dim**-0.5, window=config.windows[layer])
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim
        outputs = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        self._qkv = Linear(config.hidden_size, outputs, config.has_qkv_bias, dtype, device)
        self._output = Linear(heads * head_dim, (config.hidden_size,), config.has_output_bias, dtype, device)
        self._norms = (
            (RMSNorm(head_dim, config.rms_eps, dtype, device), RMSNorm(head_dim, config.rms_eps, dtype, device))
            if config.has_qk_norm
            else None
        )

    def targets(self, prefix: str) -> Iterator[Target]:
        """Where the checkpoint's tensors of this layer go."""
        yield from self._qkv.targets(f"{prefix}q_proj", f"{prefix}k_proj", f"{prefix}v_proj")
        yield from self._output.targets(f"{prefix}o_proj")
        if self._norms is not None:
            yield f"{prefix}q_norm.weight", self._norms[0].weight
            yield f"{prefix}k_norm.weight", self._norms[1].weight

    def pack(self) -> None:
        """See `Linear.pack`."""
        self._qkv.pack()
        self._output.pack()

    def forward(self, hidden: Tensor, angles: tuple[Tensor, Tensor], kv: Tensor, state: ForwardState) -> Tensor:
        """Shapes: hidden [T, hidden]; kv: one layer of the arena; returns [T, hidden]."""
        tokens = hidden.shape[0]
        heads = self._qkv.forward(hidden).view(tokens, self._heads + 2 * self._kv_heads, self._head_dim)
        query, key, value = heads.split((self._heads, self._kv_heads, self._kv_heads), dim=1)
        if self._norms is not None:
            query, key = self._norms[0].forward(query), self._norms[1].forward(key)
        query, key = rotate(query, *angles), rotate(key, *angles)
        out = self._attention.attend(query, key, value, kv, state, self._params)
        return self._output.forward(out.view(tokens, -1))


class Layer:
    """Attention and MLP, each after a norm and beside the residual."""

    def __init__(
        self, config: DecoderConfig, layer: int, attention: Attention, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._attention_norm = RMSNorm(config.hidden_size, config.rms_eps, dtype, device)
        self._attention = SelfAttention(config, layer, attention, dtype, device)
        self._mlp_norm = RMSNorm(config.hidden_size, config.rms_eps, dtype, device)
        self._mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.has_mlp_bias, dtype, device)

    def targets(self, prefix: str) -> Iterator[Target]:
        """Where the checkpoint's tensors of this layer go."""
        yield f"{prefix}input_layernorm.weight", self._attention_norm.weight
        yield from self._attention.targets(f"{prefix}self_attn.")
        yield f"{prefix}post_attention_layernorm.weight", self._mlp_norm.weight
        yield from self._mlp.targets(f"{prefix}mlp.")

    def pack(self) -> None:
        """See `Linear.pack`."""
        self._attention.pack()
        self._mlp.pack()

    def forward(self, hidden: Tensor, angles: tuple[Tensor, Tensor], kv: Tensor, state: ForwardState) -> Tensor:
        """Shapes: hidden [T, hidden]; kv: one layer of the arena; returns [T, hidden]."""
        hidden = hidden + self._attention.forward(self._attention_norm.forward(hidden), angles, kv, state)
        return hidden + self._mlp.forward(self._mlp_norm.forward(hidden))


class Decoder:
    """A whole model; satisfies `Model`. Its weights are unset until `targets` were filled."""

    impl = "native"

    def __init__(self, config: DecoderConfig, attention: Attention, dtype: torch.dtype, device: torch.device) -> None:
        self.layers, self.kv_heads, self.head_dim = config.layers, config.kv_heads, config.head_dim
        self.vocab_size, self.max_model_len = config.vocab_size, config.max_model_len
        self.dtype = dtype
        self.fingerprint = bytes(32)
        self._embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self._rotary = Rotary(config.rope, config.head_dim, dtype, device)
        self._layers = tuple(Layer(config, index, attention, dtype, device) for index in range(config.layers))
        self._norm = RMSNorm(config.hidden_size, config.rms_eps, dtype, device)
        self._is_tied = config.is_tied
        self._head = (
            Linear.sharing(self._embedding)
            if config.is_tied
            else Linear(config.hidden_size, (config.vocab_size,), False, dtype, device)
        )
        self.weights_bytes = sum(tensor.nbytes for _, tensor in self.targets())

    def targets(self) -> Iterator[Target]:
        """Every tensor of the checkpoint and the memory it is loaded into."""
        yield "model.embed_tokens.weight", self._embedding
        for index, layer in enumerate(self._layers):
            yield from layer.targets(f"model.layers.{index}.")
        yield "model.norm.weight", self._norm.weight
        if not self._is_tied:
            yield from self._head.targets("lm_head")

    def pack(self) -> None:
        """Exchange the weights, once they are loaded, for packed ones where the device is faster with them.

        Cost:    one weight at a time twice in memory. A tied head is packed, beside the embedding that it shares, only
                 where that copy is a small part of the model.
        Effects: `targets` no longer holds the weights.
        """
        if not can_pack(self.dtype, self._embedding.device):
            return
        for layer in self._layers:
            layer.pack()
        if not self._is_tied:
            self._head.pack()
        elif self._embedding.nbytes <= _TIED_SHARE * self.weights_bytes:
            self._head.pack()
            self.weights_bytes += self._embedding.nbytes

    def forward(self, tokens: Tensor, kv: Tensor, state: ForwardState) -> Tensor:
        """See `Model.forward`."""
        hidden = F.embedding(tokens, self._embedding)
        angles = self._rotary.angles(state.positions)
        for index, layer in enumerate(self._layers):
            hidden = layer.forward(hidden, angles, kv[:, index], state)
        return self._norm.forward(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model.logits`."""
        return self._head.forward(hidden).float()
