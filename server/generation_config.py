"""The model's own sampling defaults: generation_config.json."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from msgspec import Struct

from tiercel.errors import ConfigError


class SamplingDefaults(Struct, frozen=True, kw_only=True):
    """What a field is when the client leaves it out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None


def load_sampling_defaults(model: Path, source: str, overrides: Mapping[str, float]) -> SamplingDefaults:
    """Read the defaults as `--generation-config` says: auto, vllm, tiercel or a folder; then apply overrides.

    Errors: ConfigError naming the file or the key.
    """
    match source:
        case "vllm" | "tiercel":
            values: dict[str, object] = {}
        case "auto":
            values = _read(model / "generation_config.json", must_exist=False)
        case folder:
            values = _read(Path(folder) / "generation_config.json", must_exist=True)
    known = SamplingDefaults.__struct_fields__
    for key in overrides:
        if key not in known:
            names = ", ".join(known)
            raise ConfigError("generation_config.key", f"--override-generation-config knows no {key!r}: {names}")
    merged = {**values, **overrides}
    neutral = SamplingDefaults()
    max_new_tokens = _number(merged, "max_new_tokens", 0)
    return SamplingDefaults(
        temperature=_number(merged, "temperature", neutral.temperature),
        top_p=_number(merged, "top_p", neutral.top_p),
        top_k=int(_number(merged, "top_k", neutral.top_k)),
        min_p=_number(merged, "min_p", neutral.min_p),
        repetition_penalty=_number(merged, "repetition_penalty", neutral.repetition_penalty),
        max_new_tokens=int(max_new_tokens) or None,
    )


def _read(path: Path, *, must_exist: bool) -> dict[str, object]:
    if not must_exist and not path.is_file():
        return {}
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError("generation_config.unreadable", f"cannot read {path}: {exc}") from exc
    if not isinstance(value, dict):
        raise ConfigError("generation_config.unreadable", f"{path} does not hold a JSON object")
    return cast(dict[str, object], value)


def _number(values: Mapping[str, object], key: str, default: float) -> float:
    value = values.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigError("generation_config.value", f"generation_config: {key} cannot be {value!r}")
    return value
