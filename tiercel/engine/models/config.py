"""Read a model's config.json into the description of the native decoder."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch

from tiercel.engine.models.mixture_config import (
    MIXTRAL_MIXTURE,
    OLMOE_MIXTURE,
    QWEN3_MIXTURE,
    MixtureConfig,
    MixtureFamily,
    parse_mixture,
)
from tiercel.modelfile.checkpoint import read_json_object
from tiercel.settings.settings import Dtype
from tiercel.values.errors import ConfigError
from tiercel.values.facts import Facts

RopeKind = Literal["default", "linear", "llama3", "yarn"]
T = TypeVar("T", int, float, bool, str)
Choice = TypeVar("Choice", bound=str)

_DTYPE_BY_NAME = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_UNSUPPORTED = "model.unsupported"  # by both implementations
_NATIVE_ONLY = "model.native_unsupported"  # the transformers implementation may run it


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rotary position embedding; field names are those of `rope_parameters`."""

    kind: RopeKind
    theta: float
    factor: float = 1.0
    original_max_position: int = 0  # tokens; llama3 and yarn
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # multiplies cos and sin
    truncate: bool = True

    @property
    def facts(self) -> Facts:
        """The embedding by names of its own, for the fingerprint of a model."""
        return {
            "kind": self.kind,
            "theta": self.theta,
            "factor": self.factor,
            "original_max_position": self.original_max_position,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "attention_factor": self.attention_factor,
            "truncate": self.truncate,
        }


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder of the Llama kind, perhaps with mixtures of experts.

    `windows` has one entry per layer; None means the whole context.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position: int  # tokens
    rms_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    is_tied: bool
    norms_whole_width: bool = False  # queries and keys of all heads have one norm
    mixture: MixtureConfig | None = None

    @property
    def facts(self) -> Facts:
        """Everything that the model computes with beside its weights, by names of their own, for its fingerprint."""
        return {
            "architecture": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "layers": self.layers,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position": self.max_position,
            "rms_eps": self.rms_eps,
            "rope": self.rope.facts,
            "windows": self.windows,
            "qkv_bias": self.has_qkv_bias,
            "output_bias": self.has_output_bias,
            "mlp_bias": self.has_mlp_bias,
            "qk_norm": self.has_qk_norm,
            "norms_whole_width": self.norms_whole_width,
            "tied": self.is_tied,
            "mixture": None if self.mixture is None else self.mixture.facts,
        }

    @property
    def max_model_len(self) -> int:
        """The longest context in tokens. YaRN multiplies the trained length by its factor."""
        if self.rope.kind == "yarn":
            return max(self.max_position, int(self.rope.original_max_position * self.rope.factor))
        return self.max_position


@dataclass(frozen=True, slots=True)
class Family:
    """The defaults of transformers' configuration class for fields that config.json omits."""

    max_position: int
    head_dim: int | None = None  # None: hidden_size / heads
    kv_heads: int | None = None  # None: heads
    qkv_bias: bool | None = None  # None: the value of attention_bias
    output_bias: bool | None = None
    has_qk_norm: bool = False
    norms_whole_width: bool = False
    rms_eps: float = 1e-6
    rope_theta: float = 10000.0
    windows: Literal["none", "every_layer", "every_layer_if_used", "by_layer_type"] = "none"
    window: int | None = 4096
    mixture: MixtureFamily | None = None


NATIVE_FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(max_position=2048),
    "MistralForCausalLM": Family(
        max_position=131072, kv_heads=8, qkv_bias=False, output_bias=False, windows="every_layer"
    ),
    "Qwen2ForCausalLM": Family(
        max_position=32768, kv_heads=32, qkv_bias=True, output_bias=False, windows="by_layer_type"
    ),
    "Qwen3ForCausalLM": Family(
        max_position=32768, head_dim=128, kv_heads=32, has_qk_norm=True, windows="by_layer_type"
    ),
    "Qwen3MoeForCausalLM": Family(
        max_position=32768,
        kv_heads=4,
        has_qk_norm=True,
        windows="every_layer_if_used",
        mixture=QWEN3_MIXTURE,
    ),
    "MixtralForCausalLM": Family(
        max_position=131072,
        kv_heads=8,
        qkv_bias=False,
        output_bias=False,
        rms_eps=1e-5,
        rope_theta=1e6,
        windows="every_layer",
        window=None,
        mixture=MIXTRAL_MIXTURE,
    ),
    "OlmoeForCausalLM": Family(
        max_position=4096, has_qk_norm=True, norms_whole_width=True, rms_eps=1e-5, mixture=OLMOE_MIXTURE
    ),
}

_MAX_COUNT = 2**31 - 1
_MAX_LAYERS = 10_000


