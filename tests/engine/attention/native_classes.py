"""The native backend with the kernels of each class that this machine can run."""

from functools import cache
from pathlib import Path

import tiercel.engine.native
from tiercel.engine.attention.native import NativeAttention
from tiercel.engine.native.build import LIBRARY_NAME
from tiercel.engine.native.library import NativeLibrary, choose_kernels, open_library
from tiercel.engine.native.table import CpuClass


@cache
def _open_classes() -> dict[str, NativeLibrary]:
    assert tiercel.engine.native.__file__ is not None
    found = open_library(Path(tiercel.engine.native.__file__).parent / LIBRARY_NAME)
    if isinstance(found, str):
        return {}
    highest = found.tiercel_class()
    return {
        f"native_{cpu_class.name.lower()}": choose_kernels(found, cpu_class)
        for cpu_class in CpuClass
        if cpu_class <= highest
    }


CLASSES = tuple(_open_classes())
"""Names of the classes; none without the library."""


def open_native(name: str) -> NativeAttention:
    """Return a backend with the kernels of a class, all of which must have passed their self-test."""
    library = _open_classes()[name]
    assert library.switched_off == ()
    return NativeAttention(library)
