"""All other decoder-only architectures: the modelling code of transformers on paged attention."""

import logging
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging
from transformers.utils.generic import ModelOutput

from tiercel.engine.attention.base import Attention
from tiercel.engine.forward.state import ForwardState
from tiercel.engine.models.bridge import INTERFACE_NAME, Bridge, LayerCall
from tiercel.engine.models.config import ConfigFields, read_architecture
from tiercel.engine.models.precision import Precision
from tiercel.engine.models.probe import check_paged_logits, own_logits, probe_prompts, record_calls
from tiercel.engine.models.weights import ContentDigest, Progress, open_checkpoint, stream_tensors
from tiercel.errors import ConfigError, TiercelError

log = logging.getLogger(__name__)

_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass
class _Body(ModelOutput):
    """The output of a body, with every field that the head of an architecture may read."""

    last_hidden_state: Tensor | None = None
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None
    cross_attentions: None = None
    router_logits: None = None


class HeadOnly(nn.Module):
    """Replaces the body of a model, and returns hidden states that were computed before.

    The architecture's own forward then runs only its head, including its changes to logits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    @property
    def decoder(self) -> "HeadOnly":
        """The same object, for architectures that have the body one level deeper."""
        return self

    def forward(self, *_: object, **__: object) -> _Body:
        """Return the hidden states in `hidden`."""
        return _Body(last_hidden_state=self.hidden)


class TransformersModel:
    """A causal language model of transformers; implements `Model`. It replaces the model's body by `HeadOnly`."""

    impl = "transformers"
    products = "torch"
    is_capturable = False

    def __init__(
        self,
        model: PreTrainedModel,
        bridge: Bridge,
        calls: tuple[LayerCall, ...],
        vocab_size: int,
        max_model_len: int,
        fingerprint: bytes,
        kv: torch.dtype,
    ) -> None:
        self.layers, self.kv_heads, self.head_dim = len(calls), calls[0].kv_heads, calls[0].head_dim
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self.precision = Precision(weights=model.dtype, activations=model.dtype, kv=kv)
        self.fingerprint = fingerprint
        self.weights_bytes = sum(tensor.nbytes for tensor in _distinct_tensors(model).values())
        self._bridge = bridge
        self._model = model
        self._body: nn.Module = getattr(model, model.base_model_prefix)
        self._head_only = HeadOnly()
        setattr(model, model.base_model_prefix, self._head_only)

    def forward(self, tokens: Tensor, kv: Tensor, state: ForwardState) -> Tensor:
        """See `Model.forward`."""
        self._bridge.enter(kv, state)
        try:
            out = self._body(input_ids=tokens[None], position_ids=state.positions[None], use_cache=False)
        finally:
            self._bridge.leave()
        return out[0][0]

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model.logits`."""
        self._head_only.hidden = hidden[None]
        try:
            return self._model(inputs_embeds=hidden[None], use_cache=False).logits[0].float()
        finally:
            self._head_only.hidden = None


def load_transformers(
    folder: Path,
    fields: ConfigFields,
    precision: Precision,
    device: torch.device,
    attention: Attention,
    progress: Progress | None,
    dummy_seed: int | None = None,
) -> TransformersModel:
    """Build an architecture of transformers on paged attention, and check that it computes the same.

    `precision`: weights and activations have one type.
    Effects: weights are read from the folder's safetensors, or drawn at random if `dummy_seed` is given.
    Errors:  ConfigError if the architecture is unknown, or cannot run on a paged, attention-only, causal cache.
    """
    config = _read_transformers_config(folder, fields)
    bridge, dtype = Bridge(attention), precision.weights
    bridge.register()
    with _quiet(), torch.no_grad():
        if dummy_seed is None:
            model = _read_model(folder, config, dtype, progress)
        else:
            model = _draw_model(config, dtype, dummy_seed)
        if type(model).__name__ != read_architecture(fields):
            raise _refusal(fields, "architectures", f"{read_architecture(fields)} is no causal language model")
        digest = ContentDigest(
            *(TransformersModel.impl, config.to_json_string(), precision.identity, f"dummy {dummy_seed}")
        )
        for name, tensor in _distinct_tensors(model).items():
            digest.add(name, tensor)
        nn.Module.to(model, device)
        model.eval().requires_grad_(False)
        bridge.attach(model)
        return _prove(model, bridge, fields, digest.finish(), precision.kv)


def _prove(
    model: PreTrainedModel, bridge: Bridge, fields: ConfigFields, fingerprint: bytes, kv: torch.dtype
) -> TransformersModel:
    """Errors: ConfigError unless the architecture computes the same through the bridge as by itself."""
    max_model_len = _max_model_len(model.config, fields)
    prompts = probe_prompts(model.config.get_text_config().vocab_size, model.device)
    with _Translated(f"{fields.source}: architectures: {type(model).__name__} cannot be called this way"):
        calls = _probe(model, bridge, fields)
        expected = own_logits(model, prompts)
        max_model_len = min(max_model_len, _unhonoured_window(model.config, calls))
        paged = TransformersModel(model, bridge, calls, expected[0].shape[-1], max_model_len, fingerprint, kv)
        check_paged_logits(paged, prompts, expected)
    return paged


def _read_transformers_config(folder: Path, fields: ConfigFields) -> PretrainedConfig:
    remote = " (auto_map: code that comes with a model is never run)" if fields.has("auto_map") else ""
    with _Translated(f"{fields.source}: model_type: {fields.raw('model_type')} cannot be read{remote}"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise _refusal(fields, "model_type", f"{config.model_type} is no causal language model{remote}")
    text = config.get_text_config()
    if text.is_encoder_decoder or getattr(text, "add_cross_attention", False):
        raise _refusal(fields, "model_type", f"{config.model_type} has cross-attention")
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in _LAYER_TYPES:
            raise _refusal(
                fields, "layer_types", f"layers of kind {kind} are not supported: the cache is attention-only"
            )
    return config


def _max_model_len(config: PretrainedConfig, fields: ConfigFields) -> int:
    """Return the longest context in tokens.

    Rotations that change with the longest sequence of a batch are limited to the length up to which they do not change.
    """
    text = config.get_text_config()
    length = getattr(text, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise _refusal(fields, "max_position_embeddings", "is missing: the model's context is unknown")
    rope = getattr(text, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if part.get("rope_type") == "longrope":
            length = min(length, part["original_max_position_embeddings"])
    return length


def _read_model(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype, progress: Progress | None
) -> PreTrainedModel:
    checkpoint = open_checkpoint(folder)
    total = sum(path.stat().st_size for path, _ in checkpoint.shards)
    stored = {tensor.dtype for _, _, tensor in stream_tensors(checkpoint)}  # reads the headers only
    if progress is not None:
        progress(0, total)
    with _Translated(f"{folder}: the weights cannot be loaded"):
        loaded = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=INTERFACE_NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported, and rejected below
            output_loading_info=True,
        )
    model, report = cast(tuple[PreTrainedModel, dict[str, Collection[object]]], loaded)
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if report.get(kind):
            raise ConfigError("weights.wrong", f"{folder}: {kind.replace('_', ' ')}: {min(map(str, report[kind]))}")
    if unused := report.get("unexpected_keys"):  # old checkpoints store buffers that are computed now
        log.warning("weights unused tensors=%d first=%s", len(unused), min(map(str, unused)))
    if progress is not None:
        progress(total, total)
    _own_memory(model, stored)
    return model


def _draw_model(config: PretrainedConfig, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    with _Translated(f"{config.model_type} cannot be built"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=INTERFACE_NAME)


def _probe(model: PreTrainedModel, bridge: Bridge, fields: ConfigFields) -> tuple[LayerCall, ...]:
    if not isinstance(getattr(model, model.base_model_prefix, None), nn.Module):
        raise _refusal(fields, "architectures", f"{type(model).__name__} has no body apart from its head")
    text = model.config.get_text_config()
    calls = record_calls(model, bridge, text.num_hidden_layers)
    window = getattr(text, "sliding_window", None)
    for call, kind in zip(calls, getattr(text, "layer_types", None) or (), strict=False):
        if (call.window is None) != (kind == "full_attention" or window is None):
            raise _refusal(fields, "layer_types", f"layer {call.layer} is {kind} but asks for window {call.window}")
    return calls


def _unhonoured_window(config: PretrainedConfig, calls: tuple[LayerCall, ...]) -> int:
    """Return the tokens up to which a configured window that no layer uses has no effect."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    is_known = getattr(text, "layer_types", None) or any(call.window is not None for call in calls)
    return sys.maxsize if is_known or not isinstance(window, int) else window


def _own_memory(model: PreTrainedModel, stored: set[torch.dtype]) -> None:
    """Copy tensors out of the mapped files, one at a time, because the folder may change while serving.

    Only tensors whose dtype was not changed are mapped; the others were copied when they were cast.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype in stored:
            tensor.data = tensor.data.clone()


def _distinct_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return weights and saved buffers by name; tied tensors occur once."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict().items():
        tensors.setdefault(tensor.data_ptr(), (name, tensor))
    return dict(tensors.values())


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress progress bars and warnings of transformers; the caller draws a progress bar."""
    level, had_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if had_bars:
            transformers_logging.enable_progress_bar()


class _Translated:
    """Translates foreign exceptions to ConfigError: architectures and their configs may raise any exception."""

    def __init__(self, failure: str) -> None:
        self._failure = failure

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if isinstance(error, KeyError) and error.args == (INTERFACE_NAME,):
            reason = "the architecture keeps its own attention and takes no other"
        elif isinstance(error, Exception) and not isinstance(error, TiercelError):
            reason = " ".join(str(error).split())[:300]
        else:
            return
        raise ConfigError("model.unsupported", f"{self._failure}: {reason}") from error


def _refusal(fields: ConfigFields, name: str, reason: str) -> ConfigError:
    return ConfigError("model.unsupported", f"{fields.source}: {name}: {reason}")
