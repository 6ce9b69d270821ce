"""The flags of `tiercel plan`."""

import re
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Struct

from tiercel.settings.option import LENGTH, SIZE, Group, Option, read_length, read_size
from tiercel.settings.readers import read_cache_dtype
from tiercel.settings.settings import CacheDtype

MAX_TOKENS = 10**9
_MAX_PARAMETERS = 10**15
_SESSION, _MODEL, _OUTPUT = Group("Load"), Group("Model and device"), Group("Output")
_COUNT = re.compile(r"(\d+(?:\.\d+)?(?:[eE]\+?\d{1,2})?)\s*([kKmMbBtT]?)")
_FACTOR_BY_LETTER = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_PARAMETERS = "parameters such as 34B, 500M or 8.03e9"


def _read_parameters(value: object) -> object:
    """Read a number of parameters, such as 34B or 8.03e9."""
    match = _COUNT.fullmatch(str(value).strip())
    if match is None:
        raise ValueError(value)
    return round(float(match[1]) * _FACTOR_BY_LETTER[match[2].lower()])


class PlanFlags(Struct, frozen=True, kw_only=True):
    """The flags with their defaults."""

    device: Annotated[str | None, Option(_MODEL, "H200, A100-80G, cpu, or a file of rates.", "NAME|FILE")] = None
    model: Annotated[str | None, Option(_MODEL, "Model folder; or give its shape.", "FOLDER")] = None
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"], Option(_MODEL, "Type of weights and KV.", "TYPE")
    ] = "auto"
    kv_cache_dtype: Annotated[
        CacheDtype, Option(_MODEL, "Type of KV; auto: see dtype.", "TYPE", read=read_cache_dtype)
    ] = "auto"
    reserve: Annotated[
        int,
        Option(
            _MODEL,
            "Memory for neither weights nor KV.",
            "BYTES",
            read=read_size,
            expects=SIZE,
            within=(0, 10**18),
        ),
    ] = 0
    parameters: Annotated[
        int | None,
        Option(
            _MODEL,
            "Number of parameters, such as 34B.",
            "NUMBER",
            read=_read_parameters,
            expects=_PARAMETERS,
            within=(1, _MAX_PARAMETERS),
        ),
    ] = None
    active_parameters: Annotated[
        int | None,
        Option(
            _MODEL,
            "Number of parameters used per token.",
            "NUMBER",
            read=_read_parameters,
            expects=_PARAMETERS,
            within=(1, _MAX_PARAMETERS),
        ),
    ] = None
    layers: Annotated[int | None, Option(_MODEL, "Number of layers.", "NUMBER", within=(1, 10_000))] = None
    heads: Annotated[int | None, Option(_MODEL, "Number of query heads.", "NUMBER", within=(1, 10_000))] = None
    kv_heads: Annotated[int | None, Option(_MODEL, "Number of key-value heads.", "NUMBER", within=(1, 10_000))] = None
    head_dim: Annotated[int | None, Option(_MODEL, "Dimension of one head.", "NUMBER", within=(1, 65_536))] = None
    attention_width: Annotated[
        int | None, Option(_MODEL, "Width of attention; default: heads * dimension.", "NUMBER", within=(1, 10**7))
    ] = None

    ctx: Annotated[
        int | None,
        Option(_SESSION, "Length of one context.", "TOKENS", read=read_length, expects=LENGTH, within=(1, MAX_TOKENS)),
    ] = None
    turns: Annotated[int, Option(_SESSION, "Number of answers per session.", "NUMBER", within=(1, 10**6))] = 1
    answer_tokens: Annotated[
        int,
        Option(_SESSION, "Length of one answer.", "TOKENS", read=read_length, expects=LENGTH, within=(1, MAX_TOKENS)),
    ] = 250
    think: Annotated[float, Option(_SESSION, "Pause after each answer.", "SECONDS", within=(0, 10**6))] = 60.0
    users: Annotated[
        int | None, Option(_SESSION, "Concurrent sessions; default: all that fit.", "NUMBER", within=(1, 10**9))
    ] = None
    workload: Annotated[Path | None, Option(_SESSION, "Workload histogram (JSON or TOML).", "FILE")] = None
    max_num_seqs: Annotated[
        int, Option(_SESSION, "Maximum concurrent requests of the workload.", "NUMBER", within=(1, 10**6))
    ] = 256

    json: Annotated[bool, Option(_OUTPUT, "Print JSON instead of tables.")] = False

    @property
    def shape(self) -> dict[str, int]:
        """The given flags that describe a model, by name."""
        values = {
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "layers": self.layers,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "attention_width": self.attention_width,
        }
        return {name: value for name, value in values.items() if value is not None}
