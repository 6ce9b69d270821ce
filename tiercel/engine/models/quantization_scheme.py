"""Read `quantization_config` of config.json into a scheme, or make the scheme of a model that is quantised at load."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.engine.models.activation_rounding import quantize_weight
from tiercel.engine.models.config import ConfigFields
from tiercel.engine.models.format_compressed import read_compressed
from tiercel.engine.models.format_fp8 import read_fp8
from tiercel.engine.models.format_gguf import read_gguf
from tiercel.engine.models.format_gptq import read_awq, read_gptq
from tiercel.engine.models.quantization import UNSUPPORTED, NamePattern, Rule, Scheme, StoredTensor, count_bytes
from tiercel.engine.models.quantized_weight import QuantizedWeight
from tiercel.values.errors import ConfigError

_READERS: Mapping[str, Callable[[ConfigFields], tuple[Rule, ...]]] = {
    "compressed-tensors": read_compressed,
    "awq": read_awq,
    "gptq": read_gptq,
    "fp8": read_fp8,
}
_KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_AT_LOAD = ("int8", "int4")
_GROUP = 32  # inputs; see `quantize_weight`


@dataclass(frozen=True, slots=True)
class RoundedFormat:
    """A weight that the checkpoint has as floating-point numbers, and that is rounded when it is read."""

    bits: int

    @property
    def text(self) -> str:
        """See `LayerFormat.text`."""
        return "int8, a scale per output" if self.bits == 8 else f"int4, groups of {_GROUP}"

    def tensors(self, layer: str, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """See `LayerFormat.tensors`."""
        return {"weight": StoredTensor(("weight",), _FLOATS, ((outputs, inputs),))}

    def stored_bytes(self, outputs: int, inputs: int) -> int:
        """See `LayerFormat.stored_bytes`."""
        if self.bits == 8 or inputs % _GROUP:
            return outputs * inputs + 4 * outputs
        return count_bytes(outputs, inputs, 4, _GROUP)

    def read(self, found: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        """See `LayerFormat.read`."""
        return quantize_weight(found["weight"], self.bits)

    def draw(self, weight: Tensor) -> QuantizedWeight:
        """See `LayerFormat.draw`."""
        return quantize_weight(weight, self.bits)


def read_scheme(fields: ConfigFields) -> Scheme:
    """Return the scheme of the object `quantization_config`.

    Errors: ConfigError naming the field; an unknown scheme is named by its `quant_method`.
    """
    method = fields.read("quant_method", str).lower()
    if method == "gguf":
        return read_gguf(fields)
    if method not in _READERS:
        shown = ", ".join(_READERS)
        raise ConfigError(UNSUPPORTED, f"{fields.source}: quant_method: {method:.200} is not supported; known: {shown}")
    rules = _READERS[method](fields)
    return Scheme(method, f"{method} {json.dumps(fields.as_object(), sort_keys=True)}", rules, skipped=_KV_SCALES)


def choose_scheme(asked: str, fields: ConfigFields) -> Scheme | None:
    """Return the scheme of a checkpoint, or the one that is asked for; None if weights stay as they are.

    `asked`: `EngineSettings.quantization`: auto, int8 or int4 at load, or the format that the checkpoint must have.

    Errors: ConfigError if a checkpoint that is quantised already is to be quantised again, or has another format than
            the one that is asked for; see `read_scheme`.
    """
    stored = fields.object("quantization_config") or fields.object("compression_config")  # its name of 2024
    if stored is not None:
        name = stored.read("quant_method", str).lower()
        if asked not in ("auto", name.replace("_", "-")):
            already = " already, with" if asked in _AT_LOAD else " with"
            raise ConfigError(
                UNSUPPORTED,
                f"--quantization {asked}: the checkpoint is quantised{already} {name:.200}: {stored.source}",
            )
        return read_scheme(stored)
    if asked == "auto":
        return None
    if asked not in _AT_LOAD:
        shown = " or ".join(_AT_LOAD)
        raise ConfigError(
            UNSUPPORTED,
            f"--quantization {asked}: the checkpoint is not quantised: {fields.source} has no quantization_config; "
            f"while it is loaded, weights can be rounded to {shown}",
        )
    # The head is read for every token. It keeps 8 bits, as does an embedding that is the head, too.
    heads = NamePattern("exact", "lm_head"), NamePattern("exact", "model.embed_tokens")
    routers = NamePattern("part", "gate"), NamePattern("part", "router")
    rules = (
        Rule(routers, None),
        Rule(heads, RoundedFormat(8)),
        Rule((NamePattern("class", "Linear"),), RoundedFormat(8 if asked == "int8" else 4)),
    )
    return Scheme("quantised at load", f"{asked} at load, 1", rules, quantizes_shared_embedding=True)
