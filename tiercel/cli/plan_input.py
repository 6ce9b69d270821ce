"""The inputs of `tiercel plan`: a model, a device and a workload. Errors name the field, the value and the limit."""

import difflib
import math
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from tiercel.cli.console import warn
from tiercel.cli.plan_flags import MAX_TOKENS
from tiercel.modelfile.checkpoint import read_json_object
from tiercel.settings.config import resolve
from tiercel.settings.option import flag_name, show_written
from tiercel.settings.settings import CacheDtype
from tiercel.simulation.sizing import DEVICES, DeviceProfile, ModelShape, WorkloadBucket
from tiercel.system.file_fault import file_fault
from tiercel.values.errors import ConfigError
from tiercel.values.tier import SCALES_BYTES
from tiercel.values.units import parse_bytes

MAX_BUCKETS = 10_000
SHARE_TOLERANCE = 0.01

_ITEMSIZE_BY_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2}
_RATES = ("flops_per_s", "memory_bytes_per_s", "link_bytes_per_s")  # required fields of a device file
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def whole(place: str, value: object, low: int, high: int) -> int:
    """Check a whole number. Errors: ConfigError naming the place, the value and the limits."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _wrong(place, value, f"a whole number from {low:,} to {high:,}")
    return value


def number(place: str, value: object, low: float, high: float, *, is_above: bool = False) -> float:
    """Check a number from `low` to `high`; `is_above` excludes `low`. Errors: ConfigError."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wrong(place, value, "a number")
    if low <= value <= high and not (is_above and value == low):
        return float(value)
    raise _wrong(place, value, f"a number {'above' if is_above else 'from'} {low:g} to {high:g}")


def size(place: str, text: str) -> int:
    """Read a number of bytes, such as 512M or 2GiB. Errors: ConfigError."""
    try:
        count = parse_bytes(text)
    except (ValueError, OverflowError):
        raise _wrong(place, text, "bytes, such as 1073741824, 512M or 2GiB") from None
    return whole(place, count, 0, 10**18)


# Model


def given_shape(given: Mapping[str, int], dtype: str, cache_dtype: CacheDtype = "auto") -> ModelShape:
    """Return the shape of a model from flags; `given` holds the flags that were given, by name. Errors: ConfigError.

    Query heads are needed for the width of attention, unless the width itself is given.
    """
    missing = [name for name in ("parameters", "layers", "kv_heads", "head_dim") if name not in given]
    if "heads" not in given and "attention_width" not in given:
        missing.append("heads")
    if missing:
        raise ConfigError("plan.shape", f"without --model, also give {', '.join(flag_name(name) for name in missing)}")
    heads, kv_heads, parameters = given.get("heads"), given["kv_heads"], given["parameters"]
    if heads is not None and heads % kv_heads:
        raise ConfigError("plan.shape", f"--heads {heads}: expected a multiple of --kv-heads {kv_heads}")
    return ModelShape(
        parameters=parameters,
        active_parameters=_active(given, parameters),
        layers=given["layers"],
        kv_heads=kv_heads,
        head_dim=given["head_dim"],
        attention_width=given.get("attention_width") or (heads or kv_heads) * given["head_dim"],
        itemsize=_ITEMSIZE_BY_DTYPE["bfloat16" if dtype == "auto" else dtype],
        kv_head_bytes=0 if cache_dtype == "auto" else 2 * given["head_dim"] + SCALES_BYTES,
    )


def folder_shape(
    model: str, given: Mapping[str, int], dtype: str, cache_dtype: CacheDtype = "auto"
) -> tuple[ModelShape, int]:
    """Return the shape of a model folder as `tiercel serve` would load it, and the length of its context.

    Reads config.json only. `given` may override the active parameters and the width of attention. Errors: ConfigError.
    """
    foreign = [flag_name(name) for name in given if name not in ("active_parameters", "attention_width")]
    if foreign:
        raise ConfigError("plan.shape", f"{foreign[0]} and --model: give one of them; the folder defines the shape")
    asked = {} if dtype == "auto" else {"dtype": dtype}
    resolved = resolve({"model": model, "load_format": "dummy", "kv_cache_dtype": cache_dtype, **asked})
    for line in resolved.warnings:
        warn(line)
    # lazy: they load torch, which takes seconds
    from tiercel.cli.model_facts import read_model_facts
    from tiercel.engine.models.config import read_config

    facts = read_model_facts(resolved.settings.engine)
    fields = read_config(Path(resolved.settings.engine.model))
    is_unknown = any(fields.has(name) for name in _EXPERTS) and not facts.expert_weights
    if is_unknown and "active_parameters" not in given:
        raise ConfigError(
            "plan.experts", f"{fields.source}: the model is a mixture of experts: give --active-parameters"
        )
    kv, itemsize, parameters = facts.kv, facts.precision.weights.itemsize, facts.weights
    width = fields.count("num_attention_heads", kv.kv_heads) * kv.head_dim
    if "attention_width" in given:
        width = given["attention_width"]
    active = parameters - round(facts.skipped_share * facts.expert_weights)
    if "active_parameters" in given:
        active = _active(given, parameters)
    shape = ModelShape(
        *(parameters, active, kv.layers, kv.kv_heads, kv.head_dim, width, itemsize),
        kv_head_bytes=kv.width * kv.itemsize,
        weight_bytes=facts.weights_bytes / facts.weights,
    )
    return shape, facts.max_model_len