class ConfigFields:
    """Typed access to the fields of a JSON object; errors name the field."""

    def __init__(self, fields: Mapping[str, object], source: str) -> None:
        self._fields = fields
        self.source = source

    def has(self, name: str) -> bool:
        """Return whether the field is present and not null."""
        return self._fields.get(name) is not None

    def raw(self, name: str) -> object:
        """Return the JSON value of the field; None if it is missing."""
        return self._fields.get(name)

    def is_null(self, name: str) -> bool:
        """Return whether the field is present and null."""
        return name in self._fields and self._fields[name] is None

    def read(self, name: str, kind: type[T], default: T | None = None) -> T:
        """Return a field, or the default if it is missing or null. Errors: ConfigError naming the field."""
        value = self._fields.get(name)
        if value is None:
            if default is None:
                raise ConfigError("model.field_missing", f"{self.source}: {name} is missing")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return kind(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError("model.field_wrong", f"{self.source}: {name} must be {kind.__name__}, not {value!r}")
        return value

    def count(self, name: str, default: int | None = None, most: int = _MAX_COUNT) -> int:
        """Return an integer field from 1 to `most`. Errors: ConfigError naming the field."""
        value = self.read(name, int, default)
        if not 1 <= value <= most:
            raise ConfigError("model.field_wrong", f"{self.source}: {name} must be from 1 to {most:,}, not {value}")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0. Errors: ConfigError naming the field."""
        value = self.read(name, float, default)
        if not 0 < value < float("inf"):
            raise ConfigError("model.field_wrong", f"{self.source}: {name} must be above 0, not {value}")
        return value

    def choice(self, name: str, allowed: Sequence[Choice], default: Choice) -> Choice:
        """Return one of several words, whose case does not count. Errors: ConfigError naming the field."""
        value = self.read(name, str, default)
        for word in allowed:
            if value.lower() == word:
                return word
        raise ConfigError(
            _UNSUPPORTED, f"{self.source}: {name}: {value:.200} is not supported, only {', '.join(allowed)}"
        )

    def names(self) -> tuple[str, ...]:
        """Return the names of all fields."""
        return tuple(self._fields)

    def as_object(self) -> Mapping[str, object]:
        """Return the JSON object itself."""
        return self._fields

    def object(self, name: str) -> "ConfigFields | None":
        """Return a nested object; None if it is missing or null. Errors: ConfigError naming the field."""
        value = self._fields.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ConfigError("model.field_wrong", f"{self.source}: {name} must be an object, not {value!r}")
        return ConfigFields(value, f"{self.source}: {name}")


def read_config(folder: Path) -> ConfigFields:
    """Return the fields of a folder's config.json. Errors: ConfigError if it is missing or not a JSON object."""
    path = folder / "config.json"
    return ConfigFields(read_json_object(path), str(path))


def read_architecture(fields: ConfigFields) -> str:
    """Return the name of the model class: the only entry of `architectures`. Errors: ConfigError."""
    names = fields.raw("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError("model.no_architecture", f"{fields.source}: architectures must name one class, not {names!r}")
    return names[0]


def refuse_foreign(fields: ConfigFields) -> None:
    """Errors: ConfigError if a field shows that neither implementation can run the model."""
    for name, what in (
        ("vision_config", "models that take images are not supported"),
        ("audio_config", "models that take audio are not supported"),
    ):
        if fields.has(name):
            raise ConfigError(_UNSUPPORTED, f"{fields.source}: {name}: {what}")
    if fields.raw("is_encoder_decoder") is True:
        raise ConfigError(_UNSUPPORTED, f"{fields.source}: is_encoder_decoder: only decoder-only models are supported")


def choose_dtype(asked: Dtype, fields: ConfigFields) -> torch.dtype:
    """Return the dtype to compute in: `asked`, or for `auto` the config's `dtype` (or `torch_dtype`).

    Errors: ConfigError if the config names a dtype other than float32, bfloat16 or float16.
    """
    if asked != "auto":
        return _DTYPE_BY_NAME[asked]
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    value = fields.read(name, str, "float32").removeprefix("torch.")
    if value not in _DTYPE_BY_NAME:
        raise ConfigError(
            "model.field_wrong", f"{fields.source}: {name}: {value} is none of {', '.join(_DTYPE_BY_NAME)}"
        )
    return _DTYPE_BY_NAME[value]


def is_native_refusal(error: ConfigError) -> bool:
    """Return whether only the native decoder cannot run the model; the transformers implementation may."""
    return error.code == _NATIVE_ONLY


def parse_decoder(fields: ConfigFields) -> DecoderConfig:
    """Read the config.json of a native family.

    Errors: ConfigError naming the field; `is_native_refusal` tells whether the transformers implementation may run it.
    """
    architecture = read_architecture(fields)
    family = NATIVE_FAMILIES.get(architecture)
    if family is None:
        raise _native_refusal(fields, "architectures", architecture)
    if (activation := fields.read("hidden_act", str, "silu")) not in ("silu", "swish"):
        raise _native_refusal(fields, "hidden_act", activation)
    hidden_size, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    layers = fields.count("num_hidden_layers", most=_MAX_LAYERS)  # before anything is made for each layer
    kv_heads = fields.count("num_key_value_heads", heads if family.kv_heads is None else family.kv_heads)
    if heads % kv_heads:
        raise ConfigError(
            "model.field_wrong",
            f"{fields.source}: num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})",
        )
    head_dim = fields.count("head_dim", family.head_dim or max(1, hidden_size // heads))
    if head_dim % 2:
        raise ConfigError("model.field_wrong", f"{fields.source}: head_dim ({head_dim}) must be even")
    if family.norms_whole_width:
        if heads * head_dim != hidden_size:
            shown = f"num_attention_heads ({heads}) times head_dim ({head_dim}) must be hidden_size ({hidden_size})"
            raise ConfigError("model.field_wrong", f"{fields.source}: {shown}")
        if fields.has("clip_qkv"):
            raise _native_refusal(fields, "clip_qkv", fields.raw("clip_qkv"))
    attention_bias = fields.read("attention_bias", bool, False)
    max_position = fields.count("max_position_embeddings", family.max_position)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_eps=fields.positive("rms_norm_eps", family.rms_eps),
        rope=parse_rope(fields, max_position, family.rope_theta),
        windows=_parse_windows(fields, family, layers),
        has_qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        has_output_bias=attention_bias if family.output_bias is None else family.output_bias,
        has_mlp_bias=architecture == "LlamaForCausalLM" and fields.read("mlp_bias", bool, False),
        has_qk_norm=family.has_qk_norm,
        is_tied=fields.read("tie_word_embeddings", bool, False),
        norms_whole_width=family.norms_whole_width,
        mixture=None if family.mixture is None else parse_mixture(fields, family.mixture, layers),
    )


def _native_refusal(fields: ConfigFields, name: str, value: object) -> ConfigError:
    return ConfigError(_NATIVE_ONLY, f"{fields.source}: {name}: {value} is not supported by the native decoder")


def _parse_windows(fields: ConfigFields, family: Family, layers: int) -> tuple[int | None, ...]:
    if family.windows == "none":
        return (None,) * layers
    # an explicit null means no window, also where transformers assumes one if the key is missing
    is_absent = fields.is_null("sliding_window") or (family.window is None and not fields.has("sliding_window"))
    window = None if is_absent else fields.count("sliding_window", family.window)
    if family.windows == "every_layer":
        return (window,) * layers
    is_windowed = fields.read("use_sliding_window", bool, False) and window is not None
    if family.windows == "every_layer_if_used":
        return (window if is_windowed else None,) * layers
    types = fields.raw("layer_types")
    if types is None:
        first = fields.read("max_window_layers", int, 28)
        return tuple(window if is_windowed and index >= first else None for index in range(layers))
    if not isinstance(types, list) or len(types) != layers:
        raise ConfigError("model.field_wrong", f"{fields.source}: layer_types must list {layers} layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise _native_refusal(fields, "layer_types", kind)
    if "sliding_attention" in types and not is_windowed:
        raise ConfigError(
            "model.field_wrong",
            f"{fields.source}: layer_types has sliding_attention layers, but sliding_window is not set",
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def parse_rope(fields: ConfigFields, max_position: int, default_theta: float = 10000.0) -> RopeConfig:
    """Read `rope_parameters`, or the older `rope_theta` and `rope_scaling`.

    Errors: ConfigError naming the field.
    Source: transformers' modeling_rope_utils; YaRN: arXiv 2309.00071.
    """
    top_theta = fields.positive("rope_theta", default_theta)
    rope = fields.object("rope_scaling") or fields.object("rope_parameters")
    if rope is None:
        return RopeConfig("default", top_theta)
    kind = rope.read("rope_type", str, rope.read("type", str, "default"))
    theta = rope.positive("rope_theta", top_theta)
    if rope.has("partial_rotary_factor") or fields.has("partial_rotary_factor"):
        raise _native_refusal(rope, "partial_rotary_factor", rope.raw("partial_rotary_factor"))
    original = rope.count("original_max_position_embeddings", max_position)
    original = fields.count("original_max_position_embeddings", original)  # at the top level it has priority
    match kind:
        case "default":
            return RopeConfig("default", theta)
        case "linear":
            return RopeConfig("linear", theta, factor=rope.positive("factor"))
        case "llama3":
            return RopeConfig(
                "llama3",
                theta,
                factor=rope.positive("factor"),
                original_max_position=original,
                low_freq_factor=rope.positive("low_freq_factor"),
                high_freq_factor=rope.positive("high_freq_factor"),
            )
        case "yarn":
            return _parse_yarn(rope, theta, original, max_position)
        case _:
            raise _native_refusal(rope, "rope_type", kind)


def _parse_yarn(rope: ConfigFields, theta: float, original: int, max_position: int) -> RopeConfig:
    factor = rope.positive("factor", max_position / original)
    if rope.has("attention_factor"):
        attention_factor = rope.positive("attention_factor")
    elif rope.raw("mscale") and rope.raw("mscale_all_dim"):
        attention_factor = _yarn_scale(factor, rope.positive("mscale")) / _yarn_scale(
            factor, rope.positive("mscale_all_dim")
        )
    else:
        attention_factor = _yarn_scale(factor, 1.0)
    return RopeConfig(
        "yarn",
        theta,
        factor=factor,
        original_max_position=original,
        beta_fast=rope.positive("beta_fast", 32.0),
        beta_slow=rope.positive("beta_slow", 1.0),
        attention_factor=attention_factor,
        truncate=rope.read("truncate", bool, True),
    )


def _yarn_scale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
