"""Choose the implementation of a model folder, and load its weights."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import assert_never

import torch

from tiercel.clock import MonotonicClock
from tiercel.engine.attention.base import Attention, PagedReader
from tiercel.engine.experts.file import ExpertFile
from tiercel.engine.experts.host_store import CudaExpertLane, HostExperts
from tiercel.engine.models.base import Model
from tiercel.engine.models.config import (
    ConfigFields,
    DecoderConfig,
    is_native_refusal,
    parse_decoder,
    read_architecture,
    read_config,
    refuse_foreign,
)
from tiercel.engine.models.decoder import Decoder, PrefersNative
from tiercel.engine.models.fused_experts import renaming_of
from tiercel.engine.models.native_ops import NativeOps
from tiercel.engine.models.ops import Ops
from tiercel.engine.models.precision import (
    CpuProducts,
    choose_precision,
    dtype_name,
    precision_warning,
    without_kernels,
)
from tiercel.engine.models.quantization import UNSUPPORTED, Scheme
from tiercel.engine.models.quantization_scheme import choose_scheme
from tiercel.engine.models.tiered_experts import ExpertTier
from tiercel.engine.models.torch_ops import TorchOps
from tiercel.engine.models.weights import (
    ContentDigest,
    DeferredPart,
    Progress,
    fill_dummy,
    load_weights,
    open_checkpoint,
)
from tiercel.engine.native.library import NativeLibrary
from tiercel.errors import ConfigError
from tiercel.settings import EngineSettings, ModelImpl

log = logging.getLogger(__name__)


def load_model(
    settings: EngineSettings,
    device: torch.device,
    attention: Attention,
    progress: Progress | None = None,
    library: NativeLibrary | None = None,
    prefers_native: PrefersNative | None = None,
) -> Model:
    """Build the model of a folder and load its weights. `library`: the native kernels; without them torch computes.

    `prefers_native`: see `Decoder.pack`.

    Errors: ConfigError with one line that names the wrong field, file or tensor.
    """
    folder = Path(settings.model)
    fields = read_config(folder)
    refuse_foreign(fields)
    scheme = choose_scheme(settings.quantization, fields)
    config = choose_native(fields, settings.model_impl, scheme)
    products = CpuProducts.of(library) if device.type == "cpu" else None
    is_dummy = settings.load_format == "dummy"
    if config is None:
        products = without_kernels(products)
    precision = choose_precision(settings.dtype, fields, products, settings.kv_cache_dtype)
    if warning := precision_warning(settings.dtype, fields, products, precision):
        log.warning("dtype %s", warning)
    if config is None:
        if settings.expert_memory_bytes is not None:
            refuse_expert_memory(config)
        # lazy: transformers' modelling code takes seconds to import
        from tiercel.engine.models.transformers_backend import load_transformers

        seed = settings.seed if is_dummy else None
        return load_transformers(folder, fields, precision, device, attention, progress, seed)
    precision = replace(precision, scheme=scheme)
    tier = _open_tier(settings, config, device)
    model = Decoder(config, open_ops(device, attention, library), precision, device, tier)
    parts = tuple(model.expert_parts(library, prefers_native))
    model.fingerprint = _fill(model, config, settings, folder, progress, parts)
    model.pack(library, prefers_native)
    if tier is not None:
        tier.start()
        model.weights_bytes += tier.slots_bytes
        log.info("experts in memory=%d of %d bytes=%d", *tier.counts, tier.slots_bytes)
    log.info("matrix products by=%s", model.products)
    return model


def _open_tier(settings: EngineSettings, config: DecoderConfig, device: torch.device) -> ExpertTier | None:
    """Return the tier of a mixture's experts: in host memory beside a GPU, else on an SSD.

    The SSD is the first folder of the SSD tier, else the cache folder. None: all experts are in memory. Errors:
    ConfigError if the model has no experts or there is no folder.
    """
    if settings.expert_memory_bytes is None:
        return None
    refuse_expert_memory(config)
    if device.type == "cuda":
        store = HostExperts(device, CudaExpertLane(device))
        return ExpertTier(settings.expert_memory_bytes, store, MonotonicClock())
    folder = settings.kv_disk_paths[0] if settings.kv_disk_paths else settings.cache_folder
    if folder is None:
        raise ConfigError("experts.no_folder", "--expert-memory needs a folder on an SSD: name one with --kv-disk-path")
    return ExpertTier(settings.expert_memory_bytes, ExpertFile.create(Path(folder)), MonotonicClock())


def refuse_expert_memory(config: DecoderConfig | None) -> None:
    """Refuse a part of the experts in memory where that is not possible. Errors: ConfigError.

    `config`: None: the model runs in transformers' code.
    """
    if config is None or config.mixture is None or not any(config.mixture.layers):
        name = "a model that runs in transformers' code" if config is None else config.architecture
        raise ConfigError(UNSUPPORTED, f"--expert-memory: {name} has no mixture of experts that is known")


def _fill(
    model: Decoder,
    config: DecoderConfig,
    settings: EngineSettings,
    folder: Path,
    progress: Progress | None,
    parts: Sequence[DeferredPart],
) -> bytes:
    """Load or draw the weights, and return their fingerprint."""
    targets = dict(model.targets())
    mixture = () if config.mixture is None else (repr(config.mixture),)
    facts = (model.impl, repr(config), model.precision.identity, *mixture)
    if settings.load_format == "dummy":
        fill_dummy(targets, settings.seed, parts=parts)
        model.weights_bytes = sum(target.nbytes for target in targets.values())
        return ContentDigest(*facts, f"dummy {settings.seed}").finish()
    digest = ContentDigest(*facts)
    scheme = model.precision.scheme
    skipped = () if scheme is None else scheme.skipped
    load_weights(targets, open_checkpoint(folder), digest, progress, skipped, renaming_of(config), parts)
    if scheme is not None and scheme.embedding is not None and not config.is_tied:
        log.info("embedding dequantised from=%s to=%s", scheme.embedding.text, dtype_name(model.precision.weights))
    model.weights_bytes = sum(target.nbytes for target in targets.values())  # of quantised ones it is known now
    return digest.finish()


def choose_native(fields: ConfigFields, impl: ModelImpl, scheme: Scheme | None = None) -> DecoderConfig | None:
    """Return the native decoder's description; None if the transformers implementation has to run the model.

    Errors: ConfigError, also if weights are quantised and the native decoder cannot run the model.
    """
    if scheme is not None and impl == "transformers":
        raise ConfigError(
            UNSUPPORTED, f"{fields.source}: --model-impl transformers does not run quantized weights ({scheme.name})"
        )
    match impl if scheme is None else "native":
        case "native":
            return parse_decoder(fields)
        case "transformers":
            read_architecture(fields)
            return None
        case "auto":
            try:
                return parse_decoder(fields)
            except ConfigError as refusal:
                if not is_native_refusal(refusal):
                    raise
                return None
        case other:
            assert_never(other)


def open_ops(device: torch.device, attention: Attention, library: NativeLibrary | None = None) -> Ops:
    """Return kernels if the attention backend is a `PagedReader`; otherwise plain torch.

    `library`: the kernels of a CPU.
    """
    if device.type == "cpu" and library is not None and isinstance(attention, PagedReader):
        return NativeOps(library, attention)
    if device.type != "cuda":
        return TorchOps(attention)
    if find_spec("triton") is None or not isinstance(attention, PagedReader):
        log.warning("model ops run without kernels attention=%s", type(attention).__name__)
        return TorchOps(attention)
    # lazy: CPU builds of torch come without Triton
    from tiercel.engine.models.triton_ops import TritonOps

    return TritonOps(attention)
