"""The model's own sampling defaults: generation_config.json."""

import math
from collections.abc import Mapping
from pathlib import Path

import pydantic
from msgspec import Struct

from tiercel.modelfile.checkpoint import read_json_object
from tiercel.server.api.schemas.sampling import SamplingFields
from tiercel.system.file_fault import is_there
from tiercel.values.errors import ConfigError


class SamplingDefaults(Struct, frozen=True, kw_only=True):
    """The values of fields that the client leaves out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None


def load_sampling_defaults(model: Path, source: str, overrides: Mapping[str, float]) -> SamplingDefaults:
    """Read the defaults from the source of `--generation-config` (auto, vllm, tiercel or a folder); apply overrides.

    Errors: ConfigError naming the file or the flag, and the key.
    """
    path = (model if source == "auto" else Path(source)) / "generation_config.json"
    is_neutral = source in ("vllm", "tiercel")
    values: dict[str, object] = {} if is_neutral else _read(path, must_exist=source != "auto")
    known = SamplingDefaults.__struct_fields__
    for key in overrides:
        if key not in known:
            names = ", ".join(known)
            raise ConfigError(
                "generation_config.key", f"--override-generation-config: unknown key {key!r}; expected one of {names}"
            )
    numbers = _numbers(values, str(path)) | _numbers(overrides, "--override-generation-config")
    neutral = SamplingDefaults()
    return SamplingDefaults(
        temperature=numbers.get("temperature", neutral.temperature),
        top_p=numbers.get("top_p", neutral.top_p),
        top_k=int(numbers.get("top_k", neutral.top_k)),
        min_p=numbers.get("min_p", neutral.min_p),
        repetition_penalty=numbers.get("repetition_penalty", neutral.repetition_penalty),
        max_new_tokens=int(numbers.get("max_new_tokens", 0)) or None,
    )


def _read(path: Path, *, must_exist: bool) -> dict[str, object]:
    return read_json_object(path) if must_exist or is_there(path) else {}


def _numbers(values: Mapping[str, object], place: str) -> dict[str, float]:
    """Return the given defaults. Each must be in the range that is valid for a client's value."""
    numbers: dict[str, float] = {}
    for key in SamplingDefaults.__struct_fields__:
        value = values.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _wrong_value(place, key, value, "expected a number")
        if key == "max_new_tokens":
            if value < 0 or value != int(value):
                raise _wrong_value(place, key, value, "expected a whole number, 0 or more")
        else:
            _check_range(place, key, value)
        numbers[key] = value
    return numbers


def _check_range(place: str, key: str, value: float) -> None:
    try:
        SamplingFields.model_validate({key: int(value) if value == int(value) else value})
    except pydantic.ValidationError as exc:
        reason = exc.errors(include_url=False, include_context=False, include_input=False)[0]["msg"]
        raise _wrong_value(place, key, value, reason[:1].lower() + reason[1:]) from exc


def _wrong_value(place: str, key: str, value: object, reason: str) -> ConfigError:
    return ConfigError("generation_config.value", f"{place}: invalid {key} {str(value)[:80]}: {reason}")
