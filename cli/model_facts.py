"""Facts about a model from its configuration and the headers of its weights."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tiercel.device.base import Device
from tiercel.engine.attention.registry import open_attention
from tiercel.engine.models.config import ConfigFields, read_architecture, read_config, refuse_foreign
from tiercel.engine.models.decoder import Decoder
from tiercel.engine.models.fused_experts import renaming_of
from tiercel.engine.models.precision import (
    CpuProducts,
    Precision,
    choose_precision,
    dtype_name,
    precision_warning,
    without_kernels,
)
from tiercel.engine.models.quantization_scheme import choose_scheme
from tiercel.engine.models.registry import choose_native, open_ops, refuse_expert_memory
from tiercel.engine.models.weights import ContentDigest, load_weights, open_checkpoint, stream_tensors
from tiercel.errors import ConfigError
from tiercel.settings import EngineSettings
from tiercel.tier import KVSpec

_NOWHERE = torch.device("meta")  # shapes without memory


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


def read_model_facts(settings: EngineSettings, products: CpuProducts | None = None) -> ModelFacts:
    """Read config.json and the headers of the weights, and check them against each other.

    `products`: those of the CPU that computes; None for a GPU or an unknown machine, which keep the checkpoint's type.
    Errors: ConfigError with one line that names the field, the file or the tensor.
    """
    folder = Path(settings.model)
    fields = read_config(folder)
    refuse_foreign(fields)
    scheme = choose_scheme(settings.quantization, fields)
    config = choose_native(fields, settings.model_impl, scheme)
    if config is None:
        products = without_kernels(products)
    precision = choose_precision(settings.dtype, fields, products, settings.kv_cache_dtype)
    precision = replace(precision, scheme=scheme)
    warning = precision_warning(settings.dtype, fields, products, precision)
    if settings.expert_memory_bytes is not None:
        refuse_expert_memory(config)
    if config is None:
        return _transformers_facts(settings, folder, fields, precision, warning)
    ops = open_ops(_NOWHERE, open_attention(settings.attention_backend, _NOWHERE))
    model = Decoder(config, ops, precision, _NOWHERE)
    if settings.load_format != "dummy":
        endings = () if scheme is None else scheme.skipped
        load_weights(dict(model.targets()), open_checkpoint(folder), _NoDigest(), None, endings, renaming_of(config))
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
        warning=warning,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        weights_bytes=model.weights_bytes,
        step_weights_bytes=model.weights_bytes - unread * precision.weights.itemsize,
        weights=weights,
        step_weights=weights - unread - round(skipped * expert_weights),
        expert_bytes=sum(target.nbytes for target in experts),
        expert_weights=expert_weights,
        skipped_share=skipped,
        kv=KVSpec(
            layers=model.layers,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            block_size=settings.block_size,
            dtype=dtype_name(precision.kv),
        ),
    )


def _transformers_facts(
    settings: EngineSettings, folder: Path, fields: ConfigFields, precision: Precision, warning: str | None
) -> ModelFacts:
    """Return the facts of a model that runs in transformers' code. Only loading it shows whether it works."""
    # lazy: transformers' modelling code takes seconds to import
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        with _NOWHERE:
            model = AutoModelForCausalLM.from_config(config, dtype=precision.weights)
    except (ValueError, OSError, KeyError, TypeError, ImportError) as exc:
        reason = str(exc).strip().partition("\n")[0]
        raise ConfigError("model.unsupported", f"{fields.source}: not a decoder-only language model: {reason}") from exc
    if settings.load_format != "dummy":
        for _ in stream_tensors(open_checkpoint(folder)):
            pass  # the iteration reads every header and checks it against the index
    text = config.get_text_config()
    kv_heads: int = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    weights = sum(tensor.numel() for tensor in model.parameters())
    unread = 0 if config.tie_word_embeddings else text.vocab_size * text.hidden_size
    return ModelFacts(
        architecture=read_architecture(fields),
        impl="transformers",
        precision=precision,
        warning=warning,
        max_model_len=text.max_position_embeddings,
        vocab_size=text.vocab_size,
        weights_bytes=weights * precision.weights.itemsize,
        step_weights_bytes=(weights - unread) * precision.weights.itemsize,
        weights=weights,
        step_weights=weights - unread,
        kv=KVSpec(
            layers=text.num_hidden_layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=settings.block_size,
            dtype=dtype_name(precision.kv),
        ),
    )
