"""The native decoder from one parametric description: Llama, Mistral, Qwen, and the mixtures Mixtral and OLMoE."""

from collections.abc import Callable, Generator, Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.engine.models.config import DecoderConfig
from tiercel.engine.models.layers import Linear, RMSNorm, Target, can_pack
from tiercel.engine.models.logit_mask import LogitMask
from tiercel.engine.models.moe import ExpertPart, MixtureMLP
from tiercel.engine.models.ops import Angles, AttentionParts, LayerParts, LayerRunner, Ops
from tiercel.engine.models.phases import AttentionCall, Phases, run_in_turn
from tiercel.engine.models.precision import Precision
from tiercel.engine.models.quantized_parts import DequantizedTarget
from tiercel.engine.models.rope import Rotary
from tiercel.engine.models.tiered_experts import ExpertTier, LibraryOf
from tiercel.engine.native.library import NativeLibrary
from tiercel.engine.native.linear import PACKED_DTYPES, return_freed_memory

PrefersNative = Callable[[int, int], bool]
"""Returns whether the native kernels are faster than oneDNN for a weight of these outputs and inputs."""

_EMBEDDING = "model.embed_tokens"
_TIED_SHARE = 0.1  # of the weights: up to this size a tied head is copied into the packed layout


class SelfAttention:
    """Projections, norms and rotation around the paged attention of one layer."""

    def __init__(self, config: DecoderConfig, layer: int, ops: Ops, precision: Precision, device: torch.device) -> None:
        heads, kv_heads, head_dim, kind = config.heads, config.kv_heads, config.head_dim, precision.activations
        self._ops = ops
        self._params = AttentionParams(scale=head_dim**-0.5, window=config.windows[layer])
        outputs = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        self._qkv = Linear(config.hidden_size, outputs, config.has_qkv_bias, precision, device)
        self._output = Linear(heads * head_dim, (config.hidden_size,), config.has_output_bias, precision, device)
        sizes = (heads * head_dim, kv_heads * head_dim) if config.norms_whole_width else (head_dim, head_dim)
        self._norms = (
            (RMSNorm(sizes[0], config.rms_eps, kind, device), RMSNorm(sizes[1], config.rms_eps, kind, device))
            if config.has_qk_norm
            else None
        )
        self._norms_whole_width = config.norms_whole_width

    def targets(self, prefix: str) -> Iterator[Target]:
        """Yield the checkpoint's tensors of this layer and their memory."""
        yield from self._qkv.targets(f"{prefix}q_proj", f"{prefix}k_proj", f"{prefix}v_proj")
        yield from self._output.targets(f"{prefix}o_proj")
        if self._norms is not None:
            yield f"{prefix}q_norm.weight", self._norms[0].weight
            yield f"{prefix}k_norm.weight", self._norms[1].weight

    def pack(self, library_of: LibraryOf) -> None:
        """See `Linear.pack`."""
        self._qkv.pack(library_of(self._qkv))
        self._output.pack(library_of(self._output))

    @property
    def parts(self) -> AttentionParts:
        """Everything that a native forward needs."""
        return AttentionParts(self._qkv, self._output, self._norms, self._params)

    def phases(self, hidden: Tensor, angles: Angles, kv: Tensor, state: ForwardState) -> Phases:
        """Shapes: hidden [T, hidden]; kv: one layer of the arena; returns [T, hidden]."""
        qkv, norms = self._qkv.forward(hidden), self._norms
        if norms is not None and self._norms_whole_width:
            start = 0
            for norm in norms:
                end = start + norm.weight.shape[0]
                qkv[:, start:end] = norm.forward(qkv[:, start:end])
                start = end
            norms = None
        call = AttentionCall(lambda: self._ops.attend(qkv, norms, angles, kv, state, self._params))
        yield call
        out = call.take()
        return self._output.forward(out.view(out.shape[0], -1))


