"""The network as training sees it: a lean Llama whose weights export to `LlamaForCausalLM`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the network."""

    vocab: int = 1792
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    inner: int = 512
    rope_theta: float = 10_000_000.0
    norm_eps: float = 1e-5
    positions: int = 4608

    def hf_config(self, end_id: int, pad_id: int) -> dict[str, object]:
        """The matching `config.json` of transformers."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "max_position_embeddings": self.positions,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": end_id,
            "pad_token_id": pad_id,
            "use_cache": True,
            "dtype": "float32",
        }


class Norm(nn.Module):
    """Root-mean-square normalisation."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


PLAIN_LENGTH = 256


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal grouped-query attention.

    On a processor, plain products with a compiled softmax train short texts about twice as
    fast as the fused kernel, whose backward pass is slow there.
    """
    batch, heads, length, size = q.shape
    kv_heads = k.shape[1]
    if q.device.type != "cpu" or length > PLAIN_LENGTH:
        k, v = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    q = (q * size**-0.5).reshape(batch * kv_heads, -1, size)
    scores = torch.bmm(q, k.reshape(batch * kv_heads, length, size).transpose(1, 2))
    scores = scores.view(batch, heads, length, length).float()
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1).to(v.dtype)
    mixed = torch.bmm(weights.view(batch * kv_heads, -1, length), v.reshape(batch * kv_heads, length, size))
    return mixed.view(batch, heads, length, size)


class Block(nn.Module):
    """One layer: grouped-query attention and a gated feed-forward part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        query, kv = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        self.norm_in = Norm(shape.hidden, shape.norm_eps)
        self.norm_mid = Norm(shape.hidden, shape.norm_eps)
        self.q = nn.Linear(shape.hidden, query, bias=False)
        self.k = nn.Linear(shape.hidden, kv, bias=False)
        self.v = nn.Linear(shape.hidden, kv, bias=False)
        self.o = nn.Linear(query, shape.hidden, bias=False)
        self.gate = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as (batch, head, position, size), rotated."""
        batch, length, _ = x.shape
        size = self.shape.head_size
        normed = self.norm_in(x)
        q = self.q(normed).view(batch, length, -1, size).transpose(1, 2)
        k = self.k(normed).view(batch, length, -1, size).transpose(1, 2)
        v = self.v(normed).view(batch, length, -1, size).transpose(1, 2)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        attended = attend(*self.heads(x, cos, sin))
        x = x + self.o(attended.transpose(1, 2).reshape(batch, length, -1))
        normed = self.norm_mid(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Network(nn.Module):
    """The whole network; `forward` gives normalised hidden states, `logits` the scores."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.norm_eps)
        steps = torch.arange(0, shape.head_size, 2, dtype=torch.float64) / shape.head_size
        angles = torch.outer(torch.arange(shape.positions, dtype=torch.float64), shape.rope_theta**-steps).repeat(1, 2)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)
        self._start()

    def _start(self) -> None:
        """Draw the first weights; the parts that write to the stream start smaller."""
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                out = name.endswith(("o.weight", "down.weight"))
                deviation = 0.03 / (2 * self.shape.layers) ** 0.5 if out else 0.03
                nn.init.normal_(weight, std=deviation)

    def layers(self) -> list[Block]:
        """The layers, first to last."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.embed(ids)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.bfloat16)
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """The scores of the next token at each of the given hidden states."""
        return functional.linear(hidden, self.embed.weight)


HF_PARTS = {
    "norm_in": "input_layernorm",
    "norm_mid": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def _weights_by_hf_name(network: Network) -> dict[str, nn.Parameter]:
    """The parameters under the names of `LlamaForCausalLM`."""
    weights = {
        "model.embed_tokens.weight": network.embed.weight,
        "model.norm.weight": network.norm.weight,
    }
    for index, block in enumerate(network.layers()):
        for part, weight in block.named_parameters():
            layer = HF_PARTS[part.removesuffix(".weight")]
            weights[f"model.layers.{index}.{layer}.weight"] = weight
    return weights


def hf_weights(network: Network, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights under the names of `LlamaForCausalLM`."""
    named = _weights_by_hf_name(network)
    return {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in named.items()}


def read_hf_weights(network: Network, weights: Mapping[str, Tensor]) -> None:
    """Give the network the weights of a `LlamaForCausalLM` of the same shape."""
    with torch.no_grad():
        for name, weight in _weights_by_hf_name(network).items():
            weight.copy_(weights[name])
