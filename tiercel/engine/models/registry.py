"""Choose the implementation of a model folder, and load its weights."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

import torch

from tiercel.device.volume_file import FileCalls
from tiercel.engine.attention.base import Attention, PagedReader
from tiercel.engine.experts.file import DISK_ERRORS, ExpertFile
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
from tiercel.engine.models.generation import read_end_tokens
from tiercel.engine.models.logit_mask import read_logit_mask
from tiercel.engine.models.native_ops import NativeOps
from tiercel.engine.models.ops import Ops
from tiercel.engine.models.precision import (
    CpuProducts,
    Precision,
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
from tiercel.settings.settings import EngineSettings, ModelImpl
from tiercel.values.clock import MonotonicClock
from tiercel.values.errors import ConfigError, system_error

if TYPE_CHECKING:
    from tiercel.engine.models.transformers_backend import TransformersModel
    from tiercel.engine.models.transformers_outline import Outline

log = logging.getLogger(__name__)

EXPERT_CALL_S = 15.0  # for a call to a disk without which the engine may serve; the supervisor waits for a minute


@dataclass(frozen=True, slots=True)
class Candidate:
    """The way in which a model folder would be served; made by `examine_model`."""

    folder: Path
    fields: ConfigFields
    decoder: DecoderConfig | None  # of the native decoder
    outline: "Outline | None"  # of transformers' code, if there is no decoder
    precision: Precision
    warning: str | None  # what the types cost on this machine; see `precision_warning`


def examine_model(settings: EngineSettings, products: CpuProducts | None) -> Candidate:
    """Decide whether and how a model folder can be served, before a weight is read.

    `tiercel check` and the engine ask this function, so that both accept the same folders and refuse others with the
    same words. Weights that are missing or wrong show when their headers are read; whether an architecture in
    transformers' code computes the same on a paged cache shows when it is loaded.

    `products`: those of the CPU that computes; None for a GPU or an unknown machine, which keep the checkpoint's type.
    Errors: ConfigError with one line that names the wrong field or flag.
    """
    folder = Path(settings.model)
    fields = read_config(folder)
    refuse_foreign(fields)
    scheme = choose_scheme(settings.quantization, fields)
    decoder = choose_native(fields, settings.model_impl, scheme)
    if decoder is None:
        products = without_kernels(products)
    precision = choose_precision(settings.dtype, fields, products, settings.kv_cache_dtype)
    precision = replace(precision, scheme=scheme)
    warning = precision_warning(settings.dtype, fields, products, precision)
    if settings.expert_memory_bytes is not None:
        refuse_expert_memory(decoder)
    outline = None
    if decoder is None:
        # lazy: transformers' modelling code takes seconds to import
        from tiercel.engine.models.transformers_outline import outline_model

        outline = outline_model(folder, fields, precision.weights)
    return Candidate(folder, fields, decoder, outline, precision, warning)


def load_model(
    settings: EngineSettings,
    device: torch.device,
    attention: Attention,
    progress: Progress | None = None,
    library: NativeLibrary | None = None,
    prefers_native: PrefersNative | None = None,
) -> Model:
    """Build the model of a folder and load its weights. `library`: the native kernels; without them torch computes.

    `prefers_native`: see `Decoder.pack`. Ids that no token of the tokenizer has are masked.

    Errors: ConfigError with one line that names the wrong field, file or tensor.
    """
    model = _load_unmasked(settings, device, attention, progress, library, prefers_native)
    tokenizer, end_tokens = Path(settings.tokenizer_folder or settings.model), read_end_tokens(Path(settings.model))
    model.logit_mask = read_logit_mask(tokenizer, model.vocab_size, end_tokens, device)
    return model


def _load_unmasked(
    settings: EngineSettings,
    device: torch.device,
    attention: Attention,
    progress: Progress | None,
    library: NativeLibrary | None,
    prefers_native: PrefersNative | None,
) -> "Decoder | TransformersModel":
    found = examine_model(settings, CpuProducts.of(library) if device.type == "cpu" else None)
    if found.warning:
        log.warning("dtype %s", found.warning)
    config = found.decoder
    if config is None:
        return load_foreign(settings, found, device, attention, progress)

    def build(tier: ExpertTier | None) -> Decoder:
        model = Decoder(config, open_ops(device, attention, library), found.precision, device, tier)
        parts = tuple(model.expert_parts(library, prefers_native))
        model.fingerprint = _fill(model, config, settings, found.folder, progress, parts)
        model.pack(library, prefers_native)
        if tier is not None:
            tier.start()
            model.weights_bytes += tier.slots_bytes
            log.info("experts in memory=%d of %d bytes=%d", *tier.counts, tier.slots_bytes)
        log.info("matrix products by=%s", model.products)
        return model

    if settings.expert_memory_bytes is None:
        return build(None)
    if device.type == "cuda":
        store = HostExperts(device, CudaExpertLane(device))
        return build(ExpertTier(settings.expert_memory_bytes, store, MonotonicClock()))
    return build_beside_ssd(settings, settings.expert_memory_bytes, build)


def load_foreign(
    settings: EngineSettings,
    found: Candidate,
    device: torch.device,
    attention: Attention,
    progress: Progress | None = None,
) -> "TransformersModel":
    """Load a candidate in transformers' code, and compare what it computes. Errors: see `load_transformers`."""
    # lazy: as above
    from tiercel.engine.models.transformers_backend import load_transformers

    assert found.outline is not None  # for the type checker: there is no decoder
    seed = settings.seed if settings.load_format == "dummy" else None
    return load_transformers(
        *(found.folder, found.fields, found.outline, found.precision, device, attention, progress), dummy_seed=seed
    )


def build_beside_ssd(
    settings: EngineSettings,
    memory_bytes: int,
    build: Callable[[ExpertTier | None], Decoder],
    calls: FileCalls | None = None,
    limit_s: float = EXPERT_CALL_S,
) -> Decoder:
    """Build a model of whose experts `memory_bytes` are in memory and all are on an SSD.

    The SSD is the first folder of the SSD tier, else the cache folder. With `settings.kv_disk_optional` a folder that
    fails is passed over, as is one that hangs for `limit_s`, and if both fail, all experts are in memory.
    Errors: ConfigError.
    """
    folders = dict.fromkeys(filter(None, (*settings.kv_disk_paths[:1], settings.cache_folder)))
    if not folders and not settings.kv_disk_optional:
        raise ConfigError("experts.no_folder", "--expert-memory needs a folder on an SSD: name one with --kv-disk-path")
    for folder in folders:
        opened: ExpertTier | None = None
        try:
            opened = ExpertTier(
                memory_bytes,
                ExpertFile.create(Path(folder), calls, limit_s if settings.kv_disk_optional else None),
                MonotonicClock(),
            )
            return build(opened)
        except ConfigError as exc:
            if opened is not None:
                opened.close()
            if not settings.kv_disk_optional or exc.code not in DISK_ERRORS:
                raise
            log.error("experts not on the SSD folder=%s error=%s reason=%r", folder, system_error(exc), exc.message)
    log.error("experts tier off: all experts are in memory, without the limit of --expert-memory")
    model = build(None)
    model.lacks_expert_tier = True
    return model


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
    facts = {"implementation": model.impl, "config": config.facts, "types": model.precision.facts}
    if settings.load_format == "dummy":
        fill_dummy(targets, settings.seed, parts=parts)
        model.weights_bytes = sum(target.nbytes for target in targets.values())
        return ContentDigest(facts | {"dummy_seed": settings.seed}).finish()
    digest = ContentDigest(facts)
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
