"""Load the compiled kernels and choose those that this processor runs correctly."""

import ctypes
import logging
import os
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tiercel.engine.native.build import FOLDER, LIBRARY_NAME, SOURCES, source_digest
from tiercel.engine.native.self_tests import attention, linear, ops, quantized, sampling
from tiercel.engine.native.table import ABI, CpuClass, KernelTable
from tiercel.values.errors import ConfigError

log = logging.getLogger(__name__)

CHECKS = (*attention.CHECKS, *linear.CHECKS, *ops.CHECKS, *quantized.CHECKS, *sampling.CHECKS)
"""A self-test for every kernel of the table."""

CLASS_VARIABLE = "TIERCEL_CPU_CLASS"
"""Environment variable that selects a lower class than the processor's, or `none` for no kernels."""


class NativeLibrary:
    """The kernels in use. Each is an attribute with the name of its field in `KernelTable`."""

    def __init__(
        self,
        kernels: dict[str, Any],
        cpu_class: CpuClass,
        switched_off: tuple[str, ...] = (),
        run_layers: Callable[..., None] | None = None,
    ) -> None:
        """`switched_off`: kernels of the class that failed their self-test; `kernels` has the portable ones instead.

        `run_layers`: computes all layers of a decoder with `table`, the kernels in use as one structure.
        """
        self.cpu_class = cpu_class
        self.switched_off = switched_off
        self.linear_bytes = kernels["linear_bytes"]
        self.linear_pack = kernels["linear_pack"]
        self.linear = kernels["linear"]
        self.embed = kernels["embed"]
        self.quantized_bytes = kernels["quantized_bytes"]
        self.quantized_pack = kernels["quantized_pack"]
        self.quantized_room = kernels["quantized_room"]
        self.quantized_linear = kernels["quantized_linear"]
        self.quantized_embed = kernels["quantized_embed"]
        self.add_norm = kernels["add_norm"]
        self.silu_mul = kernels["silu_mul"]
        self.store_heads = kernels["store_heads"]
        self.attend = kernels["attend"]
        self.draw_rows = kernels["draw_rows"]
        self.table = KernelTable(**kernels)
        self.run_layers = run_layers

    @property
    def class_name(self) -> str:
        """The class as $TIERCEL_CPU_CLASS names it."""
        return self.cpu_class.name.lower()


@cache
def load_library() -> NativeLibrary | None:
    """Return the kernels for this processor, and log which; None if there are none, with the reason in the log.

    Errors: see `find_library`.
    """
    found = find_library()
    if isinstance(found, str):
        log.warning("native kernels missing, torch computes instead, which is slower reason=%s", found)
        return None
    log.info("native kernels class=%s switched_off=%s", found.class_name, ",".join(found.switched_off) or "-")
    return found


@cache
def find_library() -> NativeLibrary | str:
    """Return the kernels for this processor, or the reason why there are none.

    Errors: ConfigError if TIERCEL_CPU_CLASS has an unknown value.
    """
    asked = read_class(os.environ.get(CLASS_VARIABLE, ""))
    if asked == "none":
        return f"{CLASS_VARIABLE}=none"
    found = open_library(FOLDER / LIBRARY_NAME)
    if isinstance(found, str):
        return found
    cpu_class = CpuClass(found.tiercel_class())
    if asked is not None and asked > cpu_class:
        log.warning("%s=%s: this processor is only %s", CLASS_VARIABLE, asked.name.lower(), cpu_class.name.lower())
    elif asked is not None:
        cpu_class = asked
    return choose_kernels(found, cpu_class)


def read_class(value: str) -> CpuClass | Literal["none"] | None:
    """Return the class that a value of TIERCEL_CPU_CLASS names; None for an empty one. Errors: ConfigError."""
    name = value.strip().lower()
    if not name:
        return None
    if name == "none":
        return "none"
    if name.upper() not in CpuClass.__members__:
        allowed = ", ".join(("none", *(one.name.lower() for one in CpuClass)))
        raise ConfigError("native.cpu_class", f"{CLASS_VARIABLE}={value}: expected one of {allowed}")
    return CpuClass[name.upper()]


def open_library(path: Path) -> ctypes.CDLL | str:
    """Return the shared library, or the reason why it cannot be used."""
    if not path.is_file():
        return f"{path} does not exist; `make setup` compiles it where g++ is installed"
    if not _is_whole(path):
        return f"{path} is incomplete; compile it again with `make setup`"
    try:
        found = ctypes.CDLL(str(path))
        found.tiercel_sources.restype = ctypes.c_char_p
        found.tiercel_kernels.restype = ctypes.POINTER(KernelTable)
        found.tiercel_run_layers.restype = None
        found.tiercel_run_layers.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
        abi, sources = found.tiercel_abi(), found.tiercel_sources().decode()
    except (OSError, AttributeError) as exc:
        return f"{path} does not load: {exc}"
    if abi != ABI or (SOURCES.is_dir() and sources != source_digest()):
        return f"{path} is older than its sources; compile it again with `make setup`"
    return found


def _is_whole(path: Path) -> bool:
    """Return whether a 64-bit ELF file reaches to the end of its table of sections, which the linker writes last.

    The dynamic linker does not check this, and a process that reads behind the end of a mapped file ends with SIGBUS.
    https://refspecs.linuxfoundation.org/elf/gabi4+/ch4.eheader.html
    """
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or header[4] != 2:  # too short, or of 32 bits
        return True  # the dynamic linker knows why it cannot load it
    order = "<" if header[5] == 1 else ">"
    (start,), (size, count) = struct.unpack_from(f"{order}Q", header, 40), struct.unpack_from(f"{order}2H", header, 58)
    return start + size * count <= path.stat().st_size


def choose_kernels(found: ctypes.CDLL, cpu_class: CpuClass) -> NativeLibrary:
    """Return the kernels of a class that the processor has, with the portable one for each that fails its self-test."""
    table, portable = (found.tiercel_kernels(which).contents for which in (cpu_class, CpuClass.PORTABLE))
    return check_kernels(table, portable, cpu_class, found.tiercel_run_layers)


def check_kernels(
    table: KernelTable, portable: KernelTable, cpu_class: CpuClass, run_layers: Callable[..., None] | None = None
) -> NativeLibrary:
    """Return the kernels of `table`, with those of `portable` for each that fails its self-test."""
    kernels: dict[str, Any] = {}
    switched_off: list[str] = []
    for check in CHECKS:
        problem = None if cpu_class is CpuClass.PORTABLE else check.compare(table, portable)
        if problem:
            log.warning("native kernel switched off, the portable one computes kernels=%s %s", check.kernels, problem)
            switched_off += check.kernels
        for name in check.kernels:
            kernels[name] = getattr(portable if problem else table, name)
    return NativeLibrary(kernels, cpu_class, tuple(switched_off), run_layers)
