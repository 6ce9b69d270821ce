"""The classes of processors whose kernels this machine can run, that of AMX with emulated instructions."""

from functools import cache
from pathlib import Path

import pytest

from tests.engine.native.emulated import open_emulated
from tiercel.engine import native
from tiercel.engine.native.build import LIBRARY_NAME
from tiercel.engine.native.library import NativeLibrary, choose_kernels, open_library
from tiercel.engine.native.table import CpuClass

CLASSES = [pytest.param(each, id=each.name.lower()) for each in CpuClass]


@cache
def library_of(cpu_class: CpuClass) -> NativeLibrary:
    """Return the kernels of a class. Skips the test without the library, or if the processor is of a lower class."""
    folder = Path(str(native.__file__)).parent
    found = open_library(folder / LIBRARY_NAME)
    if isinstance(found, str):
        pytest.skip("the native library is not compiled")
    processor = CpuClass(found.tiercel_class())
    if cpu_class is CpuClass.AMX and processor < cpu_class:
        return choose_kernels(open_emulated(folder, processor), cpu_class)
    if processor < cpu_class:
        pytest.skip(f"this processor is no {cpu_class.name.lower()}")
    return choose_kernels(found, cpu_class)