def _active(given: Mapping[str, int], parameters: int) -> int:
    if "active_parameters" not in given:
        return parameters
    active = given["active_parameters"]
    if active > parameters:
        raise ConfigError(
            "plan.shape", f"--active-parameters {active:,}: expected at most the model's {parameters:,} parameters"
        )
    return active


# Device


def read_device(name: str | None) -> DeviceProfile:
    """Return a built-in profile by its name in any case, or the profile in a JSON or TOML file of measured rates.

    The file has memory_bytes (a number, or text such as "24GiB"), flops_per_s, memory_bytes_per_s and link_bytes_per_s;
    name and float32_flops_per_s are optional.
    Errors: ConfigError naming the file, the field and its limits.
    """
    if name is None:
        raise ConfigError("plan.device", f"--device is missing: expected one of {', '.join(DEVICES)}, or a file")
    path = Path(name)
    if path.suffix not in (".json", ".toml"):
        for profile in DEVICES.values():
            if profile.name.lower() == name.lower():
                return profile
        raise ConfigError(
            "plan.device", f"--device {name}: expected one of {', '.join(DEVICES)}, or a .json or .toml file"
        )
    fields = _read_object(path, "--device")
    _refuse_unknown(fields, (*_RATES, "name", "memory_bytes", "float32_flops_per_s"), str(path))
    memory, label = fields.get("memory_bytes"), fields.get("name", path.stem)
    if not isinstance(label, str) or not label.isprintable() or not 0 < len(label) <= 80:
        raise _wrong(f"{path}: name", label, "1 to 80 printable characters")
    rates = {rate: number(f"{path}: {rate}", _required(fields, rate, path), 1, 1e21) for rate in _RATES}
    float32_rate = fields.get("float32_flops_per_s")
    memory_place = f"{path}: memory_bytes"
    _required(fields, "memory_bytes", path)
    return DeviceProfile(
        name=label,
        memory_bytes=whole(memory_place, size(memory_place, memory) if isinstance(memory, str) else memory, 1, 10**18),
        float32_flops_per_s=None
        if float32_rate is None
        else number(f"{path}: float32_flops_per_s", float32_rate, 1, 1e21),
        **rates,
    )


# Workload


def read_workload(path: Path) -> tuple[WorkloadBucket, ...]:
    """Return the histogram in a JSON or TOML file: `buckets`, a list of input_tokens, output_tokens and share.

    Shares sum to 1. A bucket may have requests_per_s: the measured rate of such requests alone on the device.
    Errors: ConfigError naming the file, the bucket, the field and its limits.
    """
    fields = _read_object(path, "--workload")
    _refuse_unknown(fields, ("buckets",), str(path))
    rows = fields.get("buckets")
    if not isinstance(rows, list) or not 1 <= len(cast("list[object]", rows)) <= MAX_BUCKETS:
        raise ConfigError("plan.workload", f"{path}: buckets: expected a list of 1 to {MAX_BUCKETS:,} buckets")
    buckets = tuple(_bucket(f"{path}: buckets[{index}]", row) for index, row in enumerate(cast("list[object]", rows)))
    total = math.fsum(bucket.share for bucket in buckets)
    if abs(total - 1) > SHARE_TOLERANCE:
        raise ConfigError("plan.workload", f"{path}: the shares of buckets sum to {total:g}: expected 1")
    return buckets


def _bucket(place: str, row: object) -> WorkloadBucket:
    if not isinstance(row, dict):
        raise ConfigError("plan.workload", f"{place}: expected an object")
    fields = cast("dict[str, object]", row)
    _refuse_unknown(fields, ("input_tokens", "output_tokens", "share", "requests_per_s"), place)
    rate = fields.get("requests_per_s")
    return WorkloadBucket(
        input_tokens=whole(f"{place}.input_tokens", _required(fields, "input_tokens", place), 1, MAX_TOKENS),
        output_tokens=whole(f"{place}.output_tokens", _required(fields, "output_tokens", place), 1, MAX_TOKENS),
        share=number(f"{place}.share", _required(fields, "share", place), 0, 1, is_above=True),
        requests_per_s=None if rate is None else number(f"{place}.requests_per_s", rate, 0, 1e9, is_above=True),
    )


# Files


def _read_object(path: Path, flag: str) -> dict[str, object]:
    if (fault := file_fault(path)) is not None:
        raise ConfigError("plan.file", f"{flag} {path}: {fault}")
    readers: dict[str, Callable[[Path], dict[str, object]]] = {".json": read_json_object, ".toml": _read_toml}
    if path.suffix not in readers:
        raise ConfigError("plan.file", f"{flag} {path}: expected a .json or .toml file")
    return readers[path.suffix](path)


def _read_toml(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError("plan.file", f"{path}: cannot be read: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigError("plan.file", f"{path}: not valid TOML: {exc}") from exc


def _required(fields: Mapping[str, object], name: str, place: object) -> object:
    if name not in fields:
        raise ConfigError("plan.field", f"{place}: {name} is missing")
    return fields[name]


def _refuse_unknown(fields: Mapping[str, object], known: tuple[str, ...], place: str) -> None:
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"expected {', '.join(known)}"
            raise ConfigError("plan.field", f"{place}: there is no field {name[:80]!r}; {hint}")


def _wrong(place: str, value: object, expects: str) -> ConfigError:
    return ConfigError("plan.value", f"{place} {show_written(value)}: expected {expects}")
