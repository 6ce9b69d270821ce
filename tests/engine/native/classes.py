"""The classes of processors whose kernels this machine can run."""

from functools import cache
from pathlib import Path

import pytest

from tiercel.engine import native
from tiercel.engine.native.build import LIBRARY_NAME
from tiercel.engine.native.library import NativeLibrary, choose_kernels, open_library
from tiercel.engine.native.table import CpuClass

CLASSES = [pytest.param(each, id=each.name.lower()) for each in CpuClass]


@cache
def library_of(cpu_class: CpuClass) -> NativeLibrary:
    """Return the kernels of a class. Skips the test without the library, or if the processor is of a lower class."""
    found = open_library(Path(str(native.__file__)).parent / LIBRARY_NAME)
    if isinstance(found, str):
        pytest.skip("the native library is not compiled")
    if found.tiercel_class() < cpu_class:
        pytest.skip(f"this processor is no {cpu_class.name.lower()}")
    return choose_kernels(found, cpu_class)
