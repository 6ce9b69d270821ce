"""Read the values of single settings. Errors: ValueError."""

import ipaddress
import re
from typing import cast
from urllib.parse import urlsplit

from tiercel.settings.option import read_json, read_length, read_names
from tiercel.system.server_url import host_fault

HOSTS = "host names without a port, such as llm.example.com or *.example.com, or * for any"
_HOST_PATTERN = re.compile(r"\*|(?:\*\.)?[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*", re.ASCII)
OVERRIDABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")

QUANTIZATIONS = ("auto", "int8", "int4", "awq", "gptq", "fp8", "compressed-tensors", "gguf")
_FORMAT_BY_KERNEL = {
    "awq-marlin": "awq",
    "gptq-marlin": "gptq",
    "gptq-marlin-24": "gptq",
    "gptq-bitblas": "gptq",
    "marlin": "gptq",
}
# Formats of vLLM that no checkpoint may have here: they are read, so that the refusal can name the checkpoint's, too.
_FOREIGN_QUANTIZATIONS = (
    *("aqlm", "auto-round", "awq-gptq", "bitblas", "bitnet", "bitsandbytes", "deepspeedfp", "experts-int8"),
    *("fbgemm-fp8", "fp-quant", "gptq-intel", "hqq", "inc", "ipex", "modelopt", "modelopt-fp4", "moe-wna16", "mxfp4"),
    *("neuron-quant", "petit-nvfp4", "ptpc-fp8", "qqq", "quark", "rtn", "squeezellm", "torchao", "tpu-int8"),
)


def read_model_length(value: object) -> object:
    """Read a number of tokens, or None for `auto`."""
    return None if value == "auto" else read_length(value)


def read_dtype(value: object) -> object:
    """Read a number type; `half` and `float` are vLLM's names."""
    return {"half": "float16", "float": "float32"}.get(value, value) if isinstance(value, str) else value


def read_cache_dtype(value: object) -> object:
    """Read a number type of KV; `fp8_e4m3` is another of vLLM's names."""
    return "fp8" if value == "fp8_e4m3" else value


def read_quantization(value: object) -> object:
    """Read the format of quantised weights; the names of vLLM's kernels stand for the formats that they read."""
    if not isinstance(value, str):
        return value
    name = value.lower().replace("_", "-")
    if name == "none":
        return "auto"
    name = _FORMAT_BY_KERNEL.get(name, name)
    if name not in (*QUANTIZATIONS, *_FOREIGN_QUANTIZATIONS):
        raise ValueError(value)
    return name


def read_root_path(value: object) -> object:
    """Read a path prefix, without the slashes at its end."""
    return value.rstrip("/") if isinstance(value, str) else value


def read_hosts(value: object) -> object:
    """Read the host names that a server answers to, in lower case; an address may stand in brackets."""
    names = read_names(value)
    return [_read_host(name) for name in cast(list[object], names)] if isinstance(names, list) else names


def _read_host(value: object) -> object:
    if not isinstance(value, str):
        return value
    name = value.lower()
    if _HOST_PATTERN.fullmatch(name.removesuffix(".")) and name != "*.":
        return name.removesuffix(".")
    is_bracketed = name.startswith("[") and name.endswith("]")
    return str(ipaddress.ip_address(name[1:-1] if is_bracketed else name))


def read_collector(value: object) -> object:
    """Read the URL of a collector of traces; a URL without a path gets OTLP's path."""
    if not isinstance(value, str):
        return value
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.port == 0:
        raise ValueError(value)
    if host_fault(parts.hostname) is not None:
        raise ValueError(value)
    if parts.query or parts.fragment:  # settings are shown and logged, and a query may hold a token
        raise ValueError(value)
    return parts._replace(path="/v1/traces").geturl() if parts.path in ("", "/") else value


def read_sampling(value: object) -> object:
    """Read a JSON object of sampling defaults."""
    found = read_json(value)
    if not isinstance(found, dict) or not cast(dict[object, object], found).keys() <= set(OVERRIDABLE):
        raise ValueError(value)
    return cast(dict[object, object], found)
