"""Facts about a model from its configuration and the headers of its weights."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tiercel.device.base import Device
from tiercel.engine.attention.registry import open_attention
from tiercel.engine.attention.sdpa import SdpaAttention
from tiercel.engine.models.decoder import Decoder
from tiercel.engine.models.fused_experts import renaming_of
from tiercel.engine.models.precision import CpuProducts, Precision, dtype_name
from tiercel.engine.models.registry import Candidate, examine_model, load_foreign, open_ops
from tiercel.engine.models.weights import ContentDigest, load_weights, open_checkpoint, stream_tensors
from tiercel.settings.settings import EngineSettings
from tiercel.values.tier import KVSpec
from tiercel.values.units import GIB, show_bytes

if TYPE_CHECKING:
    from tiercel.engine.models.transformers_outline import Outline

_NOWHERE = torch.device("meta")  # shapes without memory
_MAX_LOADED_BYTES = 2 * GIB
_LOADED_SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model that are known before its weights are read."""

    architecture: str
    impl: str  # native | transformers
    precision: Precision
    warning: str | None  # what the types cost on this machine; see `precision_warning`
    max_model_len: int  # tokens
    vocab_size: int
    weights_bytes: int
    step_weights_bytes: int  # read by a step at most: all but an embedding that the head does not share
    weights: int  # their number
    step_weights: int  # the number of weights that a token is multiplied by
    kv: KVSpec
    expert_bytes: int = 0  # of the weights: those of a mixture's experts
    expert_weights: int = 0  # their number
    skipped_share: float = 0.0  # of the experts of a layer: those that one token does not choose


class LoadedDevice:
    """A device whose free memory is reduced by weights that are not loaded yet."""

    def __init__(self, device: Device, weights_bytes: int) -> None:
        self.name = device.name
        self._device = device
        self._weights_bytes = weights_bytes

    def free_bytes(self) -> int:
        """Return the free memory without the weights."""
        return max(0, self._device.free_bytes() - self._weights_bytes)

    def total_bytes(self) -> int:
        """Return the memory of the device."""
        return self._device.total_bytes()

    def host_free_bytes(self) -> int:
        """Return the free host memory; on the CPU, without the weights."""
        free = self._device.host_free_bytes()
        return max(0, free - self._weights_bytes) if self.name == "cpu" else free

    def host_limit(self) -> str:
        """Return in words which limit the free host memory comes from."""
        return self._device.host_limit()


class _NoDigest(ContentDigest):
    """A digest that ignores its input, so that no weight is read."""

    def add(self, name: str, tensor: Tensor) -> None:
        pass


def check_attention(settings: EngineSettings, device: Device) -> None:
    """Open the attention backend as the engine does. Errors: ConfigError if the machine excludes it."""
    open_attention(settings.attention_backend, torch.device(device.name), device.processors, device.capability)


def read_model_facts(settings: EngineSettings, products: CpuProducts | None = None) -> ModelFacts:
    """Examine a model as the engine does, read the headers of its weights, and check them against each other.

    `products`: see `examine_model`.
    Errors: ConfigError with one line that names the field, the file or the tensor.
    """
    return facts_of(settings, examine_model(settings, products))


def facts_of(settings: EngineSettings, found: Candidate) -> ModelFacts:
    """Return the facts of a candidate. Errors: as of `read_model_facts`."""
    if found.outline is not None:
        return _foreign_facts(settings, found, found.outline)
    config, precision = found.decoder, found.precision
    assert config is not None  # for the type checker: there is no outline
    ops = open_ops(_NOWHERE, open_attention(settings.attention_backend, _NOWHERE))
    model = Decoder(config, ops, precision, _NOWHERE)
    if settings.load_format != "dummy":
        endings = () if precision.scheme is None else precision.scheme.skipped
        checkpoint = open_checkpoint(found.folder)
        load_weights(dict(model.targets()), checkpoint, _NoDigest(), None, endings, renaming_of(config))
    weights = sum(math.prod(target.shape) for _, target in model.targets())
    unread = 0 if config.is_tied else config.vocab_size * config.hidden_size
    mixture = config.mixture
    skipped = 0.0 if mixture is None else 1 - mixture.per_token / mixture.experts
    experts = [target for name, target in model.targets() if ".experts." in name]
    expert_weights = sum(math.prod(target.shape) for target in experts)
    return ModelFacts(
        architecture=config.architecture,
        impl=model.impl,
        precision=precision,
        warning=found.warning,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        weights_bytes=model.weights_bytes,
        step_weights_bytes=model.weights_bytes - unread * precision.weights.itemsize,
        weights=weights,
        step_weights=weights - unread - round(skipped * expert_weights),
        expert_bytes=sum(target.nbytes for target in experts),
        expert_weights=expert_weights,
        skipped_share=skipped,
        kv=_kv_spec(settings, precision, model.layers, model.kv_heads, model.head_dim),
    )


def _foreign_facts(settings: EngineSettings, found: Candidate, outline: "Outline") -> ModelFacts:
    """Return the facts of a model that runs in transformers' code."""
    if settings.load_format != "dummy":
        for _ in stream_tensors(open_checkpoint(found.folder)):
            pass  # the iteration reads every header and checks it against the index
    precision, calls = found.precision, outline.calls
    unread = outline.unread_bytes // precision.weights.itemsize
    return ModelFacts(
        architecture=outline.architecture,
        impl="transformers",
        precision=precision,
        warning=found.warning,
        max_model_len=outline.max_model_len,
        vocab_size=outline.vocab_size,
        weights_bytes=outline.weights_bytes,
        step_weights_bytes=outline.weights_bytes - outline.unread_bytes,
        weights=outline.weights,
        step_weights=outline.weights - unread,
        kv=_kv_spec(settings, precision, len(calls), calls[0].kv_heads, calls[0].head_dim),
    )


def _kv_spec(settings: EngineSettings, precision: Precision, layers: int, kv_heads: int, head_dim: int) -> KVSpec:
    return KVSpec(
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=settings.block_size,
        dtype=dtype_name(precision.kv),
    )


def compare_small_model(settings: EngineSettings, found: Candidate, free_bytes: int) -> str:
    """Load a small model in transformers' code as the engine does; return what that showed, or why it was not done.

    The engine compares the logits of such a model with transformers' own when it loads the weights. A model of more
    than 2 GiB, or of more than a third of the free memory, is left to the engine. Errors: ConfigError; the engine would
    refuse the model with the same words.
    """
    if found.outline is None:
        return ""
    size = found.outline.weights_bytes
    if size > _MAX_LOADED_BYTES or size > free_bytes * _LOADED_SHARE:
        return f"not compared: with {show_bytes(size)} of weights this is left to the start of the engine"
    load_foreign(settings, found, torch.device("cpu"), SdpaAttention())
    return "logits on the paged cache equal those of transformers"
