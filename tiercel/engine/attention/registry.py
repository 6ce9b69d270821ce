"""Open an attention backend by name."""

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING, assert_never

import torch

from tiercel.engine.attention.base import Attention
from tiercel.engine.attention.fa3 import Fa3Attention, has_fa3, load_fa3
from tiercel.engine.attention.grouped import GroupedAttention
from tiercel.engine.attention.native import NativeAttention
from tiercel.engine.attention.sdpa import SdpaAttention
from tiercel.engine.native.library import load_library
from tiercel.settings.settings import AttentionName
from tiercel.values.errors import ConfigError

if TYPE_CHECKING:
    from tiercel.engine.attention.triton import TritonAttention

log = logging.getLogger(__name__)

_HOPPER = 9  # major version of the compute capability that FlashAttention-3 needs


def open_attention(
    name: AttentionName, device: torch.device, processors: int = 1, capability: tuple[int, int] | None = None
) -> Attention:
    """Return the backend of this name; `auto` is the fastest one for the device and the installed packages.

    `processors` and `capability`: see `device.base.Device`.

    Errors: ConfigError if the device or a missing package excludes the backend.
    """
    if device.type == "meta":
        return SdpaAttention()  # nothing is computed on `meta`, and the computing machine may be another one
    match name:
        case "sdpa":
            return SdpaAttention()
        case "grouped":
            return GroupedAttention()
        case "native":
            return _open_native(device)
        case "triton":
            return _open_triton(device, processors, capability)
        case "fa3":
            return _open_fa3(device, processors, capability)
        case "auto":
            return _open_fastest(device, processors, capability)
        case _:
            assert_never(name)


def _open_fastest(device: torch.device, processors: int, capability: tuple[int, int] | None) -> Attention:
    if device.type == "cpu":
        library = load_library()
        return GroupedAttention() if library is None else NativeAttention(library)
    if device.type != "cuda" or not _has_triton():
        return SdpaAttention()
    triton = _open_triton(device, processors, capability)
    if capability is not None and capability[0] == _HOPPER and has_fa3():
        try:
            return Fa3Attention(load_fa3(), processors, spare=triton)
        except ConfigError as exc:
            log.warning("attention falls back to triton error=%s", exc)
    return triton


def _open_native(device: torch.device) -> NativeAttention:
    if device.type != "cpu":
        raise ConfigError("attention.native_needs_cpu", "--attention-backend native needs a CPU: use triton")
    library = load_library()
    if library is None:
        raise ConfigError(
            "attention.no_native",
            "--attention-backend native: the native library does not load; see the log",
        )
    return NativeAttention(library)


def _open_triton(device: torch.device, processors: int, capability: tuple[int, int] | None) -> "TritonAttention":
    if not _has_triton():
        raise ConfigError(
            "attention.no_triton", "--attention-backend triton: the package triton is missing; a CUDA torch brings it"
        )
    # lazy: CPU builds of torch come without Triton
    from tiercel.engine.attention.triton import TritonAttention
    from tiercel.engine.kernels.interpreter import is_interpreted
    from tiercel.engine.kernels.tiles import choose_form

    if device.type != "cuda" and not is_interpreted():
        raise ConfigError(
            "attention.triton_needs_gpu",
            "--attention-backend triton needs a CUDA GPU; on a CPU only Triton's interpreter runs its kernels "
            "(TRITON_INTERPRET=1), for tests",
        )
    return TritonAttention(processors, form=choose_form(capability))


def _open_fa3(device: torch.device, processors: int, capability: tuple[int, int] | None) -> Fa3Attention:
    if device.type != "cuda" or capability is None or capability[0] != _HOPPER:
        raise ConfigError("attention.fa3_needs_hopper", "--attention-backend fa3 needs a Hopper GPU (capability 9.x)")
    return Fa3Attention(load_fa3(), processors)


def _has_triton() -> bool:
    return find_spec("triton") is not None
