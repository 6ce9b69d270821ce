"""Connect the attention modules of transformers to a paged attention backend.

Source: transformers' AttentionInterface, by which a registered function replaces every layer's attention.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from tiercel.engine.attention.base import Attention
from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.values.errors import ConfigError, InvariantError

INTERFACE_NAME = "tiercel"
"""The value of a model's `_attn_implementation`. No mask function has this name, so masks are None."""

_ATTRIBUTE = "tiercel_bridge"
# Keywords of layers that have no effect on attention over a whole causal context.
_HARMLESS = frozenset(
    ("position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "output_router_logits")
)


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The attention that one layer asked for."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None


class Bridge:
    """Holds the arena and the state of a forward for the attention modules of one model."""

    def __init__(self, attention: Attention) -> None:
        self._attention = attention
        self._forward: tuple[Tensor, ForwardState] | None = None  # arena and state of the current forward
        self._calls: list[LayerCall] | None = None

    @staticmethod
    def register() -> None:
        """Register the paged function with transformers, before a model is built. Repeated calls are harmless."""
        AttentionInterface.register(INTERFACE_NAME, paged_attention)

    def attach(self, model: nn.Module) -> None:
        """Set the bridge as an attribute of every module of the model."""
        for module in model.modules():
            setattr(module, _ATTRIBUTE, self)

    def enter(self, kv: Tensor, state: ForwardState) -> None:
        """Set the arena and the state of the next forward.

        Shapes: kv [slots, layers, block_size, kv_heads, width].
        """
        self._forward = (kv, state)

    def leave(self) -> None:
        """Release the arena and the state after a forward."""
        self._forward = None

    def start_record(self) -> list[LayerCall]:
        """Record calls: until `stop_record`, append each to the returned list and return zeros from attention."""
        self._calls = []
        return self._calls

    def stop_record(self) -> None:
        """Compute attention again."""
        self._calls = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Compute attention of one layer. Shapes: as of `paged_attention`; returns [1, T, heads, head_dim]."""
        if self._calls is not None:
            _, heads, _, head_dim = query.shape
            self._calls.append(LayerCall(layer, heads, key.shape[1], head_dim, params.window))
            return torch.zeros_like(query).transpose(1, 2)
        if self._forward is None:
            raise InvariantError("bridge.no_forward", layer=layer)
        kv, state = self._forward
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return self._attention.attend(query, key, value, kv[:, layer], state, params).unsqueeze(0)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unknown: object,  # every architecture of transformers may add keywords
) -> tuple[Tensor, None]:
    """Compute attention for a module of transformers; registered as `tiercel`.

    Shapes: query [1, heads, T, head_dim]; key, value [1, kv_heads, T, head_dim]; returns [1, T, heads, head_dim].
    Errors: ConfigError if the layer needs something that paged attention cannot do. Every layer is probed at loading.
    """
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise _refusal(module, "its attention has no layer_idx")
    if attention_mask is not None:
        raise _refusal(module, "it makes its own attention mask")
    if is_causal is False or (is_causal is None and getattr(module, "is_causal", True) is False):
        raise _refusal(module, "its attention is not causal")
    if dropout:
        raise _refusal(module, "it uses dropout")
    for name, argument in unknown.items():
        if argument is not None and name not in _HARMLESS:
            raise _refusal(module, f"it passes the unknown keyword {name}")
    if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        raise _refusal(module, f"keys {tuple(key.shape)} and values {tuple(value.shape)} differ in shape")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise _refusal(module, "it attends over tokens other than those of its input")
    bridge = getattr(module, _ATTRIBUTE, None)
    if not isinstance(bridge, Bridge):
        raise _refusal(module, "its attention is no module of the model")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    params = AttentionParams(scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux)
    return bridge.attend(layer, query, key, value, params), None


def _refusal(module: nn.Module, reason: str) -> ConfigError:
    return ConfigError("model.unsupported", f"{type(module).__name__}: {reason}")
