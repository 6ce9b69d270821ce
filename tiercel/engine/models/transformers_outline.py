"""An architecture of transformers as it is known before a weight is read: its layers, its context, its size.

`tiercel check` and the engine both ask `outline_model`, so a folder that one of them refuses is refused by the other
with the same words.
"""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from tiercel.engine.attention.sdpa import SdpaAttention
from tiercel.engine.models.bridge import INTERFACE_NAME, Bridge, LayerCall
from tiercel.engine.models.config import ConfigFields, read_architecture
from tiercel.engine.models.probe import RECORDED_TOKENS, record_calls
from tiercel.engine.models.shape_run import ShapeRun
from tiercel.values.errors import ConfigError, TiercelError

_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class Outline:
    """Facts about an architecture of transformers, found by running it on tensors without memory."""

    config: PretrainedConfig
    architecture: str
    calls: tuple[LayerCall, ...]  # the attention that each layer asks for
    vocab_size: int  # width of the logits
    max_model_len: int  # tokens
    weights: int  # their number
    weights_bytes: int
    unread_bytes: int  # of an embedding that the head does not share: a step reads single rows of it


def outline_model(folder: Path, fields: ConfigFields, dtype: torch.dtype) -> Outline:
    """Build an architecture of transformers without memory, and record what its layers ask of attention.

    `dtype`: of the weights. Cost: no weight is read; a second or less once transformers is imported.
    Errors: ConfigError if the architecture is unknown, or cannot run on a paged, attention-only, causal cache. Whether
            it then computes what transformers computes, only its weights show: see `load_transformers`.
    """
    config = _read_transformers_config(folder, fields)
    bridge = Bridge(SdpaAttention())  # it never computes: the calls are recorded only
    bridge.register()
    with quiet(), torch.no_grad():
        with translated(f"{folder}: {config.model_type} cannot be built"), torch.device("meta"):
            # A copy: building changes the configuration, which is a part of the fingerprint.
            own = copy.deepcopy(config)
            model = AutoModelForCausalLM.from_config(own, dtype=dtype, attn_implementation=INTERFACE_NAME)
        name, asked = type(model).__name__, read_architecture(fields)
        if name != asked:
            raise _refusal(fields, "architectures", f"{asked} is no causal language model")
        max_model_len = _max_model_len(config, fields)
        model.eval()
        bridge.attach(model)
        with translated(f"{fields.source}: architectures: {name} cannot be called this way"), ShapeRun(RECORDED_TOKENS):
            calls, vocab_size = _probe(model, bridge, fields)
    tensors = distinct_tensors(model).values()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_shared = isinstance(head, nn.Module) and head.weight is embedding.weight
    return Outline(
        config=config,
        architecture=name,
        calls=calls,
        vocab_size=vocab_size,
        max_model_len=min(max_model_len, _unhonoured_window(config, calls)),
        weights=sum(tensor.numel() for tensor in tensors),
        weights_bytes=sum(tensor.nbytes for tensor in tensors),
        unread_bytes=0 if is_shared or embedding.weight is None else embedding.weight.nbytes,
    )


def _read_transformers_config(folder: Path, fields: ConfigFields) -> PretrainedConfig:
    remote = " (auto_map: code that comes with a model is never run)" if fields.has("auto_map") else ""
    with translated(f"{fields.source}: model_type: {fields.raw('model_type')} cannot be read{remote}"):
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


def _probe(model: PreTrainedModel, bridge: Bridge, fields: ConfigFields) -> tuple[tuple[LayerCall, ...], int]:
    """Return the calls of the layers, and the width of the logits."""
    if not isinstance(getattr(model, model.base_model_prefix, None), nn.Module):
        raise _refusal(fields, "architectures", f"{type(model).__name__} has no body apart from its head")
    text = model.config.get_text_config()
    calls, vocab_size = record_calls(model, bridge, text.num_hidden_layers)
    window = getattr(text, "sliding_window", None)
    for call, kind in zip(calls, getattr(text, "layer_types", None) or (), strict=False):
        if (call.window is None) != (kind == "full_attention" or window is None):
            raise _refusal(fields, "layer_types", f"layer {call.layer} is {kind} but asks for window {call.window}")
    return calls, vocab_size


def _unhonoured_window(config: PretrainedConfig, calls: tuple[LayerCall, ...]) -> int:
    """Return the tokens up to which a configured window that no layer uses has no effect."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    is_known = getattr(text, "layer_types", None) or any(call.window is not None for call in calls)
    return sys.maxsize if is_known or not isinstance(window, int) else window


def distinct_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return weights and saved buffers by name; tied tensors occur once."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensors.setdefault(tensor.data_ptr() or id(tensor), (name, tensor))  # without memory all are at address 0
    return {name: tensor.detach() for name, tensor in tensors.values()}


@contextmanager
def quiet() -> Iterator[None]:
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


class translated:
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
