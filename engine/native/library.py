"""Load the compiled kernels and choose those that this processor runs correctly."""

import ctypes
import logging
import os
from functools import cache
from pathlib import Path
from typing import Any

from tiercel.engine.native.build import LIBRARY_NAME, SOURCES, source_digest
from tiercel.engine.native.self_tests import attention, ops
from tiercel.engine.native.table import ABI, CpuClass, KernelTable

log = logging.getLogger(__name__)

CHECKS = (*ops.CHECKS, *attention.CHECKS)
"""A self-test for every kernel of the table."""

CLASS_VARIABLE = "TIERCEL_CPU_CLASS"
"""Environment variable that selects a lower class than the processor's: portable, avx2, avx512."""


class NativeLibrary:
    """The kernels in use. Each is an attribute with the name of its field in `KernelTable`."""

    def __init__(self, kernels: dict[str, Any], cpu_class: CpuClass, switched_off: tuple[str, ...] = ()) -> None:
        """`switched_off`: kernels of the class that failed their self-test; `kernels` has the portable ones instead."""
        self.cpu_class = cpu_class
        self.switched_off = switched_off
        self.add_norm = kernels["add_norm"]
        self.silu_mul = kernels["silu_mul"]
        self.store_heads = kernels["store_heads"]
        self.attend = kernels["attend"]


@cache
def load_library() -> NativeLibrary | None:
    """Return the kernels for this processor; None if the library is missing, outdated or broken. Logs the reason."""
    path = Path(__file__).resolve().parent / LIBRARY_NAME
    found = open_library(path)
    if isinstance(found, str):
        log.warning("native kernels missing, torch computes instead, several times slower reason=%s", found)
        return None
    wanted = os.environ.get(CLASS_VARIABLE)
    cpu_class = CpuClass(found.tiercel_class())
    if wanted:
        cpu_class = min(cpu_class, CpuClass[wanted.upper()])
    library = choose_kernels(found, cpu_class)
    log.info("native kernels class=%s switched_off=%s", cpu_class.name.lower(), ",".join(library.switched_off) or "-")
    return library


def open_library(path: Path) -> ctypes.CDLL | str:
    """Return the shared library, or the reason why it cannot be used."""
    if not path.is_file():
        return f"{path} does not exist; `make setup` compiles it where g++ is installed"
    try:
        found = ctypes.CDLL(str(path))
        found.tiercel_sources.restype = ctypes.c_char_p
        found.tiercel_kernels.restype = ctypes.POINTER(KernelTable)
        abi, sources = found.tiercel_abi(), found.tiercel_sources().decode()
    except (OSError, AttributeError) as exc:
        return f"{path} does not load: {exc}"
    if abi != ABI or (SOURCES.is_dir() and sources != source_digest()):
        return f"{path} is older than its sources; compile it again with `make setup`"
    return found


def choose_kernels(found: ctypes.CDLL, cpu_class: CpuClass) -> NativeLibrary:
    """Return the kernels of a class, with the portable one for each that fails its self-test."""
    portable = found.tiercel_kernels(CpuClass.PORTABLE).contents
    table = found.tiercel_kernels(cpu_class).contents
    kernels: dict[str, Any] = {}
    switched_off: list[str] = []
    for check in CHECKS:
        problem = None if cpu_class is CpuClass.PORTABLE else check.compare(table, portable)
        if problem:
            log.warning("native kernel switched off, the portable one computes kernels=%s %s", check.kernels, problem)
            switched_off += check.kernels
        for name in check.kernels:
            kernels[name] = getattr(portable if problem else table, name)
    return NativeLibrary(kernels, cpu_class, tuple(switched_off))