class GatedMLP:
    """The MLP of a layer: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig, ops: Ops, precision: Precision, device: torch.device) -> None:
        hidden, inner, has_bias = config.hidden_size, config.intermediate_size, config.has_mlp_bias
        self._ops = ops
        self._gate_up = Linear(hidden, (inner, inner), has_bias, precision, device)
        self._down = Linear(inner, (hidden,), has_bias, precision, device)

    def targets(self, prefix: str) -> Iterator[Target]:
        """Yield the checkpoint's tensors of this layer and their memory. `prefix`: that of the decoder's layer."""
        yield from self._gate_up.targets(f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj")
        yield from self._down.targets(f"{prefix}mlp.down_proj")

    def pack(self, library_of: LibraryOf) -> None:
        """See `Linear.pack`."""
        self._gate_up.pack(library_of(self._gate_up))
        self._down.pack(library_of(self._down))

    @property
    def parts(self) -> tuple[Linear, Linear]:
        """The layers before and behind the activation."""
        return self._gate_up, self._down

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: x [T, hidden] -> same."""
        return self._down.forward(self._ops.silu_mul(self._gate_up.forward(x)))


class Layer:
    """Attention and MLP, each after a norm. Their outputs are added to the residual by the following norm."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        ops: Ops,
        precision: Precision,
        device: torch.device,
        tier: ExpertTier | None = None,
    ) -> None:
        self._ops = ops
        self._attention_norm = RMSNorm(config.hidden_size, config.rms_eps, precision.activations, device)
        self._attention = SelfAttention(config, layer, ops, precision, device)
        self._mlp_norm = RMSNorm(config.hidden_size, config.rms_eps, precision.activations, device)
        mixture = config.mixture
        self._mlp = (
            MixtureMLP(config.hidden_size, mixture, ops, precision, device, tier=tier)
            if mixture is not None and mixture.layers[layer]
            else GatedMLP(config, ops, precision, device)
        )

    def targets(self, prefix: str) -> Iterator[Target]:
        """Yield the checkpoint's tensors of this layer and their memory."""
        yield f"{prefix}input_layernorm.weight", self._attention_norm.weight
        yield from self._attention.targets(f"{prefix}self_attn.")
        yield f"{prefix}post_attention_layernorm.weight", self._mlp_norm.weight
        yield from self._mlp.targets(prefix)

    def pack(self, library_of: LibraryOf) -> None:
        """See `Linear.pack`."""
        self._attention.pack(library_of)
        self._mlp.pack(library_of)

    @property
    def mixture(self) -> MixtureMLP | None:
        """The mixture of experts; None if the layer has a dense MLP."""
        return self._mlp if isinstance(self._mlp, MixtureMLP) else None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The layers of the attention and of a dense MLP."""
        mlp = self._mlp.parts if isinstance(self._mlp, GatedMLP) else ()
        return self._attention.parts.qkv, self._attention.parts.output, *mlp

    def join_experts(self) -> bool:
        """See `MixtureMLP.join`; True for a layer without a mixture."""
        return isinstance(self._mlp, GatedMLP) or self._mlp.join()

    @property
    def parts(self) -> LayerParts | None:
        """Everything that a native forward needs; None for a layer with a mixture."""
        if not isinstance(self._mlp, GatedMLP):
            return None
        return LayerParts(self._attention_norm, self._attention.parts, self._mlp_norm, *self._mlp.parts)

    def phases(
        self, x: Tensor, residual: Tensor | None, angles: Angles, kv: Tensor, state: ForwardState
    ) -> Generator[AttentionCall, None, tuple[Tensor, Tensor]]:
        """Compute the layer. `x` is the output of the previous layer, which is not yet added to `residual`.

        Returns the same two values of this layer.

        Shapes: x and residual [T, hidden]; residual is None before the first layer; kv: one layer of the arena.
        """
        first, second = self._attention_norm, self._mlp_norm
        normed, residual = self._ops.add_norm(x, residual, first.weight, first.eps)
        x = yield from self._attention.phases(normed, angles, kv, state)
        normed, residual = self._ops.add_norm(x, residual, second.weight, second.eps)
        return self._mlp.forward(normed), residual


class Decoder:
    """A native model; implements `Model`. Its weights are unset until the tensors of `targets` are filled."""

    impl = "native"

    def __init__(
        self,
        config: DecoderConfig,
        ops: Ops,
        precision: Precision,
        device: torch.device,
        tier: ExpertTier | None = None,
    ) -> None:
        """`tier`: has the experts that are not in memory; None: all are."""
        self.layers, self.kv_heads, self.head_dim = config.layers, config.kv_heads, config.head_dim
        self.vocab_size, self.max_model_len = config.vocab_size, config.max_model_len
        self.precision = precision
        self.is_capturable = ops.is_capturable
        self.fingerprint = bytes(32)
        self.products = "torch"  # what computes the matrix products: torch, and after `pack` perhaps native or oneDNN
        self._ops = ops
        self._rotary = Rotary(config.rope, config.head_dim, precision.activations, device)
        self.tier = tier
        self.logit_mask: LogitMask | None = None  # of ids without a token
        self.lacks_expert_tier = False  # the folder of the experts could not be used: all are in memory
        self._layers = tuple(Layer(config, index, ops, precision, device, tier) for index in range(config.layers))
        for mixture, following in pairwise(self.mixtures):
            mixture.precede(following)
        self._norm = RMSNorm(config.hidden_size, config.rms_eps, precision.activations, device)
        self._is_tied = config.is_tied
        # A quantised matrix that is both the embedding and the head is kept once, as the head.
        scheme = precision.scheme
        self._has_shared_head = config.is_tied and scheme is not None and scheme.quantizes_shared_embedding
        self._embedding_format = None if config.is_tied or scheme is None else scheme.embedding
        rows = 0 if self._has_shared_head else config.vocab_size
        self._embedding = torch.empty(rows, config.hidden_size, dtype=precision.weights, device=device)
        self._native: LayerRunner | None = None  # all layers in one call, where the ops offer it
        self._head = (
            Linear.sharing(self._embedding, precision)
            if config.is_tied and not self._has_shared_head
            else Linear(config.hidden_size, (config.vocab_size,), False, precision, device)
        )
        self.weights_bytes = sum(tensor.nbytes for _, tensor in self.targets())

    def targets(self) -> Iterator[Target]:
        """Yield every tensor of the checkpoint and the memory it is loaded into."""
        if self._has_shared_head:
            yield from self._head.targets(_EMBEDDING)
        elif self._embedding_format is not None:
            yield _EMBEDDING, DequantizedTarget(_EMBEDDING, self._embedding_format, self._embedding)
        else:
            yield f"{_EMBEDDING}.weight", self._embedding
        for index, layer in enumerate(self._layers):
            yield from layer.targets(f"model.layers.{index}.")
        yield "model.norm.weight", self._norm.weight
        if not self._is_tied:
            yield from self._head.targets("lm_head")

    @property
    def mixtures(self) -> tuple[MixtureMLP, ...]:
        """The mixtures of experts, in the order of the layers that have one."""
        return tuple(mixture for layer in self._layers if (mixture := layer.mixture) is not None)

    def expert_parts(
        self, library: NativeLibrary | None = None, prefers_native: PrefersNative | None = None
    ) -> Iterator[ExpertPart]:
        """Yield the experts of a tier, which `targets` leaves out. See `pack`."""
        library_of = self._library_of(library, prefers_native) or self._packer_of()
        for index, layer in enumerate(self._layers):
            if layer.mixture is not None:
                yield from layer.mixture.parts(f"model.layers.{index}.", library_of)

    @property
    def plain_linears(self) -> tuple[Linear, ...]:
        """The layers outside of mixtures whose products torch computes from their weights as they were loaded."""
        linears = (*(linear for layer in self._layers for linear in layer.linears), self._head)
        return tuple(linear for linear in linears if linear.is_plain)

    @property
    def parts(self) -> tuple[LayerParts, ...]:
        """The weights and parameters of all layers; empty if a layer has a mixture."""
        parts = tuple(part for layer in self._layers if (part := layer.parts) is not None)
        return parts if len(parts) == len(self._layers) else ()

    def pack(self, library: NativeLibrary | None = None, prefers_native: PrefersNative | None = None) -> None:
        """Replace the loaded weights by packed ones where they are faster on this device.

        Cost:    one weight at a time is in memory twice. The native kernels read rows of a tied head as the embedding;
                 for oneDNN a tied head is copied, if the copy is a small part of the model.
        Effects: `targets` no longer yields the weights.

        `prefers_native`: chooses between the library and oneDNN where both are fast; by default the library.
        """
        joined = [layer.join_experts() for layer in self._layers]
        self.is_capturable = self._ops.is_capturable and all(joined)
        library_of = self._library_of(library, prefers_native)
        if library is not None and library_of is not None and self._has_native_products(library):
            for layer in self._layers:
                layer.pack(library_of)
                return_freed_memory()  # otherwise the memory of small weights is kept beside the packed ones
            self._head.pack(library)  # never many rows
            self._native = self._ops.join_layers(self.parts) if self.parts else None
            if self._is_tied:
                self._embedding = self._embedding.new_empty(0)
            return_freed_memory()
            has_choice = prefers_native is not None and can_pack(self.precision, self._embedding.device)
            self.products = "native or oneDNN, by weight" if has_choice else "native"
            return
        packer_of = self._packer_of()
        if packer_of is not None:
            for layer in self._layers:
                layer.pack(packer_of)
            self._head.pack(packer_of(self._head))
            self.products = "Triton where weights are quantised, else torch"
            return
        if library_of is None:
            return
        self.products = "oneDNN"
        for layer in self._layers:
            layer.pack(library_of)
        if not self._is_tied or self._has_shared_head:
            self._head.pack()
        elif self._embedding.nbytes <= _TIED_SHARE * self.weights_bytes:
            self._head.pack()
            self.weights_bytes += self._embedding.nbytes

    def _packer_of(self) -> LibraryOf | None:
        """Return what packs a quantised layer for kernels of a GPU; None if there are none."""
        scheme, device = self.precision.scheme, self._embedding.device
        packer = None if scheme is None else self._ops.quantized_packer(device)
        return None if packer is None else lambda _: packer

    def _has_native_products(self, library: NativeLibrary | None) -> bool:
        is_cpu = self._embedding.device.type == "cpu"
        return library is not None and is_cpu and self.precision.weights in PACKED_DTYPES

    def _library_of(self, library: NativeLibrary | None, prefers_native: PrefersNative | None) -> LibraryOf | None:
        """Return what packs a layer: the native kernels, or None for oneDNN; None if nothing is packed."""
        packs = can_pack(self.precision, self._embedding.device)
        if not self._has_native_products(library):
            return (lambda _: None) if packs else None
        prefers = prefers_native if packs else None

        def library_of(linear: Linear) -> NativeLibrary | None:
            is_native = prefers is None or linear.is_quantized or prefers(sum(linear.outputs), linear.inputs)
            return library if is_native else None

        return library_of

    def forward(self, tokens: Tensor, kv: Tensor, state: ForwardState) -> Tensor:
        """See `Model.forward`."""
        if self._native is None:
            return run_in_turn(self.phases(tokens, kv, state))
        angles = self._ops.angles(self._rotary, state.positions)
        x, residual = self._native.forward(self._embed(tokens), angles, kv, state)
        return self._ops.add_norm(x, residual, self._norm.weight, self._norm.eps)[0]

    def phases(self, tokens: Tensor, kv: Tensor, state: ForwardState) -> Phases:
        """See `PhasedModel.phases`."""
        angles = self._ops.angles(self._rotary, state.positions)
        x, residual = self._embed(tokens), None
        for index, layer in enumerate(self._layers):
            x, residual = yield from layer.phases(x, residual, angles, kv[:, index], state)
        return self._ops.add_norm(x, residual, self._norm.weight, self._norm.eps)[0]

    def _embed(self, tokens: Tensor) -> Tensor:
        if self._is_tied and not self._embedding.numel():
            return self._head.embed(tokens, self.precision.activations)
        return F.embedding(tokens, self._embedding).to(self.precision.activations)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model.logits`."""
        logits = self._head.forward(hidden)
        return logits if self.logit_mask is None else self.logit_mask.apply_no_sync(logits)
