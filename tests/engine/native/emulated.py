"""The AMX class with emulated tile registers, for machines without AMX."""

import contextlib
import ctypes
from pathlib import Path

import pytest

from tiercel.engine.native.build import (
    AVX512,
    FOLDER,
    LIBRARY_NAME,
    PORTABLE_UNITS,
    CompilerError,
    compile_library,
    is_current,
)
from tiercel.engine.native.library import open_library
from tiercel.engine.native.table import CpuClass

EMULATED_NAME = "_kernels_emulated.so"


def compile_emulated(target: Path, processor: CpuClass, extra_flags: tuple[str, ...] = ()) -> None:
    """Compile the portable class and that of AMX, with the vectors of AVX-512 where the processor has them."""
    vectors = AVX512 if processor >= CpuClass.AVX512 else ()
    units = PORTABLE_UNITS | {"class_amx.cpp": (*vectors, "-DTIERCEL_EMULATE_TILES")}
    compile_library(target, ("-O1", *extra_flags), units)


def open_emulated(folder: Path, processor: CpuClass) -> ctypes.CDLL:
    """Return the library in a folder, compiled if it is not current. Skips the test without a compiler."""
    path = folder / EMULATED_NAME
    try:
        if not is_current(path):
            compile_emulated(path, processor)
    except CompilerError as exc:
        pytest.skip(str(exc))
    found = open_library(path)
    assert not isinstance(found, str), found
    return found


def main() -> None:
    """Compile the library beside that of this machine before tests wait for it; without a compiler do nothing."""
    found = open_library(FOLDER / LIBRARY_NAME)
    if not isinstance(found, str) and not is_current(FOLDER / EMULATED_NAME):
        with contextlib.suppress(CompilerError):
            compile_emulated(FOLDER / EMULATED_NAME, CpuClass(found.tiercel_class()))


if __name__ == "__main__":
    main()
